"""Split planner of Flash-Decoding: load-balances KV splits over persistent workers.

A *line* is a block of query rows of one request on one key/value head. It must read its keys, n tiles of them, and may
be split between any two tiles, since states merge (:mod:`colonnade.kernels.softmax_state`). W workers (persistent
thread blocks) each process a list of pieces. A piece of n tiles costs start + n · tile; split lines are merged in a
second step, which costs merge + part · (most pieces of a line) + row · (rows of split lines). So no plan ends before

    ideal = (Σ n · tile + lines · start) / W

**Splitting** (stream-K: Osama et al., arXiv 2301.03598). Put all lines end to end and fill one worker after another up
to a limit X, moving to the next when no further tile fits. This takes the fewest workers that X allows, so a search
over X finds the least X for W workers. X = ideal + 2 start + tile always suffices: a full worker holds more than X −
start − tile, W full workers hold at most Σ n · tile + (lines + W − 1) · start, since a split costs one more start, and
the two contradict each other. So the load is balanced whatever the lengths are, also if there are few lines, or
slightly more than a whole number of rounds.

**Not splitting.** Whole lines are assigned longest first, each to the worker that ends first (Graham 1969). The plan
that ends earlier, including its merge, is chosen; with few lines fewer workers are tried too, whose merge has fewer
pieces. If workers merge the lines they split (``twice``), one piece per worker is tried as well, so that no worker
merges two lines. If workers share a multiprocessor (``teams``), one more way is tried: as many whole lines as give
every multiprocessor equally many, and the remaining ones cut over all. Else, of 140 lines on 132 multiprocessors, 8
would make 8 multiprocessors read twice as long. The pieces end before the whole lines, so their merge costs no time.

**Fixed splits** (``chunk``): lines are split at multiples of ``chunk`` keys, independently of the batch; which worker
reads a chunk does not change its state, and chunks merge in order. A request's result is then bitwise the same alone
and in any batch. Chunks are assigned longest first, and the plan ends at most the longest chunk after the ideal. With
``runs``, consecutive chunks of a line may be one piece, a run, in which a further chunk costs a quarter of a start:
lines are then also filled end to end as above, with chunks as tiles, and assigned whole, and the plan that ends
earliest is chosen. With ``aligned`` pieces a piece is a power of 2 of chunks, starting at a multiple of their number,
and has one state: the subtree of a binary tree over chunks, which the kernel completes. All cut lines have pieces of
one size; the size whose plan ends earliest is chosen.

If the number of workers is a multiple of the key/value heads, a plan for one head is replicated: planning is faster,
and the heads of a token, which are neighbours in memory, are read at about the same time.

All of this needs true lengths: a plan for allocated lengths splits 300 keys as if they were 131,072. A plan may look a
few keys ``ahead`` and then serves that many decode steps: kernels stop at the length stored on the device, and a piece
beyond it has the identity state. Planning uses no device and is deterministic. Costs are integers in any unit.
"""

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from colonnade.errors import ConfigError
from colonnade.kernels.attention.split_plan import (
    ALIGNED_PARTS,
    ALIGNED_PIECES,
    FIELDS,
    Costs,
    Plan,
    Shape,
    check_lengths,
    pack_rows,
)

MANY_LINES = 4096
"""Lines from which on up to a thirty-second of the workers may idle to plan in time."""
MAX_WHOLE_LINES = 3
"""Whole lines of a team at most, if its multiprocessor also reads a piece of another."""
MIN_MERGE_TILES = 16
"""Tiles of the longest line at least: a merge of shorter ones is not hidden."""
ALONE = 12
"""With two teams, by what part of its time a team is slower once the other has ended: half of the ring is idle."""


