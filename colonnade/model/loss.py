"""Vocabulary-parallel cross-entropy in chunks, without materialising or communicating all logits.

    loss = Σ_t valid_t · (lse_t − (1 − ε)·z_t[target_t] − ε·mean_v z_t[v])        z = x Wᵀ (+ b, BERT's)

Each rank computes the logits of its own rows of W; per token the ranks reduce one maximum and one sum of three values
(Σ exp, the target's logit, Σ logits) (Megatron-LM, arXiv 1909.08053, section 3, which sends b·s values instead of
b·s·v). Label smoothing (Szegedy 2016) spreads ε over the *whole* vocabulary, so it is the same on every rank.

The forward pass takes tokens in chunks and adds a chunk's gradient ∂loss/∂z = softmax(z) − (1 − ε)·onehot − ε/V to dx
and dW while its logits are in memory: nothing of size T·V is stored, and no product is computed twice. The backward
pass only scales by the upstream gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.parallel.axis import Axis

IGNORE = -100
"""A target of this value contributes neither loss nor count."""

CHUNK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Memory for one chunk of logits [bytes]: large enough for full-speed products, small compared to a model."""

CHUNK_ROWS = {"cpu": 512, "cuda": 1 << 30}
"""Maximum number of tokens in one chunk: on a CPU products reach full speed at 512, and smaller chunks stay in cache
(2,048 tokens, V = 4,096: 184 ms in one chunk, 166 ms in four)."""

ALIGN = {"cpu": 1, "cuda": 64}
"""Tensor cores need rows in multiples of at least 16 bytes: 50,257 logits took 126 ms per step of GPT-2 1.2B, and
50,304 take a quarter of that. So W is padded with zero rows during the product, and only there."""


