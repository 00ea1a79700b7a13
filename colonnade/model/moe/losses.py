"""Losses that balance the experts' load, over the tokens of all ranks.

    gshard      E/T² · Σ_e (Σ_t p_te)(Σ_t [top1 = e])            1 when uniform        GShard, arXiv 2006.16668, alg. 1
    switch      E · Σ_e f_e · P_e,  f_e = Σ_tj [i_tj = e] / (T·A)   1 when uniform     Switch, arXiv 2101.03961, eq. 4
    choices     the same with f_e = Σ_tj [i_tj = e] / T             A when uniform     as Hugging Face has it
    importance  CV²(Σ_t p_te) = E·Σ_e s_e² / (Σ_e s_e)² − 1         0 when uniform     Shazeer, arXiv 1701.06538, eq. 6

with P_e = Σ_t p_te / T; and the z-loss mean_t logsumexp(logits_t)² (ST-MoE, arXiv 2202.08906, eq. 5). T counts the
tokens of all ranks in this forward pass; counts of choices carry no gradient. Each loss is a function of Σ_t p_te alone
where gradients are concerned, so a rank needs the slope ∂loss/∂(Σ_t p_te) and its own tokens: one sum over the ranks,
without a gradient, is all that is exchanged.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.config import MoeConfig
from colonnade.model.moe.router import Choice
from colonnade.parallel.axis import Axis


class Sums(NamedTuple):
    """Over the tokens of all ranks; no gradient."""

    prob_E: Tensor
    """Σ_t p_te."""
    load_E: Tensor
    """Choices."""
    top_E: Tensor
    """First choices."""
    T: Tensor
    """(1,): tokens."""


def load(ids_TA: Tensor, experts: int) -> Tensor:
    """int64 (E,): choices by expert; those of none are not counted."""
    count_E = torch.zeros(experts + 1, dtype=torch.int64, device=ids_TA.device)
    ids_R = ids_TA.flatten()
    return count_E.index_add(0, ids_R, torch.ones_like(ids_R))[:experts]


def losses(
    choice: Choice, load_E: Tensor, logits_TE: Tensor | None, moe: MoeConfig, over: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """(surrogate, balance, z): a sum over this rank's tokens whose gradient is that of (weighted losses · T), and the
    two losses themselves, means over the tokens of all ranks ``over``.
    """
    E, probs_TE = moe.experts, choice.probs_TE
    top_E = load(choice.ids_TA[:, :1], E)
    z_T = None if logits_TE is None else logits_TE.logsumexp(1).square()
    mine = [probs_TE.detach().sum(0), load_E, top_E, torch.full((1,), len(probs_TE), device=probs_TE.device)]
    mine.append(probs_TE.new_zeros(1) if z_T is None else z_T.detach().sum().reshape(1))
    all_ranks = over.sum_(torch.cat([part.to(probs_TE.dtype) for part in mine]))
    prob_E, load_all_E, top_all_E, count, z = all_ranks.split([E, E, E, 1, 1])
    sums = Sums(prob_E, load_all_E, top_all_E, count.clamp(min=1))
    slope_E, balance = _BALANCES[moe.balance](sums, moe)
    surrogate = moe.balance_weight * (probs_TE * (slope_E * sums.T)).sum()
    if z_T is not None and moe.z_weight:
        surrogate = surrogate + moe.z_weight * z_T.sum()
    return surrogate, balance.sum(), (z / sums.T).sum()


def _none(sums: Sums, moe: MoeConfig) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.zeros_like(sums.prob_E), torch.zeros_like(sums.T)


def _gshard(sums: Sums, moe: MoeConfig) -> tuple[Tensor, Tensor]:
    slope_E = moe.experts / sums.T.square() * sums.top_E
    return slope_E, (slope_E * sums.prob_E).sum()


def _choices(sums: Sums, moe: MoeConfig) -> tuple[Tensor, Tensor]:
    slope_E = moe.experts / sums.T.square() * sums.load_E
    return slope_E, (slope_E * sums.prob_E).sum()


def _switch(sums: Sums, moe: MoeConfig) -> tuple[Tensor, Tensor]:
    slope_E, value = _choices(sums, moe)
    return slope_E / moe.active, value / moe.active


def _importance(sums: Sums, moe: MoeConfig) -> tuple[Tensor, Tensor]:
    whole, squares = sums.prob_E.sum(), sums.prob_E.square().sum()
    slope_E = 2 * moe.experts * (sums.prob_E / whole**2 - squares / whole**3)
    return slope_E, moe.experts * squares / whole**2 - 1


_BALANCES = {"none": _none, "gshard": _gshard, "switch": _switch, "choices": _choices, "importance": _importance}
