"""Auxiliary losses that balance the experts' load, over the tokens of all ranks.

    gshard      E/T² · Σ_e (Σ_t p_te)(Σ_t [top1 = e])            1 when uniform        GShard, arXiv 2006.16668, alg. 1
    switch      E · Σ_e f_e · P_e,  f_e = Σ_tj [i_tj = e] / (T·A)   1 when uniform     Switch, arXiv 2101.03961, eq. 4
    choices     the same with f_e = Σ_tj [i_tj = e] / T             A when uniform     as in Hugging Face
    sequence    the mean over sequences of each one's own switch    1 when uniform     DeepSeek-V3, 2412.19437, eq. 17
                f by the A highest scores, without bias or groups (eq. 18)
    importance  CV²(Σ_t p_te) + CV²(Σ_t P_te)                       0 when uniform     Shazeer, 1701.06538, eq. 6-11

with P_e = Σ_t p_te / T, CV²(s) = E·Σ_e s_e² / (Σ_e s_e)² − 1, and P_te the probability that the router's noise sends
t to e (:mod:`colonnade.model.moe.routers.noisy`); and the z-loss mean_t logsumexp(logits_t)² (ST-MoE, arXiv 2202.08906,
eq. 5). T counts the tokens of all ranks in this forward pass; counts of choices have no gradient.

With ``balance_over`` "layer" the losses of all layers are added. With "model" (switch, choices) there is one loss, and
its sums run over the tokens of all L layers with experts: choices is then E/(L·T)² · Σ_e (Σ_lt p_lte)(Σ_ltj [i_ltj =
e]), transformers' load_balancing_loss_func. Its slopes depend on every layer, so the layers' sums (:func:`layer_sums`)
are added up along the model and sent between pipeline stages like the activations; :func:`attach_model_balance` follows
the last layer.

The gradient of each loss depends on Σ_t p_te (and Σ_t P_te) only, so a rank needs the slopes ∂loss/∂(Σ_t p_te) and its
own tokens: the ranks exchange one sum, without a gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.config import MoeConfig
from colonnade.errors import ConfigError
from colonnade.kernels.registry import choose
from colonnade.model.moe.router import RouterOutput, top_indices
from colonnade.model.moe.routing_context import Routing, TokenGroups, attach
from colonnade.parallel.axis import Axis


class LoadSums(NamedTuple):
    """Sums over the tokens of all ranks, without a gradient."""

    prob_E: Tensor
    """Σ_t p_te."""
    expected_E: Tensor
    """Σ_t P_te; 0 for a router without noise."""
    load_E: Tensor
    """Choices by expert."""
    top_E: Tensor
    """First choices by expert."""
    T: Tensor
    """(1,): number of tokens."""


class LossAndSlopes(NamedTuple):
    """A loss and its derivatives."""

    value: Tensor
    slope_E: Tensor
    """∂value / ∂(Σ_t p_te)."""
    slope_expected_E: Tensor | None = None
    """∂value / ∂(Σ_t P_te)."""


def expert_load(ids_TA: Tensor, experts: int) -> Tensor:
    """int64 (E,): choices by expert; empty choices are not counted."""
    return choose("count_by_expert", ids_TA.device.type, ids_TA.dtype)(ids_TA, experts)


def balance_losses(
    choice: RouterOutput,
    load_E: Tensor,
    logits_TE: Tensor | None,
    moe: MoeConfig,
    over: Axis,
    groups: TokenGroups | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(surrogate, balance, z): the surrogate is a sum over this rank's tokens with the gradient of (weighted losses ·
    T).

    ``balance`` and ``z`` are means over the tokens of all ranks ``over``; balance is 0 if it is taken over all layers.
    Raises :class:`ConfigError` for a loss of sequences without ``groups``.
    """
    E = moe.experts
    # bfloat16 cannot count beyond 256.
    exact = torch.promote_types(choice.probs_TE.dtype, torch.float32)
    probs_TE = choice.probs_TE.to(exact)
    if moe.balance == "importance" and moe.router.noise and choice.expected_TE is None:
        raise ConfigError(
            "model.moe.balance 'importance' needs the probability that noise sends a token to each expert, which "
            f"router '{moe.router.kind}' does not provide; set model.moe.router.noise to 0, or model.moe.balance to "
            "switch"
        )
    expected_TE = None if choice.expected_TE is None else choice.expected_TE.to(exact)
    z_T = None if logits_TE is None else logits_TE.to(exact).logsumexp(1).square()
    none_E = probs_TE.new_zeros(E)
    mine = [
        probs_TE.detach().sum(0),
        none_E if expected_TE is None else expected_TE.detach().sum(0),
        load_E,
        expert_load(choice.ids_TA[:, :1], E),
        none_E.new_full((1,), len(probs_TE)),
        none_E[:1] if z_T is None else z_T.detach().sum().reshape(1),
    ]
    all_ranks = over.sum_(torch.cat([part.to(exact) for part in mine]))
    *parts, count, z = all_ranks.split([E, E, E, E, 1, 1])
    prob_E, expected_E, load_all_E, top_E = parts
    sums = LoadSums(prob_E, expected_E, load_all_E, top_E, count.clamp(min=1))
    if moe.balance == "sequence":
        value, slope_TE = _by_sequence(choice, probs_TE.detach(), logits_TE, moe, over, groups)
        slope_expected_E = None
    else:
        value, slope_TE, slope_expected_E = _BALANCES["none" if moe.pools_layers else moe.balance](sums, moe)
    surrogate = moe.balance_weight * (probs_TE * (slope_TE * sums.T)).sum()
    if expected_TE is not None and slope_expected_E is not None:
        surrogate = surrogate + moe.balance_weight * (expected_TE * (slope_expected_E * sums.T)).sum()
    if z_T is not None and moe.z_weight:
        surrogate = surrogate + moe.z_weight * z_T.sum()
    return surrogate, value.sum(), (z / sums.T).sum()


