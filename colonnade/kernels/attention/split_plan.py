"""A plan of Flash-Decoding as data: who reads which keys, what is merged;
:mod:`~colonnade.kernels.attention.split_planner` makes it, kernels read it.
"""

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from colonnade.errors import CapacityError

FIELDS = 8
"""Numbers of an item, and of a merge, in the flat form; a multiple of 4, so that rows are aligned."""


def check_lengths(lengths: Sequence[int], room: int) -> None:
    """Raise CapacityError where a request has more keys than its table of pages has ``room`` for."""
    if (longest := max(lengths, default=0)) > room:
        where = list(lengths).index(longest)
        raise CapacityError(
            f"request {where} has {longest} keys and its table of pages room for {room}; give it more pages"
        )


class Costs(NamedTuple):
    """What work costs, in one unit, such as nanoseconds."""

    tile: int
    """A tile of keys, read while all workers read."""
    start: int
    """Beginning a piece and writing its result."""
    merge: int
    """A merge of anything at all."""
    part: int
    """Each piece of the line that has most."""
    row: int = 0
    """Each row that is merged."""
    twice: int = 0
    """A worker with pieces of two cut lines, where workers merge themselves."""
    lone: int = 0
    """A tile while few workers read, the least that one can take; 0: as much as while all read."""


class Shape(NamedTuple):
    """What is the same for all requests."""

    kv_heads: int
    group: int
    """Query heads of a key/value head; any number."""
    rows: int
    """Rows of a block: row m of a request is query m // group, head m % group of its key/value head."""
    tile: int
    """Keys of a tile; tiles begin at its multiples."""
    window: int | None = None
    """Keys that a query sees, itself included, the last ones; keys before cost nothing."""
    causal: bool = True
    """Whether keys end with the queries; where not, all of them come before every query, and none is left out."""

    def blocks(self, queries: int) -> int:
        """Blocks of rows of a request with so many queries."""
        return -(-queries * self.group // self.rows)

    def used_rows(self, queries: int) -> int:
        """Rows of a block that requests of up to so many queries fill."""
        return min(self.rows, queries * self.group)

    def keys(self, length: int, queries: int, block: int) -> tuple[int, int]:
        """(first, end) of the keys that any row of a block sees; equal where there are none."""
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
    """Which key/value head."""
    block: int
    first: int
    end: int
    slot: int
    """Where its state goes, to be merged, that of its first chunk where it is a run of them; −1: it is the whole line,
    and writes the output itself."""


SHARE = 7
"""Field of an item in the flat form: which piece of its line it is times 2^16, plus how many the line has."""


class Merge(NamedTuple):
    """A line that was cut: the states in slots first .. end − 1, in the order of their keys; of none, the identity."""

    request: int
    head: int
    block: int
    first: int
    end: int


class Capacity(NamedTuple):
    """Sizes of arrays that hold any plan for so many requests: what a captured graph is given."""

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
        """For ``requests`` of at most ``queries`` queries; with fixed cuts also of at most ``context`` keys.

        W workers have W − 1 ends between them, so at most so many cuts, and each makes at most two slots; a line that
        is ``joined`` with keys read elsewhere has one slot more than cuts.
        """
        lines = requests * shape.kv_heads * shape.blocks(queries)
        if chunk is None:
            slots = lines + workers - 1 if joined else 2 * (workers - 1)
            return cls(workers, lines + workers - 1, lines, slots)
        pieces = lines * -(-context // chunk)
        return cls(workers, pieces, lines, pieces)


@dataclass(frozen=True)
class Plan:
    """Who reads what. Worker w takes items ``starts[w] .. starts[w + 1] − 1``, in turn.

    Items and merges are kept as :func:`pack_rows`, as kernels read them: an engine makes a plan every few steps, and no
    object for any of them.
    """

    starts: tuple[int, ...]
    item_rows: "array[int]"
    merge_rows: "array[int]"
    slots: int
    finish: int
    """When it should end, its merge included, in the unit of the costs."""
    ideal: int
    """Before which no plan can, rounded up."""
    chunk: int | None = None
    """Keys between cuts that are fixed: an item that goes beyond one is several pieces."""

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All workers' pieces of work."""
        numbers = self.item_rows
        return tuple(Item(*numbers[i : i + len(Item._fields)]) for i in range(0, len(numbers), FIELDS))

    @cached_property
    def pieces(self) -> tuple[Item, ...]:
        """What has a state of its own: items, with fixed cuts chunk by chunk, in slots one after another."""
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
        numbers = self.merge_rows
        return tuple(Merge(*numbers[i : i + len(Merge._fields)]) for i in range(0, len(numbers), FIELDS))

    @property
    def capacity(self) -> Capacity:
        """The least that holds this plan."""
        return Capacity(len(self.starts) - 1, len(self.item_rows) // FIELDS, len(self.merge_rows) // FIELDS, self.slots)

    def flat(self, capacity: Capacity | None = None) -> "array[int]":
        """The plan as one array for a kernel: merges' number and that of those of nothing, starts, items,
        merges, firsts, from :func:`flat_offsets` on.

        The firsts are each worker's first item once more, and behind it how many the worker has, so that it can begin
        without looking up where its items stand.

        With a larger ``capacity`` the array is as long as any plan's of that capacity; workers beyond these have
        nothing. Raises CapacityError where the plan is larger.
        """
        own, room = self.capacity, capacity or self.capacity
        if any(have > most for have, most in zip(own, room, strict=True)):
            raise CapacityError(f"a plan of {own} does not fit {room}; capture the graph for more requests or queries")
        first_start, first_item, first_merge, firsts, total = flat_offsets(room)
        starts = array("i", self.starts)
        starts.extend(starts[-1:] * (room.workers - own.workers))
        flat = array("i", [0]) * total
        flat[0] = own.merges
        spans = zip(self.merge_rows[3::FIELDS], self.merge_rows[4::FIELDS], strict=True)
        flat[1] = sum(first == end for first, end in spans)
        for at, numbers in ((first_start, starts), (first_item, self.item_rows), (first_merge, self.merge_rows)):
            flat[at : at + len(numbers)] = numbers
        for w, (i, end) in enumerate(itertools.pairwise(self.starts)):
            if end > i:
                at = firsts + w * FIELDS
                flat[at : at + FIELDS] = self.item_rows[i * FIELDS : (i + 1) * FIELDS]
                flat[at + len(Item._fields)] = end - i
        return flat


def pack_rows(of: Iterable[Sequence[int]]) -> "array[int]":
    """Items or merges one after another, each in ``FIELDS`` numbers, the last ones 0."""
    numbers: list[int] = []
    for row in of:
        numbers += row
        numbers += _ZEROS[len(row) :]
    return array("i", numbers)


_ZEROS = (0,) * FIELDS


def flat_offsets(capacity: Capacity) -> tuple[int, int, int, int, int]:
    """(where the starts, items, merges and firsts begin in the flat form, its length); all multiples of 4."""
    items = 4 + -(-(capacity.workers + 1) // 4) * 4
    merges = items + capacity.items * FIELDS
    firsts = merges + capacity.merges * FIELDS
    return 4, items, merges, firsts, firsts + capacity.workers * FIELDS