def plan(
    lengths: Sequence[int],
    queries: Sequence[int],
    shape: Shape,
    workers: int,
    costs: Costs,
    *,
    chunk: int | None = None,
    runs: bool = False,
    aligned: bool = False,
    max_keys: int | None = None,
    ahead: int = 0,
    skip: Sequence[int | None] | None = None,
    teams: int = 1,
) -> Plan:
    """A plan for requests of ``lengths`` keys, the last ``queries`` of which are new, on ``workers`` workers.

    With ``chunk``, a multiple of the tile, splits are fixed, and with ``runs`` or ``aligned`` an item may be several
    chunks.
    ``max_keys`` is the size of a page table's row in keys; a longer request raises CapacityError, and invalid sizes
    raise ConfigError. The plan stays valid while all lengths grow by up to ``ahead`` keys. ``skip`` says how many of
    each request's first keys another plan reads, whose states will be merged with this one's (None: no other plan); all
    states of such a request go to slots. ``teams`` workers share a multiprocessor, each with the one that follows
    ``workers`` / ``teams`` later.
    """
    skip = [None] * len(lengths) if skip is None else skip
    _check(lengths, queries, shape, workers, chunk, max_keys)
    heads, idle = shape.kv_heads, workers % shape.kv_heads
    many = sum(map(shape.blocks, queries)) * heads > MANY_LINES
    if heads > 1 and (idle == 0 or (many and 32 * idle <= workers)):
        alone = shape._replace(kv_heads=1)
        per_worker = costs._replace(row=costs.row * heads)
        one = plan(
            lengths,
            queries,
            alone,
            workers // heads,
            per_worker,
            chunk=chunk,
            runs=runs,
            aligned=aligned,
            max_keys=max_keys,
            ahead=ahead,
            skip=skip,
            teams=teams if workers // teams % heads == 0 else 1,
        )
        return _replicate_over_heads(one, heads, workers)
    lines, empty = _list_lines(lengths, queries, shape, max_keys, ahead, skip)
    prices = [costs.start + n * costs.tile for n in lines.tiles]
    if chunk is not None and aligned:
        assignment = _assign_aligned(lines, prices, shape.tile, workers, costs, chunk)
    elif chunk is not None:
        assignment = _assign_chunks(lines, shape.tile, workers, costs, chunk, runs)
    else:
        assignment = [_assign_longest_first(_whole_lines(lines), prices, [1] * len(prices), workers)]
        fewer = workers
        while prices and fewer > 0 and (fewer == workers or fewer > len(prices)):
            if costs.twice and len(prices) <= fewer:
                assignment.append(_one_piece_per_worker(lines, shape.tile, fewer, workers, costs))
            # The costs are not known to an eighth of a tile.
            assignment.append(_stream_k(lines, prices, shape.tile, fewer, costs, costs.tile // 8))
            fewer //= 2
    used = shape.used_rows(max(queries, default=0))
    if costs.lone and (chunk is None or aligned):
        assignment = [
            per_worker._replace(read=_read_time(per_worker, shape.tile, workers, costs)) for per_worker in assignment
        ]
    if chunk is None and teams > 1 and not any(lines.joined):
        assignment += _whole_and_rest(lines, prices, shape.tile, workers, teams, costs)
    finish = [
        per_worker.read + max(0, _merge_cost(per_worker, lines, costs, used) - per_worker.early)
        for per_worker in assignment
    ]
    best = min(range(len(assignment)), key=finish.__getitem__)
    return _build_plan(
        lines, assignment[best], finish[best], workers, empty, -(-sum(prices) // workers), None if aligned else chunk
    )


_Name = tuple[int, int, int]
"""A line: request, head, block."""
_Piece = tuple[int, int, int]
"""Line, first key, end."""


class _Lines(NamedTuple):
    """All lines as lists of their fields; a step has thousands of lines, too many for objects."""

    names: list[_Name]
    firsts: list[int]
    ends: list[int]
    tiles: list[int]
    joined: list[bool]
    """Whether the line is merged in any case."""

    def chosen(self, which: list[int]) -> "_Lines":
        return _Lines(
            [self.names[i] for i in which],
            [self.firsts[i] for i in which],
            [self.ends[i] for i in which],
            [self.tiles[i] for i in which],
            [self.joined[i] for i in which],
        )


class _Assignment(NamedTuple):
    """Each worker's pieces, the number of states of each line, when all reads end, the keys of aligned pieces, and how
    long before the end of all reads the last states of split lines are there.
    """

    pieces: list[list[_Piece]]
    parts: list[int]
    read: int
    aligned: int = 0
    early: int = 0


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
    return [(i, first, end) for i, (first, end) in enumerate(zip(lines.firsts, lines.ends, strict=True))]


def _assign_longest_first(cut: list[_Piece], prices: list[int], parts: list[int], workers: int) -> _Assignment:
    """Assigns pieces, longest first, to the worker that ends first; ties keep their order."""
    pieces: list[list[_Piece]] = [[] for _ in range(workers)]
    # time · workers + worker: integers compare faster than tuples, and in the same order.
    heap = list(range(workers))
    for i in sorted(range(len(cut)), key=prices.__getitem__, reverse=True):
        pieces[heap[0] % workers].append(cut[i])
        heapq.heapreplace(heap, heap[0] + prices[i] * workers)
    return _Assignment(pieces, parts, max(heap) // workers)


def _assign_chunks(lines: _Lines, tile: int, workers: int, costs: Costs, chunk: int, runs: bool) -> list[_Assignment]:
    """Assigns chunks one by one; with ``runs`` also lines whole, and lines filled end to end."""
    whole = _whole_lines(lines)
    begins = [range(first // chunk * chunk, end, chunk) for _, first, end in whole]
    parts = list(map(len, begins))
    cut = [(i, max(at, first), min(at + chunk, end)) for i, first, end in whole for at in begins[i]]
    prices = [costs.start + (-(-end // tile) - first // tile) * costs.tile for _, first, end in cut]
    assignment = [_assign_longest_first(cut, prices, parts, workers)]
    if runs:
        again = costs.start // 4
        per_worker = costs._replace(tile=chunk // tile * costs.tile + again, start=costs.start - again)
        # A first chunk that a window cuts counts as a whole one, so that all chunks but the last cost the same.
        prices = [
            per_worker.start + n * again + (-(-end // tile) - begin.start // tile) * costs.tile
            for n, begin, end in zip(parts, begins, lines.ends, strict=True)
        ]
        filled = _stream_k(lines._replace(tiles=parts), prices, chunk, workers, per_worker, costs.tile // 8)
        # On a tie the one with the fewest pieces comes first.
        assignment = [_assign_longest_first(whole, prices, parts, workers), filled._replace(parts=parts), *assignment]
    return assignment


def _assign_aligned(
    lines: _Lines, prices: list[int], tile: int, workers: int, costs: Costs, chunk: int
) -> list[_Assignment]:
    """Assigns aligned pieces of each size, longest first; the last size is that of the longest line."""
    whole, longest = _whole_lines(lines), max(lines.ends, default=0)
    most = ALIGNED_PIECES * workers
    assignment = [_assign_longest_first(whole, prices, [1] * len(whole), workers)]
    size = chunk
    while size < longest:
        parts = [-(-end // size) - first // size for _, first, end in whole]
        if max(parts) <= ALIGNED_PARTS and sum(n for n in parts if n > 1) <= most:
            cut = [
                (i, max(at, first), min(at + size, end))
                for i, first, end in whole
                for at in range(first // size * size, end, size)
            ]
            each = [costs.start + (-(-end // tile) - first // tile) * costs.tile for _, first, end in cut]
            assignment.append(_assign_longest_first(cut, each, parts, workers)._replace(aligned=size))
        size *= 2
    return assignment


def _stream_k(lines: _Lines, prices: list[int], tile: int, workers: int, costs: Costs, near: int) -> _Assignment:
    """Fills workers with lines end to end, up to the smallest sufficient limit (within ``near``)."""
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
    # A worker reads from tile ``done`` of line i on, and ``more`` tiles of line j, possibly none.
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


def _read_time(assignment: _Assignment, tile: int, workers: int, costs: Costs) -> int:
    """When all reads end if a tile takes less time while few workers read, down to ``lone``."""
    loads = [
        (sum(-(-end // tile) - first // tile for _, first, end in taken), len(taken))
        for taken in assignment.pieces
        if taken
    ]
    read, before = 0, 0
    for done, (tiles, _) in enumerate(sorted(loads)):
        busy = len(loads) - done
        read += (tiles - before) * (costs.lone + (costs.tile - costs.lone) * busy // workers)
        before = tiles
    return read + costs.start * max((pieces for tiles, pieces in loads if tiles == before), default=0)


def _one_piece_per_worker(lines: _Lines, tile: int, most: int, workers: int, costs: Costs) -> _Assignment:
    """One piece for each of at most ``most`` workers, as short as possible; a line's pieces are equal."""
    low, high = 0, max(lines.tiles)  # tiles per piece: too few, enough
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


def _whole_and_rest(
    lines: _Lines, prices: list[int], tile: int, workers: int, teams: int, costs: Costs
) -> list[_Assignment]:
    """As many whole lines for each multiprocessor as all can have; the shorter lines that remain are cut.

    The last team of each takes what is cut: one piece, or with more than two teams as stream-K. Empty if no line
    remains, there are too few or too many, or they are short.
    """
    blocks = workers // teams
    count = len(lines.tiles) // blocks * blocks
    if (
        not 0 < count < len(lines.tiles)
        or count > MAX_WHOLE_LINES * (teams - 1) * blocks
        or max(lines.tiles) < MIN_MERGE_TILES
    ):
        return []
    order = sorted(range(len(lines.tiles)), key=lines.tiles.__getitem__, reverse=True)
    whole: list[list[_Piece]] = [[] for _ in range(workers - blocks)]
    tiles = [0] * blocks
    heap = list(range(blocks))
    for i in order[:count]:
        block = heap[0] % blocks
        least = min(range(block, workers - blocks, blocks), key=lambda worker: len(whole[worker]))
        whole[least].append((i, lines.firsts[i], lines.ends[i]))
        tiles[block] += lines.tiles[i]
        heapq.heapreplace(heap, heap[0] + prices[i] * blocks)
    rest = sorted(order[count:])
    left = lines.chosen(rest)
    ways = [_one_piece_per_worker(left, tile, blocks, blocks, costs)]
    if teams > 2:
        ways.append(_stream_k(left, [prices[i] for i in rest], tile, blocks, costs, costs.tile // 8))
    return [_beside_whole_lines(whole, tiles, cut, rest, lines, tile, teams, costs) for cut in ways]


def _beside_whole_lines(
    whole: list[list[_Piece]],
    tiles: list[int],
    cut: _Assignment,
    rest: list[int],
    lines: _Lines,
    tile: int,
    teams: int,
    costs: Costs,
) -> _Assignment:
    """Whole lines of all teams but the last, and for that the pieces of ``cut``, whose lines are ``rest``.

    ``tiles`` are those of each multiprocessor's whole lines; the one with the fewest takes the most pieces.
    """
    parts, tiles = [1] * len(lines.tiles), tiles[:]
    for i, n in zip(rest, cut.parts, strict=True):
        parts[i] = n
    taken = sorted(cut.pieces, key=lambda pieces: _tiles_of(pieces, tile), reverse=True)
    last: list[list[_Piece]] = [[] for _ in tiles]
    for block, pieces in zip(sorted(range(len(tiles)), key=tiles.__getitem__), taken, strict=False):
        last[block] = [(rest[i], first, end) for i, first, end in pieces]
        tiles[block] += _tiles_of(pieces, tile)
    # Teams share their multiprocessor's bandwidth equally.
    end = max(tiles) * costs.tile // teams
    alone = end - min(teams * _tiles_of(taken[0], tile), max(tiles)) * costs.tile // teams
    slower = alone // ALONE if teams == 2 else 0
    starts = costs.start * max(map(len, (*whole, *last)))
    return _Assignment([*whole, *last], parts, starts + end + slower, early=alone)


def _tiles_of(pieces: list[_Piece], tile: int) -> int:
    return sum(-(-end // tile) - first // tile for _, first, end in pieces)


def _fill_workers(tiles: list[int], before: list[int], limit: int, costs: Costs) -> list[tuple[int, int]]:
    """Where each worker starts, as (line, tile), when workers are filled up to a limit.

    ``before`` is the cumulative cost of the lines. A worker that starts at cost x ends in the line that contains x +
    limit, however many lines are between; the rest of a split line costs one more start, which a start position of
    ``before[line] + done · tile`` includes.
    """
    line, done, per_worker = 0, 0, (limit - costs.start) // costs.tile
    begins = [(0, 0)]
    while (target := before[line] + done * costs.tile + limit) < before[-1]:
        if target < before[line + 1]:
            begins += [(line, n) for n in range(done + per_worker, tiles[line], per_worker)]
            done = begins[-1][1]
        else:
            line = bisect_right(before, target, line) - 1
            done = max(0, (target - before[line] - costs.start) // costs.tile)
            begins.append((line, done))
    return begins


def _merge_cost(assignment: _Assignment, lines: _Lines, costs: Costs, used: int) -> int:
    """Cost of the merge, for blocks of ``used`` rows."""
    parts = assignment.parts
    joins = any(lines.joined)
    most = max(parts, default=0) + joins
    if most <= 1:
        return 0
    merged = len(parts) - parts.count(1)
    if joins:
        merged = sum(n > 1 or joined for n, joined in zip(parts, lines.joined, strict=True))
    several = (taken for taken in assignment.pieces if len(taken) > 1) if costs.twice else ()
    merges = max((sum(parts[i] > 1 for i, _, _ in taken) for taken in several), default=0)
    twice = costs.twice * max(0, merges - 1)
    return costs.merge + costs.part * most + costs.row * merged * used + twice


def _build_plan(
    lines: _Lines, assignment: _Assignment, finish: int, workers: int, empty: list[_Name], ideal: int, chunk: int | None
) -> Plan:
    """Builds the plan: the states of a split line get consecutive slots in key order."""
    merges = [(*name, 0, 0) for name in empty]
    slots, at = 0, [-1] * len(assignment.parts)
    for i, parts in enumerate(assignment.parts):
        if parts > 1 or lines.joined[i]:
            merges.append((*lines.names[i], slots, slots + parts))
            at[i] = slots
            slots += parts
    slot_of: dict[_Piece, int] = {}
    share: dict[_Piece, int] = {}
    begun = at[:]
    for piece in sorted([piece for taken in assignment.pieces for piece in taken if at[piece[0]] >= 0]):
        i, first, end = piece
        slot_of[piece] = at[i]
        if chunk is None:
            share[piece] = (at[i] - begun[i]) * 2**16 + assignment.parts[i]
        at[i] += 1 if chunk is None else -(-end // chunk) - first // chunk
    shift = [first // assignment.aligned % ALIGNED_PARTS if assignment.aligned else 0 for first in lines.firsts]
    items = [
        (*lines.names[i], first, end, slot_of.get((i, first, end), -1), shift[i], share.get((i, first, end), 0))
        for taken in assignment.pieces
        for i, first, end in taken
    ]
    starts = [0, *accumulate(map(len, assignment.pieces))]
    starts += [len(items)] * (workers + 1 - len(starts))
    return Plan(tuple(starts), pack_rows(items), pack_rows(merges), slots, finish, ideal, chunk)


def _replicate_over_heads(one: Plan, heads: int, workers: int) -> Plan:
    """The plan of one head for all: worker w of head h becomes w · heads + h; remaining workers idle."""
    per_worker = [_shifted_to_head(one, head) for head in range(heads)]
    starts, items, merges = [0], array("i"), array("i")
    for first, end in pairwise(one.starts):
        for rows_of_head, _ in per_worker:
            items += rows_of_head[first * FIELDS : end * FIELDS]
            starts.append(starts[-1] + end - first)
    for _, rows_of_head in per_worker:
        merges += rows_of_head
    ideal = -(-one.ideal * (len(starts) - 1) // workers)
    starts += [starts[-1]] * (workers + 1 - len(starts))
    return Plan(tuple(starts), items, merges, one.slots * heads, one.finish, ideal, one.chunk)


def _shifted_to_head(one: Plan, head: int) -> "tuple[array[int], array[int]]":
    """(items, merges) of a one-head plan for another head, whose slots follow those of the heads before it."""
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
        raise ConfigError(f"{len(lengths)} lengths for {len(queries)} numbers of queries; pass one of each per request")
    if min(workers, shape.kv_heads, shape.group, shape.rows, shape.tile) < 1:
        raise ConfigError(f"{workers} workers for {shape}; every size is at least 1")
    if chunk is not None and (chunk < 1 or chunk % shape.tile):
        raise ConfigError(f"cuts at every {chunk} keys cut tiles of {shape.tile}; use a multiple of the tile")
    if min((*lengths, *queries, 0)) < 0:
        raise ConfigError(
            f"a number below 0 among lengths {list(lengths)} and queries {list(queries)}; use counts of 0 or more"
        )
    if max_keys is not None:
        check_lengths(lengths, max_keys)
