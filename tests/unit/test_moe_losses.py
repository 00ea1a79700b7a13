"""Each balance loss against its formula, and its closed-form gradient against autograd."""

import math

import pytest
import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.model.moe import RouterOutput, TokenGroups
from colonnade.model.moe.losses import attach_model_balance, balance_losses, expert_load, layer_sums
from colonnade.model.moe.routing_context import Routing
from colonnade.parallel.axis import SOLO, Axis, world_axis
from tests.routers import EXPERTS, SEQUENCES, TOKENS, moe_of, router_of, tokens
from tests.worlds import assert_same, run

E, T = EXPERTS, TOKENS
OF_T = torch.repeat_interleave(torch.arange(len(SEQUENCES)), torch.tensor(SEQUENCES))


def random_choice(active: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, ids, expected): scores, choices by other scores (some of them none), and probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(T, E, generator=generator, dtype=torch.float64)
    ids_TA = torch.randn(T, E, generator=generator).topk(active).indices
    ids_TA[torch.rand(ids_TA.shape, generator=generator) < 0.1] = E
    expected_TE = torch.rand(T, E, generator=generator, dtype=torch.float64)
    return logits_TE, ids_TA, expected_TE


def cv_squared(values: Tensor) -> Tensor:
    """The squared coefficient of variation: variance over squared mean."""
    return values.var(correction=0) / values.mean() ** 2


def expert_counts(ids: Tensor) -> Tensor:
    return torch.tensor([(ids == e).sum().item() for e in range(E)], dtype=torch.float64)


def reference_loss(balance: str, probs_TE: Tensor, ids_TA: Tensor, expected_TE: Tensor | None, active: int) -> Tensor:
    """The loss as its paper writes it, differentiable in the probabilities."""
    if balance == "none":
        return probs_TE.sum() * 0
    if balance == "gshard":
        return E * (expert_counts(ids_TA[:, 0]) / T * probs_TE.mean(0)).sum()
    if balance in ("switch", "choices"):
        share_E = expert_counts(ids_TA) / T / (active if balance == "switch" else 1)
        return E * (share_E * probs_TE.mean(0)).sum()
    if balance == "sequence":
        parts = []
        for s in set(OF_T.tolist()):
            mine = OF_T.eq(s)
            f_E = expert_counts(ids_TA[mine]) * E / (active * mine.sum())
            parts.append((f_E * probs_TE[mine].mean(0)).sum())
        return torch.stack(parts).mean()
    importance = cv_squared(probs_TE.sum(0))
    return importance if expected_TE is None else importance + cv_squared(expected_TE.sum(0))


@pytest.mark.parametrize("active", [1, 3])
@pytest.mark.parametrize("with_noise", [False, True])
@pytest.mark.parametrize("balance", ["none", "gshard", "switch", "choices", "sequence", "importance"])
def test_losses_match_formula_and_autograd(balance, with_noise, active):
    moe = moe_of("softmax", balance=balance, active=active, balance_weight=0.7, z_weight=0.2)
    logits_TE, ids_TA, expected_TE = random_choice(active)
    expected_TE = expected_TE if with_noise else None

    def loss_and_reference(logits_TE: Tensor, expected_TE: Tensor | None):
        leaves = [logits_TE.clone().requires_grad_()]
        if expected_TE is not None:
            leaves.append(expected_TE.clone().requires_grad_())
        return leaves, leaves[0].softmax(1), leaves[1] if len(leaves) > 1 else None

    leaves, probs_TE, noisy_TE = loss_and_reference(logits_TE, expected_TE)
    weights_TA = torch.ones(ids_TA.shape, dtype=torch.float64)
    choice = RouterOutput(ids_TA, weights_TA, probs_TE, expected_TE=noisy_TE)
    surrogate, value, z = balance_losses(
        choice, expert_load(ids_TA, E), leaves[0], moe, SOLO, TokenGroups(OF_T, len(SEQUENCES))
    )
    surrogate.backward()

    plain_leaves, plain_probs_TE, plain_noisy_TE = loss_and_reference(logits_TE, expected_TE)
    reference = reference_loss(balance, plain_probs_TE, ids_TA, plain_noisy_TE, active)
    plain_z = plain_leaves[0].exp().sum(1).log().square().mean()
    ((0.7 * reference + 0.2 * plain_z) * T).backward()

    assert_same(value, reference.detach(), what="value")
    assert_same(z, plain_z.detach(), what="z")
    for got, expected in zip(leaves, plain_leaves, strict=True):
        got_grad = got.grad if got.grad is not None else torch.zeros_like(got)
        expected_grad = expected.grad if expected.grad is not None else torch.zeros_like(expected)
        assert_same(got_grad, expected_grad, what="slope")


