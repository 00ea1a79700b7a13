"""Fixed splits of the CUDA C++ kernel: whatever a plan cuts, a line's chunks are added in one order.

The kernel's steps (cuda_decode_fixed.cuh) are repeated here on symbols: a chunk is its number, a sum a pair.
"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.kernels.attention import cuda_decode, reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import (
    ALIGNED_PARTS,
    FIELDS,
    SHARE,
    SHIFT,
    Capacity,
    Costs,
    Plan,
    Shape,
    flat_offsets,
)
from colonnade.kernels.attention.split_planner import plan as plan_splits
from tests.worlds import assert_same

CHUNK = 128
COSTS = Costs(tile=40, start=1000, merge=1800, part=12, twice=3000)
Line = tuple[int, int, int]


def joined(a: Any, b: Any) -> Any:
    """The sum of two; None is the identity."""
    return a if b is None else b if a is None else (a, b)


def sum_of_piece(first: int, last: int) -> Any:
    """Chunks ``first`` .. ``last``, as one team adds them."""
    kept: dict[int, Any] = {}
    total: Any = None
    for chunk in range(first, last + 1):
        total, level = chunk, 0
        while (chunk >> level) > (first >> level) if chunk == last else (chunk >> level) & 1:
            if (chunk >> level) & 1 and (chunk >> level) > (first >> level):
                total = joined(kept[level], total)
            level += 1
        kept[level] = total
    return total


def sum_of_parts(parts: list[Any], shift: int) -> Any:
    """The parts of a cut line, as slots are merged: neighbours first, from the number of the first one on."""
    level = [None] * shift + parts
    while len(level) > 1:
        level = [joined(*pair) for pair in itertools.zip_longest(level[::2], level[1::2])]
    return level[0]


def sums(plan: Plan) -> dict[Line, Any]:
    """The sum of each line that has keys."""
    pieces: dict[Line, list] = {}
    flat, (_, items_at, *_) = plan.flat(), flat_offsets(plan.capacity)
    for i, item in enumerate(plan.items):
        at = items_at + i * FIELDS
        total = sum_of_piece(item.first // CHUNK, (item.end - 1) // CHUNK)
        pieces.setdefault(item[:3], []).append(
            (flat[at + SHARE] >> 16, flat[at + SHARE] & 0xFFFF, flat[at + SHIFT], total)
        )
    found = {}
    for line, parts in pieces.items():
        parts.sort(key=lambda part: part[0])
        _, count, shift, total = parts[0]
        if count:
            assert [part[:3] for part in parts] == [(i, len(parts), shift) for i in range(count)]
            assert len(parts) <= ALIGNED_PARTS
            total = sum_of_parts([part[3] for part in parts], shift)
        found[line] = total
    return found


requests = st.lists(
    st.tuples(st.one_of(st.integers(0, 300), st.integers(0, 60_000)), st.sampled_from([0, 1, 1, 1, 5])), max_size=6
)


@given(
    requests, st.integers(1, 60_000), st.sampled_from([None, 700, 9000]), st.sampled_from([1, 2, 60, 264]),
    st.sampled_from([0, 16]), st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=60)
def test_chunks_are_added_in_one_order_alone_and_in_any_batch(drawn, length, window, workers, ahead, random) -> None:
    shape = Shape(kv_heads=2, group=4, rows=8, tile=16, window=window)

    def plan(batch: list[tuple[int, int]], count: int) -> Plan:
        lengths, queries = [n for n, _ in batch], [n for _, n in batch]
        return plan_splits(lengths, queries, shape, count, COSTS, chunk=CHUNK, aligned=True, ahead=ahead)

    at = random.randint(0, len(drawn))
    among = plan([*drawn[:at], (length, 1), *drawn[at:]], workers)
    alone = sums(plan([(length, 1)], 132))
    for (request, head, block), total in sums(among).items():
        if request == at:
            assert total == alone[0, head, block]
    room = Capacity.of_aligned(len(drawn) + 1, 5, shape, workers)
    assert len(among.flat(room)) == flat_offsets(room)[-1]


def test_a_long_request_among_short_ones_is_cut_and_uniform_lines_are_whole() -> None:
    shape = Shape(kv_heads=2, group=8, rows=8, tile=16)
    how = {"chunk": 512, "aligned": True}
    few = plan_splits([65_536, *[100] * 20], [1] * 21, shape, 132, COSTS, **how)
    pieces = [item for item in few.items if item.request == 0]
    assert len(pieces) > 60 and {item.first % 1024 for item in pieces} == {0}
    assert all(item.slot == -1 for item in few.items if item.request > 0)
    assert plan_splits([1024] * 64, [1] * 64, shape, 132, COSTS, **how).slots == 0


def test_aligned_plan_computes_attention() -> None:
    torch.manual_seed(0)
    shape = Shape(kv_heads=2, group=3, rows=8, tile=16, window=900)
    lengths, queries, page = [1500, 0, 33], [1, 0, 4], 16
    pages = torch.randperm(300)[:285].view(3, 95).int()
    k, v = torch.randn(2, 300, page, 2, 8, dtype=torch.float64)
    q = torch.randn(5, 6, 8, dtype=torch.float64)
    table = PageTable(pages, torch.tensor([0, 1, 1, 5]).int(), torch.tensor(lengths).int(), page, 4, 1500)
    cut = plan_splits(lengths, queries, shape, 7, Costs(tile=10, start=1, merge=0, part=0), chunk=128, aligned=True)
    assert cut.slots
    state = reference.run_plan(cut, shape, q, k, v, table)
    assert_same(state.o, reference.paged(q, k, v, table, window=900))


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128])
@pytest.mark.parametrize("size", [1, 2])
def test_teams_divide_the_streams_of_a_chunk(width: int, size: int) -> None:
    for rows in (8, 16):
        for lines in (1, 200, 700):
            tiles = cuda_decode.choose_block(rows, width, size, lines, 132, fixed=True)
            sizes = cuda_decode.BlockSizes(tiles.warps, tiles.stages)
            team = tiles.warps // tiles.workers
            assert 8 % team == 0 and tiles.warps % team == 0
            assert rows == 8 or team == 8
            assert cuda_decode.shared_memory_size(width, size, rows, sizes) <= cuda_decode.HOPPER_BYTES