def layer_sums(choice: RouterOutput, load_E: Tensor) -> Tensor:
    """(2E + 1,): Σ_t p_te (differentiable), choices by expert, and tokens, of one layer on this rank."""
    probs_TE = choice.probs_TE.to(torch.promote_types(choice.probs_TE.dtype, torch.float32))
    return torch.cat((probs_TE.sum(0), load_E.to(probs_TE.dtype), probs_TE.new_full((1,), len(probs_TE))))


def attach_model_balance(x_tD: Tensor, routing: Routing, moe: MoeConfig, layers: int, over: Axis) -> Tensor:
    """Return ``x_tD`` with a backward pass that adds the gradient of the balance loss over all ``layers`` with experts.

    The loss itself is stored in ``routing.pooled``.
    """
    pooled, E = routing.pooled, moe.experts
    if pooled.sums is None or routing.weight is None:
        return x_tD
    mine = pooled.take()
    prob_E, load_E, count = over.sum_(mine.detach()).split([E, E, 1])
    zero_E = torch.zeros_like(prob_E)
    sums = LoadSums(prob_E, zero_E, load_E, zero_E, count.clamp(min=1))
    pooled.balance, slope_E, _ = _BALANCES[moe.balance](sums, moe)
    surrogate = moe.balance_weight * (mine[:E] * slope_E * count / layers).sum()
    return attach(x_tD, surrogate, routing.weight)


def _none(sums: LoadSums, moe: MoeConfig) -> LossAndSlopes:  # noqa: ARG001
    return LossAndSlopes(torch.zeros_like(sums.T), torch.zeros_like(sums.prob_E))


def _gshard(sums: LoadSums, moe: MoeConfig) -> LossAndSlopes:
    slope_E = moe.experts / sums.T.square() * sums.top_E
    return LossAndSlopes((slope_E * sums.prob_E).sum(), slope_E)


def _choices(sums: LoadSums, moe: MoeConfig) -> LossAndSlopes:
    slope_E = moe.experts / sums.T.square() * sums.load_E
    return LossAndSlopes((slope_E * sums.prob_E).sum(), slope_E)


def _switch(sums: LoadSums, moe: MoeConfig) -> LossAndSlopes:
    value, slope_E, _ = _choices(sums, moe)
    return LossAndSlopes(value / moe.active, slope_E / moe.active)


def _importance(sums: LoadSums, moe: MoeConfig) -> LossAndSlopes:  # noqa: ARG001
    importance, slope_E = _variation(sums.prob_E)
    expected, slope_expected_E = _variation(sums.expected_E)
    return LossAndSlopes(importance + expected, slope_E, slope_expected_E)


def _variation(sum_E: Tensor) -> tuple[Tensor, Tensor]:
    """CV² and its slope; 0 for a sum of 0."""
    E, total, squares = len(sum_E), sum_E.sum(), sum_E.square().sum()
    nonzero = total != 0
    safe = total.where(nonzero, 1)
    slope_E = 2 * E * (sum_E / safe**2 - squares / safe**3)
    return torch.where(nonzero, E * squares / safe**2 - 1, 0), slope_E


def _by_sequence(
    choice: RouterOutput,
    probs_TE: Tensor,
    logits_TE: Tensor | None,
    moe: MoeConfig,
    over: Axis,
    groups: TokenGroups | None,
) -> tuple[Tensor, Tensor]:
    """The sequence loss, and its slope by each token's p_te."""
    if groups is None:
        raise ConfigError(
            "model.moe.balance 'sequence' is a loss over sequences, but the stream does not say which token belongs "
            "to which; set token_groups in its Routing, or use 'switch'"
        )
    E, ids_TA = moe.experts, choice.ids_TA
    if moe.bias_rate or moe.router.groups > 1:
        # Compare logits: probabilities that round to 0 or 1 are equal.
        ids_TA = top_indices(probs_TE if logits_TE is None else logits_TE, moe.active)
    chosen_TE = probs_TE.new_zeros(len(probs_TE), E + 1).scatter_add(
        1, ids_TA, torch.ones_like(ids_TA, dtype=probs_TE.dtype)
    )[:, :E]
    ones_T1 = probs_TE.new_ones(len(probs_TE), 1)
    sum_U = over.sum_(groups.sum_by_group(torch.cat([probs_TE, chosen_TE, ones_T1], 1)))
    prob_UE, load_UE, count_U1 = sum_U.split([E, E, 1], 1)
    sequences = (count_U1 > 0).sum(dtype=count_U1.dtype).clamp(min=1)
    slope_UE = E / moe.active / sequences * load_UE / count_U1.clamp(min=1).square()
    return (slope_UE * prob_UE).sum(), slope_UE[groups.group_T]


_BALANCES: dict[str, Callable[[LoadSums, MoeConfig], LossAndSlopes]] = {
    "none": _none,
    "gshard": _gshard,
    "switch": _switch,
    "choices": _choices,
    "importance": _importance,
}