@pytest.mark.parametrize(
    ("name", "changes"),
    [("sigmoid", {"active": 2}), ("sigmoid_groups", {}), ("softmax_biased", {}), ("softmax", {"groups": 2})],
)
def test_sequence_loss_counts_top_scores_without_bias_or_groups(name, changes):
    """DeepSeek-V3, equations 17 to 20, token by token: s ∈ Topk, s' = s/Σs, f = E/(A·T)·Σ_t, P = 1/T·Σ_t."""
    moe = moe_of(name, balance="sequence", **changes)
    router, (x_TD, tokens_T, index_T, units) = router_of(moe), tokens()
    if router.bias_E is not None:
        router.bias_E.zero_()[:2] = 0.3
    choice, logits_TE = router(x_TD, tokens_T, index_T, None, training=True, token_groups=units)
    _, value, _ = balance_losses(choice, expert_load(choice.ids_TA, E), logits_TE, moe, SOLO, units)
    logits_TE = logits_TE.detach()
    parts, biased = [], 0
    for s in set(OF_T.tolist()):
        f, P = [0.0] * E, [0.0] * E
        mine = [t for t in range(T) if OF_T[t] == s]
        for t in mine:
            scores = logits_TE[t].sigmoid() if "sigmoid" in name else logits_TE[t].softmax(0)
            best = sorted(range(E), key=lambda e, scores=scores: -scores[e])[: moe.active]
            biased += set(best) != set(choice.ids_TA[t].tolist())
            for e in range(E):
                f[e] += E / (moe.active * len(mine)) * (e in best)
                P[e] += float(scores[e] / scores.sum()) / len(mine)
        parts.append(sum(a * b for a, b in zip(f, P, strict=True)))
    assert biased, "the bias or the groups changed no choice"
    assert value.item() == pytest.approx(sum(parts) / len(parts), rel=1e-12)


def test_load_loss_without_noisy_router_is_refused():
    moe = moe_of("topology", balance="importance", noise=1.0)
    choice = RouterOutput(random_choice(2)[1], torch.ones(T, 2), torch.ones(T, E))
    with pytest.raises(ConfigError, match=r"router 'topology' does not provide; set model\.moe\.router\.noise to 0"):
        balance_losses(choice, expert_load(choice.ids_TA, E), None, moe, SOLO)


