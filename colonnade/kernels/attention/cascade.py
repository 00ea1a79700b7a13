"""Cascade attention: keys that several requests share are read once for all of them.

Requests whose page tables start with the same pages (a system prompt, a document with several questions, branches of
one text) form a *group*. The shared keys are read by a second plan, in which all queries of the group are rows of one
matrix; each request's own plan starts after them, and the two states of a query are merged:

    state(q) = merge(state over the group's keys, state over the request's own keys)

So S shared keys of B requests are read once instead of B times. There is one level: a request belongs to at most one
group. Groups are chosen by cost. Sorted by their pages, requests with a common prefix are neighbours, and common
prefixes nest into a tree; each node either becomes one group or is divided as its children decide, whichever saves
more:

    saved(node) = max(saving of one group of all requests below, Σ saved(children))

Shared keys lie in full pages before every query of their group, so that no causal mask is needed. If both plans
together end no earlier than one plan without groups, no groups are used.

Juravsky et al., Hydragen (arXiv 2402.05099); Ye et al., Cascade inference (FlashInfer, 2024). Here groups are found in
the page tables instead of being declared, and chosen by the plans' cost model. Pure Python and deterministic.
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
    """Requests that share the keys ``first`` .. ``end`` − 1; a window hides all earlier keys from them."""

    requests: tuple[int, ...]
    first: int
    end: int


class KernelCosts(NamedTuple):
    """A kernel's block shape, its number of workers and its costs."""

    shape: Shape
    workers: int
    costs: Costs


class CascadeCapacity(NamedTuple):
    """Sizes of the array that describes group membership, as a captured graph allocates it."""

    requests: int
    groups: int
    rows: int
    """Queries of all groups."""

    @property
    def offsets(self) -> tuple[int, int, int]:
        """(offset of the groups, offset of the rows, length) of the flat array."""
        groups = 4 * self.requests
        rows = groups + 4 * self.groups
        return groups, rows, rows + 2 * self.rows


