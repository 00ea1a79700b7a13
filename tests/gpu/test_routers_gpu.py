"""Routers on a GPU: choices, weights, drops and losses equal the CPU's in float64; kernels equal their references."""

from dataclasses import replace

import pytest
import torch

from colonnade.kernels import permute, routing
from colonnade.kernels.registry import Kernel, choose
from colonnade.model.moe.capacity import apply_capacity
from colonnade.model.moe.layer import _all_finite
from colonnade.model.moe.losses import balance_losses, expert_load
from colonnade.parallel.axis import SOLO
from tests.gpu.rows import rows
from tests.routers import (
    CHOICES,
    EXPERTS,
    KINDS,
    hard_scores,
    moe_of,
    noise_for,
    router_of,
    same_choice,
    tokens,
)  # fmt: skip
from tests.worlds import assert_same


def _route_on(name: str, device: str) -> dict[str, torch.Tensor]:
    moe = moe_of(name, capacity=1.0, priority=True)
    x_TD, tokens_T, index_T, units = tokens()
    noise, router = noise_for(moe, index_T.to(device)), router_of(moe).to(device)
    noise = noise and replace(noise, key=noise.key.to(device))
    x_TD = x_TD.to(device).requires_grad_()
    index_T, units = index_T.to(device), units._replace(group_T=units.group_T.to(device))
    choice, logits_TE = router(x_TD, tokens_T.to(device), index_T, noise, training=True, token_groups=units)
    admitted = apply_capacity(choice, index_T, moe, SOLO)
    load_E = expert_load(choice.ids_TA, EXPERTS)
    surrogate, balance, z = balance_losses(choice, load_E, logits_TE, moe, SOLO, units)
    total = surrogate + (admitted.weights_TA * (admitted.ids_TA + 1)).sum()
    if total.requires_grad:
        total.backward()
    found = {"ids": choice.ids_TA, "kept": admitted.ids_TA, "weights": admitted.weights_TA, "balance": balance, "z": z}
    found |= {"x": torch.zeros_like(x_TD) if x_TD.grad is None else x_TD.grad}
    return {what: value.detach().cpu() for what, value in found.items()}


@pytest.mark.parametrize("name", KINDS)
def test_gpu_routing_equals_cpu(name: str) -> None:
    got, reference = _route_on(name, "cuda"), _route_on(name, "cpu")
    for what in reference:
        assert_same(got[what].double(), reference[what].double(), what=what)


def test_fast_kernels_are_the_default() -> None:
    assert choose("router_scores", "cuda", torch.bfloat16) is choose(
        "router_scores", "cuda", torch.bfloat16, "tensor_core"
    )
    for operation, dtype in (("top_experts", torch.float32), ("count_by_expert", torch.int64)):
        assert choose(operation, "cuda", dtype) is choose(operation, "cuda", dtype, "triton")


