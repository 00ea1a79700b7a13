"""Rows in the order of their experts and back, in Triton: each element is read once and written once.

    gather    x_r = x_t of the row's choice                            (T + R)·D elements
    combine   y_t = Σ_j w_tj y_r(t, j)                                 (R + T)·D; j in order, in float32

The way back of each is the other, by the inverse permutation r(t, j), so that no addition is atomic and the bits are
the same each time. dw_tj = y_r · dy_t is found in the pass that writes dy_r = w_tj dy_t. A gather goes by tokens, whose
rows it finds by r(t, j) too, where they have more than one each; else by rows, which read 2·R·D elements but need no
permutation.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# A kernel is launched with more than its signature says; its constants are plain numbers, and say what is bound.

import torch
import triton
from torch import Tensor
from triton import language as tl


@triton.jit
def _invert(order_ptr, inverse_ptr, R, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(inverse_ptr + tl.load(order_ptr + r, r < R, 0), r, r < R)


@triton.jit
def _sum(
    x_ptr, order_ptr, inverse_ptr, ends_ptr, weights_ptr, y_ptr, R, last_expert, D, stride,
    A: tl.constexpr, WEIGHTED: tl.constexpr, ENDS: tl.constexpr, SEARCH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """With SEARCH, a power of two of at least R, a choice's row is looked for among all; else it is known."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    last = R
    if ENDS:  # rows past the last end hold nothing
        last = tl.load(ends_ptr + last_expert).to(tl.int32)
    if SEARCH:
        i = tl.arange(0, SEARCH)
        order = tl.load(order_ptr + i, i < R, -1)
    total = tl.zeros((BD,), tl.float32)
    for j in tl.static_range(A):
        r = tl.sum(tl.where(order == t * A + j, i + 1, 0), 0) - 1 if SEARCH else tl.load(inverse_ptr + t * A + j)
        width = tl.where((r >= 0) & (r < last), D, 0)
        x = tl.load(x_ptr + r.to(tl.int64) * stride + d, d < width, 0.0).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(weights_ptr + t * A + j).to(tl.float32)
        total += x
    tl.store(y_ptr + t * D + d, total.to(y_ptr.dtype.element_ty), d < D)


