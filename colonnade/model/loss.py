"""Vocabulary-parallel cross-entropy in chunks: logits never fill memory, and never cross ranks.

    loss = Σ_t valid_t · (lse_t − (1 − ε)·z_t[target_t] − ε·mean_v z_t[v])        z = x Wᵀ

Each rank computes the logits of its own rows of W; per token, one maximum and one sum of three numbers (Σ exp, the
target's logit, Σ logits) cross the ranks (Megatron-LM, arXiv 1909.08053, section 3, which sends b·s numbers instead
of b·s·v). Label smoothing (Szegedy 2016) spreads ε over the *whole* vocabulary, so it is the same on every rank.

Tokens are taken in chunks, and a chunk's gradient ∂loss/∂z = softmax(z) − (1 − ε)·onehot − ε/V is folded into dx and
dW at once, while its logits are still there: nothing of size T·V is ever kept and no product is done twice. The
backward only scales by the upstream gradient.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.parallel.axis import Axis

IGNORE = -100
"""A target of this value contributes neither loss nor count."""

CHUNK_BYTES = 1 << 27
"""Memory for one chunk of logits [bytes]: large enough for full-speed products, small beside a model."""


def cross_entropy_sum(
    x_TD: Tensor, weight_vD: Tensor, targets_T: Tensor, *, tp: Axis, vocab_size: int, smoothing: float = 0.0
) -> Tensor:
    """The summed loss of the valid tokens, float32 (float64 for float64 inputs), the same on all tp ranks.

    ``x_TD`` must come out of ``tp.fan_out``: each rank's gradient of it is that of its own rows of W only.
    """
    return _CrossEntropy.apply(x_TD, weight_vD, targets_T, tp, vocab_size, smoothing)


def _chunks(T: int, v: int, itemsize: int) -> list[tuple[int, int]]:
    rows = max(1, CHUNK_BYTES // max(1, v * itemsize))
    return [(a, min(T, a + rows)) for a in range(0, T, rows)]


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, x_TD, weight_vD, targets_T, tp: Axis, vocab_size: int, smoothing: float) -> Tensor:
        exact = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        v = weight_vD.shape[0]
        start, _ = tp.part(vocab_size)
        chunks = _chunks(x_TD.shape[0], v, exact.itemsize)
        wants_x, wants_w = ctx.needs_input_grad[:2]
        dx_TD = torch.empty_like(x_TD) if wants_x else None
        # Chunks add up in full precision; a single one needs no adding up.
        dw_vD = torch.zeros_like(weight_vD, dtype=exact) if wants_w else None
        loss = torch.zeros((), dtype=exact, device=x_TD.device)
        for a, b in chunks:
            x_cD, target_c = x_TD[a:b], targets_T[a:b]
            z_cv = (x_cD @ weight_vD.T).to(exact)
            valid_c = target_c != IGNORE
            local_c = target_c - start
            here_c = (local_c >= 0) & (local_c < v)
            row_c1 = torch.where(here_c, local_c, 0).unsqueeze(1)
            top_c = tp.max_(z_cv.amax(1))
            target_z_c = torch.where(here_c, z_cv.gather(1, row_c1).squeeze(1), 0.0)
            total_z_c = z_cv.sum(1) if smoothing else torch.zeros_like(target_z_c)
            e_cv = z_cv.sub_(top_c.unsqueeze(1)).exp_()
            sum_c, target_z_c, total_z_c = tp.sum_(torch.stack((e_cv.sum(1), target_z_c, total_z_c)))
            loss_c = sum_c.log() + top_c - (1 - smoothing) * target_z_c - smoothing / vocab_size * total_z_c
            loss += torch.where(valid_c, loss_c, 0.0).sum()
            if not (wants_x or wants_w):
                continue
            dz_cv = e_cv.div_(sum_c.unsqueeze(1))
            dz_cv.scatter_add_(1, row_c1, (here_c.to(exact) * (smoothing - 1)).unsqueeze(1))
            if smoothing:
                dz_cv.sub_(smoothing / vocab_size)
            dz_cv = dz_cv.mul_(valid_c.unsqueeze(1)).to(x_TD.dtype)
            if dx_TD is not None:
                torch.mm(dz_cv, weight_vD, out=dx_TD[a:b])
            if dw_vD is not None:
                dw_vD += dz_cv.T @ x_cD
        ctx.save_for_backward(dx_TD, dw_vD)
        ctx.weight_dtype = weight_vD.dtype
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx_TD, dw_vD = ctx.saved_tensors
        dx_TD = None if dx_TD is None else (dx_TD * grad).to(dx_TD.dtype)
        dw_vD = None if dw_vD is None else (dw_vD * grad).to(ctx.weight_dtype)
        return dx_TD, dw_vD, None, None, None, None
