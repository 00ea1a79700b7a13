"""Shared prefixes: groups found in page tables, used only where faster, and the plans' results."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import CapacityError
from colonnade.kernels.attention import reference
from colonnade.kernels.attention.cascade import Cascade, CascadeCapacity, Group, KernelCosts, groups, plan
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Costs, Plan, Shape
from tests.worlds import assert_same

COSTS = Costs(tile=2000, start=1500, merge=2500, part=20)
FEW = KernelCosts(Shape(kv_heads=2, group=8, rows=16, tile=64), 264, COSTS)
MANY = KernelCosts(Shape(kv_heads=2, group=8, rows=128, tile=64), 132, COSTS._replace(tile=1000))


def requests_with_prefix(prefix: int, own: Sequence[int], page: int = 16) -> tuple[list[list[int]], list[int]]:
    """(tables, lengths) of requests with ``prefix`` common keys, each followed by ``own`` keys."""
    full_pages = prefix // page
    tables = [[*range(full_pages), *range(1000 * (i + 1), 1000 * (i + 1) + n // page + 2)] for i, n in enumerate(own)]
    return tables, [prefix + n for n in own]


def find_groups(tables: list[list[int]], lengths: list[int], new: int = 1, page: int = 16) -> list[Group]:
    return groups(tables, lengths, [new] * len(tables), page, FEW, MANY)


def test_a_common_prefix_is_read_once() -> None:
    tables, lengths = requests_with_prefix(32_768, [40 + i for i in range(32)])
    cascade = plan(tables, lengths, [1] * 32, 16, FEW, MANY)
    assert isinstance(cascade, Cascade)
    assert cascade.groups == (Group(tuple(range(32)), 0, 32_768),)
    # 256 rows are two blocks of 128, and each block reads the keys of both heads once.
    assert sum(i.end - i.first for i in cascade.shared.items) == 2 * 2 * 32_768
    assert min(i.first for i in cascade.own.items) == 32_768
    alone = plan(requests_with_prefix(0, lengths)[0], lengths, [1] * 32, 16, FEW, MANY)
    assert isinstance(alone, Plan)
    assert alone.finish > 8 * cascade.finish


def test_groups_are_made_only_where_faster() -> None:
    """Reading 64 common keys twice is cheaper than one more launch and merge."""
    tables, lengths = requests_with_prefix(64, [5000, 5000])
    assert isinstance(plan(tables, lengths, [1, 1], 16, FEW, MANY), Plan)
    expensive = MANY._replace(costs=MANY.costs._replace(tile=10**6))
    assert isinstance(plan(*requests_with_prefix(32_768, [1] * 32), [1] * 32, 16, FEW, expensive), Plan)


def test_only_full_pages_before_all_queries_are_shared() -> None:
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    for lengths, new, end in (([80, 80], 1, 64), ([81, 81], 1, 64), ([80, 80], 17, 0), ([200, 64], 1, 0)):
        few, many = (r._replace(costs=Costs(1000, 0, 0, 0), workers=1) for r in (FEW, MANY))
        got = groups(tables, lengths, [new, new], 16, few, many)
        assert [group.end for group in got] == [end][: end > 0]


def test_shared_keys_are_whole_tiles() -> None:
    tables, lengths = requests_with_prefix(16 * 100, [3] * 8)
    (group,) = find_groups(tables, lengths)
    assert group.end == 1600 // 64 * 64


def test_one_large_group_or_several_longer_ones_by_cost() -> None:
    """All eight requests share 4096 keys, and each half shares more."""
    few_more, many_more = 256, 65_536
    for more, expected in ((few_more, 1), (many_more, 2)):
        tables = [
            [*range(256), *range(10**5 * (1 + i // 4), 10**5 * (1 + i // 4) + more // 16), 10**6 + i] for i in range(8)
        ]
        got = find_groups(tables, [4096 + more + 1] * 8)
        assert len(got) == expected
        assert [r for group in got for r in group.requests] == list(range(8))
        assert {group.end for group in got} == {4096 if expected == 1 else 4096 + more}


def test_only_keys_inside_the_window_are_shared() -> None:
    few = FEW._replace(shape=FEW.shape._replace(window=2000))
    tables, lengths = requests_with_prefix(8192, [10] * 16)
    (group,) = groups(tables, lengths, [1] * 16, 16, few, MANY)
    assert (group.first, group.end) == (8192 + 10 - 2000, 8192)
    assert not groups(*requests_with_prefix(8192, [3000] * 16), [1] * 16, 16, few, MANY)


def test_requests_without_queries_or_keys_join_no_group() -> None:
    tables, lengths = requests_with_prefix(8192, [5] * 8)
    lengths[3], queries = 0, [1, 1, 0, 0, 1, 1, 1, 1]
    (group,) = groups(tables, lengths, queries, 16, FEW, MANY)
    assert group.requests == (0, 1, 4, 5, 6, 7)
    assert groups([], [], [], 16, FEW, MANY) == []


def test_very_deep_prefix_trees() -> None:
    """The 1500 turns of a conversation as requests, each a prefix of the next."""
    turns = 1500
    got = find_groups([list(range(i + 2)) for i in range(turns)], [16 * (i + 1) + 1 for i in range(turns)])
    assert len({r for group in got for r in group.requests}) == sum(len(group.requests) for group in got) > turns // 3


tables_of_pages = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=12), st.integers(0, 3), st.integers(0, 15)), max_size=9
)


@given(tables_of_pages, st.sampled_from([1, 4]), st.sampled_from([None, 20]))
@settings(max_examples=60)
def test_groups_are_disjoint_and_share_their_pages(drawn: list, page: int, window: int | None) -> None:
    """Members share the stated pages and are in one group each; no pair of requests is missed."""
    cheap = Costs(1000, 0, 0, 0)
    few = KernelCosts(Shape(1, 3, 4, 1, window), 1, cheap)
    many = KernelCosts(Shape(1, 3, 8, 1), 1, cheap)
    tables = [[*begins, *[9] * (2 + new)] for begins, new, _ in drawn]
    queries = [new for _, new, _ in drawn]
    lengths = [len(begins) * page + min(more, page) for begins, _, more in drawn]
    got = groups(tables, lengths, queries, page, few, many)
    assert got == groups(tables, lengths, queries, page, few, many)
    members = [r for group in got for r in group.requests]
    assert len(members) == len(set(members))
    for group in got:
        assert len(group.requests) > 1 and 0 <= group.first < group.end
        for r in group.requests:
            assert queries[r] and group.end <= lengths[r] - queries[r]
            assert tables[r][: -(-group.end // page)] == tables[group.requests[0]][: -(-group.end // page)]
    if not got and window is None:
        full = [max(0, n - new) // page if new else 0 for n, new in zip(lengths, queries, strict=True)]
        starts = [tables[r][0] for r in range(len(tables)) if full[r]]
        # Pairs with several queries may be left ungrouped: they would fill only one block of the larger kernel.
        assert len(set(starts)) == len(starts) or max(queries) > 1


def test_flat_array_of_a_cuda_graph_holds_any_groups() -> None:
    tables, lengths = requests_with_prefix(32_768, [5] * 6)
    cascade = plan(tables, lengths, [1, 2, 1, 1, 1, 1], 16, FEW, MANY)
    assert isinstance(cascade, Cascade)
    capacity = CascadeCapacity(8, 4, 20)
    flat = cascade.flat(capacity)
    groups_at, rows_at, total = capacity.offsets
    assert len(flat) == total
    assert flat[4 * 2 : 4 * 2 + 3] == [0, 1, 3]  # preceded by three queries of its group
    assert flat[4 * 6] == flat[4 * 7] == -1
    assert flat[groups_at : groups_at + 3] == [0, rows_at, 7]
    assert flat[rows_at : rows_at + 8] == [0, 0, 1, 0, 1, 1, 2, 0]
    with pytest.raises(CapacityError, match="capture the graph for more"):
        cascade.flat(CascadeCapacity(8, 4, 6))


@pytest.mark.parametrize("group", [1, 3, 17])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("extras", ["plain", "all"])
def test_cascade_equals_paged_attention(group: int, window: int | None, extras: str) -> None:
    """Two groups and some ungrouped requests of one to three queries, on plans with many splits."""
    generator = torch.Generator().manual_seed(group)
    page, K, H = 16, 2, 8
    first, second = list(range(10)), list(range(20, 26))
    tables = [[*first, 30], [40, 41], [*second, 31], [*first, 32, 33], [*second, 34], [*first, 35], [50]]
    lengths, queries = [170, 30, 100, 190, 97, 163, 0], [1, 2, 3, 1, 1, 2, 0]
    pages = torch.tensor([[*t, *[0] * (12 - len(t))] for t in tables]).int()
    q, k, v = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((sum(queries), K * group, H), (60, page, K, H), (60, page, K, H))
    )
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    table = PageTable(pages, cu, torch.tensor(lengths).int(), page, 3, 190)
    more = {}
    if extras == "all":
        more = {
            "cap": 1.5,
            "slopes_N": torch.linspace(0.01, 0.2, K * group),
            "sinks_N": torch.linspace(-2, 2, K * group),
        }
    cheap = Costs(tile=1000, start=10, merge=0, part=0)
    few = KernelCosts(Shape(K, group, 16, 16, window), 5, cheap)
    many = KernelCosts(Shape(K, group, 32, 16), 3, cheap)
    cascade = plan(tables, lengths, queries, page, few, many)
    assert isinstance(cascade, Cascade) and len(cascade.groups) == 2 and cascade.shared.slots > 4
    state = reference.run_cascade(cascade, few.shape, many.shape, q, k, v, table, **more)
    assert_same(state.o, reference.paged(q, k, v, table, window=window, **more), 1e-12)