@pytest.mark.parametrize(("row", "dtype"), rows("router_scores"))
@pytest.mark.parametrize(
    ("T", "E", "D"), [(16384, 128, 2048), (16384, 8, 4096), (333, 60, 1000), (1, 64, 2048), (0, 8, 64)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_scores(row: Kernel, dtype: torch.dtype, T: int, E: int, D: int, biased: bool) -> None:
    """Float32 results up to summation order; gradients up to rounding to 16 bits."""
    draw = torch.Generator("cuda").manual_seed(0)
    leaves = [torch.randn(n, device="cuda", generator=draw).to(dtype) for n in ((T, D), (E, D), (E,))][: 2 + biased]
    g_TE, results = torch.randn(T, E, device="cuda", generator=draw), []
    for run, kind in ((row.run, dtype), (routing.scores, torch.float64)):
        inputs = [leaf.detach().to(kind).requires_grad_() for leaf in leaves]
        logits_TE = run(*inputs)
        logits_TE.backward(g_TE.to(logits_TE.dtype))
        results.append((logits_TE.detach(), *(leaf.grad for leaf in inputs)))
    for i, (got, exact) in enumerate(zip(*results, strict=True)):
        assert got.dtype == (torch.float32 if i == 0 else dtype)
        assert (got - exact).norm() <= (1e-5 if i == 0 else torch.finfo(dtype).eps / 2) * exact.norm()


@pytest.mark.parametrize(("row", "dtype"), rows("top_experts"))
@pytest.mark.parametrize(("T", "E", "A"), [*CHOICES, (16384, 128, 8), (16384, 8, 2), (777, 64, 6), (5, 4096, 3)])
@pytest.mark.parametrize("normalise", [False, True])
def test_choice(row: Kernel, dtype: torch.dtype, T: int, E: int, A: int, normalise: bool) -> None:
    """16-bit dtypes only with exactly representable scores; the reference's division rounds more often."""
    for name, scores_TE in hard_scores(T, E).items():
        if dtype == torch.float32 or (name in ("normal", "ties", "zeros of both signs") and not normalise):
            same_choice(row.run, routing.top_experts, scores_TE.to(dtype).cuda(), A, normalise=normalise, scale=1.7)


@pytest.mark.parametrize(("row", "dtype"), rows("count_by_expert"))
@pytest.mark.parametrize(
    ("T", "E", "A"), [(16384, 128, 8), (16384, 8, 2), (777, 60, 3), (1, 64, 6), (0, 4, 2), (99, 1, 1)]
)
def test_count(row: Kernel, dtype: torch.dtype, T: int, E: int, A: int) -> None:
    ids_TA = torch.randint(E + 1, (T, A), generator=torch.Generator().manual_seed(0)).cuda()
    for ids in (ids_TA, ids_TA[:, :1], torch.zeros_like(ids_TA), torch.full_like(ids_TA, E)):
        assert torch.equal(row.run(ids, E), permute.count(ids, E))


@pytest.mark.parametrize(
    ("T", "A", "E"), [(16384, 8, 128), (16384, 8, 64), (16384, 2, 8), (9999, 7, 60), (5000, 3, 300)]
)
def test_sort_and_gather(T: int, A: int, E: int) -> None:
    """Sorting and gathering equal the reference exactly, with dropped choices and with the exact row count."""
    draw = torch.Generator().manual_seed(0)
    ids_TA = torch.rand(T, E + 1, generator=draw).argsort(1)[:, :A].cuda()
    x_TD = torch.randn(T, 200, generator=draw).bfloat16().cuda()
    for rows_ in (None, int((ids_TA < E).sum())):
        order_R, ends_E = choose("sort_by_expert", "cuda", x_TD.dtype, "triton")(ids_TA, E, rows_)
        for got, exact in zip((order_R, ends_E), permute.sort(ids_TA, E, rows_), strict=True):
            assert torch.equal(got, exact)
        gathered = choose("gather_rows", "cuda", x_TD.dtype, "triton")(x_TD, order_R, A)
        assert torch.equal(gathered, permute.gather(x_TD, order_R, A))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_scores_are_detected(bad: float) -> None:
    scores_TE = torch.randn(16384, 128, device="cuda")
    assert bool(_all_finite(scores_TE))
    scores_TE[9000, 77] = bad
    assert not bool(_all_finite(scores_TE))


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
@pytest.mark.parametrize("backward", [False, True])
def test_router_compiles_to_one_graph(backward: bool) -> None:
    """With bfloat16, which uses the fast kernels."""
    router = router_of(moe_of("softmax")).bfloat16().cuda()
    x_TD, tokens_T, index_T, _ = (t.cuda() if isinstance(t, torch.Tensor) else t for t in tokens())

    def weights(x_TD: torch.Tensor) -> torch.Tensor:
        choice, logits_TE = router(x_TD, tokens_T, index_T, None)
        return choice.weights_TA * (choice.ids_TA + 1) + logits_TE.sum(1, keepdim=True)

    results = []
    for run in (weights, torch.compile(weights, fullgraph=True)):
        x = x_TD.bfloat16().requires_grad_()
        y = run(x)
        results.append(torch.autograd.grad(y.sum(), x)[0] if backward else y)
    torch.testing.assert_close(*results)
