"""The split planner of Flash-Decoding: which keys are read where, so that every multiprocessor ends at the same time.

A *line* is a block of query rows of one request on one key/value head. It must see its keys, n tiles of them, and may
be cut between any two tiles, since states merge (:mod:`colonnade.kernels.softmax_state`). W workers (blocks of threads
that stay) each take a list of pieces, one after another. A piece of n tiles costs start + n · tile; what was cut is
merged in a second step, which costs merge + part · (pieces of the line with most) + row · (rows of lines that were
cut). So no plan ends before

    ideal = (Σ n · tile + lines · start) / W

**Cutting** (stream-K: Osama et al., arXiv 2301.03598). Lay all lines end to end and fill one worker after another up to
a limit X, going on to the next when no further tile fits. This takes the fewest workers that X allows, so a search over
X finds the least for W workers; and X = ideal + 2 start + tile always suffices: a worker that was closed holds more
than X − start − tile, W closed workers hold at most Σ n · tile + (lines + W − 1) · start, a cut costing one more start,
and the two contradict each other. Work is thus balanced whatever the lengths are, also where lines are few, or make
little more than a whole number of rounds.

**Not cutting.** Lines are given out whole, longest first, each to whoever ends first (Graham 1969). What ends earlier,
its merge included, is the plan; with few lines fewer workers are tried too, whose merge has fewer pieces. Where
workers merge what they cut (``twice``), so is one piece for each worker, so that nobody merges two lines.

**Fixed cuts** (``chunk``): lines are cut at the multiples of ``chunk`` keys, whoever else is in the batch; who reads a
chunk does not change its numbers, and chunks merge in their order. A request's result is then the same bits alone and
among any others. Chunks are given out as lines are, whole, longest first, and it ends at most the longest of them later
than the ideal. With ``runs`` neighbours of a line may be one piece, a run, in which a chunk more costs a fourth of a
start: then lines are also filled end to end as above, with chunks for tiles, and given out whole, and what ends
earliest is the plan.

Where workers divide over the key/value heads, a plan for one head serves all: it is made so much sooner, and the heads
of a token, which are neighbours in memory, are read at about the same time.

All of this needs true lengths: a plan for allocated ones cuts 300 keys as if they were 131,072. It may look a few keys
``ahead``, and then serves so many steps of decoding: kernels stop at the length that the device knows, and a piece that
nothing has reached yet is the identity. Nothing here asks a device, and equal arguments give equal plans. Costs are
whole numbers of any unit.
"""

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from colonnade.errors import ConfigError
from colonnade.kernels.attention.split_plan import FIELDS, Costs, Plan, Shape, check_lengths, pack_rows

MANY_LINES = 4096
"""Lines, from which on a thirty-second of the workers may stay idle for a plan that is made in good time."""


