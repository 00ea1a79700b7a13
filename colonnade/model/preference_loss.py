"""Log-probabilities of given tokens with a gradient, and losses of pairs of sequences: DPO, conservative DPO, IPO.

    logp_r = z_r[target_r] − log Σ_v exp(z_r[v])                           z = x Wᵀ / temperature
    ∂logp_r/∂z_r = onehot(target_r) − softmax(z_r)

The gradient's weight is known only in the backward pass, unlike that of cross-entropy (:mod:`colonnade.model.loss`). So
the forward pass keeps x and the log-sum-exp of each row, and the backward pass computes the logits again, chunk by
chunk: nothing of size R·V is stored.

With Δ = (π_w − π_l) − (ref_w − ref_l), π the summed log-probability of a sequence, w chosen and l rejected, a pair's
loss is

    dpo    −(1 − ε) log σ(β Δ) − ε log σ(−β Δ)          Rafailov 2023, arXiv 2305.18290; ε > 0: Mitchell 2023
    ipo    (Δ − 1 / 2β)²  with mean log-probabilities   Azar 2023, arXiv 2310.12036
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.kernels.linear.quantise import Quantised, dequantise
from colonnade.model.loss import ALIGN, CHUNK_BYTES, CHUNK_ROWS, IGNORE, gradient, statistics
from colonnade.model.output_heads import OutputProjection, projection_input
from colonnade.parallel.axis import Axis


def logp_with_gradient(
    x_tD: Tensor, T: int, rows_R: Tensor | None, targets_R: Tensor, output: OutputProjection, temperature: float = 1.0
) -> Tensor:
    """logp_R of ``targets_R`` after the tokens ``rows_R`` of the stream (None: all), 0 for :data:`IGNORE`.

    In float32 (float64 for float64 inputs), the same on all tp ranks.
    """
    x_RD, bias_v = projection_input(x_tD, T, rows_R, output)
    assert bias_v is None, "preferences are for models that generate text"
    weight_vD = output.weight_vD
    if isinstance(weight_vD, Quantised):
        weight_vD = dequantise(weight_vD, x_RD.dtype)
    return _TokenLogp.apply(x_RD, weight_vD, targets_R, output.axes.tp, output.vocab_size, temperature)


class _TokenLogp(Function):
    @staticmethod
    def forward(
        ctx, x_RD: Tensor, weight_vD: Tensor, targets_R: Tensor, tp: Axis, vocab_size: int, temperature: float
    ) -> Tensor:
        exact = torch.float64 if x_RD.dtype == torch.float64 else torch.float32
        start, _ = tp.part(vocab_size)
        logp_R, lse_R = (torch.zeros(len(x_RD), dtype=exact, device=x_RD.device) for _ in range(2))
        for part, z_cv in _logits(x_RD, weight_vD, temperature):
            target_c = targets_R[part]
            top_c, sums_3c = statistics(x_RD.is_cuda)(z_cv, target_c - start, exact, 0.0)
            highest_c = tp.max_(top_c)
            sums_3c[0] *= torch.exp(top_c - highest_c)
            sum_c, target_z_c, _ = tp.sum_(sums_3c)
            lse_R[part] = sum_c.log() + highest_c
            logp_R[part] = torch.where(target_c != IGNORE, target_z_c - lse_R[part], 0.0)
        ctx.save_for_backward(x_RD, weight_vD, targets_R, lse_R)
        ctx.start, ctx.vocab_size, ctx.temperature = start, vocab_size, temperature
        return logp_R

    @staticmethod
    def backward(ctx, grad_R: Tensor):
        x_RD, weight_vD, targets_R, lse_R = ctx.saved_tensors
        wants_x, wants_w = ctx.needs_input_grad[:2]
        dx_RD = torch.zeros_like(x_RD) if wants_x else None
        dw_vD = torch.zeros_like(weight_vD, dtype=lse_R.dtype) if wants_w else None
        for part, z_cv in _logits(x_RD, weight_vD, ctx.temperature):
            target_c = targets_R[part]
            dz_cv = gradient(x_RD.is_cuda)(
                z_cv, lse_R[part], target_c != IGNORE, target_c - ctx.start, 0.0, ctx.vocab_size
            )
            dz_cv = (dz_cv * (-grad_R[part, None] / ctx.temperature)).to(x_RD.dtype)
            if dx_RD is not None:
                dx_RD[part] = dz_cv @ weight_vD
            if dw_vD is not None:
                dw_vD += dz_cv.T @ x_RD[part]
        return dx_RD, None if dw_vD is None else dw_vD.to(weight_vD.dtype), None, None, None, None


def _logits(x_RD: Tensor, weight_vD: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """(rows, z_cv) of one chunk of rows after another; divided in full precision, as the sampler does."""
    kind, v = x_RD.device.type, len(weight_vD)
    exact = torch.float64 if x_RD.dtype == torch.float64 else torch.float32
    padded_vD = F.pad(weight_vD, (0, 0, 0, -v % ALIGN[kind]))
    rows = max(1, min(CHUNK_ROWS[kind], CHUNK_BYTES[kind] // (max(1, v) * exact.itemsize)))
    for a in range(0, len(x_RD), rows):
        part = slice(a, a + rows)
        z_cv = (x_RD[part] @ padded_vD.T)[:, :v]
        yield part, z_cv if temperature == 1.0 else z_cv.to(exact) / temperature


@dataclass(frozen=True)
class SequenceLogprobs:
    """A model head: the summed log-probability of the targets of each of ``count`` sequences, over context ranks.

    ``sequence_R`` is the sequence of each target, ``rows_R`` the row of the stream that predicts it (None: all).
    """

    targets_R: Tensor
    sequence_R: Tensor
    count: int
    rows_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logp_S, with a gradient, the same on all tp and cp ranks."""
        logp_R = logp_with_gradient(x_tD, T, self.rows_R, self.targets_R, output)
        logp_S = logp_R.new_zeros(self.count).index_add(0, self.sequence_R, logp_R)
        return output.axes.cp.fan_in(logp_S)


