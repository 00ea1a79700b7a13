"""Experts computed one at a time, skipping those without rows: fastest on a CPU, where a GEMM is a library call.

:func:`routed` does not gather all tokens into expert order: each expert gathers its own tokens from x and adds its
result to y while both are in the cache. An expert without rows is not read, so a decode step of one token reads the
weights of A experts, whatever E is. The backward pass is written out, y_r = w_r (h_r W_down + b) and
dh_r = W_downᵀ dy_t, with dw_r = h_r · dh_r + b · dy_t: with autograd, the gradient of each expert's slice would be as
large as all stacked weights. Milliseconds of one core of an EPYC 9004, uniform loads, no gradient, D × F of 512 × 1024
for 8 experts (2 per token) and 512 × 256 for 64 (8 per token):

                          float32, E = 8                 bfloat16, E = 64
    tokens           1     16    256   1024           1     16    256   1024
    loop          0.67   4.77   22.6   71.2        0.97   10.2   19.3   44.3
    padded        4.04   7.58   25.5   77.7        5.62   7.24   20.2   69.8
    grouped_mm    0.41   6.74   23.3   77.2        0.93   8.43   19.3   50.2
    reference     0.86   6.58   22.4   71.0        1.60   10.4   19.5   43.2

:func:`padded_batch` is one batched GEMM per matrix, with each expert's rows padded to those of the busiest expert. It
computes E · max n_e rows instead of Σ n_e and reads every expert's weights: good for few, evenly loaded experts, bad
for skewed loads and for few tokens among many experts.

:func:`routed_bf16` is for bfloat16 without gradients, and picks the variant with the fewest library calls. Calling a
GEMM of a few rows and a small matrix costs more than its arithmetic: at 512 × 256 some 35 µs, a third of it arithmetic,
and the loop makes three calls per expert. torch's grouped GEMM makes one for all experts; where most of many small
experts have rows, a padded batch spreads better over the cores. Milliseconds of two cores of an EPYC, even loads, D × F
of 512 × 256 with 8 of 64 experts, of 512 × 1024 with 2 of 8, and of 1024 × 3584 with 2 of 8:

    tokens       1     2     4     8    16    64   256  1024  |     1     4    16   256  |     1     4    16   256
    loop      1.24  2.11  3.90  6.55  8.75  11.3  15.9  43.1  |  0.58  1.35  2.29  6.77  |  3.03  7.90  14.1  40.2
    grouped   1.14  1.73  2.93  4.76  6.43   9.1  13.2  37.9  |  0.55  1.18  2.02  6.65  |  2.85  7.82  13.8  39.8
    padded                      4.61  4.84   7.0  12.8  28.2  |              1.77  6.94  |
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels import permute
from colonnade.kernels.dropout import HiddenDropout
from colonnade.kernels.experts import grouped_mm
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights
from colonnade.kernels.linear import skinny_gemm_cpu

SKINNY_DTYPES = (torch.float32, torch.float64)
"""The dtypes for which torch computes GEMMs of few rows on one core (see
:mod:`colonnade.kernels.linear.skinny_gemm_cpu`)."""

BAG_MAX_ROWS, BAG_MAX_ELEMENTS = 2, 1 << 20
"""Limits up to which :func:`_down` uses an embedding bag."""
COLUMN_MAJOR_MIN_ELEMENTS = 1 << 21
"""Larger bfloat16 matrices are stored column-major (:func:`down_column_major`); smaller ones stay in a cache."""
GATHER_ONCE_MAX_ROWS = 2048
"""Up to this many choices, one gather and one sum cost less than one of each per expert."""


def _activation_grad(activation: str, dh: Tensor, a: Tensor) -> Tensor:
    """dh ⊙ act'(a)."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(dh, a)
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dh, a, 0)
    return torch.ops.aten.gelu_backward(dh, a, approximate="tanh" if activation == "gelu_tanh" else "none")


def _down(h_cF: Tensor, down_FD: Tensor) -> Tensor:
    """h W_down without a gradient; for one or two rows and a small matrix, as an embedding bag.

    Microseconds in bfloat16, one core and two of an EPYC 9004, as a GEMM and as an embedding bag:

        F × D         rows      one core         two
        256 × 512        1       37    19       37    18
        256 × 512        2       39    24       41    26
        256 × 512        4       45    36       38    40
        3584 × 1024      1      999   712      581   683
        3584 × 1024      2      976   919      522   882
    """
    c, F_ = h_cF.shape
    small = c <= BAG_MAX_ROWS and down_FD.numel() <= BAG_MAX_ELEMENTS
    if not small or h_cF.is_cuda or h_cF.dtype == torch.float64 or not down_FD.is_contiguous():
        return h_cF @ down_FD
    index_cF = torch.arange(F_).expand(c, -1)
    return F.embedding_bag(index_cF, down_FD, per_sample_weights=h_cF, mode="sum")


