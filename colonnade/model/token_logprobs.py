"""Log-probabilities of given tokens, from logits that are sharded over the vocabulary.

    logp_r = z_r[target_r] − max_v z_r[v] − log Σ_v exp(z_r[v] − max)

Per row the tp ranks reduce one maximum and one sum of three values: Σ exp, the target's logit, and the number of ranks
that disprove that the target is the argmax. Logits are never gathered, and rows are taken in chunks, so that nothing of
size T·V is stored. Logits are raw: no temperature, filter or penalty. The results have no gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.sampling import by_row_
from colonnade.model.loss import CHUNK_BYTES, CHUNK_ROWS, IGNORE
from colonnade.model.output_heads import OutputProjection, project_rows, projection_input
from colonnade.parallel.axis import SOLO, Axis


class TokenScores(NamedTuple):
    """Scores of R tokens, and the K most probable tokens in their place; the same on all tp ranks."""

    logp_R: Tensor
    """float32 (float64 for float64 logits)."""
    greedy_R: Tensor
    """Whether the token is the argmax of the logits, the lowest id among equals."""
    top_logp_RK: Tensor
    """In descending order; the first is the argmax."""
    top_ids_RK: Tensor

    def pad(self, count: int) -> "TokenScores":
        """With ``count`` alternatives, at least K: the further ones have id 0 and log-probability -inf."""
        more = (0, count - self.top_ids_RK.shape[1])
        logp_RK, ids_RK = F.pad(self.top_logp_RK, more, value=-math.inf), F.pad(self.top_ids_RK, more)
        return self._replace(top_logp_RK=logp_RK, top_ids_RK=ids_RK)

    @staticmethod
    def cat(parts: Sequence["TokenScores"]) -> "TokenScores":
        """The rows of all ``parts``."""
        return TokenScores(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


@dataclass(frozen=True)
class TokenLogprobs:
    """A model head: the log-probability of ``targets_R`` after the tokens ``rows_R`` of the stream (None: all)."""

    targets_R: Tensor
    rows_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(logp_R, greedy_R); for a target of :data:`IGNORE` 0 and False."""
        scores = score_rows(x_tD, T, self.rows_R, self.targets_R, output)
        return scores.logp_R, scores.greedy_R