@dataclass(frozen=True)
class PreferenceLoss:
    """A model head: the summed loss of pairs, sequences 2i (chosen) and 2i + 1 (rejected), and their number."""

    sequences: SequenceLogprobs
    counts_S: Tensor
    """Targets of each sequence, over context ranks; a pair without counts for nothing."""
    reference_S: Tensor
    """The reference model's logp_S."""
    beta: float
    kind: Literal["dpo", "ipo"] = "dpo"
    flipped: float = 0.0

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the pairs' losses, number of pairs); of several context ranks one has the value, all the gradient."""
        ratio_S = self.sequences(x_tD, T, output)
        ratio_S = ratio_S - self.reference_S.to(ratio_S.dtype)
        valid_P = (self.counts_S.view(-1, 2) > 0).all(1)
        loss_P = pair_loss(ratio_S, self.counts_S, self.beta, self.kind, self.flipped)
        total = torch.where(valid_P, loss_P, 0.0).sum()
        if output.axes.cp.rank:
            total = total - total.detach()
        return total, valid_P.sum()


def pair_loss(ratio_S: Tensor, counts_S: Tensor, beta: float, kind: Literal["dpo", "ipo"], flipped: float) -> Tensor:
    """The loss of each pair, from log(π / ref) of its two sequences."""
    if kind == "ipo":
        ratio_S = ratio_S / counts_S.clamp(min=1)
        chosen_P, rejected_P = ratio_S.view(-1, 2).unbind(1)
        return (chosen_P - rejected_P - 1 / (2 * beta)).square()
    chosen_P, rejected_P = ratio_S.view(-1, 2).unbind(1)
    logit_P = beta * (chosen_P - rejected_P)
    return -(1 - flipped) * F.logsigmoid(logit_P) - flipped * F.logsigmoid(-logit_P)
