"""Top-k expert selection in Triton: one launch, each score read once.

A program holds a few tokens' scores as integers in the same order, and takes the maximum A times, ties by lower expert.
Taken and padding entries are below every number, −∞ and NaN included: whatever the scores are, a token's A experts are
distinct and valid. The backward writes A values per token into zeros.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels import routing
from colonnade.kernels.triton_permute import row_contiguous

BLOCK_VALUES = 2048
"""Scores that a program holds at a time."""
MAX_ROWS = 16
"""Tokens per program, at most."""
MAX_EXPERTS = 4096
"""With more experts a token's scores would not fit the registers; torch sorts them instead."""
HIGHEST, LOWEST = tl.constexpr(2**31 - 1), tl.constexpr(-(2**31))
MIN_SCORE_SUM = tl.constexpr(routing.MIN_SCORE_SUM)


@triton.jit
def _top_experts(
    compared_ptr, scores_ptr, ids_ptr, weights_ptr, T, E, compared_stride, scores_stride, scale,
    A: tl.constexpr, NORMALISE: tl.constexpr, E_PAD: tl.constexpr, A_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    e, j = tl.arange(0, E_PAD)[None, :], tl.arange(0, A_PAD)[None, :]
    x = tl.load(compared_ptr + t * compared_stride + e, (t < T) & (e < E), 0.0).to(tl.float32)
    # A float's bits sort like the float, except for the sign: −0 becomes 0, and negative numbers are inverted.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ HIGHEST, bits)
    key = tl.where(x == x, key, HIGHEST)  # noqa: PLR0124 - NaN
    key = tl.where(e < E, key, LOWEST)
    ids = tl.zeros((ROWS, A_PAD), tl.int32)
    for i in range(A):
        top = tl.max(key, 1)[:, None]
        first = tl.min(tl.where(key == top, e, E_PAD), 1)[:, None]
        ids = tl.where(j == i, first, ids)
        key = tl.where(e == first, LOWEST, key)
    mask = (t < T) & (j < A)
    weights = tl.load(scores_ptr + t * scores_stride + ids, mask, 0.0).to(tl.float32)
    if NORMALISE:
        total = tl.sum(weights, 1)[:, None]
        weights = weights / tl.where(total < MIN_SCORE_SUM, MIN_SCORE_SUM, total)
    tl.store(ids_ptr + t * A + j, ids.to(tl.int64), mask)
    tl.store(weights_ptr + t * A + j, (weights * scale).to(weights_ptr.dtype.element_ty), mask)


@torch.library.custom_op("colonnade::top_experts", mutates_args=())
def _select(
    compared_TE: Tensor, scores_TE: Tensor, active: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    compared_TE, scores_TE, (T, E) = row_contiguous(compared_TE), row_contiguous(scores_TE), compared_TE.shape
    ids_TA, weights_TA = compared_TE.new_empty(T, active, dtype=torch.int64), scores_TE.new_empty(T, active)
    if ids_TA.numel():
        padded = max(2, triton.next_power_of_2(E))
        rows = max(1, min(MAX_ROWS, BLOCK_VALUES // padded))
        _top_experts[triton.cdiv(T, rows),](
            compared_TE, scores_TE, ids_TA, weights_TA, T, E, compared_TE.stride(0), scores_TE.stride(0), scale,
            active, normalise, padded, max(2, triton.next_power_of_2(active)), rows,
        )  # fmt: skip
    return weights_TA, ids_TA


@_select.register_fake
def _(compared_TE, scores_TE, active, normalise, scale):
    T = len(compared_TE)
    return scores_TE.new_empty(T, active), compared_TE.new_empty(T, active, dtype=torch.int64)


def _save_inputs(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[1], output[1])
    ctx.how = inputs[3:]


def _weights_grad(ctx, dw_TA: Tensor, _: Tensor | None):
    """With w = s/σ: ds = (dw − Σ dw·w)/σ; if the sum is below the bound, σ is a constant and ds = dw/σ."""
    (scores_TE, ids_TA), (normalise, scale) = ctx.saved_tensors, ctx.how
    ds_TA = dw_TA if scale == 1 else dw_TA * scale
    if normalise:
        selected_TA = scores_TE.gather(1, ids_TA)
        sum_T1 = selected_TA.sum(1, keepdim=True)
        total_T1 = sum_T1.clamp(min=routing.MIN_SCORE_SUM)
        projection_T1 = (ds_TA * selected_TA).sum(1, keepdim=True) / total_T1
        ds_TA = (ds_TA - projection_T1.where(sum_T1 >= routing.MIN_SCORE_SUM, 0)) / total_T1
    return None, torch.zeros_like(scores_TE).scatter_(1, ids_TA, ds_TA), None, None, None


_select.register_autograd(_weights_grad, setup_context=_save_inputs)


def top_experts(
    compared_TE: Tensor, scores_TE: Tensor, active: int, *, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA) (see :func:`routing.top_experts`)."""
    if compared_TE.shape[1] > MAX_EXPERTS:
        return routing.top_experts(compared_TE, scores_TE, active, normalise=normalise, scale=scale)
    weights_TA, ids_TA = _select(compared_TE.detach(), scores_TE, active, normalise, float(scale))
    return ids_TA, weights_TA