def plan(
    lengths: Sequence[int],
    queries: Sequence[int],
    shape: Shape,
    workers: int,
    costs: Costs,
    *,
    chunk: int | None = None,
    runs: bool = False,
    max_keys: int | None = None,
    ahead: int = 0,
    skip: Sequence[int | None] | None = None,
) -> Plan:
    """A plan for requests of ``lengths`` keys, the last ``queries`` of which are the new ones, on ``workers`` workers.

    With ``chunk``, a multiple of the tile, cuts are fixed, and with ``runs`` an item may be several chunks. ``room`` is
    how many keys a request's table of pages has place for; a longer request raises CapacityError, and sizes that cannot
    be raise ConfigError. The plan also holds while all lengths grow by up to ``ahead`` keys. ``skip`` says of each
    request how many of its first keys are left to another plan, whose states will be merged with this one's (None:
    there is no other plan): all that it finds then goes to slots.
    """
    skip = [None] * len(lengths) if skip is None else skip
    _check(lengths, queries, shape, workers, chunk, max_keys)
    heads, idle = shape.kv_heads, workers % shape.kv_heads
    many = sum(map(shape.blocks, queries)) * heads > MANY_LINES
    if heads > 1 and (idle == 0 or (many and 32 * idle <= workers)):
        alone = shape._replace(kv_heads=1)
        each = costs._replace(row=costs.row * heads)
        one = plan(
            lengths,
            queries,
            alone,
            workers // heads,
            each,
            chunk=chunk,
            runs=runs,
            max_keys=max_keys,
            ahead=ahead,
            skip=skip,
        )
        return _replicate_over_heads(one, heads, workers)
    lines, empty = _list_lines(lengths, queries, shape, room, ahead, skip)
    prices = [costs.start + n * costs.tile for n in lines.tiles]
    if chunk is not None:
        found = _assign_chunks(lines, shape.tile, workers, costs, chunk, runs)
    else:
        found = [_assign_longest_first(_whole_lines(lines), prices, [1] * len(prices), workers)]
        fewer = workers
        while prices and fewer > 0 and (fewer == workers or fewer > len(prices)):
            if costs.twice and len(prices) <= fewer:
                found.append(_one_piece_per_worker(lines, shape.tile, fewer, workers, costs))
            # An eighth of a tile is nearer than the costs are known.
            found.append(_stream_k(lines, prices, shape.tile, fewer, costs, costs.tile // 8))
            fewer //= 2
    used = shape.used_rows(max(queries, default=0))
    if costs.lone and chunk is None:
        found = [each._replace(read=_read_time(each, shape.tile, workers, costs)) for each in found]
    finish = [each.read + _merge_cost(each, lines, costs, used) for each in found]
    best = min(range(len(found)), key=finish.__getitem__)
    return _build_plan(lines, found[best], finish[best], workers, empty, -(-sum(prices) // workers), chunk)


_Name = tuple[int, int, int]
"""Of a line: request, head, block."""
_Piece = tuple[int, int, int]
"""Line, first key, end."""


class _Lines(NamedTuple):
    """What is to be read, a list of each of its numbers: a step has thousands of lines, and no object for any."""

    names: list[_Name]
    firsts: list[int]
    ends: list[int]
    tiles: list[int]
    joined: list[bool]
    """Whether it is merged in any case."""


class _Assignment(NamedTuple):
    """Each worker's pieces, of how many states each line is, and when all is read."""

    pieces: list[list[_Piece]]
    parts: list[int]
    read: int


def _list_lines(
    lengths: Sequence[int],
    queries: Sequence[int],
    shape: Shape,
    max_keys: int | None,
    ahead: int,
    skip: Sequence[int | None],
) -> tuple[_Lines, list[_Name]]:
    """All lines with keys, and the names of those without."""
    lines, empty = _Lines([], [], [], [], []), list[_Name]()
    names, firsts, ends, tiles, joined = lines
    heads, tile = range(shape.kv_heads), shape.tile
    for r, (length, new, left) in enumerate(zip(lengths, queries, skip, strict=True)):
        later = length + ahead if max_keys is None else min(length + ahead, max_keys)
        spans: list[tuple[int, int, int]] = []
        for block in range(shape.blocks(new)):
            # Without a window every block sees the first key.
            first = 0 if shape.window is None else shape.keys(length, new, block)[0]
            spans.append((block, max(first, left or 0), shape.keys(later, new, block)[1]))
        for head in heads:
            for block, first, end in spans:
                if end > first:
                    names.append((r, head, block))
                    firsts.append(first)
                    ends.append(end)
                    tiles.append(-(-end // tile) - first // tile)
                    joined.append(left is not None)
                else:
                    empty.append((r, head, block))
    return lines, empty


def _whole_lines(lines: _Lines) -> list[_Piece]:
    """Each line as one piece."""
    return [(i, first, end) for i, (first, end) in enumerate(zip(lines.firsts, lines.ends, strict=True))]


def _assign_longest_first(cut: list[_Piece], prices: list[int], parts: list[int], workers: int) -> _Assignment:
    """Pieces, longest first, to whoever ends first; equal ones in their order."""
    pieces: list[list[_Piece]] = [[] for _ in range(workers)]
    # time · workers + worker: numbers are compared sooner than pairs, and in the same order.
    heap = list(range(workers))
    for i in sorted(range(len(cut)), key=prices.__getitem__, reverse=True):
        pieces[heap[0] % workers].append(cut[i])
        heapq.heapreplace(heap, heap[0] + prices[i] * workers)
    return _Assignment(pieces, parts, max(heap) // workers)


def _assign_chunks(lines: _Lines, tile: int, workers: int, costs: Costs, chunk: int, runs: bool) -> list[_Assignment]:
    """Chunks given out one by one; and where they may be read in runs, lines that are whole or filled end to end."""
    whole = _whole_lines(lines)
    begins = [range(first // chunk * chunk, end, chunk) for _, first, end in whole]
    parts = list(map(len, begins))
    cut = [(i, max(at, first), min(at + chunk, end)) for i, first, end in whole for at in begins[i]]
    prices = [costs.start + (-(-end // tile) - first // tile) * costs.tile for _, first, end in cut]
    found = [_assign_longest_first(cut, prices, parts, workers)]
    if runs:
        again = costs.start // 4
        each = costs._replace(tile=chunk // tile * costs.tile + again, start=costs.start - again)
        # A first chunk that a window begins within counts as a whole one: chunks then cost the same, but for a last.
        prices = [
            each.start + n * again + (-(-end // tile) - begin.start // tile) * costs.tile
            for n, begin, end in zip(parts, begins, lines.ends, strict=True)
        ]
        filled = _stream_k(lines._replace(tiles=parts), prices, chunk, workers, each, costs.tile // 8)
        # Of equal ends that of fewest pieces.
        found = [_assign_longest_first(whole, prices, parts, workers), filled._replace(parts=parts), *found]
    return found


def _stream_k(lines: _Lines, prices: list[int], tile: int, workers: int, costs: Costs, near: int) -> _Assignment:
    """Lines end to end, filled into workers up to the least limit that does, or one that is ``near``."""
    before = [0, *accumulate(prices)]
    ideal = -(-before[-1] // workers)
    low, high = max(ideal, costs.start + costs.tile), ideal + 2 * costs.start + costs.tile
    while high - low > max(1, near):
        limit = (low + high) // 2
        if len(_fill_workers(lines.tiles, before, limit, costs)) <= workers:
            high = limit
        else:
            low = limit
    begins = [*_fill_workers(lines.tiles, before, high, costs), (len(lines.tiles), 0)]
    pieces: list[list[_Piece]] = []
    parts, longest = [1] * len(lines.tiles), 0
    # A worker reads from tile ``done`` of line i on, and of line j the tiles before ``more``, maybe none.
    for (i, done), (j, more) in pairwise(begins):
        firsts, ends = lines.firsts[i : j + 1], lines.ends[i:j]
        if done:
            firsts[0] = (firsts[0] // tile + done) * tile
        if more:
            ends.append((lines.firsts[j] // tile + more) * tile)
            parts[j] += 1
        pieces.append(list(zip(range(i, j + 1), firsts, ends, strict=False)))
        cost = before[j] - before[i] + (more - done) * costs.tile + (costs.start if more else 0)
        longest = max(longest, cost)
    return _Assignment(pieces, parts, longest)


def _read_time(found: _Assignment, tile: int, workers: int, costs: Costs) -> int:
    """When all is read where few workers, or those that end last, read a tile sooner, down to ``lone``."""
    loads = [
        (sum(-(-end // tile) - first // tile for _, first, end in taken), len(taken)) for taken in found.pieces if taken
    ]
    read, before = 0, 0
    for done, (tiles, _) in enumerate(sorted(loads)):
        busy = len(loads) - done
        read += (tiles - before) * (costs.lone + (costs.tile - costs.lone) * busy // workers)
        before = tiles
    return read + costs.start * max((pieces for tiles, pieces in loads if tiles == before), default=0)


def _one_piece_per_worker(lines: _Lines, tile: int, most: int, workers: int, costs: Costs) -> _Assignment:
    """One piece for each of at most ``most`` workers, of the fewest tiles; the pieces of a line are equal."""
    low, high = 0, max(lines.tiles)  # tiles of a piece: too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if sum(-(-n // middle) for n in lines.tiles) <= most:
            high = middle
        else:
            low = middle
    pieces: list[list[_Piece]] = []
    parts = [-(-n // high) for n in lines.tiles]
    for i, (n, first, end) in enumerate(zip(parts, lines.firsts, lines.ends, strict=True)):
        at = [(first // tile + part * lines.tiles[i] // n) * tile for part in range(1, n)]
        pieces += [[(i, *piece)] for piece in pairwise([first, *at, end])]
    pieces += [[] for _ in range(workers - len(pieces))]
    return _Assignment(pieces, parts, costs.start + high * costs.tile)


def _fill_workers(tiles: list[int], before: list[int], limit: int, costs: Costs) -> list[tuple[int, int]]:
    """Where each worker begins, as a line and tiles of it, when workers are filled up to a limit.

    ``before`` says what all lines before a line cost. So a worker that begins at cost x ends in the line in which
    x + limit lies, however many lines there are between; and the rest of a line that was cut costs one more start,
    which a beginning at ``before[line] + done · tile`` counts.
    """
    line, done, each = 0, 0, (limit - costs.start) // costs.tile
    begins = [(0, 0)]
    while (reach := before[line] + done * costs.tile + limit) < before[-1]:
        if reach < before[line + 1]:
            begins += [(line, n) for n in range(done + each, tiles[line], each)]
            done = begins[-1][1]
        else:
            line = bisect_right(before, reach, line) - 1
            done = max(0, (reach - before[line] - costs.start) // costs.tile)
            begins.append((line, done))
    return begins


def _merge_cost(found: _Assignment, lines: _Lines, costs: Costs, used: int) -> int:
    """What a merge costs of blocks of ``used`` rows."""
    parts = found.parts
    joins = any(lines.joined)
    most = max(parts, default=0) + joins
    if most <= 1:
        return 0
    merged = len(parts) - parts.count(1)
    if joins:
        merged = sum(n > 1 or joined for n, joined in zip(parts, lines.joined, strict=True))
    # Only at its ends has a worker parts of lines.
    ends = [(taken[0][0], taken[-1][0]) for taken in found.pieces if len(taken) > 1] if costs.twice else []
    twice = costs.twice if any(parts[i] > 1 and parts[j] > 1 for i, j in ends) else 0
    return costs.merge + costs.part * most + costs.row * merged * used + twice


def _build_plan(
    lines: _Lines, found: _Assignment, finish: int, workers: int, empty: list[_Name], ideal: int, chunk: int | None
) -> Plan:
    """Slots for the states of lines that were cut, a line's together and in the order of their keys."""
    merges = [(*name, 0, 0) for name in empty]
    slots, at = 0, [-1] * len(found.parts)
    for i, parts in enumerate(found.parts):
        if parts > 1 or lines.joined[i]:
            merges.append((*lines.names[i], slots, slots + parts))
            at[i] = slots
            slots += parts
    place: dict[_Piece, int] = {}
    share: dict[_Piece, int] = {}
    begun = at[:]
    for piece in sorted([piece for taken in found.pieces for piece in taken if at[piece[0]] >= 0]):
        i, first, end = piece
        place[piece] = at[i]
        if chunk is None:
            share[piece] = (at[i] - begun[i]) * 2**16 + found.parts[i]
        at[i] += 1 if chunk is None else -(-end // chunk) - first // chunk
    items = [
        (*lines.names[i], first, end, place.get((i, first, end), -1), 0, share.get((i, first, end), 0))
        for taken in found.pieces
        for i, first, end in taken
    ]
    starts = [0, *accumulate(map(len, found.pieces))]
    starts += [len(items)] * (workers + 1 - len(starts))
    return Plan(tuple(starts), pack_rows(items), pack_rows(merges), slots, finish, ideal, chunk)


def _replicate_over_heads(one: Plan, heads: int, workers: int) -> Plan:
    """A plan for one head as that of all; worker w of head h becomes w · heads + h, and the rest have nothing."""
    each = [_shifted_to_head(one, head) for head in range(heads)]
    starts, items, merges = [0], array("i"), array("i")
    for first, end in pairwise(one.starts):
        for mine, _ in each:
            items += mine[first * FIELDS : end * FIELDS]
            starts.append(starts[-1] + end - first)
    for _, mine in each:
        merges += mine
    ideal = -(-one.ideal * (len(starts) - 1) // workers)
    starts += [starts[-1]] * (workers + 1 - len(starts))
    return Plan(tuple(starts), items, merges, one.slots * heads, one.finish, ideal, one.chunk)


def _shifted_to_head(one: Plan, head: int) -> "tuple[array[int], array[int]]":
    """(items, merges) of a plan for one head as another's, whose slots come after those of the heads before it."""
    items, merges, shift = one.item_rows[:], one.merge_rows[:], head * one.slots
    for numbers in items, merges:
        numbers[1::FIELDS] = array("i", [head]) * (len(numbers) // FIELDS)
    items[5::FIELDS] = array("i", [slot if slot < 0 else slot + shift for slot in items[5::FIELDS]])
    spans = list(zip(merges[3::FIELDS], merges[4::FIELDS], strict=True))
    merges[3::FIELDS] = array("i", [first + shift if end > first else 0 for first, end in spans])
    merges[4::FIELDS] = array("i", [end + shift if end > first else 0 for first, end in spans])
    return items, merges


def _check(
    lengths: Sequence[int], queries: Sequence[int], shape: Shape, workers: int, chunk: int | None, max_keys: int | None
) -> None:
    if len(lengths) != len(queries):
        raise ConfigError(f"{len(lengths)} lengths for {len(queries)} numbers of queries; give one of each a request")
    if min(workers, shape.kv_heads, shape.group, shape.rows, shape.tile) < 1:
        raise ConfigError(f"{workers} workers for {shape}; every size is at least 1")
    if chunk is not None and (chunk < 1 or chunk % shape.tile):
        raise ConfigError(f"cuts at every {chunk} keys cut tiles of {shape.tile}; give a multiple of the tile")
    if min((*lengths, *queries, 0)) < 0:
        raise ConfigError(f"a number below 0 among lengths {list(lengths)} and queries {list(queries)}; give counts")
    if max_keys is not None:
        check_lengths(lengths, max_keys)
