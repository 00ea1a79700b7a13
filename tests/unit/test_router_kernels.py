"""Router kernels: the plain ones against their formulas, and tensor-core scores computed without tensor cores.

The Triton kernels for choosing and counting run the same cases in tests/interpreted_experts.py.
"""

import pytest
import torch

from colonnade.kernels import permute, routing
from colonnade.kernels.registry import choose
from colonnade.model.moe import RouterInput, RouterOutput
from colonnade.model.moe.layer import _all_finite
from colonnade.model.moe.router import ROUTERS
from tests.routers import CHOICES, hard_scores, moe_of, router_of, same_choice, tokens


def random_values(*shape: int, dtype: torch.dtype, seed: int = 0, wanted: bool = True) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_(wanted)


@pytest.fixture
def emulate_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulates a 16-bit matrix product with float32 output, which torch has for GPUs only."""
    monkeypatch.setattr(routing, "matmul_float32", lambda a, b: a.float() @ b.float())


@pytest.mark.usefixtures("emulate_tensor_cores")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("T", "E", "D"), [(40, 6, 24), (1, 1, 7), (0, 5, 8), (300, 33, 65)])
@pytest.mark.parametrize("biased", [False, True])
def test_float32_scores_of_16_bit_inputs(dtype: torch.dtype, T: int, E: int, D: int, biased: bool) -> None:
    """As in float64; gradients too, except for their own rounding to 16 bits."""
    x, w, b = (
        random_values(T, D, dtype=dtype),
        random_values(E, D, dtype=dtype, seed=1),
        random_values(E, dtype=dtype, seed=2),
    )
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    g = random_values(T, E, dtype=torch.float32, seed=3, wanted=False) * torch.logspace(-2, 3, E)
    got = routing.scores_tensor_core(x, w, b if biased else None)
    wanted = routing.scores(exact[0], exact[1], exact[2] if biased else None)
    assert got.dtype == torch.float32 and wanted.dtype == torch.float64
    assert (got - wanted).norm() <= 1e-6 * wanted.norm()
    got.backward(g)
    wanted.backward(g.double())
    for ours, theirs in zip((x, w, b)[: 2 + biased], exact, strict=False):
        assert ours.grad.dtype == dtype
        assert (ours.grad - theirs.grad).norm() <= torch.finfo(dtype).eps / 2 * theirs.grad.norm()


@pytest.mark.usefixtures("emulate_tensor_cores")
def test_unneeded_gradients_are_not_computed() -> None:
    x, w = random_values(9, 8, dtype=torch.bfloat16), random_values(5, 8, dtype=torch.bfloat16)
    for frozen, trained in ((x, w), (w, x)):
        frozen.requires_grad_(False)
        routing.scores_tensor_core(x, w).sum().backward()
        assert frozen.grad is None and trained.grad is not None
        frozen.requires_grad_()
        trained.grad = None


@pytest.mark.usefixtures("emulate_tensor_cores")
def test_score_operators_pass_opcheck() -> None:
    for T in (0, 4):
        x, w = random_values(T, 8, dtype=torch.bfloat16), random_values(5, 8, dtype=torch.bfloat16)
        torch.library.opcheck(torch.ops.colonnade.router_scores.default, (x, w))


def test_gradient_is_the_sum_of_its_parts() -> None:
    """Bitwise, for large and small values alike."""
    g = random_values(200, 7, dtype=torch.float32, wanted=False) * torch.logspace(-30, 30, 200)[:, None]
    assert torch.equal(routing.split_into_bfloat16(g).unflatten(1, (3, 7)).double().sum(1), g.double())


def test_mixed_dtypes_use_the_plain_product() -> None:
    x, w = (
        random_values(9, 8, dtype=torch.bfloat16, wanted=False),
        random_values(5, 8, dtype=torch.float32, wanted=False),
    )
    assert torch.equal(routing.scores_tensor_core(x, w), torch.nn.functional.linear(x.float(), w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scores_are_at_least_float32(dtype: torch.dtype) -> None:
    x, w, b = (random_values(*shape, dtype=dtype, wanted=False) for shape in ((9, 8), (5, 8), (5,)))
    exact = torch.promote_types(dtype, torch.float32)
    got = choose("router_scores", "cpu", dtype)(x, w, b)
    assert got.dtype == exact
    assert torch.equal(got, torch.nn.functional.linear(x.to(exact), w.to(exact), b.to(exact)))


@pytest.mark.parametrize(("T", "E", "A"), CHOICES)
def test_plain_top_k_matches_a_sort(T: int, E: int, A: int) -> None:
    """Against Python's sort, which is stable."""

    def by_hand(compared_TE, scores_TE, active, *, normalise, scale):
        ids = [sorted(range(E), key=lambda e, row=row: -row[e])[:active] for row in compared_TE.tolist()]
        ids_TA = torch.tensor(ids, dtype=torch.int64).view(T, active)
        picked_TA = scores_TE.gather(1, ids_TA)
        total_T1 = picked_TA.sum(1, keepdim=True).clamp(min=1e-20) if normalise else 1
        return ids_TA, picked_TA / total_T1 * scale

    scores = hard_scores(T, E)
    for name in ("normal", "ties", "infinite", "all equal"):
        for normalise in (False, True):
            same_choice(by_hand, routing.top_experts, scores[name], A, normalise=normalise, scale=1.7)


def test_ties_and_non_finite_scores_are_sorted_stably() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-4, 4, (200, 9), generator=generator).float()
    x[::3] += torch.rand(67, 9, generator=generator)  # rows without ties
    x[::7, 2], x[::11, 4], x[::13, 6] = float("nan"), float("-inf"), float("nan")
    x[5] = 0.0
    x[5, ::2] = -0.0
    for count in (1, 4, 8, 9):
        assert torch.equal(
            routing.stable_topk(x, count), x.sort(dim=1, descending=True, stable=True).indices[:, :count]
        )


def test_weights_are_plain_scores_by_default() -> None:
    scores = random_values(9, 6, dtype=torch.float32, wanted=False)
    ids, weights = routing.top_experts(scores, scores, 2, normalise=False, scale=1.0)
    assert torch.equal(weights, scores.gather(1, ids))


def test_plain_expert_count() -> None:
    ids = torch.tensor([[0, 2], [2, 3], [9, 2]])
    assert permute.count(ids, 3).tolist() == [1, 0, 3]
    assert permute.count(ids[:0], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_scores_are_detected(bad: float) -> None:
    scores = random_values(9, 6, dtype=torch.float32, wanted=False) * 3e38
    assert bool(_all_finite(scores.clamp(-3e38, 3e38)))
    scores = scores.clamp(-3e38, 3e38)
    scores[4, 2] = bad
    assert not bool(_all_finite(scores))


@pytest.mark.parametrize("name", ["softmax", "cosine", "hash", "switch"])
def test_routers_see_tokens_in_the_score_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any caller; stored tokens keep their dtype."""
    seen: list[RouterInput] = []
    rule = ROUTERS[moe_of(name).router.kind]

    def recorded(it: RouterInput) -> RouterOutput:
        seen.append(it)
        return rule.choose(it)

    monkeypatch.setitem(ROUTERS, moe_of(name).router.kind, rule._replace(choose=recorded))
    x_TD, tokens_T, index_T, _ = tokens()
    choice, _ = router_of(moe_of(name)).bfloat16()(x_TD.bfloat16(), tokens_T, index_T, None)
    assert seen[0].raw_TD.dtype == torch.bfloat16 and seen[0].logits_TE.dtype == torch.float32
    assert seen[0].x_TD.dtype == choice.weights_TA.dtype == torch.float32
