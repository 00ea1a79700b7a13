"""The split planner of Flash-Decoding: which keys are read where, so that every multiprocessor ends at the same time.

A *line* is a block of query rows of one request on one key/value head. It must see its keys, n tiles of them, and may
be cut between any two tiles, since states merge (:mod:`colonnade.kernels.softmax_state`). W workers (blocks of threads
that stay) each take a list of pieces, one after another. A piece of n tiles costs start + n · tile; what was cut is
merged in a second step, which costs merge + part · (pieces of the line with most). So no plan ends before

    ideal = (Σ n · tile + lines · start) / W

**Cutting** (stream-K: Osama et al., arXiv 2301.03598). Lay all lines end to end and fill one worker after another up to
a limit X, going on to the next when no further tile fits. This takes the fewest workers that X allows, so a search over
X finds the least for W workers; and X = ideal + 2 start + tile always suffices: a worker that was closed holds more
than X − start − tile, W closed workers hold at most Σ n · tile + (lines + W − 1) · start, a cut costing one more start,
and the two contradict each other. Work is thus balanced whatever the lengths are, also where lines are few, or make
little more than a whole number of rounds.

**Not cutting.** Lines are given out whole, longest first, each to whoever ends first (Graham 1969). What ends earlier,
its merge included, is the plan; with few lines fewer workers are tried too, whose merge has fewer pieces.

**Fixed cuts** (``chunk``): lines are cut at the multiples of ``chunk`` keys, whoever else is in the batch, and pieces
are given out as above; who takes a piece does not change its numbers, and pieces merge in their order. A request's
result is then the same bits alone and among any others. It ends at most the longest piece later than the ideal.

Where workers divide over the key/value heads, a plan for one head serves all: it is made so much sooner, and the heads
of a token, which are neighbours in memory, are read at about the same time.

All of this needs true lengths: a plan for allocated ones cuts 300 keys as if they were 131,072. It may look a few keys
``ahead``, and then serves so many steps of decoding: kernels stop at the length that the device knows, and a piece that
nothing has reached yet is the identity. Nothing here asks a device, and equal arguments give equal plans. Costs are
whole numbers of any unit.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from colonnade.errors import ConfigError
from colonnade.kernels.attention.split_plan import Costs, Item, Merge, Plan, Shape, check_lengths

MANY = 4096
"""Lines, from which on a thirty-second of the workers may stay idle for a plan that is made in good time."""


def plan(
    lengths: Sequence[int],
    queries: Sequence[int],
    shape: Shape,
    workers: int,
    costs: Costs,
    *,
    chunk: int | None = None,
    room: int | None = None,
    ahead: int = 0,
    skip: Sequence[int | None] | None = None,
) -> Plan:
    """A plan for requests of ``lengths`` keys, the last ``queries`` of which are the new ones, on ``workers`` workers.

    With ``chunk``, a multiple of the tile, cuts are fixed. ``room`` is how many keys a request's table of pages has
    place for; a longer request raises CapacityError, and sizes that cannot be raise ConfigError. The plan also holds
    while all lengths grow by up to ``ahead`` keys. ``skip`` says of each request how many of its first keys are left
    to another plan, whose states will be merged with this one's (None: there is no other plan): all that it finds then
    goes to slots.
    """
    skip = [None] * len(lengths) if skip is None else skip
    _check(lengths, queries, shape, workers, chunk, room)
    heads, idle = shape.kv_heads, workers % shape.kv_heads
    many = sum(map(shape.blocks, queries)) * heads > MANY
    if heads > 1 and (idle == 0 or (many and 32 * idle <= workers)):
        alone = shape._replace(kv_heads=1)
        one = plan(lengths, queries, alone, workers // heads, costs, chunk=chunk, room=room, ahead=ahead, skip=skip)
        return _for_all_heads(one, heads, workers)
    lines: list[_Line] = []
    merges: list[Merge] = []
    for r, (length, new) in enumerate(zip(lengths, queries, strict=True)):
        later = length + ahead if room is None else min(length + ahead, room)
        blocks = range(shape.blocks(new))
        spans = [(shape.keys(length, new, block)[0], shape.keys(later, new, block)[1]) for block in blocks]
        left = skip[r]
        joined = left is not None
        spans = [(max(first, left or 0), end) for first, end in spans]
        for head in range(shape.kv_heads):
            for block, (first, end) in enumerate(spans):
                if end > first:
                    n = -(-end // shape.tile) - first // shape.tile
                    lines.append(_Line(r, head, block, first, end, n, joined))
                else:
                    merges.append(Merge(r, head, block, 0, 0))
    total = sum(line.tiles for line in lines) * costs.tile + len(lines) * costs.start
    ideal = -(-total // workers)
    if chunk is not None:
        best = _given_out(lines, shape.tile, workers, costs, chunk)
    else:
        best = _given_out(lines, shape.tile, workers, costs, None)
        fewer = workers
        while lines and fewer > 0 and (fewer == workers or fewer > len(lines)):
            best = min(best, _cut(lines, shape.tile, fewer, costs, total), key=lambda found: found.finish)
            fewer //= 2
    return _written(best, workers, merges, ideal)


class _Line(NamedTuple):
    request: int
    head: int
    block: int
    first: int
    end: int
    tiles: int
    joined: bool
    """Whether it is merged in any case."""


class _Piece(NamedTuple):
    line: int
    first: int
    end: int


class _Found(NamedTuple):
    """Each worker's pieces, and when all is done."""

    lines: list[_Line]
    pieces: list[list[_Piece]]
    finish: int


