"""Embeddings of packed texts, and their contrastive loss (InfoNCE) over the batch of all data ranks.

    loss_q = −log exp(s(q, p_q) / τ) / Σ_c exp(s(q, c) / τ)        s: cosine;  p_q: the positive of query q

(van den Oord 2018, arXiv 1807.03748; Karpukhin 2020, arXiv 2004.04906.) The candidates c are the positives and the hard
negatives of *all* queries of all data ranks, gathered with gradients. A candidate with the tokens of q or of p_q is not
a negative of q, and is excluded. With several ``widths`` the loss is the mean over them, each of the first so many
numbers of the embeddings (Matryoshka, Kusupati 2022, arXiv 2205.13147).

The loss cannot be computed by micro-batches. So with several of them a first pass without gradients collects all
embeddings, the loss's gradient by each is computed, and a second pass of each micro-batch takes it from there
(GradCache, Gao 2021, arXiv 2101.06983).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.config.serve import Pooling
from colonnade.model.loss import IGNORE
from colonnade.model.output_heads import OutputProjection
from colonnade.parallel.axis import Axis


@dataclass(frozen=True)
class Embeddings:
    """A model head: embeddings of S packed texts that start at ``cu_seqlens``, which ends with their total length."""

    cu_seqlens: Tensor
    pooling: Pooling
    normalize: bool

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """x_SD, in at least float32."""
        x_SD = self._pool(output.axes.all_tokens(x_tD, T))
        return F.normalize(x_SD, dim=1) if self.normalize else x_SD

    def _pool(self, x_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        ends = self.cu_seqlens.long()
        if self.pooling == "mean":
            return torch.segment_reduce(x_TD.to(wide), "mean", lengths=ends.diff(), axis=0)
        return x_TD[ends[:-1] if self.pooling == "cls" else ends[1:] - 1].to(wide)


@dataclass(frozen=True)
class Contrast:
    """How texts are compared; a sample has ``texts`` of them: a query, its positive, and hard negatives."""

    pooling: Pooling
    temperature: float
    widths: tuple[int, ...]
    texts: int


@dataclass(frozen=True)
class ContrastiveLoss:
    """A model head: the summed loss of this rank's queries, and their number."""

    embeddings: Embeddings
    ids_S: Tensor
    """A number for each text, equal for equal tokens."""
    targets_Q: Tensor
    """:data:`IGNORE` for a sample that does not count, as query or as candidate."""
    contrast: Contrast
    cached: tuple[Tensor, Tensor] | None = None
    """The loss's gradient by each embedding, and the summed loss; None: the candidates are those of this pass."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of queries), the same on all tp ranks."""
        x_SD = self.embeddings(x_tD, T, output)
        valid_Q = self.targets_Q != IGNORE
        if self.cached is not None:
            gradient_SD, loss = self.cached
            surrogate = (x_SD * gradient_SD).sum()
            return surrogate - surrogate.detach() + loss, valid_Q.sum()
        return contrastive_losses(x_SD, self.ids_S, valid_Q, self.contrast, output.axes.dp).sum(), valid_Q.sum()


def contrastive_losses(x_SD: Tensor, ids_S: Tensor, valid_Q: Tensor, contrast: Contrast, dp: Axis) -> Tensor:
    """loss_Q of this rank's queries, 0 where not ``valid_Q``; every data rank has as many samples."""
    Q = len(valid_Q)
    x_QkD, ids_Qk = x_SD.unflatten(0, (Q, contrast.texts)), ids_S.unflatten(0, (Q, contrast.texts))
    own_CD = x_QkD[:, 1:].flatten(0, 1)
    all_CD = dp.gather(own_CD, 0, len(own_CD) * dp.size)
    ids_C = dp.all_gather_(ids_Qk[:, 1:].flatten()).flatten()
    valid_C = dp.all_gather_(valid_Q.repeat_interleave(contrast.texts - 1)).flatten()
    positive_Q = (dp.rank * Q + torch.arange(Q, device=x_SD.device)) * (contrast.texts - 1)
    left_out_QC = (ids_C == ids_Qk[:, :1]) | (ids_C == ids_Qk[:, 1:2]) | ~valid_C
    left_out_QC = left_out_QC.scatter(1, positive_Q[:, None], value=False)
    losses = []
    for width in contrast.widths:
        query_QD, candidate_CD = (F.normalize(x[:, :width], dim=1) for x in (x_QkD[:, 0], all_CD))
        cosine_QC = (query_QD @ candidate_CD.T).masked_fill(left_out_QC, -torch.inf)
        losses.append(F.cross_entropy(cosine_QC / contrast.temperature, positive_Q, reduction="none"))
    return torch.stack(losses).mean(0) * valid_Q