def down_column_major(elements: int, dtype: torch.dtype) -> bool:
    """Whether W_down (F, D) of ``elements`` elements should be stored column-major, for GEMMs of few rows.

    Milliseconds of h W_down, one core of an EPYC 9004, with W_down row-major and column-major:

        F × D            rows     bfloat16         float16          float32
        14336 × 4096        1    17.1   10.9      383   10.7       10.9   10.6
        14336 × 4096        4    18.1    9.8     1550   24.0       32.6   25.8
        3584 × 4096         1     4.2    2.4       95    1.3        2.4    3.2
        4096 × 1024         2    0.74   0.58     30.6    1.2        1.4    1.6
        768 × 2048          2    0.35   0.38     10.5    0.4       0.44   0.73
    """
    return dtype == torch.float16 or (dtype == torch.bfloat16 and elements > COLUMN_MAJOR_MIN_ELEMENTS)


def _experts_with_rows(ends_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of each expert that has rows."""
    ends = ends_E.tolist()
    return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, activation: str,
        keep: bool, dropout: HiddenDropout | None, *stacks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x = tokens
        weights, act, ranges = Weights(*stacks), ACTIVATIONS[activation], _experts_with_rows(ends_E)  # type: ignore[arg-type]
        linear = skinny_gemm_cpu.skinny_linear if x.dtype in SKINNY_DTYPES and not x.is_cuda else F.linear
        saved, token_R, w_R1, y_RD = [], None, None, None
        if order_R is not None and routing_TA is not None:
            token_R, w_R1 = order_R // routing_TA.shape[1], routing_TA.flatten()[order_R].unsqueeze(1)
            y = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, routing_TA.dtype))
            if len(order_R) <= GATHER_ONCE_MAX_ROWS:
                x, y_RD = x[token_R], x.new_zeros(len(order_R), x.shape[1])
        else:
            y = y_RD = torch.zeros_like(x)
        for e, start, end in ranges:
            up, down, gate, up_b, gate_b, down_b = weights.expert(e)
            x_cD = x[start:end] if y_RD is not None or token_R is None else x[token_R[start:end]]
            u = linear(x_cD, up, up_b)
            a = u if gate is None else linear(x_cD, gate, gate_b)
            h = act(a) if gate is None else (act(a) if keep else _activate_inplace(activation, act, a)) * u
            if dropout is not None:
                h = dropout.rows(slice(start, end)).drop(h)
            y_cD = _down(h, down) if down_b is None else _down(h, down) + down_b
            if y_RD is not None:
                y_RD[start:end] = y_cD
            elif token_R is not None and w_R1 is not None:
                y.index_add_(0, token_R[start:end], (y_cD * w_R1[start:end]).to(y.dtype))
            if keep:
                saved += [a, u] if gate is not None else [u]
        if token_R is not None and w_R1 is not None and y_RD is not None:
            y.index_add_(0, token_R, (y_RD * w_R1).to(y.dtype))
        if keep:
            ctx.save_for_backward(tokens, order_R, routing_TA, *stacks, *saved)
            ctx.activation, ctx.ranges, ctx.dropout = activation, ranges, dropout
        return y.to(tokens.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, order_R, routing_TA, *rest) = grads, ctx.saved_tensors
        weights, saved = Weights(*rest[:6]), iter(rest[6:])
        act, needs = ACTIVATIONS[ctx.activation], ctx.needs_input_grad
        weight_grads, token_R, w_R1, dw_R = any(needs[7:]), None, None, None
        if order_R is not None:
            token_R, w_R1 = order_R // routing_TA.shape[1], routing_TA.flatten()[order_R].unsqueeze(1)
            dw_R = torch.zeros_like(w_R1).squeeze(1)
        dx = torch.zeros_like(x) if needs[0] else None
        d_stacks = [None if w is None or not weight_grads else torch.empty_like(w) for w in weights]
        d = Weights(*d_stacks)  # type: ignore[arg-type]
        ranges = {e: (start, end) for e, start, end in ctx.ranges}
        for e in range(len(weights.up_EFD)) if weight_grads else ranges:
            if e not in ranges:
                for stack in d:
                    if stack is not None:
                        stack[e].zero_()
                continue
            start, end = ranges[e]
            up, down, gate, _, _, down_b = weights.expert(e)
            token_c = None if token_R is None else token_R[start:end]
            dy_cD, a, u = dy[start:end] if token_c is None else dy[token_c], next(saved), None
            if gate is not None:
                u = next(saved)
            dh = dy_cD @ down.T
            h = act(a) if u is None else act(a) * u
            if ctx.dropout is not None:
                row_dropout = ctx.dropout.rows(slice(start, end))
                dh, h = row_dropout.drop(dh), row_dropout.drop(h)
            if w_R1 is not None and dw_R is not None:
                w = w_R1[start:end]
                dw_R[start:end] = (h * dh).sum(1, dtype=w.dtype)
                if down_b is not None:
                    dw_R[start:end] += (dy_cD @ down_b).to(w.dtype)
                dh, dy_cD = (dh * w).to(x.dtype), (dy_cD * w).to(x.dtype)
            du = _activation_grad(ctx.activation, dh, a) if u is None else dh * act(a)
            da = None if u is None else _activation_grad(ctx.activation, dh * u, a)
            if dx is not None:
                dx_cD = du @ up
                if da is not None and gate is not None:
                    dx_cD = dx_cD.addmm_(da, gate)
                if token_c is None:
                    dx[start:end] = dx_cD
                else:
                    dx.index_add_(0, token_c, dx_cD)
            if weight_grads:
                x_cD = x[start:end] if token_c is None else x[token_c]
                for stack, left, right in ((d.up_EFD, du, x_cD), (d.gate_EFD, da, x_cD), (d.down_EFD, h, dy_cD)):
                    if stack is not None and left is not None:
                        torch.mm(left.T, right, out=stack[e])
                for stack, rows in ((d.up_bias_EF, du), (d.gate_bias_EF, da), (d.down_bias_ED, dy_cD)):
                    if stack is not None and rows is not None:
                        torch.sum(rows, 0, out=stack[e])
        d_routing = None
        if order_R is not None and dw_R is not None:
            d_routing = torch.zeros_like(routing_TA).flatten().scatter_(0, order_R, dw_R).view_as(routing_TA)
        return dx, None, None, d_routing, None, None, None, *d


def _activate_inplace(activation: str, act: Any, a: Tensor) -> Tensor:
    """act(a), in place where torch can; ``a`` is not used again."""
    return F.silu(a, inplace=True) if activation == "silu" else act(a)


def _run(
    x: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, w: Weights, activation: str,
    dropout: HiddenDropout | None = None,
) -> Tensor:  # fmt: skip
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, routing_TA, *w))
    return _Loop.apply(x, order_R, ends_E, routing_TA, activation, keep, dropout, *w)


def experts(
    x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str, dropout: HiddenDropout | None = None
) -> Tensor:
    """y_RD (see :func:`reference.experts`)."""
    return _run(x_RD, None, ends_E, None, weights, activation, dropout)


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`)."""
    return _run(x_TD, order_R, ends_E, weights_TA, weights, activation)


def padded_batch(x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_RD (see :func:`reference.experts`), with one batched GEMM per matrix."""
    E, D, R = len(ends_E), x_RD.shape[1], len(x_RD)
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    longest = int(sizes_E.max()) if E else 0
    row = torch.arange(R, device=x_RD.device)
    expert_R = torch.searchsorted(ends_E, row, right=True)
    valid = row[expert_R < E]
    expert_c = expert_R[valid]
    slot_c = expert_c * longest + valid - (ends_E - sizes_E)[expert_c]
    x_ECD = x_RD.new_zeros(E * longest, D).index_copy(0, slot_c, x_RD[valid]).view(E, longest, D)

    def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.bmm(x, w) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, w)

    h = linear(x_ECD, weights.up_EFD.transpose(1, 2), weights.up_bias_EF)
    act = ACTIVATIONS[activation]
    if weights.gate_EFD is None:
        h = act(h)
    else:
        h = act(linear(x_ECD, weights.gate_EFD.transpose(1, 2), weights.gate_bias_EF)) * h
    y_ECD = linear(h, weights.down_EFD, weights.down_bias_ED)
    return torch.zeros_like(x_RD).index_copy(0, valid, y_ECD.flatten(0, 1)[slot_c])


PADDED_MAX_ELEMENTS = 1 << 19
"""Elements of an expert's matrix up to which :func:`padded_batch` is used."""
PADDED_MAX_ROWS, PADDED_MAX_RATIO = 128, 4
"""Limits of :func:`padded_batch`: rows of the busiest expert, and padded rows per actual row."""
GATHERED_MAX_ELEMENTS = 1 << 22
"""Elements of all gathered rows, D or F wide, up to which they are gathered; beyond, only one expert's rows fit a
cache."""
GROUPED_ALIGNMENT = 8
"""bfloat16 elements in 16 bytes; torch's grouped GEMM needs widths that are multiples of it."""


def routed_bf16(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`); falls back to the loop where that is faster or a gradient is needed."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, weights_TA, *weights.tensors))
    width = max(weights.up_EFD.shape[1:])
    if needs_grad or not 0 < len(order_R) * width <= GATHERED_MAX_ELEMENTS or not len(ends_E):
        return routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    if weights.up_EFD[0].numel() <= PADDED_MAX_ELEMENTS and _padding_is_faster(ends_E):
        run = padded_batch
    elif grouped_mm.available and _needs_no_padding(weights):
        run = grouped_mm.experts
    else:
        return routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    x_RD = permute.gather(x_TD, order_R, weights_TA.shape[1])
    return permute.combine(run(x_RD, ends_E, weights, activation), order_R, weights_TA)


def _padding_is_faster(ends_E: Tensor) -> bool:
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    longest, E = int(sizes_E.max()), len(ends_E)
    most_have_rows = 2 * int(sizes_E.count_nonzero()) > E
    return 0 < longest <= PADDED_MAX_ROWS and most_have_rows and longest * E <= PADDED_MAX_RATIO * int(ends_E[-1])


def _needs_no_padding(weights: Weights) -> bool:
    """Whether the grouped GEMM takes the weights as they are."""
    biased = any(bias is not None for bias in weights[3:])
    return not biased and all(n % GROUPED_ALIGNMENT == 0 for n in weights.up_EFD.shape[1:])