@pytest.mark.parametrize(
    ("balance", "even"), [("gshard", 1), ("switch", 1), ("choices", 3), ("sequence", 1), ("importance", 0)]
)
def test_losses_of_an_even_load(balance, even):
    moe = moe_of("softmax", balance=balance, active=3)
    ids_TA = (torch.arange(30)[:, None] * 3 + torch.arange(3)) % E
    probs_TE = torch.full((30, E), 1 / E, dtype=torch.float64)
    choice = RouterOutput(ids_TA, torch.ones(30, 3), probs_TE)
    units = TokenGroups(torch.arange(30) // 10, 3)
    _, value, _ = balance_losses(choice, expert_load(ids_TA, E), None, moe, SOLO, units)
    assert value.item() == pytest.approx(even, abs=1e-12)


def test_the_two_normalisations_differ_by_a_factor_of_A():  # noqa: N802
    logits_TE, ids_TA, _ = random_choice(4)
    results = {}
    for balance in ("switch", "choices"):
        moe = moe_of("softmax", balance=balance, active=4, z_weight=0.0, balance_weight=1.0)
        leaf = logits_TE.clone().requires_grad_()
        choice = RouterOutput(ids_TA, ids_TA.double(), leaf.softmax(1))
        surrogate, value, _ = balance_losses(choice, expert_load(ids_TA, E), leaf, moe, SOLO)
        surrogate.backward()
        results[balance] = value, leaf.grad
    assert torch.equal(results["choices"][0], 4 * results["switch"][0])
    assert torch.equal(results["choices"][1], 4 * results["switch"][1])


def test_choice_loss_equals_transformers():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits_TE = random_choice(2)[0]
    ids_TA = logits_TE.topk(2).indices
    moe = moe_of("softmax", balance="choices")
    choice = RouterOutput(ids_TA, ids_TA.double(), logits_TE.softmax(1))
    _, value, _ = balance_losses(choice, expert_load(ids_TA, E), logits_TE, moe, SOLO)
    theirs = modeling.load_balancing_loss_func((logits_TE,), E, 2)
    # transformers counts in float32.
    assert value.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_losses_without_tokens_are_finite():
    for balance in ("none", "gshard", "switch", "choices", "sequence", "importance"):
        moe = moe_of("softmax", balance=balance)
        leaf = torch.zeros(0, E, dtype=torch.float64, requires_grad=True)
        ids_TA = torch.zeros(0, 2, dtype=torch.int64)
        choice = RouterOutput(ids_TA, leaf[:, :2], leaf.softmax(1))
        surrogate, value, z = balance_losses(choice, expert_load(ids_TA, E), leaf, moe, SOLO, TokenGroups(OF_T[:0], 3))
        surrogate.backward()
        assert surrogate.item() == 0
        assert math.isfinite(value.item())
        assert z.item() == 0


def test_16_bit_scores_are_counted_exactly():
    """bfloat16 cannot represent 701 or 1001."""
    moe = moe_of("softmax", active=1, balance="switch", z_weight=0.0)
    ids_TA = (torch.arange(1001) < 701).long()[:, None]
    probs_TE = torch.zeros(1001, E, dtype=torch.bfloat16).scatter(1, ids_TA, 1)
    _, value, _ = balance_losses(
        RouterOutput(ids_TA, probs_TE[:, :1], probs_TE), expert_load(ids_TA, E), None, moe, SOLO
    )
    assert value.item() == pytest.approx(E * (701**2 + 300**2) / 1001**2, rel=1e-6)


def test_nan_scores_give_nan_losses():
    for balance in ("gshard", "switch", "choices", "importance"):
        moe = moe_of("softmax", balance=balance)
        logits_TE, ids_TA, _ = random_choice(2)
        logits_TE[3, 1] = math.nan
        choice = RouterOutput(ids_TA, ids_TA.double(), logits_TE.softmax(1))
        _, value, z = balance_losses(choice, expert_load(ids_TA, E), logits_TE, moe, SOLO)
        assert value.isnan()
        assert z.isnan()


def test_sequence_loss_requires_sequences():
    moe = moe_of("softmax", balance="sequence")
    _, ids_TA, _ = random_choice(2)
    choice = RouterOutput(ids_TA, ids_TA.double(), torch.ones(T, E, dtype=torch.float64))
    with pytest.raises(ConfigError, match="loss over sequences, but the stream does not say"):
        balance_losses(choice, expert_load(ids_TA, E), None, moe, SOLO)


def model_balance(mine: slice, over: Axis) -> tuple[Tensor, Tensor]:
    """The balance loss over two layers, and its gradient by the scores of the tokens ``mine``."""
    moe = moe_of("softmax", balance_over="model", balance_weight=0.7)
    leaves, routing = [], Routing(torch.arange(T)[mine], weight=1.0)
    for layer in range(2):
        logits_TE, ids_TA, _ = random_choice(2, seed=layer)
        leaves.append(logits_TE[mine].requires_grad_())
        choice = RouterOutput(ids_TA[mine], ids_TA[mine].double(), leaves[-1].softmax(1))
        sums = layer_sums(choice, expert_load(choice.ids_TA, E))
        routing.pooled.sums = sums if routing.pooled.sums is None else routing.pooled.sums + sums
    x_TD = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    attach_model_balance(x_TD, routing, moe, 2, over).sum().backward()
    assert routing.pooled.balance is not None
    return routing.pooled.balance.detach(), torch.stack([leaf.grad for leaf in leaves])


def model_balance_of_a_share() -> tuple[Tensor, Tensor]:
    world = world_axis()
    return model_balance([slice(0, 11), slice(11, T)][world.rank], world)


def test_model_balance_counts_the_tokens_of_all_ranks() -> None:
    value, grad_LTE = model_balance(slice(None), SOLO)
    (first, first_LTE), (second, second_LTE) = run(2, model_balance_of_a_share)
    assert_same(first, value, what="value")
    assert_same(second, value, what="value")
    assert_same(torch.cat((first_LTE, second_LTE), 1), grad_LTE, what="gradients")
