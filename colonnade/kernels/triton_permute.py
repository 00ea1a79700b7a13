"""Token permutation by expert and back in Triton; each element is read once and written once.

    gather    x_r = x_t of the row's choice                            (T + R)·D elements
    combine   y_t = Σ_j w_tj y_r(t, j)                                 (R + T)·D; j in order, in float32

Each is the backward of the other, through the inverse permutation r(t, j), so that no addition is atomic and results
are deterministic. dw_tj = y_r · dy_t is computed in the pass that writes dy_r = w_tj dy_t. If tokens have more than one
row on average, a gather loops over tokens and finds their rows by r(t, j); otherwise it loops over rows, which reads
2·R·D elements but needs no inverse permutation.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl


@triton.jit
def _inverse_permutation(order_ptr, inverse_ptr, R, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(inverse_ptr + tl.load(order_ptr + r, r < R, 0), r, r < R)


@triton.jit
def _combine_kernel(
    x_ptr, order_ptr, inverse_ptr, ends_ptr, weights_ptr, y_ptr, R, last_expert, D, stride,
    A: tl.constexpr, WEIGHTED: tl.constexpr, ENDS: tl.constexpr, SEARCH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """SEARCH, a power of two of at least R, finds a choice's row by search; 0 reads it from the inverse permutation."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    last = R
    if ENDS:  # rows past the last end are undefined
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
def _gather_by_row(x_ptr, order_ptr, y_ptr, D, stride, active, BD: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    t = tl.load(order_ptr + r).to(tl.int64) // active
    tl.store(y_ptr + r * D + d, tl.load(x_ptr + t * stride + d, d < D), d < D)


@triton.jit
def _gather_by_token(x_ptr, inverse_ptr, y_ptr, D, stride, A: tl.constexpr, BD: tl.constexpr):
    """Copies each token to all of its rows; −1 marks a choice without a row."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    x = tl.load(x_ptr + t * stride + d, d < D)
    for j in tl.static_range(A):
        r = tl.load(inverse_ptr + t * A + j).to(tl.int64)
        tl.store(y_ptr + r * D + d, x, d < tl.where(r >= 0, D, 0))


@triton.jit
def _combine_grad(
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


def row_contiguous(x: Tensor) -> Tensor:
    """``x`` with contiguous rows."""
    return x if x.stride(1) == 1 else x.contiguous()


SEARCH_ROWS = 512
"""Up to this many rows, searching for a choice's row is cheaper than launching the inverse permutation."""


def inverse_permutation(order_R: Tensor, T: int, active: int) -> Tensor:
    """int32 (T, A): the row of each choice; −1 if it has none."""
    R, complete = len(order_R), len(order_R) == T * active
    inverse_TA = torch.empty(T, active, dtype=torch.int32, device=order_R.device)
    if not complete:
        inverse_TA.fill_(-1)
    if R:
        _inverse_permutation[(triton.cdiv(R, 1024),)](order_R, inverse_TA, R, 1024)
    return inverse_TA


def inverse_if_large(order_R: Tensor, T: int, active: int) -> Tensor | None:
    """:func:`inverse_permutation`, or None for so few rows that kernels search instead."""
    return inverse_permutation(order_R, T, active) if len(order_R) > SEARCH_ROWS else None


def combine_rows(
    x_RD: Tensor, order_R: Tensor, T: int, A: int, weights_TA: Tensor | None = None, ends_E: Tensor | None = None,
    inverse_TA: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y_TD = Σ_j w_tj x_r(t, j), over rows before the last end if ``ends_E`` is given.

    ``inverse_TA`` is the result of :func:`inverse_if_large`, if the caller has it already.
    """
    x_RD, R, D = row_contiguous(x_RD), len(x_RD), x_RD.shape[1]
    y_TD = x_RD.new_empty(T, D)
    if y_TD.numel():
        block = min(1024, triton.next_power_of_2(D))
        inverse_TA = inverse_if_large(order_R, T, A) if inverse_TA is None else inverse_TA
        _combine_kernel[(T, triton.cdiv(D, block))](
            x_RD, order_R, inverse_TA, ends_E, weights_TA, y_TD, R,
            0 if ends_E is None else len(ends_E) - 1, D, x_RD.stride(0), A, weights_TA is not None, ends_E is not None,
            triton.next_power_of_2(max(R, 1)) if inverse_TA is None else 0, block,
        )  # fmt: skip
    return y_TD


def gather_rows(x_TD: Tensor, order_R: Tensor, active: int, inverse_TA: Tensor | None = None) -> Tensor:
    """x_RD: the token of each row; ``inverse_TA`` as for :func:`combine_rows`."""
    x_TD, R, (T, D) = row_contiguous(x_TD), len(order_R), x_TD.shape
    y_RD = x_TD.new_empty(R, D)
    if not y_RD.numel():
        return y_RD
    block = min(1024, triton.next_power_of_2(D))
    if R > T and inverse_TA is None:
        inverse_TA = inverse_if_large(order_R, T, active)
    if R > T and inverse_TA is not None:
        _gather_by_token[(T, triton.cdiv(D, block))](x_TD, inverse_TA, y_RD, D, x_TD.stride(0), active, block)
    else:
        _gather_by_row[(R, triton.cdiv(D, block))](x_TD, order_R, y_RD, D, x_TD.stride(0), active, block)
    return y_RD


@torch.library.custom_op("colonnade::gather_rows", mutates_args=())
def _gather(x_TD: Tensor, order_R: Tensor, active: int) -> Tensor:
    return gather_rows(x_TD, order_R, active)


@_gather.register_fake
def _(x_TD, order_R, active):
    return x_TD.new_empty(len(order_R), x_TD.shape[1])


@torch.library.custom_op("colonnade::combine_rows", mutates_args=())
def _combine(y_RD: Tensor, order_R: Tensor, weights_TA: Tensor | None, T: int, active: int) -> Tensor:
    weights_TA = None if weights_TA is None else weights_TA.contiguous()
    return combine_rows(y_RD, order_R, T, active, weights_TA)


@_combine.register_fake
def _(y_RD, order_R, weights_TA, T, active):
    return y_RD.new_empty(T, y_RD.shape[1])


@torch.library.custom_op("colonnade::combine_rows_backward", mutates_args=())
def _combine_backward(dy_TD: Tensor, y_RD: Tensor, order_R: Tensor, weights_TA: Tensor) -> tuple[Tensor, Tensor]:
    dy_TD, y_RD, weights_TA = row_contiguous(dy_TD), row_contiguous(y_RD), weights_TA.contiguous()
    (R, D), A = y_RD.shape, weights_TA.shape[1]
    dx_RD, dw_TA = y_RD.new_empty(R, D), torch.zeros_like(weights_TA)
    if R:
        block = min(1024, triton.next_power_of_2(max(D, 1)))
        _combine_grad[(R,)](
            dy_TD, y_RD, order_R, weights_TA, dx_RD, dw_TA, D, dy_TD.stride(0), y_RD.stride(0), A, block
        )
    return dx_RD, dw_TA


@_combine_backward.register_fake
def _(dy_TD, y_RD, order_R, weights_TA):
    return y_RD.new_empty(y_RD.shape), weights_TA.new_empty(weights_TA.shape)


def _save_gather(ctx, inputs: tuple, output: Tensor) -> None:
    x_TD, order_R, active = inputs
    ctx.save_for_backward(order_R)
    ctx.how = len(x_TD), active


def _gather_grad(ctx, dx_RD: Tensor):
    return _combine(dx_RD, ctx.saved_tensors[0], None, *ctx.how), None, None


def _save_combine(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _combine_backward_pass(ctx, dy_TD: Tensor):
    y_RD, order_R, weights_TA = ctx.saved_tensors
    dx_RD, dw_TA = _combine_backward(dy_TD, y_RD, order_R, weights_TA)
    return dx_RD, None, dw_TA, None, None


_gather.register_autograd(_gather_grad, setup_context=_save_gather)
_combine.register_autograd(_combine_backward_pass, setup_context=_save_combine)


def gather(x_TD: Tensor, order_R: Tensor, active: int) -> Tensor:
    """x_RD (see :func:`permute.gather`)."""
    return _gather(x_TD, order_R, active)


def combine(y_RD: Tensor, order_R: Tensor, weights_TA: Tensor) -> Tensor:
    """y_TD (see :func:`permute.combine`)."""
    return _combine(y_RD, order_R, weights_TA, *weights_TA.shape)
