"""The split planner: known failures of other planners, properties of every plan, and correct attention."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import CapacityError, ConfigError
from colonnade.kernels.attention import reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import FIELDS, SHARE, Capacity, Costs, Item, Plan, Shape, flat_offsets
from colonnade.kernels.attention.split_planner import plan as plan_splits
from tests.worlds import assert_same

COSTS = Costs(tile=2000, start=1500, merge=2500, part=20)
"""Approximately an H200, in nanoseconds, for tiles of 64 keys, two workers on each of 132 multiprocessors."""
WORKERS = 264
SHAPE = Shape(kv_heads=2, group=8, rows=16, tile=64)
"""16 query heads, 2 key/value heads."""


def make_plan(lengths: Sequence[int], shape: Shape = SHAPE, queries: int = 1, **options) -> Plan:
    return plan_splits(lengths, [queries] * len(lengths), shape, WORKERS, COSTS, **options)


def busy_workers(plan: Plan) -> int:
    """Number of workers with at least one item."""
    return sum(a < b for a, b in itertools.pairwise(plan.starts))


def worker_loads(plan: Plan, shape: Shape, costs: Costs = COSTS) -> list[int]:
    """Cost of each worker's items."""
    return [
        sum(
            costs.start
            + (-(-i.end // shape.tile) - i.first // shape.tile) * costs.tile
            + (state_count(i, plan.chunk) - 1) * (costs.start // 4)
            for i in plan.items[a:b]
        )
        for a, b in itertools.pairwise(plan.starts)
    ]


def state_count(item: Item, chunk: int | None) -> int:
    """Number of partial states of an item."""
    return 1 if chunk is None else -(-item.end // chunk) - item.first // chunk


# -- failures of planners in use ---------------------------------------------------------------------------------------


def test_splits_depend_on_used_not_allocated_lengths() -> None:
    """300 keys used of 131,072 allocated: as many splits as 300 keys justify."""
    plan = make_plan([300], max_keys=131_072)
    assert plan == make_plan([300], max_keys=320)
    assert plan.slots <= 2 * -(-300 // SHAPE.tile)


def test_few_key_tiles_are_split() -> None:
    """One key/value head and a context of four tiles: an idle GPU processes each tile in parallel."""
    one = Shape(kv_heads=1, group=8, rows=16, tile=64)
    cheap = COSTS._replace(merge=1000)
    plan = plan_splits([256], [1], one, WORKERS, cheap)
    assert [item.first for item in plan.items] == [0, 64, 128, 192]
    assert busy_workers(plan) == 4


def test_merges_that_cost_more_than_they_save_are_avoided() -> None:
    one = Shape(kv_heads=1, group=8, rows=16, tile=64)
    assert plan_splits([256], [1], one, WORKERS, COSTS._replace(merge=10_000)).slots == 0
    assert make_plan([64] * 256).slots == 0


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 64, 131, 133, 200, 263, 265])
def test_indivisible_batches_do_not_collapse_to_one_split(batch: int) -> None:
    """Around every number of lines that does not divide the workers: within the bound of the ideal."""
    plan = make_plan([8192] * batch)
    assert plan.finish <= plan.ideal + 2 * COSTS.start + COSTS.tile + COSTS.merge + COSTS.part * WORKERS
    if 2 * batch < WORKERS // 2:
        assert busy_workers(plan) > WORKERS * 0.9


@pytest.mark.parametrize("queries", [2, 4, 8, 64])
def test_several_queries_are_still_split(queries: int) -> None:
    plan = make_plan([65_536], queries=queries)
    assert busy_workers(plan) > WORKERS * 0.9
    lines = SHAPE.kv_heads * SHAPE.blocks(queries)
    assert len(plan.merges) == lines
    assert len(plan.items) >= WORKERS * 0.9


def test_large_batches_are_still_split() -> None:
    """1000 short requests and a long one: it is split, and the plan ends as soon as the work allows."""
    plan = make_plan([64] * 1000 + [262_144])
    long = [item for item in plan.items if item.request == 1000]
    assert len(long) > WORKERS // 2
    assert plan.finish < 1.2 * plan.ideal


def test_slightly_more_than_one_round_does_not_cost_two() -> None:
    """277 equal lines on 264 workers, 1.05 rounds."""
    one = SHAPE._replace(kv_heads=1)
    plan = make_plan([16_384] * 277, one)
    line = COSTS.start + 256 * COSTS.tile
    assert plan.finish < 1.1 * line  # 2 rounds would be 2 lines
    assert plan.finish <= plan.ideal + 2 * COSTS.start + COSTS.tile + COSTS.merge + COSTS.part * WORKERS


def test_unequal_lengths_are_balanced() -> None:
    """One request of 64k among 31 short ones."""
    plan = make_plan([65_536] + [200] * 31)
    mean = sum(worker_loads(plan, SHAPE)) / WORKERS
    assert max(worker_loads(plan, SHAPE)) <= mean + 2 * COSTS.start + COSTS.tile
    # Pieces of a line are consecutive ranges across workers: stream-K.
    for head in range(2):
        pieces = [(i.first, i.end) for i in plan.items if (i.request, i.head) == (0, head)]
        assert len(pieces) > 60
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 71])
@pytest.mark.parametrize("queries", [1, 3])
def test_any_group_size(group: int, queries: int) -> None:
    shape = Shape(kv_heads=2, group=group, rows=16, tile=64)
    plan = make_plan([5000], shape, queries)
    assert_covers(plan, [5000], [queries], shape)
    assert {i.block for i in plan.items} == set(range(-(-group * queries // 16)))


def test_merges_have_few_pieces_where_faster() -> None:
    """Sequential merging took 36 µs instead of 21: the planner includes the cost of each extra piece."""
    dear, cheap = (plan_splits([16_384], [1], SHAPE, WORKERS, COSTS._replace(part=part)) for part in (400, 1))
    assert max(m.end - m.first for m in dear.merges) < max(m.end - m.first for m in cheap.merges)
    assert dear.finish < COSTS.start + -(-256 // 132) * COSTS.tile + COSTS.merge + 132 * 400


def test_lines_with_many_rows_to_merge_are_not_split() -> None:
    """186 requests of 844 keys, 5 heads per group: split in two they took 33 µs on an H200, unsplit 28."""
    shape, costs = Shape(kv_heads=1, group=5, rows=16, tile=64), COSTS._replace(merge=4000)
    free, dear = (plan_splits([844] * 186, [1] * 186, shape, WORKERS, costs._replace(row=row)) for row in (0, 3))
    assert len(free.merges) == 186
    assert dear.slots == 0
    assert free.finish < dear.finish < free.finish + 3 * 5 * 186
    # With one plan per head the rows of all heads count; with few rows lines are split as before.
    heads = [
        plan_splits([844] * 46, [1] * 46, shape._replace(kv_heads=4), WORKERS, costs._replace(row=row))
        for row in (0, 3)
    ]
    assert heads[0].slots > heads[1].slots == 0
    assert plan_splits([5000], [1], shape, WORKERS, COSTS._replace(row=3)).slots == 79


# -- properties of every plan -----------------------------------------------------------------------------------------


def assert_covers(plan: Plan, lengths: Sequence[int], queries: Sequence[int], shape: Shape) -> None:
    """Every visible key is covered exactly once, slots are in merge order, and no item is empty."""
    seen: dict[tuple[int, int, int], list] = {}
    assert sum(state_count(item, plan.chunk) for item in plan.items) == len(plan.pieces)
    for item in plan.pieces:
        assert item.first < item.end
        seen.setdefault(item[:3], []).append(item)
    merges = {merge[:3]: merge for merge in plan.merges}
    assert len(merges) == len(plan.merges)
    for r, (length, new) in enumerate(zip(lengths, queries, strict=True)):
        for head, block in itertools.product(range(shape.kv_heads), range(shape.blocks(new))):
            first, end = shape.keys(length, new, block)
            pieces = sorted(seen.pop((r, head, block), []), key=lambda item: item.first)
            assert [p.first for p in pieces[:1]] == [first][: end > first]
            assert [p.end for p in pieces[-1:]] == [end][: end > first]
            assert all(
                a.end == b.first and a.end % (plan.chunk or shape.tile) == 0 for a, b in itertools.pairwise(pieces)
            )
            assert plan.chunk is None or len(pieces) == -(-end // plan.chunk) - first // plan.chunk or end <= first
            if len(pieces) == 1:
                assert pieces[0].slot == -1
            else:
                merge = merges.pop((r, head, block))
                assert [p.slot for p in pieces] == list(range(merge.first, merge.end))
    assert not seen
    assert not merges
    assert sorted(i.slot for i in plan.pieces if i.slot >= 0) == list(range(plan.slots))
    assert plan.starts[0] == 0
    assert plan.starts[-1] == len(plan.items)
    assert list(plan.starts) == sorted(plan.starts)


requests = st.lists(
    st.tuples(st.one_of(st.integers(0, 300), st.integers(0, 5000)), st.sampled_from([0, 1, 1, 1, 2, 5])),
    max_size=8,
)
shapes = st.builds(
    Shape,
    kv_heads=st.sampled_from([1, 2, 5]),
    group=st.sampled_from([1, 3, 8, 71]),
    rows=st.sampled_from([16, 64]),
    tile=st.sampled_from([16, 64]),
    window=st.sampled_from([None, None, 1, 100, 2000]),
)


@given(
    requests,
    shapes,
    st.sampled_from([1, 2, 7, 60]),
    st.sampled_from([(None, False), (64, False), (64, True), (512, False), (512, True)]),
    st.integers(0, 10**4),
    st.sampled_from([0, 3, 400]),
)
@settings(max_examples=100)
def test_every_plan_is_valid(
    drawn: list[tuple[int, int]],
    shape: Shape,
    workers: int,
    cuts: tuple[int | None, bool],
    merge_cost: int,
    row_cost: int,
) -> None:
    lengths, queries, (chunk, runs) = [n for n, _ in drawn], [n for _, n in drawn], cuts
    costs = COSTS._replace(merge=merge_cost, row=row_cost)
    plan = plan_splits(lengths, queries, shape, workers, costs, chunk=chunk, runs=runs)
    assert_covers(plan, lengths, queries, shape)
    assert plan == plan_splits(lengths, queries, shape, workers, costs, chunk=chunk, runs=runs)
    assert runs or plan.items == plan.pieces
    work = worker_loads(plan, shape, costs)
    assert len(work) == workers
    most = max((m.end - m.first for m in plan.merges), default=0)
    used = min(shape.rows, shape.group * max(queries, default=0))
    cut = sum(m.end > m.first for m in plan.merges)
    merging = costs.merge + costs.part * most + costs.row * cut * used if most else 0
    assert plan.finish >= max(work) + merging >= 0
    if chunk is None:
        late = 2 * costs.start + costs.tile + costs.merge + (costs.part + costs.row * used) * workers
        assert plan.finish <= plan.ideal + late
        assert plan.slots <= 2 * (workers - 1)
    else:
        pieces = [costs.start + (-(-i.end // shape.tile) - i.first // shape.tile) * costs.tile for i in plan.pieces]
        assert max(work) <= sum(pieces) / workers + max(pieces, default=0)
    room = Capacity.of(
        len(drawn), max(queries, default=0), shape, workers, chunk=chunk, context=max(lengths, default=0)
    )
    flat = plan.flat(room)
    assert len(flat) == flat_offsets(room)[-1]
    assert_flat(flat, room, plan)


def assert_flat(flat: Sequence[int], room: Capacity, plan: Plan) -> None:
    starts, items, merges, firsts, _ = flat_offsets(room)
    assert flat[0] == len(plan.merges)
    assert flat[1] == sum(line.first == line.end for line in plan.merges)
    assert tuple(flat[starts : starts + len(plan.starts)]) == plan.starts
    for at, rows in ((items, plan.items), (merges, plan.merges)):
        for i, row in enumerate(rows):
            assert tuple(flat[at + i * FIELDS : at + i * FIELDS + len(row)]) == row
    for w in range(room.workers):
        count = flat[starts + w + 1] - flat[starts + w]
        row = list(flat[firsts + w * FIELDS : firsts + (w + 1) * FIELDS])
        first = flat[starts + w]
        share = flat[items + first * FIELDS + SHARE]
        assert row == ([*plan.items[first], count, share] if count else [0] * FIELDS)
    if plan.chunk is None:
        lines = {line[:3]: line for line in plan.merges}
        for i, item in enumerate(plan.items):
            line = lines.get(item[:3])
            share = (item.slot - line.first) * 2**16 + line.end - line.first if line else 0
            assert flat[items + i * FIELDS + SHARE] == share


@given(
    requests, st.integers(0, 5000), shapes, st.sampled_from([64, 512]), st.booleans(), st.integers(0, 20),
    st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=60)
def test_fixed_splits_do_not_depend_on_the_batch(
    drawn, length: int, shape: Shape, chunk: int, runs: bool, ahead: int, random
) -> None:
    """A request's pieces and their merge order are the same alone and in any batch."""

    def mine(others: list[tuple[int, int]], at: int) -> tuple[list, list]:
        batch = [*others[:at], (length, 3), *others[at:]]
        how = {"chunk": chunk, "runs": runs, "ahead": ahead}
        plan = plan_splits([n for n, _ in batch], [n for _, n in batch], shape, WORKERS, COSTS, **how)
        pieces = sorted((i[1:5], i.slot < 0) for i in plan.pieces if i.request == at)
        return pieces, sorted((*m[1:3], m.end - m.first) for m in plan.merges if m.request == at)

    alone = mine([], 0)
    assert mine(drawn, random.randint(0, len(drawn))) == alone
    assert all(piece[3] <= (piece[2] // chunk + 1) * chunk for piece, _ in alone[0])


@pytest.mark.parametrize("window", [None, 100, 1000, 2999])
@pytest.mark.parametrize("queries", [1, 2, 7])
def test_fixed_splits_are_at_multiples_for_any_window(window: int | None, queries: int) -> None:
    """So a key has the same neighbours in every step and prompt chunk that sees it."""
    plan = make_plan([5000], SHAPE._replace(window=window), queries, chunk=512)
    for pieces in (
        [i for i in plan.items if (i.head, i.block) == line] for line in {(i.head, i.block) for i in plan.items}
    ):
        first, end = min(i.first for i in pieces), max(i.end for i in pieces)
        assert {i.first for i in pieces} == {first, *range(-(-first // 512) * 512, end, 512)}


@pytest.mark.parametrize(
    ("lengths", "most"), [([65_536] * 16, 16), ([131_072], 2), ([1024] * 64, 1), ([256] * 256, 2), ([4000, 90_000], 2)]
)
def test_consecutive_chunks_are_read_as_one_run(lengths: list[int], most: int) -> None:
    """No worker has more of them than if chunks were assigned one by one, and hardly more items than workers."""
    plan, single = (make_plan(lengths, chunk=512, runs=runs) for runs in (True, False))
    assert_covers(plan, lengths, [1] * len(lengths), SHAPE)
    for one in (plan, single):
        assert most == max(sum(state_count(i, 512) for i in one.items[a:b]) for a, b in itertools.pairwise(one.starts))
    assert plan.finish <= single.finish
    assert len(plan.items) <= max(2 * len(lengths), WORKERS + 2 * len(lengths))
    assert (plan.slots, plan.merges) == (single.slots, single.merges)


def test_runs_cover_the_plan_lookahead() -> None:
    for grown, room in ((16, None), (8, 1032)):
        plan = make_plan([1024, 500, 1020], chunk=512, runs=True, ahead=16, max_keys=room)
        assert_covers(plan, [1024 + grown, 500 + 16, 1020 + min(16, grown + 4)], [1] * 3, SHAPE)


def test_empty_batch_gives_an_empty_plan() -> None:
    for lengths, queries in (([], []), ([0, 0], [0, 0]), ([500], [0])):
        plan = plan_splits(lengths, queries, SHAPE, WORKERS, COSTS)
        assert (plan.items, plan.merges, plan.slots, plan.finish) == ((), (), 0, 0)
    # A query without keys has the identity state: an empty merge.
    plan = make_plan([0])
    assert not plan.items
    assert [(m.head, m.first, m.end) for m in plan.merges] == [(0, 0, 0), (1, 0, 0)]


def test_keys_before_the_window_are_skipped() -> None:
    shape = SHAPE._replace(window=1000)
    plan = make_plan([100_000], shape)
    assert min(i.first for i in plan.items) == 99_000
    assert sum(i.end - i.first for i in plan.items) == 2 * 1000
    # A block of 16 rows of 8 heads has two queries, whose windows begin one key apart.
    plan = make_plan([100_000], shape, queries=2)
    assert min(i.first for i in plan.items) == 98_999


def test_plan_with_lookahead_covers_grown_lengths() -> None:
    shape = SHAPE._replace(window=500)
    plan = plan_splits([640, 0, 100], [1, 1, 0], shape, WORKERS, COSTS, ahead=64)
    for grown in (0, 1, 64):
        for r in (0, 1):
            first, end = shape.keys([640, 0][r] + grown, 1, 0)
            keys = sorted(k for i in plan.items if (i.request, i.head) == (r, 1) for k in range(i.first, i.end))
            assert keys == list(range(keys[0], keys[-1] + 1))
            assert keys[0] <= first
            assert keys[-1] >= end - 1
    assert max(i.end for i in make_plan([640], ahead=64, max_keys=650).items) == 650


def test_graph_buffers_hold_every_step() -> None:
    """Sizes are fixed at graph capture; they then hold any lengths, or report that they do not."""
    room = Capacity.of(4, 1, SHAPE, WORKERS)
    sizes = set()
    for lengths in ([0, 0, 0, 0], [1, 1, 1, 1], [131_072, 1, 70, 0], [9000] * 4):
        plan = make_plan(lengths)
        sizes.add(len(plan.flat(room)))
        assert_flat(plan.flat(room), room, plan)
    assert len(sizes) == 1
    with pytest.raises(CapacityError, match="capture the graph for more"):
        make_plan([9000] * 300).flat(room)


@pytest.mark.parametrize(
    ("kind", "words", "arguments"),
    [
        (CapacityError, "request 1 has 4097 keys, but its page table has room for 4096", {"max_keys": 4096}),
        (ConfigError, "cuts at every 100 keys cut tiles of 64", {"chunk": 100}),
        (ConfigError, "below 0", {"lengths": [-1, 2]}),
        (ConfigError, "2 lengths for 1 numbers", {"queries": [1]}),
        (ConfigError, "every size is at least 1", {"workers": 0}),
    ],
)
def test_invalid_arguments_are_refused(kind: type, words: str, arguments: dict) -> None:
    usual = {"lengths": [5, 4097], "queries": [1, 1], "shape": SHAPE, "workers": WORKERS, "costs": COSTS}
    with pytest.raises(kind, match=words):
        plan_splits(**(usual | arguments))


# -- executing a plan -------------------------------------------------------------------------------------------------


def paged_inputs(lengths: list[int], queries: list[int], K: int, group: int, page: int) -> tuple:
    """(q_TNH, k_PpKH, v_PpKH, table) in float64, with scattered pages."""
    generator = torch.Generator().manual_seed(sum(lengths))
    needed = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator).int()
    pages = torch.zeros(len(lengths), max(1, *needed), dtype=torch.int32)
    for r, n in enumerate(needed):
        pages[r, :n] = order[sum(needed[:r]) : sum(needed[:r]) + n]
    q, k, v = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((sum(queries), K * group, 8), (len(order), page, K, 8), (len(order), page, K, 8))
    )
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    return q, k, v, PageTable(pages, cu, torch.tensor(lengths).int(), page, max(queries), max(lengths))


@pytest.mark.sample(2)
@pytest.mark.parametrize("group", [1, 3, 8, 17])
@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("extras", ["plain", "cap", "slopes", "sinks"])
def test_plan_computes_attention(group: int, window: int | None, extras: str) -> None:
    lengths, queries = [150, 3, 0, 77, 200, 9], [1, 3, 0, 7, 2, 9]
    q, k, v, table = paged_inputs(lengths, queries, K := 2, group, 16)
    more = {
        "plain": {},
        "cap": {"cap": 1.5},
        "slopes": {"slopes_N": torch.linspace(0.01, 0.5, K * group)},
        "sinks": {"sinks_N": torch.linspace(-2, 2, K * group), "cap": 3.0},
    }[extras]
    shape = Shape(K, group, 16, 16, window)
    exact = reference.paged(q, k, v, table, window=window, **more)
    runs = {"chunk": 32, "runs": True, "ahead": 40}
    for workers, options in (
        (1, {}),
        (9, {}),
        (300, {}),
        (7, {"chunk": 32}),
        (300, {"ahead": 40}),
        (3, runs),
        (7, runs),
    ):
        plan = plan_splits(lengths, queries, shape, workers, COSTS._replace(merge=0), **options)
        assert plan.slots or workers < 50 or window
        assert_same(reference.run_plan(plan, shape, q, k, v, table, **more).o, exact, 1e-12)


def test_split_states_equal_unsplit_states() -> None:
    """Also the log-sum-exp; queries without visible keys have the identity state."""
    q, k, v, table = paged_inputs([40, 3, 0], [2, 5, 2], 1, 3, 16)
    shape = Shape(1, 3, 16, 16)
    plan = plan_splits([40, 3, 0], [2, 5, 2], shape, 4, COSTS._replace(merge=0))
    state = reference.run_plan(plan, shape, q, k, v, table)
    keys = k[table.pages_RP[0, :3].long()].flatten(0, 1)[:40]
    whole = reference.attend(q[:2], keys, v[table.pages_RP[0, :3].long()].flatten(0, 1)[:40])
    assert_same(state.o[:2], whole.o, 1e-12)
    assert_same(state.lse[:2], whole.lse, 1e-12)
    assert (state.lse[2:4] == -torch.inf).all() and (state.lse[7:] == -torch.inf).all()
    assert state.lse[4:7].isfinite().all()
    assert (state.o[2:4] == 0).all() and (state.o[7:] == 0).all()


@pytest.mark.parametrize(
    "more",
    [
        {"cap": 0.7},
        {"slopes_N": torch.tensor([0.3, 1.0], dtype=torch.float64)},
        {"sinks_N": torch.tensor([0.2, 3.0], dtype=torch.float64)},
    ],
)
def test_reference_scores_by_definition(more: dict) -> None:
    """Softcap, ALiBi slopes and sinks against an explicit softmax."""
    q, k, v, table = paged_inputs([12], [3], 1, 2, 16)
    keys, values = (x[table.pages_RP[0].long()].flatten(0, 1)[:12, 0] for x in (k, v))
    s = torch.einsum("tnh,sh->nts", q, keys) * 8**-0.5
    if "cap" in more:
        s = 0.7 * torch.tanh(s / 0.7)
    behind = torch.arange(9, 12)[:, None] - torch.arange(12)
    if "slopes_N" in more:
        s = s - more["slopes_N"][:, None, None] * behind
    e = torch.exp(s).masked_fill(behind < 0, 0)
    total = e.sum(-1) + (torch.exp(more["sinks_N"])[:, None] if "sinks_N" in more else 0)
    assert_same(reference.paged(q, k, v, table, **more), torch.einsum("nts,sh->tnh", e / total[..., None], values))


def test_many_lines_are_planned_per_head() -> None:
    """33 thousand lines on 264 workers, 8 of which stay idle."""
    shape = Shape(kv_heads=128, group=8, rows=16, tile=64)
    lengths = [1000] * 250 + [0, 7, 40_000]
    plan = make_plan(lengths, shape)
    assert_covers(plan, lengths, [1] * 253, shape)
    assert plan.finish < 1.05 * plan.ideal
    assert sum(a == b for a, b in itertools.pairwise(plan.starts)) == 8


@pytest.mark.parametrize("lengths", [[65_536], [32_768] * 2, [4096] * 16, [70_000, 900, 4000], [5, 0, 7], [17]])
def test_no_worker_merges_two_lines_where_slower(lengths: list[int]) -> None:
    """And equal lines are split equally."""
    shape, costs = SHAPE._replace(rows=8, tile=16), Costs(tile=260, start=1000, merge=2000, part=10, twice=3000)
    plan = plan_splits(lengths, [1] * len(lengths), shape, 132, costs)
    assert_covers(plan, lengths, [1] * len(lengths), shape)
    assert all(b - a <= 1 for a, b in itertools.pairwise(plan.starts))
    assert len({line.end - line.first for line in plan.merges if lengths.count(lengths[line.request]) > 1}) <= 1
    without = plan_splits(lengths, [1] * len(lengths), shape, 132, costs._replace(twice=0))
    assert plan.finish <= without.finish + costs.twice


@pytest.mark.parametrize(("count", "keys", "heads"), [(157, 1000, 1), (71, 1316, 2), (19, 456, 10), (165, 4516, 1)])
def test_a_few_more_lines_than_multiprocessors_are_level(count: int, keys: int, heads: int) -> None:
    """The lines beyond a whole number for each multiprocessor are cut, so that all read as many tiles."""
    shape, lengths, queries = Shape(kv_heads=heads, group=8, rows=8, tile=16), [keys] * count, [1] * count
    costs = Costs(tile=260, start=1000, merge=1800, part=12, twice=3000, lone=112)
    plan = plan_splits(lengths, queries, shape, WORKERS, costs, teams=2)
    assert_covers(plan, lengths, queries, shape)
    tiles = [sum(-(-i.end // 16) - i.first // 16 for i in plan.items[a:b]) for a, b in itertools.pairwise(plan.starts)]
    blocks = [a + b for a, b in zip(tiles[:132], tiles[132:], strict=True)]
    assert max(blocks) <= 1.1 * sum(blocks) / 132
    assert sum(item.slot < 0 for item in plan.items) == count * heads // 132 * 132
    assert plan.finish <= plan_splits(lengths, queries, shape, WORKERS, costs).finish


@pytest.mark.parametrize(
    "lengths", [[2000] * 264, [70_000, *[30] * 150], [900] * 1500, [0] * 140, [114] * 192], ids=len
)
def test_other_lines_are_planned_as_without_teams(lengths: list[int]) -> None:
    shape, queries = Shape(kv_heads=1, group=8, rows=8, tile=16), [1] * len(lengths)
    costs = Costs(tile=260, start=1000, merge=1800, part=12, twice=3000, lone=112)
    plain = plan_splits(lengths, queries, shape, WORKERS, costs)
    assert plan_splits(lengths, queries, shape, WORKERS, costs, teams=2) == plain


@given(st.lists(st.integers(0, 3000), max_size=40), st.sampled_from([1, 2, 3]), st.sampled_from([2, 4]), st.booleans())
@settings(max_examples=100)
def test_every_plan_for_teams_is_valid(lengths: list[int], heads: int, teams: int, twice: bool) -> None:
    shape, costs = Shape(heads, 8, 8, 16), Costs(260, 1000, 0, 1, twice=3000 * twice, lone=112)
    plan = plan_splits(lengths, [1] * len(lengths), shape, 12 * teams, costs, teams=teams)
    assert_covers(plan, lengths, [1] * len(lengths), shape)
    assert plan.slots <= 2 * (12 * teams - 1)
    # A worker merges its first and its last piece alone.
    for a, b in itertools.pairwise(plan.starts):
        assert all(item.slot < 0 for item in plan.items[a + 1 : b - 1])