def _given_out(lines: list[_Line], tile: int, workers: int, costs: Costs, chunk: int | None) -> _Found:
    """Lines, or their chunks, longest first to whoever ends first; equal ones in their order."""
    cut: list[tuple[int, _Piece]] = []
    most = 1
    for i, line in enumerate(lines):
        size = chunk or line.end
        for k, at in enumerate(range(line.first // size * size, line.end, size)):
            piece = _Piece(i, max(at, line.first), min(at + size, line.end))
            cut.append((costs.start + (-(-piece.end // tile) - piece.first // tile) * costs.tile, piece))
            most = max(most, k + 1)
    cut.sort(key=lambda priced: -priced[0])
    pieces: list[list[_Piece]] = [[] for _ in range(workers)]
    heap = [(0, w) for w in range(workers)]
    for cost, piece in cut:
        busy, w = heap[0]
        pieces[w].append(piece)
        heapq.heapreplace(heap, (busy + cost, w))
    return _Found(lines, pieces, max(heap)[0] + _merging(most, lines, costs))


def _cut(lines: list[_Line], tile: int, workers: int, costs: Costs, total: int) -> _Found:
    """Lines end to end, filled into workers up to the least limit that does."""
    low = max(-(-total // workers), costs.start + costs.tile)
    high = -(-total // workers) + 2 * costs.start + costs.tile
    # An eighth of a tile is nearer than the costs are known.
    while high - low > max(1, costs.tile // 8):
        limit = (low + high) // 2
        if _needed(lines, limit, costs) <= workers:
            high = limit
        else:
            low = limit
    pieces: list[list[_Piece]] = [[]]
    left, most, longest = high, 1, 0
    for i, line in enumerate(lines):
        at, first, parts = line.first // tile, line.first, 0
        last = at + line.tiles
        while at < last:
            room = (left - costs.start) // costs.tile
            if room < 1:
                pieces.append([])
                left = high
                continue
            at = min(last, at + room)
            end = min(line.end, at * tile)
            pieces[-1].append(_Piece(i, first, end))
            left -= costs.start + (at - first // tile) * costs.tile
            longest = max(longest, high - left)
            first = end
            parts += 1
        most = max(most, parts)
    return _Found(lines, pieces, longest + _merging(most, lines, costs))


def _needed(lines: list[_Line], limit: int, costs: Costs) -> int:
    """How many workers the lines fill up to a limit."""
    needed, left = 1, limit
    for line in lines:
        n = line.tiles
        while n:
            room = (left - costs.start) // costs.tile
            if room < 1:
                needed, left = needed + 1, limit
            else:
                taken = min(n, room)
                n -= taken
                left -= costs.start + taken * costs.tile
    return needed


def _merging(most: int, lines: list[_Line], costs: Costs) -> int:
    most += any(line.joined for line in lines)
    return costs.merge + costs.part * most if most > 1 else 0


def _written(found: _Found, workers: int, merges: list[Merge], ideal: int) -> Plan:
    """Slots for the pieces of lines that were cut, a line's together and in the order of their keys.

    ``merges`` has the lines of no keys.
    """
    parts = [0] * len(found.lines)
    for taken in found.pieces:
        for piece in taken:
            parts[piece.line] += 1
    slots, at = 0, [-1] * len(parts)
    for i, count in enumerate(parts):
        line = found.lines[i]
        if count > 1 or line.joined:
            merges.append(Merge(line.request, line.head, line.block, slots, slots + count))
            at[i] = slots
            slots += count
    place: dict[_Piece, int] = {}
    for piece in sorted(piece for taken in found.pieces for piece in taken if at[piece.line] >= 0):
        place[piece] = at[piece.line]
        at[piece.line] += 1
    starts: list[int] = [0]
    items: list[Item] = []
    for taken in found.pieces:
        for piece in taken:
            line = found.lines[piece.line]
            slot = place.get(piece, -1)
            items.append(Item(line.request, line.head, line.block, piece.first, piece.end, slot))
        starts.append(len(items))
    starts += [len(items)] * (workers + 1 - len(starts))
    return Plan(tuple(starts), tuple(items), tuple(merges), slots, found.finish, ideal)


def _for_all_heads(one: Plan, heads: int, workers: int) -> Plan:
    """A plan for one head as that of all; worker w of head h becomes w · heads + h, and the rest have nothing."""
    starts: list[int] = [0]
    items: list[Item] = []
    for first, end in itertools.pairwise(one.starts):
        taken = one.items[first:end]
        for head in range(heads):
            shift = head * one.slots
            items += [Item(r, head, b, i, j, slot if slot < 0 else slot + shift) for r, _, b, i, j, slot in taken]
            starts.append(len(items))
    merges = [
        Merge(r, head, b, i + head * one.slots, j + head * one.slots) if j > i else Merge(r, head, b, 0, 0)
        for head in range(heads)
        for r, _, b, i, j in one.merges
    ]
    ideal = -(-one.ideal * (len(starts) - 1) // workers)
    starts += [len(items)] * (workers + 1 - len(starts))
    return Plan(tuple(starts), tuple(items), tuple(merges), one.slots * heads, one.finish, ideal)


def _check(
    lengths: Sequence[int], queries: Sequence[int], shape: Shape, workers: int, chunk: int | None, room: int | None
) -> None:
    if len(lengths) != len(queries):
        raise ConfigError(f"{len(lengths)} lengths for {len(queries)} numbers of queries; give one of each a request")
    if min(workers, shape.kv_heads, shape.group, shape.rows, shape.tile) < 1:
        raise ConfigError(f"{workers} workers for {shape}; every size is at least 1")
    if chunk is not None and (chunk < 1 or chunk % shape.tile):
        raise ConfigError(f"cuts at every {chunk} keys cut tiles of {shape.tile}; give a multiple of the tile")
    if min((*lengths, *queries, 0)) < 0:
        raise ConfigError(f"a number below 0 among lengths {list(lengths)} and queries {list(queries)}; give counts")
    if room is not None:
        check_lengths(lengths, room)