@triton.jit
def _copy(x_ptr, order_ptr, y_ptr, D, stride, active, BD: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    t = tl.load(order_ptr + r).to(tl.int64) // active
    tl.store(y_ptr + r * D + d, tl.load(x_ptr + t * stride + d, d < D), d < D)


@triton.jit
def _deal(x_ptr, inverse_ptr, y_ptr, D, stride, A: tl.constexpr, BD: tl.constexpr):
    """A token to each of its rows; a choice without one has -1."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    x = tl.load(x_ptr + t * stride + d, d < D)
    for j in tl.static_range(A):
        r = tl.load(inverse_ptr + t * A + j).to(tl.int64)
        tl.store(y_ptr + r * D + d, x, d < tl.where(r >= 0, D, 0))


@triton.jit
def _weighted_copy(
    dy_ptr, y_ptr, order_ptr, weights_ptr, dx_ptr, dw_ptr, D, dy_stride, y_stride, active, BD: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64)
    choice = tl.load(order_ptr + r).to(tl.int64)
    w = tl.load(weights_ptr + choice).to(tl.float32)
    dot = tl.zeros((BD,), tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        dy = tl.load(dy_ptr + choice // active * dy_stride + d, d < D, 0.0).to(tl.float32)
        dot += dy * tl.load(y_ptr + r * y_stride + d, d < D, 0.0).to(tl.float32)
        tl.store(dx_ptr + r * D + d, (dy * w).to(dx_ptr.dtype.element_ty), d < D)
    tl.store(dw_ptr + choice, tl.sum(dot, 0).to(dw_ptr.dtype.element_ty))


def rows_in(x: Tensor) -> Tensor:
    """``x`` with its rows' elements side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


SEARCHED = 512
"""Up to so many rows, looking for a choice's costs less than the launch that would know it."""


def inverse(order_R: Tensor, T: int, active: int) -> Tensor:
    """(T, A): the row of each choice; −1 of one that has none."""
    R, all_there = len(order_R), len(order_R) == T * active
    inverse_TA = torch.empty(T, active, dtype=torch.int32, device=order_R.device)
    if not all_there:
        inverse_TA.fill_(-1)
    if R:
        _invert[(triton.cdiv(R, 1024),)](order_R, inverse_TA, R, 1024)
    return inverse_TA


def found(order_R: Tensor, T: int, active: int) -> Tensor | None:
    """:func:`inverse`; None where so few rows are sooner looked through for each choice."""
    return inverse(order_R, T, active) if len(order_R) > SEARCHED else None


def summed(
    x_RD: Tensor, order_R: Tensor, T: int, A: int, weights_TA: Tensor | None = None, ends_E: Tensor | None = None,
    inverse_TA: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y_TD = Σ_j w_tj x_r(t, j), over the rows before the last end where ends are given; ``inverse_TA`` is
    what :func:`found` gave, where it was asked.
    """
    x_RD, R, D = rows_in(x_RD), len(x_RD), x_RD.shape[1]
    y_TD = x_RD.new_empty(T, D)
    if y_TD.numel():
        block = min(1024, triton.next_power_of_2(D))
        inverse_TA = found(order_R, T, A) if inverse_TA is None else inverse_TA
        _sum[(T, triton.cdiv(D, block))](
            x_RD, order_R, inverse_TA, ends_E, weights_TA, y_TD, R,
            0 if ends_E is None else len(ends_E) - 1, D, x_RD.stride(0), A, weights_TA is not None, ends_E is not None,
            triton.next_power_of_2(max(R, 1)) if inverse_TA is None else 0, block,
        )  # fmt: skip
    return y_TD


def laid(x_TD: Tensor, order_R: Tensor, active: int, inverse_TA: Tensor | None = None) -> Tensor:
    """x_RD: the token of each row; ``inverse_TA`` as for :func:`summed`."""
    x_TD, R, (T, D) = rows_in(x_TD), len(order_R), x_TD.shape
    y_RD = x_TD.new_empty(R, D)
    if not y_RD.numel():
        return y_RD
    block = min(1024, triton.next_power_of_2(D))
    if R > T and inverse_TA is None:
        inverse_TA = found(order_R, T, active)
    if R > T and inverse_TA is not None:
        _deal[(T, triton.cdiv(D, block))](x_TD, inverse_TA, y_RD, D, x_TD.stride(0), active, block)
    else:
        _copy[(R, triton.cdiv(D, block))](x_TD, order_R, y_RD, D, x_TD.stride(0), active, block)
    return y_RD


@torch.library.custom_op("colonnade::gather_rows", mutates_args=())
def _gather(x_TD: Tensor, order_R: Tensor, active: int) -> Tensor:
    return laid(x_TD, order_R, active)


@_gather.register_fake
def _(x_TD, order_R, active):
    return x_TD.new_empty(len(order_R), x_TD.shape[1])


@torch.library.custom_op("colonnade::combine_rows", mutates_args=())
def _combine(y_RD: Tensor, order_R: Tensor, weights_TA: Tensor | None, T: int, active: int) -> Tensor:
    weights_TA = None if weights_TA is None else weights_TA.contiguous()
    return summed(y_RD, order_R, T, active, weights_TA)


@_combine.register_fake
def _(y_RD, order_R, weights_TA, T, active):
    return y_RD.new_empty(T, y_RD.shape[1])


@torch.library.custom_op("colonnade::combine_rows_backward", mutates_args=())
def _combine_backward(dy_TD: Tensor, y_RD: Tensor, order_R: Tensor, weights_TA: Tensor) -> tuple[Tensor, Tensor]:
    dy_TD, y_RD, weights_TA = rows_in(dy_TD), rows_in(y_RD), weights_TA.contiguous()
    (R, D), A = y_RD.shape, weights_TA.shape[1]
    dx_RD, dw_TA = y_RD.new_empty(R, D), torch.zeros_like(weights_TA)
    if R:
        block = min(1024, triton.next_power_of_2(max(D, 1)))
        _weighted_copy[(R,)](
            dy_TD, y_RD, order_R, weights_TA, dx_RD, dw_TA, D, dy_TD.stride(0), y_RD.stride(0), A, block
        )
    return dx_RD, dw_TA


@_combine_backward.register_fake
def _(dy_TD, y_RD, order_R, weights_TA):
    return y_RD.new_empty(y_RD.shape), weights_TA.new_empty(weights_TA.shape)


def _keep_gather(ctx, inputs: tuple, output: Tensor) -> None:
    x_TD, order_R, active = inputs
    ctx.save_for_backward(order_R)
    ctx.how = len(x_TD), active


def _back_gather(ctx, dx_RD: Tensor):
    return _combine(dx_RD, ctx.saved_tensors[0], None, *ctx.how), None, None


def _keep_combine(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _back_combine(ctx, dy_TD: Tensor):
    y_RD, order_R, weights_TA = ctx.saved_tensors
    dx_RD, dw_TA = _combine_backward(dy_TD, y_RD, order_R, weights_TA)
    return dx_RD, None, dw_TA, None, None


_gather.register_autograd(_back_gather, setup_context=_keep_gather)
_combine.register_autograd(_back_combine, setup_context=_keep_combine)


def gather(x_TD: Tensor, order_R: Tensor, active: int) -> Tensor:
    """x_RD (see :func:`reference.gather`)."""
    return _gather(x_TD, order_R, active)


def combine(y_RD: Tensor, order_R: Tensor, weights_TA: Tensor) -> Tensor:
    """y_TD (see :func:`reference.combine`)."""
    return _combine(y_RD, order_R, weights_TA, *weights_TA.shape)
