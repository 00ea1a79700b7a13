"""The CUDA C++ kernel for a few keys: equal to float64, chosen by the plan's lengths, and deterministic.

pytest -q tests/gpu/test_decode_short_gpu.py
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from colonnade.kernels.attention import cuda_decode
from colonnade.kernels.attention.triton_decode import attend
from tests.decoding import Case, CaseTensors
from tests.gpu.launches import launch_often

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not cuda_decode._device_supported(torch.device("cuda", 0)),
        reason="for Hopper GPUs with NVRTC",
    ),
]

FEW = [1, 16, 17, 0, 100, 128, 63, 33, 8, 256, 157, 7]


def same(case: Case, tolerance: float = 4e-3) -> CaseTensors:
    made = case.made("cuda")
    near_exact(made, tolerance)
    return made


def near_exact(made: CaseTensors, tolerance: float = 4e-3) -> None:
    assert made.ready.short_keys == int(made.table.lengths_R.max())
    state, exact = made.run(), made.exact()
    for what, got, right in zip(("o", "lse"), state, exact, strict=True):
        seen = right.isfinite()
        assert torch.equal(got.isfinite(), seen), what
        assert float((got.double() - right)[seen].norm()) < tolerance * float(right[seen].norm()), what


@pytest.mark.parametrize(
    ("width", "group"), [(64, 1), (64, 16), (96, 5), (128, 1), (128, 8), (128, 9), (192, 16), (256, 3), (256, 16)]
)
@pytest.mark.parametrize("most", [8, 16, 32, 48, 70, 128, 160, 256])
def test_widths_groups_and_tiles(width: int, group: int, most: int) -> None:
    """Lines of half a tile, and of one to sixteen warps."""
    lengths = [min(length, most) for length in FEW]
    same(Case(lengths, [1] * len(FEW), K=3, group=group, H=width, page=16, dtype=torch.bfloat16))


@pytest.mark.parametrize("page", [16, 32, 48, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pages(page: int, dtype: torch.dtype) -> None:
    same(
        Case(FEW, [1] * len(FEW), K=2, group=8, H=128, page=page, dtype=dtype), 6e-4 if dtype == torch.float16 else 4e-3
    )


@pytest.mark.parametrize("most", [3, 20, 70, 128])
@pytest.mark.parametrize(("K", "group"), [(8, 1), (3, 7), (1, 16)])
def test_many_lines(most: int, K: int, group: int) -> None:
    """Blocks of several lines; requests without keys among them, and one that is not finite."""
    lengths = [(37 * i) % (most + 1) for i in range(200)]
    made = same(Case(lengths, [1] * 200, K=K, group=group, H=64, page=16, dtype=torch.bfloat16, sinks=True))
    first = made.run()
    assert all(torch.equal(a, b) for a, b in zip(made.run(), first, strict=True))
    made.q[151] = torch.nan
    state, others = made.run(), torch.arange(200, device="cuda") != 151
    assert state.o[151].isnan().all() and torch.equal(state.o[others], first.o[others])


@pytest.mark.parametrize("window", [None, 1, 20, 100])
@pytest.mark.parametrize(
    "more", [{}, {"cap": 5.0}, {"slopes": True}, {"sinks": True}, {"cap": 3.0, "slopes": True, "sinks": True}], ids=str
)
@pytest.mark.parametrize("most", [8, 16, 256])
def test_features(window: int | None, more: dict, most: int) -> None:
    lengths = [min(length, most) for length in FEW]
    same(Case(lengths, [1] * len(FEW), K=2, group=4, H=64, page=16, dtype=torch.float16, window=window, **more), 6e-4)


def test_bad_pages_are_not_read() -> None:
    for lengths in ([120, 60], [7, 3]):
        made = Case(lengths, [1, 1], K=1, group=2, H=64, page=16, dtype=torch.bfloat16).made("cuda")
        good = made.run().o[-1]
        for wrong in (-1, 10**8, 2**31 - 1, -(2**31)):
            made.table.pages_RP[0, ::2] = wrong
            o = made.run().o
            assert o.isfinite().all() and torch.equal(o[-1], good)


def test_half_a_tile_with_values_that_are_not_finite() -> None:
    """Infinite values make infinite outputs in their columns alone, and what lies behind the keys is not read."""
    made = Case([5, 8, 1], [1, 1, 1], K=2, group=4, H=64, page=16, dtype=torch.bfloat16).made("cuda")
    first = made.run().o
    page = int(made.table.pages_RP[1, 0])
    made.v[page, 3, 0, 9] = torch.inf
    o = made.run().o
    assert (o[1, :4, 9] == torch.inf).all()
    o[1, :4, 9] = first[1, :4, 9]
    assert torch.equal(o, first)


@pytest.mark.parametrize(
    "more",
    [
        {"lengths": [cuda_decode.SHORT_KEYS + 1, 3]}, {"queries": [2, 1]}, {"queries": [1, 0]}, {"chunk": 128},
        {"cache": torch.int8}, {"H": 80}, {"group": 17}, {"dtype": torch.float32},
    ],
    ids=str,
)  # fmt: skip
def test_other_steps_follow_their_plan(more: dict) -> None:
    how = {"lengths": [9, 3], "queries": [1, 1], "K": 1, "group": 4, "H": 64, "page": 16, "dtype": torch.float16}
    made = Case(**{**how, **more}).made("cuda")
    exact = made.exact().o
    assert (made.run().o.double() - exact).norm() < 1e-3 * exact.norm()
    one_each = made.table.longest_query == 1 and len(made.q) == 2
    assert made.ready.short_keys is None or not one_each


def test_plan_of_a_captured_graph_is_followed() -> None:
    """Its next step may have any lengths."""
    made = Case([9, 3], [1, 1], K=1, group=4, H=64, page=16, dtype=torch.float16).made("cuda", capacity=True)
    assert made.ready.short_keys is None and made.layout.short


def test_capture_without_warm_up() -> None:
    made = Case([30, 0, 100], [1, 1, 1], K=2, group=8, H=64, page=16, dtype=torch.bfloat16).made("cuda")
    exact = made.run().o
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend(made.q, made.k, made.v, made.table, made.ready).o
    o.fill_(torch.nan)
    graph.replay()
    assert torch.equal(o, exact)


def test_blocks_that_start_early_wait_for_their_inputs() -> None:
    """Queries, lengths and pages written right before each launch of a graph are those that it reads."""
    made = Case([100, 128, 7, 64], [1] * 4, K=2, group=8, H=128, page=16, dtype=torch.bfloat16).made("cuda")
    made.k.nan_to_num_(nan=0.5)  # other requests' pages and lengths show what memory holds behind their ends
    made.v.nan_to_num_(nan=0.5)
    steps = 40
    queries = torch.randn(steps, *made.q.shape, device="cuda").to(made.q.dtype)
    lengths = torch.randint(1, 128, (steps, 4), device="cuda", dtype=torch.int32)
    pages = torch.stack([made.table.pages_RP[torch.randperm(4)] for _ in range(steps)])
    expected = []
    for step in range(steps):
        made.q.copy_(queries[step])
        made.table.lengths_R.copy_(lengths[step])
        made.table.pages_RP.copy_(pages[step])
        torch.cuda.synchronize()
        expected.append(attend(made.q, made.k, made.v, made.table, made.ready).o)
        torch.cuda.synchronize()
        assert expected[-1].isfinite().all()
    filler = torch.zeros(2**24, device="cuda")
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for step in range(steps):
            filler.add_(1)  # takes longer than a launch
            made.q.copy_(queries[step])
            made.table.lengths_R.copy_(lengths[step])
            made.table.pages_RP.copy_(pages[step])
            outputs.append(attend(made.q, made.k, made.v, made.table, made.ready).o)
    for _ in range(5):
        for o in outputs:
            o.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(o, right) for o, right in zip(outputs, expected, strict=True))


def test_a_thousand_launches_leak_no_memory() -> None:
    def cell(i: int) -> CaseTensors:
        lengths = [(37 * r + 11 * i) % ((256, 40, 8)[i % 3] + 1) for r in range((3, 40, 200)[i % 3])]
        case = Case(
            lengths, [1] * len(lengths), K=(1, 3, 8)[i // 3 % 3], group=(8, 5, 1)[i % 3], H=(64, 128)[i // 2 % 2],
            page=16, dtype=torch.bfloat16, sinks=bool(i // 7 % 2),
        )  # fmt: skip
        return case.made("cuda")

    launch_often(cell, 200, near_exact)