@dataclass(frozen=True)
class Cascade:
    """A plan for the requests, a plan for the groups, and the group membership."""

    groups: tuple[Group, ...]
    own: Plan
    """Plan of the requests, without the keys that their groups share."""
    shared: Plan
    """Plan of the groups: its items and merges refer to groups instead of requests, and it merges all of its lines in
    order."""
    queries: tuple[int, ...]
    """Of each request."""
    blocks: tuple[int, ...]
    """Of each group."""
    kv_heads: int

    @property
    def finish(self) -> int:
        """When both plans end, one after the other."""
        return self.own.finish + self.shared.finish

    @property
    def keys(self) -> tuple[int, int]:
        """(keys that are shared, reads of a key that sharing saves)."""
        each = [(group.end - group.first, len(group.requests) - 1) for group in self.groups]
        return sum(keys for keys, _ in each), sum(keys * others for keys, others in each)

    @property
    def capacity(self) -> CascadeCapacity:
        """The smallest capacity that holds this cascade."""
        rows = sum(self.queries[r] for group in self.groups for r in group.requests)
        return CascadeCapacity(len(self.queries), len(self.groups), rows)

    def flat(self, capacity: CascadeCapacity | None = None) -> list[int]:
        """The group membership as an array for kernels; ``capacity`` may be larger than needed.

        Per request: the first line of its group among the merges of ``shared`` (−1: no group), the blocks per head
        there, and how many of the group's queries precede its own. Per group: one of its requests, the offset of its
        rows in this array, their number. Per row: request and query index.
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
    """A :class:`Cascade` for requests with these page tables, or a plain plan if that ends no later.

    ``few`` are the costs of the kernel that reads requests, ``many`` of the one that reads groups; its shape is taken
    as not causal. Otherwise as :func:`split_planner.plan`, which also lists the errors.
    """
    plain = split_planner.plan(lengths, queries, few.shape, few.workers, few.costs, max_keys=max_keys, ahead=ahead)
    shape = many.shape._replace(causal=False)
    many = many._replace(shape=shape)
    chosen = groups(tables, lengths, queries, page_tokens, few, many)
    if not chosen:
        return plain
    skip: list[int | None] = [None] * len(lengths)
    for group in chosen:
        for r in group.requests:
            skip[r] = group.end
    own = split_planner.plan(
        lengths, queries, few.shape, few.workers, few.costs, max_keys=max_keys, ahead=ahead, skip=skip
    )
    group_queries = [sum(queries[r] for r in group.requests) for group in chosen]
    ends, firsts = [group.end for group in chosen], [group.first for group in chosen]
    shared = split_planner.plan(ends, group_queries, shape, many.workers, many.costs, skip=firsts)
    shared = replace(shared, merge_rows=pack_rows(sorted(shared.merges)))
    blocks = tuple(map(shape.blocks, group_queries))
    cascade = Cascade(tuple(chosen), own, shared, tuple(queries), blocks, shape.kv_heads)
    return cascade if cascade.finish < plain.finish else plain


def groups(
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    queries: Sequence[int],
    page_tokens: int,
    few: KernelCosts,
    many: KernelCosts,
) -> list[Group]:
    """The grouping that saves most: each request is in one group or none, in order of requests."""

    def group_of(requests: Sequence[int], pages: int) -> Group:
        end = pages * page_tokens // few.shape.tile * few.shape.tile
        window, first = few.shape.window, 0
        if window is not None:
            first = min(lengths[r] - queries[r] for r in requests) - window + 1
        return Group(tuple(sorted(requests)), min(max(0, first), end), end)

    def saving(group: Group) -> int:
        """The cost that sharing saves, in cost units times both numbers of workers."""
        keys = group.end - group.first
        if not keys:
            return 0
        separate_cost = (
            sum(few.shape.blocks(queries[r]) for r in group.requests) * -(-keys // few.shape.tile) * few.costs.tile
        )
        shared_cost = many.costs.start + -(-keys // many.shape.tile) * many.costs.tile
        shared_cost *= many.shape.blocks(sum(queries[r] for r in group.requests))
        return separate_cost * many.workers - shared_cost * few.workers

    full = [max(0, n - new) // page_tokens if new else 0 for n, new in zip(lengths, queries, strict=True)]
    heads = Counter(table[0] for table, n in zip(tables, full, strict=True) if n)
    full = [n if n and heads[table[0]] > 1 else 0 for table, n in zip(tables, full, strict=True)]
    # Bytes are compared a thousand at a time.
    page_bytes = [array("q", table[:n]).tobytes() for table, n in zip(tables, full, strict=True)]
    order = sorted((r for r, n in enumerate(full) if n), key=lambda r: page_bytes[r])
    common = [_common_prefix_bytes(page_bytes[a], page_bytes[b]) // 8 for a, b in pairwise(order)]
    stack: list[_PrefixNode] = []
    saved, chosen = 0, list[Group]()
    for i, next_pages in enumerate([*common, 0][: len(order)]):
        saved, chosen, start = 0, [], i
        while stack and stack[-1].pages > next_pages:
            node = stack.pop()
            node.saved, node.groups, start = node.saved + saved, node.groups + chosen, node.start
            group = group_of(order[start : i + 1], node.pages)
            one_group = saving(group)
            saved, chosen = (one_group, [group]) if one_group > node.saved else (node.saved, node.groups)
        if stack and stack[-1].pages == next_pages:
            stack[-1].saved, stack[-1].groups = stack[-1].saved + saved, stack[-1].groups + chosen
        else:
            stack.append(_PrefixNode(next_pages, start, saved, chosen))
    # The root (no common pages) is left, with all other nodes merged into it.
    return sorted(stack[0].groups) if stack else []


@dataclass
class _PrefixNode:
    """A common prefix of the requests from index ``start`` of the order on; later ones may still join."""

    pages: int
    start: int
    saved: int = 0
    """By the groups of its completed children."""
    groups: list[Group] = field(default_factory=list)


def _common_prefix_bytes(a: bytes, b: bytes) -> int:
    """Length of the common prefix, by bisection."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
