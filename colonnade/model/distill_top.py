"""A teacher's most likely tokens instead of all its logits: the contents of a cache of its outputs.

    p over k + 1 events: the k most likely tokens, and the rest of the vocabulary        KL = Σ_e p_e log(p_e / q_e)
    dKL/du_v = q_v − p_v for the k tokens, q_v (1 − p_rest / q_rest) for the others           u = z/τ

Merging events never raises a divergence (the data-processing inequality), so this is a lower bound of the KL over the
vocabulary, with equality where q is proportional to p on the rest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.parallel.axis import Axis

MIN_REST = 1e-12
"""Lower bound of the student's probability of the rest."""


class TopTokens(NamedTuple):
    """The teacher's most likely tokens at the run's temperature."""

    ids_Tk: Tensor
    """int32 token ids of the whole vocabulary."""
    logp_Tk: Tensor
    """float32 log-probabilities."""

    def rows(self, part: slice) -> "TopTokens":
        """Those of some tokens."""
        return TopTokens(self.ids_Tk[part], self.logp_Tk[part])


def top_tokens(logp_cv: Tensor, k: int, tp: Axis, vocab_size: int) -> TopTokens:
    """The ``k`` most likely tokens of log-probabilities sharded over the vocabulary."""
    start, stop = tp.part(vocab_size)
    own = min(k, stop - start)
    values, ids = logp_cv.topk(own, 1)
    values = torch.nn.functional.pad(values.float(), (0, k - own), value=-torch.inf)
    ids = torch.nn.functional.pad(ids + start, (0, k - own))
    if tp.size > 1:
        values, ids = (tp.all_gather_(x).movedim(0, 1).flatten(1) for x in (values, ids))
    best, at = values.topk(min(k, vocab_size), 1)
    return TopTokens(ids.gather(1, at).to(torch.int32), best)


def top_kl(top: TopTokens, logq_cv: Tensor, valid_c: Tensor, start: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """(Σ of the valid tokens' divergences on all ranks, its gradient by u = z/τ)."""
    q_cv, logp_ck = logq_cv.exp(), top.logp_Tk.to(logq_cv.dtype)
    p_ck = logp_ck.exp()
    local_ck = top.ids_Tk.long() - start
    here_ck = (local_ck >= 0) & (local_ck < logq_cv.shape[1])
    local_ck = local_ck.where(here_ck, 0)
    logq_ck = tp.sum_(logq_cv.gather(1, local_ck).where(here_ck, 0))
    p_rest_c = (1 - p_ck.sum(1)).clamp(min=0)
    q_rest_c = (1 - logq_ck.exp().sum(1)).clamp(min=MIN_REST)
    value_c = (p_ck * (logp_ck - logq_ck)).sum(1) + torch.special.xlogy(p_rest_c, p_rest_c / q_rest_c)
    du_cv = q_cv * (1 - p_rest_c / q_rest_c)[:, None]
    # Instead of what the rest would give: q − p.
    change_ck = (q_cv.gather(1, local_ck) * (p_rest_c / q_rest_c)[:, None] - p_ck).where(here_ck, 0)
    du_cv.scatter_add_(1, local_ck, change_ck)
    return (value_c * valid_c).sum(), du_cv * valid_c[:, None]
