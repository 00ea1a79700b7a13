"""Split plans as data: which worker reads which keys, and what is merged.

:mod:`~colonnade.kernels.attention.split_planner` makes them and kernels read them.
"""

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from colonnade.errors import CapacityError

FIELDS = 8
"""Integers of an item or a merge in the flat array; a multiple of 4, for alignment."""


def check_lengths(lengths: Sequence[int], max_keys: int) -> None:
    """Raises CapacityError if a request has more than ``max_keys`` keys."""
    if (longest := max(lengths, default=0)) > max_keys:
        request = list(lengths).index(longest)
        raise CapacityError(
            f"request {request} has {longest} keys, but its page table has room for {max_keys}; pass a wider page table"
        )


class Costs(NamedTuple):
    """Cost model of a kernel, in any one unit, such as nanoseconds."""

    tile: int
    """A tile of keys while all workers read."""
    start: int
    """Starting a piece and writing its result."""
    merge: int
    """The fixed cost of a merge."""
    part: int
    """Each piece of the line with the most pieces."""
    row: int = 0
    """Each merged row."""
    twice: int = 0
    """A worker with pieces of two split lines, if workers merge themselves."""
    lone: int = 0
    """The least time of a tile, when few workers read; 0: the same as with all."""


class Shape(NamedTuple):
    """Block shape of a kernel, equal for all requests."""

    kv_heads: int
    group: int
    """Query heads per key/value head."""
    rows: int
    """Rows of a block: row m of a request is query m // group, head m % group of its key/value head."""
    tile: int
    """Keys of a tile; tiles start at its multiples."""
    window: int | None = None
    """Keys that a query sees, the last ones including its own; earlier keys cost nothing."""
    causal: bool = True
    """Whether the queries are the last positions; if not, all keys precede every query."""

    def blocks(self, queries: int) -> int:
        """Blocks of rows of a request with so many queries."""
        return -(-queries * self.group // self.rows)

    def used_rows(self, queries: int) -> int:
        """Rows of a block that requests with up to so many queries use."""
        return min(self.rows, queries * self.group)

    def keys(self, length: int, queries: int, block: int) -> tuple[int, int]:
        """(first, end) of the keys that any row of a block sees; equal if there are none."""
        if not self.causal:
            return 0, length
        first_query = block * self.rows // self.group
        end_query = min(queries, -(-(block + 1) * self.rows // self.group))
        end = max(0, length - queries + end_query)
        first = 0 if self.window is None else max(0, length - queries + first_query - self.window + 1)
        return min(first, end), end


class Item(NamedTuple):
    """A piece of work: one block of rows and keys first .. end − 1."""

    request: int
    head: int
    """Key/value head."""
    block: int
    first: int
    end: int
    slot: int
    """Where its state is stored for the merge, that of its first chunk if it is a run of chunks; −1: the item is a
    whole line and writes the output itself."""


ITEM_END = Item._fields.index("end")
SHIFT, SHARE = 6, 7
"""Fields of an item in the flat array: with ``aligned`` pieces the number of a line's first piece, modulo
:data:`ALIGNED_PARTS`; index of the piece in its line times 2^16, plus the line's pieces."""
ALIGNED_PARTS, ALIGNED_PIECES = 128, 4
"""Pieces of a line at most, and per worker those of all cut lines, if pieces are ``aligned``."""


class Merge(NamedTuple):
    """A split line: merges the states in slots first .. end − 1 in key order; without slots, the identity."""

    request: int
    head: int
    block: int
    first: int
    end: int


class Capacity(NamedTuple):
    """Sizes of arrays that hold any plan for so many requests, as a captured graph allocates them."""

    workers: int
    items: int
    merges: int
    slots: int

    @classmethod
    def of(
        cls,
        requests: int,
        queries: int,
        shape: Shape,
        workers: int,
        *,
        chunk: int | None = None,
        context: int = 0,
        joined: bool = False,
    ) -> "Capacity":
        """Capacity for ``requests`` requests of at most ``queries`` queries; with fixed splits also of ``context``
        keys.

        W workers have W − 1 boundaries, so at most so many splits, each of which makes at most two slots. A line that
        is ``joined`` with keys read elsewhere has one slot more than splits.
        """
        lines = requests * shape.kv_heads * shape.blocks(queries)
        if chunk is None:
            slots = lines + workers - 1 if joined else 2 * (workers - 1)
            return cls(workers, lines + workers - 1, lines, slots)
        pieces = lines * -(-context // chunk)
        return cls(workers, pieces, lines, pieces)

    @classmethod
    def of_aligned(cls, requests: int, queries: int, shape: Shape, workers: int) -> "Capacity":
        """Capacity of plans with ``aligned`` pieces (:mod:`split_planner`)."""
        lines = requests * shape.kv_heads * shape.blocks(queries)
        cut = ALIGNED_PIECES * workers
        return cls(workers, lines + cut, lines, cut)


@dataclass(frozen=True)
class Plan:
    """A split plan: worker w takes items ``starts[w] .. starts[w + 1] − 1`` in turn.

    Items and merges are stored packed (:func:`pack_rows`), as kernels read them: an engine makes a plan every few
    steps, and objects for each item would be slow.
    """

    starts: tuple[int, ...]
    item_rows: "array[int]"
    merge_rows: "array[int]"
    slots: int
    finish: int
    """Estimated time of the end, including the merge, in cost units."""
    ideal: int
    """Lower bound of any plan's end, rounded up."""
    chunk: int | None = None
    """Keys between fixed splits: an item that crosses one is several pieces."""

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All workers' items."""
        packed = self.item_rows
        return tuple(Item(*packed[i : i + len(Item._fields)]) for i in range(0, len(packed), FIELDS))

    @cached_property
    def pieces(self) -> tuple[Item, ...]:
        """Items divided into parts with their own state: with fixed splits each chunk, in consecutive slots."""
        if self.chunk is None:
            return self.items
        cuts = [range(item.first // self.chunk * self.chunk, item.end, self.chunk) for item in self.items]
        return tuple(
            Item(*item[:3], max(at, item.first), min(at + self.chunk, item.end), item.slot + n)
            for item, begins in zip(self.items, cuts, strict=True)
            for n, at in enumerate(begins)
        )

    @cached_property
    def merges(self) -> tuple[Merge, ...]:
        """Lines that no item writes."""
        packed = self.merge_rows
        return tuple(Merge(*packed[i : i + len(Merge._fields)]) for i in range(0, len(packed), FIELDS))

    @property
    def capacity(self) -> Capacity:
        """The smallest capacity that holds this plan."""
        return Capacity(len(self.starts) - 1, len(self.item_rows) // FIELDS, len(self.merge_rows) // FIELDS, self.slots)

    def flat(self, capacity: Capacity | None = None) -> "array[int]":
        """The plan as one array for kernels: number of merges and of empty ones, then starts, items, merges, firsts.

        Offsets are those of :func:`flat_offsets`. The firsts repeat each worker's first item, followed by its number of
        items, so that it can start without a lookup. With a larger ``capacity`` the array has the length of any plan of
        that capacity, and additional workers have no items. Raises CapacityError if the plan does not fit.
        """
        own, capacity = self.capacity, capacity or self.capacity
        if any(have > most for have, most in zip(own, capacity, strict=True)):
            raise CapacityError(
                f"a plan of {own} does not fit {capacity}; capture the graph for more requests or queries"
            )
        first_start, first_item, first_merge, firsts, total = flat_offsets(capacity)
        starts = array("i", self.starts)
        starts.extend(starts[-1:] * (capacity.workers - own.workers))
        flat = array("i", [0]) * total
        flat[0] = own.merges
        spans = zip(self.merge_rows[3::FIELDS], self.merge_rows[4::FIELDS], strict=True)
        flat[1] = sum(first == end for first, end in spans)
        for at, packed in ((first_start, starts), (first_item, self.item_rows), (first_merge, self.merge_rows)):
            flat[at : at + len(packed)] = packed
        for w, (i, end) in enumerate(itertools.pairwise(self.starts)):
            if end > i:
                at = firsts + w * FIELDS
                flat[at : at + FIELDS] = self.item_rows[i * FIELDS : (i + 1) * FIELDS]
                flat[at + len(Item._fields)] = end - i
        return flat


def pack_rows(tuples: Iterable[Sequence[int]]) -> "array[int]":
    """Items or merges packed one after another, ``FIELDS`` integers each, zero-padded."""
    packed: list[int] = []
    for row in tuples:
        packed += row
        packed += _ZEROS[len(row) :]
    return array("i", packed)


_ZEROS = (0,) * FIELDS


def flat_offsets(capacity: Capacity) -> tuple[int, int, int, int, int]:
    """(offsets of starts, items, merges and firsts in the flat array, its length), all multiples of 4."""
    items = 4 + -(-(capacity.workers + 1) // 4) * 4
    merges = items + capacity.items * FIELDS
    firsts = merges + capacity.merges * FIELDS
    return 4, items, merges, firsts, firsts + capacity.workers * FIELDS
