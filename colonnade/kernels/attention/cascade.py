"""Cascade: keys that several requests share are read once for all of them.

Requests whose tables begin with the same pages (a system prompt, a document with several questions, branches of one
text) form a *group*. Its shared keys are read by one more plan, in which all queries of the group are rows of one
matrix; each request's own plan begins after them, and the two states of a query merge as any others:

    state(q) = merge(state over the group's keys, state over the request's own keys)

So B requests read S shared keys once and not B times. It is one level deep: a request belongs to one group. Which one
is chosen by cost. Sorted by their pages, requests with a common beginning are neighbours, and common beginnings nest
into a tree; of each node either all its requests form a group, or its children are asked, whichever saves more:

    saved(node) = max(worth(all requests below, their common pages), Σ saved(children))

Shared keys lie in full pages before every query of their group, so that there is nothing causal about them. Where both
plans together end no earlier than one plan without groups, there are none.

Juravsky et al., Hydragen (arXiv 2402.05099); Ye et al., Cascade inference (FlashInfer, 2024). Different here: groups
are found in the tables of pages, nobody declares them; and the plans' own prices decide. Pure Python; equal arguments
give equal plans.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from colonnade.errors import CapacityError
from colonnade.kernels.attention import split_planner
from colonnade.kernels.attention.split_plan import Costs, Plan, Shape, pack_rows


class Group(NamedTuple):
    """Requests that share keys ``first`` .. ``end`` − 1; earlier ones no query of theirs sees."""

    requests: tuple[int, ...]
    first: int
    end: int


class KernelCosts(NamedTuple):
    """Who reads: blocks of ``shape`` on ``workers`` workers at these costs."""

    shape: Shape
    workers: int
    costs: Costs


class CascadeCapacity(NamedTuple):
    """Sizes of the array that tells who is in which group: what a captured graph is given."""

    requests: int
    groups: int
    rows: int
    """Queries of all groups."""

    @property
    def offsets(self) -> tuple[int, int, int]:
        """(where the groups and where the rows begin in the flat form, its length)."""
        groups = 4 * self.requests
        rows = groups + 4 * self.groups
        return groups, rows, rows + 2 * self.rows


@dataclass(frozen=True)
class Cascade:
    """Two plans and who shares what."""

    groups: tuple[Group, ...]
    own: Plan
    """Of the requests, without the keys that their groups share."""
    shared: Plan
    """Of the groups: in its items and merges a request is a group. Its merges are all its lines, in order."""
    queries: tuple[int, ...]
    """Of each request."""
    blocks: tuple[int, ...]
    """Of each group."""
    kv_heads: int

    @property
    def finish(self) -> int:
        """When both should have ended, one after the other."""
        return self.own.finish + self.shared.finish

    @property
    def keys(self) -> tuple[int, int]:
        """(keys that are read once for several requests, readings of a key that this saves)."""
        each = [(group.end - group.first, len(group.requests) - 1) for group in self.groups]
        return sum(keys for keys, _ in each), sum(keys * others for keys, others in each)

    @property
    def capacity(self) -> CascadeCapacity:
        """The least that holds this."""
        rows = sum(self.queries[r] for group in self.groups for r in group.requests)
        return CascadeCapacity(len(self.queries), len(self.groups), rows)

    def flat(self, capacity: CascadeCapacity | None = None) -> list[int]:
        """Who is in which group, for kernels; ``room`` may be larger.

        Of each request: its group's first line among the merges of ``shared`` (−1: it is in none), the blocks of a
        head there, how many of the group's queries come before its own. Of each group: a request whose pages are
        read, where its rows begin in this list, how many they are. Of each row: request and number of the query.
        """
        capacity = capacity or self.capacity
        if any(have > most for have, most in zip(self.capacity, capacity, strict=True)):
            raise CapacityError(f"groups of {self.capacity} do not fit {capacity}; capture the graph for more requests")
        groups_at, rows_at, total = capacity.offsets
        flat = [0] * total
        flat[: 4 * capacity.requests : 4] = [-1] * capacity.requests
        line = 0
        for g, group in enumerate(self.groups):
            start, before = rows_at, 0
            for r in group.requests:
                flat[4 * r : 4 * r + 3] = line, self.blocks[g], before
                for query in range(self.queries[r]):
                    flat[rows_at : rows_at + 2] = r, query
                    rows_at += 2
                before += self.queries[r]
            flat[groups_at + 4 * g : groups_at + 4 * g + 3] = group.requests[0], start, before
            line += self.kv_heads * self.blocks[g]
        return flat


def plan(
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    queries: Sequence[int],
    page_tokens: int,
    few: KernelCosts,
    many: KernelCosts,
    *,
    max_keys: int | None = None,
    ahead: int = 0,
) -> Cascade | Plan:
    """How requests with these tables of pages are read: a :class:`Cascade` where it ends earlier than a plan without.

    ``few`` reads requests, ``many`` groups; otherwise as :func:`split_planner.plan`, which says what is refused.
    ``many``'s shape is taken as not causal.
    """
    plain = split_planner.plan(lengths, queries, few.shape, few.workers, few.costs, max_keys=max_keys, ahead=ahead)
    shape = many.shape._replace(causal=False)
    many = many._replace(shape=shape)
    found = groups(tables, lengths, queries, page_tokens, few, many)
    if not found:
        return plain
    skip: list[int | None] = [None] * len(lengths)
    for group in found:
        for r in group.requests:
            skip[r] = group.end
    own = split_planner.plan(
        lengths, queries, few.shape, few.workers, few.costs, max_keys=max_keys, ahead=ahead, skip=skip
    )
    stacked = [sum(queries[r] for r in group.requests) for group in found]
    ends, firsts = [group.end for group in found], [group.first for group in found]
    shared = split_planner.plan(ends, stacked, shape, many.workers, many.costs, skip=firsts)
    shared = replace(shared, merge_rows=pack_rows(sorted(shared.merges)))
    blocks = tuple(map(shape.blocks, stacked))
    cascade = Cascade(tuple(found), own, shared, tuple(queries), blocks, shape.kv_heads)
    return cascade if cascade.finish < plain.finish else plain


def groups(
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    queries: Sequence[int],
    page_tokens: int,
    few: KernelCosts,
    many: KernelCosts,
) -> list[Group]:
    """Of all ways to put each request into one group or none, the one that saves most, in order of requests."""

    def group_of(requests: Sequence[int], pages: int) -> Group:
        end = pages * page_tokens // few.shape.tile * few.shape.tile
        window, first = few.shape.window, 0
        if window is not None:
            first = min(lengths[r] - queries[r] for r in requests) - window + 1
        return Group(tuple(sorted(requests)), min(max(0, first), end), end)

    def worth(group: Group) -> int:
        """What reading together saves, in the costs' unit times both numbers of workers."""
        keys = group.end - group.first
        if not keys:
            return 0
        apart = sum(few.shape.blocks(queries[r]) for r in group.requests) * -(-keys // few.shape.tile) * few.costs.tile
        together = many.costs.start + -(-keys // many.shape.tile) * many.costs.tile
        together *= many.shape.blocks(sum(queries[r] for r in group.requests))
        return apart * many.workers - together * few.workers

    full = [max(0, n - new) // page_tokens if new else 0 for n, new in zip(lengths, queries, strict=True)]
    heads = Counter(table[0] for table, n in zip(tables, full, strict=True) if n)
    full = [n if n and heads[table[0]] > 1 else 0 for table, n in zip(tables, full, strict=True)]
    # As bytes, which are compared a thousand at a time.
    names = [array("q", table[:n]).tobytes() for table, n in zip(tables, full, strict=True)]
    order = sorted((r for r, n in enumerate(full) if n), key=lambda r: names[r])
    common = [_common_prefix_bytes(names[a], names[b]) // 8 for a, b in pairwise(order)]
    stack: list[_PrefixNode] = []
    saved, found = 0, list[Group]()
    for i, down in enumerate([*common, 0][: len(order)]):
        saved, found, start = 0, [], i
        while stack and stack[-1].pages > down:
            node = stack.pop()
            node.saved, node.groups, start = node.saved + saved, node.groups + found, node.start
            group = group_of(order[start : i + 1], node.pages)
            alone = worth(group)
            saved, found = (alone, [group]) if alone > node.saved else (node.saved, node.groups)
        if stack and stack[-1].pages == down:
            stack[-1].saved, stack[-1].groups = stack[-1].saved + saved, stack[-1].groups + found
        else:
            stack.append(_PrefixNode(down, start, saved, found))
    # The node of no common pages, which all others are below, is left.
    return sorted(stack[0].groups) if stack else []


@dataclass
class _PrefixNode:
    """A common beginning of the requests from ``start`` of the order on, while later ones may still join."""

    pages: int
    start: int
    saved: int = 0
    """By the groups of its children that are complete."""
    groups: list[Group] = field(default_factory=list)


def _common_prefix_bytes(a: bytes, b: bytes) -> int:
    """How many bytes are the same before the first that is not, by halves."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
