"""Float8 experts on a Hopper GPU: torch's grouped GEMM equals its reference, without synchronisation."""

import pytest
import torch

from colonnade.kernels.experts import float8, grouped_mm, reference
from colonnade.kernels.experts.grouped_mm import wgrad
from colonnade.kernels.linear.float8 import E4M3, quantise
from colonnade.kernels.registry import choose
from tests.experts import Case, gradients, routed_experts

pytestmark = pytest.mark.filterwarnings("ignore")

hopper = pytest.mark.skipif(
    torch.cuda.get_device_capability() != grouped_mm.SCALED_CAPABILITY,
    reason="torch's float8 grouped product is for compute capability 9.0",
)

CASES = [
    Case(512, 2, 8, 256, 384),
    Case(333, 8, 64, 128, 96, load="skewed"),
    Case(77, 4, 40, 64, 48, load="one", biased=True, activation="gelu"),
    Case(150, 3, 16, 144, 272, load="some dropped", gated=False, activation="relu"),
    Case(90, 2, 8, 128, 208, load="bounded", biased=True),
    Case(40, 2, 8, 64, 64, load="all dropped"),
    Case(1, 8, 128, 512, 256),
    Case(0, 2, 8, 64, 64),
    Case(4096, 8, 64, 1024, 768),
]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-3))


@hopper
@pytest.mark.parametrize("sizes", [[16, 32, 0, 48], [1, 7, 0, 300, 5], [0, 0, 3], [129] * 20], ids=str)
def test_grouped_products_equal_reference(sizes: list[int]) -> None:
    """Any number of rows per expert, and rows past the last end; same operands, so only summation order differs."""
    draw = torch.Generator("cuda").manual_seed(0)
    R, E, K, N = sum(sizes) + 9, len(sizes), 272, 144
    a, a_scale = quantise(torch.randn(R, K, device="cuda", generator=draw).bfloat16(), E4M3, row_wise=True)
    b, b_scale = quantise(torch.randn(E * N, K, device="cuda", generator=draw).bfloat16(), E4M3, row_wise=True)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    operands = a, b.view(E, N, K), a_scale, b_scale.view(E, N, 1), ends, torch.bfloat16
    got, expected = (
        run(*operands)[: sum(sizes)] for run in (grouped_mm.scaled_product, grouped_mm.scaled_product_reference)
    )
    # Fast accumulation keeps about 14 bits.
    assert error(got, expected) < 6e-3
    p, q = (torch.randn(R, n, device="cuda", generator=draw).bfloat16() for n in (K, N))
    assert error(wgrad(p, q, ends), grouped_mm.wgrad_reference(p.double(), q.double(), ends)) < 4e-3


@hopper
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.T}x{case.A}of{case.E}-{case.load}")
def test_experts_equal_emulation(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gradients(routed_experts(reference.routed), case, torch.float64, "cuda", values=torch.bfloat16)
    fast = gradients(routed_experts(float8.routed), case, torch.bfloat16, "cuda")
    replaced = ("scaled_grouped_mm", "grouped_wgrad")
    monkeypatch.setattr(
        float8, "choose", lambda op, *on: choose(op, *on, *(["reference"] if op in replaced else []))
    )  # fmt: skip
    plain = gradients(routed_experts(float8.routed), case, torch.bfloat16, "cuda")
    for name, got in fast.items():
        # A sum that lands on the other side of a float8 rounding boundary is rounded to the neighbour.
        assert error(got, plain[name]) < 3e-2, (name, error(got, plain[name]))
        # relu's slope differs wherever rounding moved a sum across 0.
        assert error(got, exact[name]) < (0.2 if case.activation == "relu" else 0.15), (name, error(got, exact[name]))


@hopper
def test_does_not_synchronise() -> None:
    case = Case(512, 2, 8, 256, 384)
    gradients(routed_experts(float8.routed), case, torch.bfloat16, "cuda")
    x, routing, *stacks = case.leaves(torch.bfloat16, "cuda")
    assert x is not None and routing is not None
    ids = case.ids().cuda()
    order_R, ends_E = choose("sort_by_expert", "cuda", torch.bfloat16)(ids, case.E)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = float8.routed(x, order_R, ends_E, routing, reference.Weights(*stacks), case.activation)  # type: ignore[arg-type]
        y.backward(y.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@hopper
@pytest.mark.parametrize("sizes", [(8, 2, 4096, 14336), (128, 8, 2048, 768)], ids=str)
def test_print_timings(sizes: tuple[int, ...]) -> None:
    """No limit on the time; prints timings with ``-s``."""
    E, A, D, F = sizes
    case = Case(16384, A, E, D, F)
    draw = torch.Generator("cuda").manual_seed(0)
    up, down, gate = (torch.randn(E, F, D, device="cuda", generator=draw).bfloat16() * 0.02 for _ in range(3))
    x = torch.randn(16384, D, device="cuda", generator=draw).bfloat16()
    routing = torch.rand(16384, A, device="cuda", generator=draw)
    order_R, ends_E = choose("sort_by_expert", "cuda", torch.bfloat16)(case.ids().cuda(), E)
    weights = reference.Weights(up, down, gate)
    elapsed_ms: dict[str, float] = {}
    runs = {"bfloat16": choose("routed_experts", "cuda", torch.bfloat16), "float8": float8.routed,
            "float8 compiled": torch.compile(float8.routed)}  # fmt: skip
    for name, run in runs.items():
        for _ in range(3):
            run(x, order_R, ends_E, routing, weights, "silu")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            run(x, order_R, ends_E, routing, weights, "silu")
        end.record()
        end.synchronize()
        elapsed_ms[name] = begin.elapsed_time(end) / 5
    print(sizes, {name: f"{ms:.2f} ms" for name, ms in elapsed_ms.items()})
    assert all(ms > 0 for ms in elapsed_ms.values())
