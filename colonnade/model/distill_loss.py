"""Vocabulary-parallel distillation loss in chunks, without materialising or communicating all logits.

    L = Σ_t  mix · CE_t + (1 − mix) · D_t + hidden · ‖h_t − h'_t‖² / ‖h'_t‖²

    p = softmax(z'/τ), the teacher's; q = softmax(z/τ), the student's                                    D_t / τ²
    kl        Hinton 2015, arXiv 1503.02531       Σ p log(p/q)
    reverse   MiniLLM, arXiv 2306.08543           Σ q log(q/p)
    jsd       GKD, arXiv 2306.13649               β KL(p‖m) + (1 − β) KL(q‖m),   m = β p + (1 − β) q
    dist      DIST, arXiv 2205.10536              2 (1 − ρ_t) + 2 Σ_v w_v (1 − ρ_v)

ρ_t is Pearson's correlation of p and q over the vocabulary. ρ_v is that over the tokens of a sample, which is never cut
over data ranks or micro-batches, so that the loss does not depend on the layout; columns count by w_v, the teacher's
mean probability (the paper, on classes of images, takes them alike and over a batch; most of a vocabulary's columns are
zeros). Each rank computes the logits of its own rows of both output projections. The forward pass also computes the
gradient, as in :mod:`colonnade.model.loss`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.config.distill import Divergence
from colonnade.model.distill_top import TopTokens, top_kl, top_tokens
from colonnade.model.loss import CHUNK_BYTES, CHUNK_ROWS, IGNORE
from colonnade.model.output_heads import OutputProjection, projection_input
from colonnade.model.tensor_parallel_linear import Matrix, linear
from colonnade.parallel.axis import Axis

TINY = 1e-30
"""Added to variances: a constant column has no correlation."""


@dataclass(frozen=True)
class DistillLoss:
    """The parts of the loss."""

    loss: Divergence = "kl"
    mix: float = 0.5
    temperature: float = 1.0
    beta: float = 0.5
    hidden: float = 0.0
    sample_tokens: int = 0
    """dist: tokens of a sample."""


@dataclass(frozen=True)
class Teacher:
    """The teacher's outputs for the same tokens."""

    x_TD: Tensor
    """The last hidden states, on every tp rank."""
    weight_vD: Matrix
    """This rank's rows of its output projection."""
    kernels: str = "auto"

    def logits(self, rows: slice) -> Tensor:
        """z'_cv."""
        return linear(self.x_TD[rows], self.weight_vD, None, self.kernels)

    def top(self, k: int, temperature: float, tp: Axis, vocab_size: int) -> TopTokens:
        """The ``k`` most likely tokens of each row, in chunks."""
        rows = CHUNK_ROWS[self.x_TD.device.type]
        parts = [
            top_tokens(log_softmax(self.logits(slice(a, a + rows)).float() / temperature, tp), k, tp, vocab_size)
            for a in range(0, len(self.x_TD), rows)
        ]
        return TopTokens(*(torch.cat(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True)
class TeacherStates:
    """A head: the :class:`Teacher` of a forward pass."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Teacher:
        """The states and the projection."""
        x_TD, bias_v = projection_input(x_tD, T, None, output)
        assert bias_v is None, "a causal model has no bias there"
        return Teacher(x_TD, output.weight_vD, output.kernels)


@dataclass(frozen=True)
class Distillation:
    """A head: the summed loss of the valid targets, and their number."""

    targets_T: Tensor
    teacher: Teacher | TopTokens
    loss: DistillLoss
    sampled_T: Tensor | None = None
    """bool: targets that the model has sampled itself; there only the divergence counts."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of valid targets), the same on all tp ranks."""
        x_TD, bias_v = projection_input(x_tD, T, None, output)
        assert bias_v is None, "a causal model has no bias there"
        assert isinstance(output.weight_vD, Tensor), "a model in training is not quantised"
        tp, V = output.axes.tp, output.vocab_size
        total = distillation_sum(
            x_TD, output.weight_vD, self.targets_T, self.teacher, self.loss, tp=tp, vocab_size=V,
            sampled_T=self.sampled_T,
        )  # fmt: skip
        return total, (self.targets_T != IGNORE).sum()


def distillation_sum(
    x_TD: Tensor,
    weight_vD: Tensor,
    targets_T: Tensor,
    teacher: Teacher | TopTokens,
    loss: DistillLoss,
    *,
    tp: Axis,
    vocab_size: int,
    sampled_T: Tensor | None = None,
) -> Tensor:
    """The summed loss of the valid tokens, float32 (float64 for float64 inputs), the same on all tp ranks.

    ``x_TD`` must come from ``tp.fan_out``: each rank computes the gradient by its own rows of W only.
    """
    return _Distillation.apply(x_TD, weight_vD, targets_T, teacher, loss, tp, vocab_size, sampled_T)


class _Distillation(Function):
    @staticmethod
    def forward(
        ctx, x_TD, weight_vD, targets_T, teacher: Teacher | TopTokens, loss: DistillLoss, tp: Axis, V: int, sampled_T
    ) -> Tensor:
        exact = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        T, v = len(x_TD), len(weight_vD)
        start, _ = tp.part(V)
        kind = x_TD.device.type
        rows = max(1, min(CHUNK_ROWS[kind], CHUNK_BYTES[kind] // (2 * max(1, v) * exact.itemsize)))
        if loss.loss == "dist" and loss.mix < 1:
            rows = loss.sample_tokens
        dx_TD = torch.zeros_like(x_TD, dtype=exact)
        dw_vD = torch.zeros_like(weight_vD, dtype=exact)
        total = torch.zeros((), dtype=exact, device=x_TD.device)
        for a in range(0, T, rows):
            part = slice(a, a + rows)
            x_cD, target_c = x_TD[part], targets_T[part]
            valid_c = target_c != IGNORE
            z_cv = (x_cD @ weight_vD.T).to(exact)
            dz_cv = torch.zeros_like(z_cv)
            if loss.mix > 0:
                text_c = valid_c if sampled_T is None else valid_c & ~sampled_T[part]
                total += loss.mix * _cross_entropy(z_cv, target_c - start, text_c, tp, loss.mix, dz_cv)
            if loss.mix < 1:
                weight, tau = 1 - loss.mix, loss.temperature
                logq_cv = log_softmax(z_cv / tau, tp)
                if isinstance(teacher, TopTokens):
                    value, du_cv = top_kl(teacher.rows(part), logq_cv, valid_c, start, tp)
                else:
                    logp_cv = log_softmax(teacher.logits(part).to(exact) / tau, tp)
                    value, du_cv = _DIVERGENCES[loss.loss](_Pair(logp_cv, logq_cv, valid_c, loss.beta, V), tp)
                total += weight * tau**2 * value
                dz_cv += weight * tau * du_cv
            dx_TD[part] = dz_cv @ weight_vD.to(exact)
            dw_vD += dz_cv.T @ x_cD.to(exact)
            if loss.hidden > 0:
                assert isinstance(teacher, Teacher), "a cache has no hidden states"
                theirs_cD = teacher.x_TD[part].to(exact)
                difference_cD = (x_cD.to(exact) - theirs_cD) * valid_c[:, None]
                scale_c1 = loss.hidden / theirs_cD.square().sum(1, keepdim=True).clamp(min=TINY)
                total += (scale_c1 * difference_cD.square()).sum()
                # Every tp rank has these states, and the backward pass of fan_out sums over the ranks.
                dx_TD[part] += 2 / tp.size * scale_c1 * difference_cD
        ctx.save_for_backward(dx_TD, dw_vD)
        ctx.dtypes = x_TD.dtype, weight_vD.dtype
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx_TD, dw_vD = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        return (dx_TD * grad).to(x_dtype), (dw_vD * grad).to(w_dtype), None, None, None, None, None, None


def log_softmax(z_cv: Tensor, tp: Axis) -> Tensor:
    """This rank's columns of the logarithm of softmax over the whole vocabulary."""
    top_c = tp.max_(z_cv.amax(1))
    sum_c = tp.sum_((z_cv - top_c[:, None]).exp().sum(1))
    return z_cv - (top_c + sum_c.log())[:, None]


def _cross_entropy(z_cv: Tensor, local_c: Tensor, valid_c: Tensor, tp: Axis, mix: float, dz_cv: Tensor) -> Tensor:
    """Σ CE of the valid tokens; adds ``mix`` times its gradient to ``dz_cv``."""
    logq_cv = log_softmax(z_cv, tp)
    here_c = valid_c & (local_c >= 0) & (local_c < z_cv.shape[1])
    rows = here_c.nonzero()[:, 0]
    columns = local_c[rows]
    dz_cv += mix * logq_cv.exp() * valid_c[:, None]
    dz_cv[rows, columns] -= mix
    found_c = torch.zeros_like(z_cv[:, 0])
    found_c[rows] = logq_cv[rows, columns]
    return -tp.sum_(found_c).sum()


class _Pair(NamedTuple):
    """Log-probabilities of both models, and what else a divergence needs."""

    logp: Tensor
    """The teacher's, (c, v)."""
    logq: Tensor
    """The student's."""
    valid_c: Tensor
    beta: float
    V: int


Result = tuple[Tensor, Tensor]
"""(Σ of the valid tokens' divergences on all ranks, its gradient by u = z/τ)."""


def _kl(pair: _Pair, tp: Axis) -> Result:
    logp, logq, valid_c, _, _ = pair
    p = logp.exp()
    value_c = tp.sum_((p * (logp - logq)).sum(1))
    return (value_c * valid_c).sum(), (logq.exp() - p) * valid_c[:, None]


def _reverse(pair: _Pair, tp: Axis) -> Result:
    logp, logq, valid_c, _, _ = pair
    q, ratio = logq.exp(), logq - logp
    value_c = tp.sum_((q * ratio).sum(1))
    return (value_c * valid_c).sum(), q * (ratio - value_c[:, None]) * valid_c[:, None]


def _jsd(pair: _Pair, tp: Axis) -> Result:
    logp, logq, valid_c, beta, _ = pair
    p, q = logp.exp(), logq.exp()
    logm = torch.logaddexp(logp + math.log(beta), logq + math.log(1 - beta))
    of_p, of_q = logp - logm, logq - logm
    sums_2c = tp.sum_(torch.stack(((beta * p * of_p).sum(1), ((1 - beta) * q * of_q).sum(1))))
    du = (1 - beta) * q * of_q - q * sums_2c[1][:, None]
    return (sums_2c.sum(0) * valid_c).sum(), du * valid_c[:, None]


def _dist(pair: _Pair, tp: Axis) -> Result:
    logp, logq, valid_c, _, V = pair
    valid_c1 = valid_c[:, None].to(logp.dtype)
    p, q, count = logp.exp(), logq.exp(), valid_c1.sum().clamp(min=1)
    # Rows: both means are 1/V.
    a, b = p - 1 / V, q - 1 / V
    ab_c, aa_c, bb_c = tp.sum_(torch.stack(((a * b).sum(1), (a * a).sum(1), (b * b).sum(1))))
    root_c = (aa_c * bb_c + TINY).sqrt()
    rho_c = ab_c / root_c
    g = -2 * (a / root_c[:, None] - (rho_c * aa_c / root_c**2)[:, None] * b) * valid_c1
    value = (2 * (1 - rho_c) * valid_c).sum()
    # Columns: over the sample's valid tokens, all on this rank.
    mean_p, mean_q = (p * valid_c1).sum(0) / count, (q * valid_c1).sum(0) / count
    a, b = (p - mean_p) * valid_c1, (q - mean_q) * valid_c1
    aa_v, bb_v = (a * a).sum(0), (b * b).sum(0)
    root_v = (aa_v * bb_v + TINY).sqrt()
    rho_v, weight_v = (a * b).sum(0) / root_v, 2 * count * mean_p
    value = value + tp.sum_((weight_v * (1 - rho_v)).sum())
    g = g - weight_v * (a / root_v - rho_v * aa_v / root_v**2 * b)
    inner_c = tp.sum_((g * q).sum(1))
    return value, q * (g - inner_c[:, None])


_DIVERGENCES: dict[Divergence, Callable[[_Pair, Axis], Result]] = {
    "kl": _kl,
    "reverse": _reverse,
    "jsd": _jsd,
    "dist": _dist,
}