def cross_entropy_sum(
    x_TD: Tensor,
    weight_vD: Tensor,
    targets_T: Tensor,
    *,
    tp: Axis,
    vocab_size: int,
    smoothing: float = 0.0,
    bias_v: Tensor | None = None,
) -> Tensor:
    """The summed loss of the valid tokens, float32 (float64 for float64 inputs), the same on all tp ranks.

    ``x_TD`` must come from ``tp.fan_out``: each rank computes the gradient by its own rows of W only.
    """
    return _CrossEntropy.apply(x_TD, weight_vD, bias_v, targets_T, tp, vocab_size, smoothing)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, x_TD, weight_vD, bias_v, targets_T, tp: Axis, vocab_size: int, smoothing: float) -> Tensor:
        exact = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        stats, dlogits = _fused() if x_TD.is_cuda else (_stats, _gradient)
        T, v = len(x_TD), len(weight_vD)
        start, _ = tp.part(vocab_size)
        kind = x_TD.device.type
        rows = max(1, min(CHUNK_ROWS[kind], CHUNK_BYTES[kind] // (v * exact.itemsize)))
        wants_x, wants_w, wants_b = ctx.needs_input_grad[:3]
        dx_TD = torch.empty_like(x_TD) if wants_x else None
        padded_vD = F.pad(weight_vD, (0, 0, 0, -v % ALIGN[kind]))
        # Accumulate over chunks in full precision.
        dw_vD = torch.zeros_like(padded_vD, dtype=exact) if wants_w else None
        db_v = torch.zeros_like(bias_v, dtype=exact) if wants_b else None
        loss = torch.zeros((), dtype=exact, device=x_TD.device)
        for a in range(0, T, rows):
            x_cD, target_c = x_TD[a : a + rows], targets_T[a : a + rows]
            z_cv = x_cD @ padded_vD.T
            z_cv[:, v:] = -torch.inf
            if bias_v is not None:
                z_cv[:, :v] += bias_v
            valid_c, local_c = target_c != IGNORE, target_c - start
            top_c, sums_3c = stats(z_cv[:, :v], local_c, exact, smoothing)
            highest_c = tp.max_(top_c)
            sums_3c[0] *= torch.exp(top_c - highest_c)
            sum_c, target_z_c, total_z_c = tp.sum_(sums_3c)
            lse_c = sum_c.log() + highest_c
            loss_c = lse_c - (1 - smoothing) * target_z_c - smoothing / vocab_size * total_z_c
            loss += torch.where(valid_c, loss_c, 0.0).sum()
            if wants_x or wants_w or wants_b:
                dz_cv = dlogits(z_cv, lse_c, valid_c, local_c, smoothing, vocab_size)
                if dx_TD is not None:
                    torch.mm(dz_cv, padded_vD, out=dx_TD[a : a + rows])
                if dw_vD is not None and dw_vD.dtype == dz_cv.dtype:
                    dw_vD.addmm_(dz_cv.T, x_cD)
                elif dw_vD is not None:
                    dw_vD += dz_cv.T @ x_cD
                if db_v is not None:
                    db_v += dz_cv[:, :v].sum(0, dtype=exact)
        ctx.save_for_backward(dx_TD, dw_vD, db_v)
        ctx.weight_dtype, ctx.rows = weight_vD.dtype, v
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx_TD, dw_vD, db_v = ctx.saved_tensors
        # In float32: 1/count in 16 bits would scale every gradient of the model but W's with an error of up to 0.4%.
        dx_TD = None if dx_TD is None else (dx_TD.to(grad.dtype) * grad).to(dx_TD.dtype)
        dw_vD = None if dw_vD is None else (dw_vD[: ctx.rows] * grad).to(ctx.weight_dtype)
        db_v = None if db_v is None else (db_v * grad).to(ctx.weight_dtype)
        return dx_TD, dw_vD, db_v, None, None, None, None


def _stats(z_cv: Tensor, local_c: Tensor, exact: torch.dtype, smoothing: float) -> tuple[Tensor, Tensor]:
    """This rank's maximum of each row, and (Σ exp(z − max), the target's logit or 0, Σ z)."""
    local_c1, row_c1 = _locate(local_c, z_cv)
    z_cv = z_cv.to(exact)
    top_c = z_cv.amax(1)
    target_z_c = torch.where(local_c1, z_cv.gather(1, row_c1), 0.0).squeeze(1)
    sum_c = (z_cv - top_c[:, None]).exp_().sum(1)
    return top_c, torch.stack((sum_c, target_z_c, z_cv.sum(1) if smoothing else torch.zeros_like(sum_c)))


def _gradient(
    z_cv: Tensor, lse_c: Tensor, valid_c: Tensor, local_c: Tensor, smoothing: float, vocab_size: int
) -> Tensor:
    """softmax(z) − (1 − ε)·onehot − ε/V in the type of ``z``, 0 for rows without a target; may overwrite ``z``."""
    local_c1, row_c1 = _locate(local_c, z_cv)
    kind = z_cv.dtype
    # exp(z − ∞) = 0: no extra pass for ignored rows.
    p_cv = z_cv.to(lse_c.dtype).sub_(torch.where(valid_c, lse_c, torch.inf)[:, None]).exp_()
    if smoothing:
        p_cv = p_cv - (smoothing / vocab_size) * valid_c.to(p_cv.dtype)[:, None]
    # The target's entry p − (1 − ε) is computed before p is rounded: near 1 rounding would dominate it.
    target_c1 = (p_cv.gather(1, row_c1) - (1 - smoothing) * (local_c1 & valid_c[:, None]).to(p_cv.dtype)).to(kind)
    return p_cv.to(kind).scatter_(1, row_c1, target_c1)


def _locate(local_c: Tensor, z_cv: Tensor) -> tuple[Tensor, Tensor]:
    """(whether the target's row of W is on this rank, its index or 0), each (c, 1)."""
    local_c1 = ((local_c >= 0) & (local_c < z_cv.shape[1]))[:, None]
    return local_c1, torch.where(local_c1, local_c[:, None], 0)


@functools.cache
def _fused() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions above, compiled to one pass over the logits each instead of a dozen."""
    return torch.compile(_stats, dynamic=True), torch.compile(_gradient, dynamic=True)


def statistics(cuda: bool = False) -> Callable[..., Any]:
    """Per row the maximum, and (Σ exp(z − max), the target's logit or 0, Σ z); compiled on a GPU."""
    return _fused()[0] if cuda else _stats


def gradient(cuda: bool = False) -> Callable[..., Any]:
    """∂loss/∂z of a row's cross-entropy, from its log-sum-exp; compiled on a GPU. It may overwrite z."""
    return _fused()[1] if cuda else _gradient