@torch.no_grad()
def score_rows(
    x_tD: Tensor,
    T: int,
    rows_R: Tensor | None,
    targets_R: Tensor,
    output: OutputProjection,
    *,
    top: int = 0,
    rowwise: bool = False,
) -> TokenScores:
    """Scores of ``targets_R`` after the tokens ``rows_R`` of the stream, with ``top`` alternatives."""
    x_RD, bias_v = projection_input(x_tD, T, rows_R, output)
    kind, exact = x_RD.device.type, torch.float64 if x_RD.dtype == torch.float64 else torch.float32
    share = -(-output.vocab_size // output.axes.tp.size)  # every rank takes the same number of chunks
    rows = max(1, min(CHUNK_ROWS[kind], CHUNK_BYTES[kind] // (share * exact.itemsize)))
    parts = [
        score_logits(
            project_rows(x_RD[a : a + rows], bias_v, output),
            targets_R[a : a + rows],
            output.axes.tp,
            output.vocab_size,
            top=top,
            rowwise=rowwise,
        )
        for a in range(0, max(1, len(x_RD)), rows)
    ]
    return TokenScores.cat(parts)


@torch.no_grad()
def score_logits(
    z_Rv: Tensor,
    targets_R: Tensor,
    tp: Axis = SOLO,
    vocab_size: int | None = None,
    *,
    top: int = 0,
    rowwise: bool = False,
) -> TokenScores:
    """Scores of ``targets_R`` under the logits ``z_Rv``, this rank's share of the vocabulary.

    ``rowwise``: no rounding depends on another row.
    """
    V = vocab_size or z_Rv.shape[1]
    shard, first = -(-V // tp.size), tp.part(V)[0]
    z_Rv = z_Rv if z_Rv.dtype == torch.float64 else z_Rv.float()
    if tp.size == 1 and not top:
        return _score_whole_rows(z_Rv, targets_R, rowwise=rowwise)
    if missing := shard - z_Rv.shape[1]:  # the last rank may have fewer tokens, or none
        z_Rv = F.pad(z_Rv, (0, missing), value=-math.inf)
    local_max_R, column_R = z_Rv.max(1)  # the first of equal maxima
    max_R = tp.max_(local_max_R)
    owner_R = targets_R.clamp(min=0) // shard
    mine_R = (owner_R == tp.rank) & (targets_R >= 0)
    local_R = torch.where(mine_R, targets_R - first, 0)
    target_R = torch.where(mine_R, z_Rv.gather(1, local_R[:, None]).squeeze(1), 0.0)
    # The target is the argmax unless its own rank has another maximum or a lower rank has an equal one.
    has_max_R = local_max_R == max_R
    other_R = torch.where(mine_R, ~has_max_R | (column_R != local_R), has_max_R & (tp.rank < owner_R))
    exp_Rv = z_Rv - max_R[:, None]
    sum_R = sum_pairwise(by_row_(torch.exp_, exp_Rv)) if rowwise else exp_Rv.exp_().sum(1)
    sum_R, target_R, others_R = tp.sum_(torch.stack((sum_R, target_R, other_R.to(sum_R)))).unbind(0)
    log_sum_R = by_row_(torch.log_, sum_R[:, None].clone())[:, 0] if rowwise else sum_R.log()
    valid_R = targets_R != IGNORE
    logp_R = torch.where(valid_R, target_R - max_R - log_sum_R, 0.0)
    greedy_R = valid_R & (others_R == 0)
    count = min(top, V)
    if not count:
        none_R0 = z_Rv.new_empty(len(z_Rv), 0)
        return TokenScores(logp_R, greedy_R, none_R0, none_R0.long())
    # Among equal logits the argmax comes first: topk alone may return another one of them.
    raised_Rv = z_Rv.scatter(1, column_R[:, None], math.inf)
    ids_RK = raised_Rv.topk(min(count, shard)).indices
    top_RK, ids_RK = z_Rv.gather(1, ids_RK), first + ids_RK
    if tp.size > 1:
        top_RK, order = _gather_ranks(top_RK, tp).sort(dim=1, descending=True, stable=True)
        ids_RK = _gather_ranks(ids_RK, tp).gather(1, order)
    top_RK, ids_RK = top_RK[:, :count], ids_RK[:, :count]
    return TokenScores(logp_R, greedy_R, top_RK - max_R[:, None] - log_sum_R[:, None], ids_RK)


def _score_whole_rows(z_RV: Tensor, targets_R: Tensor, *, rowwise: bool) -> TokenScores:
    """Scores without alternatives on one rank, without sums over ranks: 8 launches on a GPU instead of 28."""
    valid_R, index_R = targets_R != IGNORE, targets_R.clamp(min=0)
    max_R, column_R = z_RV.max(1)
    if rowwise:
        sum_R1 = sum_pairwise(by_row_(torch.exp_, z_RV - max_R[:, None]))[:, None]
        target_R = z_RV.gather(1, index_R[:, None])[:, 0]
        logp_R = target_R - max_R - by_row_(torch.log_, sum_R1.clone())[:, 0]
    else:
        logp_R = z_RV.log_softmax(1).gather(1, index_R[:, None])[:, 0]
    none_R0 = z_RV.new_empty(len(z_RV), 0)
    return TokenScores(torch.where(valid_R, logp_R, 0.0), valid_R & (column_R == index_R), none_R0, none_R0.long())


def sum_pairwise(x_Rv: Tensor) -> Tensor:
    """The sum of each row, element by element in an order that depends on its length only."""
    x_Rv = F.pad(x_Rv, (0, (1 << (x_Rv.shape[1] - 1).bit_length()) - x_Rv.shape[1]))
    while x_Rv.shape[1] > 1:
        half = x_Rv.shape[1] // 2
        x_Rv = x_Rv[:, :half] + x_Rv[:, half:]
    return x_Rv[:, 0]


def _gather_ranks(x_RK: Tensor, tp: Axis) -> Tensor:
    """The columns of all ranks side by side."""
    return tp.join(x_RK, 1, x_RK.shape[1] * tp.size) if len(x_RK) else x_RK
