"""Each token's A highest of E numbers and what they count, in Triton: one launch, each number read once.

A program holds a few tokens' numbers, as integers in the same order, and takes the highest A times: the lower expert of
equals. What was taken, and what is no expert, is below every number, -∞ and NaN too: whatever the numbers are, the A
experts of a token are distinct, and experts. The way back writes A numbers a token into zeros.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels import routing
from colonnade.kernels.triton_permute import rows_in

HELD = 2048
"""Numbers that a program holds at once."""
ROWS = 16
"""Tokens of a program, at most."""
MOST_EXPERTS = 4096
"""With more, a token's numbers would not fit the registers, and torch sorts them."""
HIGHEST, NONE = tl.constexpr(2**31 - 1), tl.constexpr(-(2**31))
LEAST = tl.constexpr(routing.LEAST)


@triton.jit
def _best(
    compared_ptr, scores_ptr, ids_ptr, weights_ptr, T, E, compared_stride, scores_stride, scale,
    A: tl.constexpr, NORMALISE: tl.constexpr, E_PAD: tl.constexpr, A_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    e, j = tl.arange(0, E_PAD)[None, :], tl.arange(0, A_PAD)[None, :]
    x = tl.load(compared_ptr + t * compared_stride + e, (t < T) & (e < E), 0.0).to(tl.float32)
    # The bits of a float are in its order, but for the sign: -0 is 0, and negative ones stand the other way round.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ HIGHEST, bits)
    key = tl.where(x == x, key, HIGHEST)  # noqa: PLR0124 - NaN
    key = tl.where(e < E, key, NONE)
    ids = tl.zeros((ROWS, A_PAD), tl.int32)
    for i in range(A):
        top = tl.max(key, 1)[:, None]
        first = tl.min(tl.where(key == top, e, E_PAD), 1)[:, None]
        ids = tl.where(j == i, first, ids)
        key = tl.where(e == first, NONE, key)
    kept = (t < T) & (j < A)
    weights = tl.load(scores_ptr + t * scores_stride + ids, kept, 0.0).to(tl.float32)
    if NORMALISE:
        total = tl.sum(weights, 1)[:, None]
        weights = weights / tl.where(total < LEAST, LEAST, total)
    tl.store(ids_ptr + t * A + j, ids.to(tl.int64), kept)
    tl.store(weights_ptr + t * A + j, (weights * scale).to(weights_ptr.dtype.element_ty), kept)


@torch.library.custom_op("colonnade::best_experts", mutates_args=())
def _choose(
    compared_TE: Tensor, scores_TE: Tensor, active: int, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    compared_TE, scores_TE, (T, E) = rows_in(compared_TE), rows_in(scores_TE), compared_TE.shape
    ids_TA, weights_TA = compared_TE.new_empty(T, active, dtype=torch.int64), scores_TE.new_empty(T, active)
    if ids_TA.numel():
        padded = max(2, triton.next_power_of_2(E))
        rows = max(1, min(ROWS, HELD // padded))
        _best[triton.cdiv(T, rows),](
            compared_TE, scores_TE, ids_TA, weights_TA, T, E, compared_TE.stride(0), scores_TE.stride(0), scale,
            active, normalise, padded, max(2, triton.next_power_of_2(active)), rows,
        )  # fmt: skip
    return weights_TA, ids_TA


@_choose.register_fake
def _(compared_TE, scores_TE, active, normalise, scale):
    T = len(compared_TE)
    return scores_TE.new_empty(T, active), compared_TE.new_empty(T, active, dtype=torch.int64)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[1], output[1])
    ctx.how = inputs[3:]


def _differentiate(ctx, dw_TA: Tensor, _: Tensor | None):
    """With w = s/σ: ds = (dw − Σ dw·w)/σ; where the sum is so small that σ is a constant, dw/σ."""
    (scores_TE, ids_TA), (normalise, scale) = ctx.saved_tensors, ctx.how
    ds_TA = dw_TA if scale == 1 else dw_TA * scale
    if normalise:
        picked_TA = scores_TE.gather(1, ids_TA)
        sum_T1 = picked_TA.sum(1, keepdim=True)
        total_T1 = sum_T1.clamp(min=routing.LEAST)
        lost_T1 = (ds_TA * picked_TA).sum(1, keepdim=True) / total_T1
        ds_TA = (ds_TA - lost_T1.where(sum_T1 >= routing.LEAST, 0)) / total_T1
    return None, torch.zeros_like(scores_TE).scatter_(1, ids_TA, ds_TA), None, None, None


_choose.register_autograd(_differentiate, setup_context=_keep)


def best(
    compared_TE: Tensor, scores_TE: Tensor, active: int, *, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA) (see :func:`routing.best`)."""
    if compared_TE.shape[1] > MOST_EXPERTS:
        return routing.best(compared_TE, scores_TE, active, normalise=normalise, scale=scale)
    weights_TA, ids_TA = _choose(compared_TE.detach(), scores_TE, active, normalise, float(scale))
    return ids_TA, weights_TA
