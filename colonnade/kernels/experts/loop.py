"""Experts one after another, only those that have rows: what a CPU does best, where a product is a call to a library.

:func:`routed` never lays many tokens out in the order of the experts: each expert takes its own out of x, and adds what
it makes of them to y while both are in the cache. An expert that nobody chose is not touched, so a decode step of one
token reads A experts' weights, whatever E is. Milliseconds of one core of an EPYC 9004, uniform loads, no gradient,
D × F of 512 × 1024 for 8 experts (2 a token) and 512 × 256 for 64 (8 a token):

                          float32, E = 8                 bfloat16, E = 64
    tokens           1     16    256   1024           1     16    256   1024
    loop          0.67   4.77   22.6   71.2        0.97   10.2   19.3   44.3
    batched       4.04   7.58   25.5   77.7        5.62   7.24   20.2   69.8
    grouped_mm    0.41   6.74   23.3   77.2        0.93   8.43   19.3   50.2
    reference     0.86   6.58   22.4   71.0        1.60   10.4   19.5   43.2

The way back is written out, y_r = w_r (h_r W_down + b) and dh_r = W_downᵀ dy_t, with dw_r = h_r · dh_r + b · dy_t: left
to autograd, each expert's slice of the stacked weights would have a gradient of the size of all of them.

Experts in one batched product, each padded to the rows of the busiest.

It multiplies E · max n_e rows for Σ n_e, and reads every expert's weights: right for few experts used alike, wrong for
skewed loads and for a few tokens among many experts.

Experts in bfloat16 on a CPU where no gradient is wanted: by whoever begins least often.

A product of a few rows with a small matrix costs a library more to begin than to compute: at 512 × 256 some 35 µs, a
third of it arithmetic, and the loop begins three for each expert in use. torch's grouped product begins one for all of
them; where most of many small experts have rows, a batched product, each expert's rows padded to those of the busiest,
spreads better over the cores. Milliseconds of two cores of an EPYC, even loads, D × F of 512 × 256 with 8 of 64
experts, of 512 × 1024 with 2 of 8, and of 1024 × 3584 with 2 of 8:

    tokens       1     2     4     8    16    64   256  1024  |     1     4    16   256  |     1     4    16   256
    loop      1.24  2.11  3.90  6.55  8.75  11.3  15.9  43.1  |  0.58  1.35  2.29  6.77  |  3.03  7.90  14.1  40.2
    grouped   1.14  1.73  2.93  4.76  6.43   9.1  13.2  37.9  |  0.55  1.18  2.02  6.65  |  2.85  7.82  13.8  39.8
    batched                     4.61  4.84   7.0  12.8  28.2  |              1.77  6.94  |
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

THIN = (torch.float32, torch.float64)
"""The types whose products with few rows torch leaves to one core (see
:mod:`colonnade.kernels.linear.skinny_gemm_cpu`)."""

FEW_ROWS, SMALL = 2, 1 << 20
LARGE = 1 << 21
"""From so many elements on, :func:`across` is what few rows in bfloat16 want; smaller matrices stay in a cache."""

AT_ONCE = 2048
"""Up to so many choices, one gather and one sum cost less than one of each for every expert."""


def _slopes(activation: str, dh: Tensor, a: Tensor) -> Tensor:
    """dh ⊙ act'(a)."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(dh, a)
    if activation == "relu":
        return torch.ops.aten.threshold_backward(dh, a, 0)
    return torch.ops.aten.gelu_backward(dh, a, approximate="tanh" if activation == "gelu_tanh" else "none")


def _down(h_cF: Tensor, down_FD: Tensor) -> Tensor:
    """h W_down, where there is no gradient to be found: of a row or two and a small matrix as a weighted sum of rows.

    Microseconds in bfloat16, one core and two of an EPYC 9004, as a product and as a bag of rows:

        F × D         rows      one core         two
        256 × 512        1       37    19       37    18
        256 × 512        2       39    24       41    26
        256 × 512        4       45    36       38    40
        3584 × 1024      1      999   712      581   683
        3584 × 1024      2      976   919      522   882
    """
    c, F_ = h_cF.shape
    small = c <= FEW_ROWS and down_FD.numel() <= SMALL
    if not small or h_cF.is_cuda or h_cF.dtype == torch.float64 or not down_FD.is_contiguous():
        return h_cF @ down_FD
    index_cF = torch.arange(F_).expand(c, -1)
    return F.embedding_bag(index_cF, down_FD, per_sample_weights=h_cF, mode="sum")


def across(matrix: int, dtype: torch.dtype) -> bool:
    """Whether W_down (F, D) of ``matrix`` elements should lie in memory column by column, for products with few rows.

    Milliseconds of h W_down, one core of an EPYC 9004, rows of W_down after one another and columns:

        F × D            rows     bfloat16         float16          float32
        14336 × 4096        1    17.1   10.9      383   10.7       10.9   10.6
        14336 × 4096        4    18.1    9.8     1550   24.0       32.6   25.8
        3584 × 4096         1     4.2    2.4       95    1.3        2.4    3.2
        4096 × 1024         2    0.74   0.58     30.6    1.2        1.4    1.6
        768 × 2048          2    0.35   0.38     10.5    0.4       0.44   0.73
    """
    return dtype == torch.float16 or (dtype == torch.bfloat16 and matrix > LARGE)


def _busy(ends_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of those that have rows."""
    ends = ends_E.tolist()
    return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, order_R: Tensor | None, ends_E: Tensor, routing_TA: Tensor | None, activation: str,
        keep: bool, dropout: HiddenDropout | None, *stacks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x = tokens
        weights, act, busy = Weights(*stacks), ACTIVATIONS[activation], _busy(ends_E)  # type: ignore[arg-type]
        linear = skinny_gemm_cpu.skinny_linear if x.dtype in THIN and not x.is_cuda else F.linear
        held, token_R, w_R1, y_RD = [], None, None, None
        if order_R is not None and routing_TA is not None:
            token_R, w_R1 = order_R // routing_TA.shape[1], routing_TA.flatten()[order_R].unsqueeze(1)
            y = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, routing_TA.dtype))
            if len(order_R) <= AT_ONCE:
                x, y_RD = x[token_R], x.new_zeros(len(order_R), x.shape[1])
        else:
            y = y_RD = torch.zeros_like(x)
        for e, start, end in busy:
            up, down, gate, up_b, gate_b, down_b = weights.of(e)
            x_cD = x[start:end] if y_RD is not None or token_R is None else x[token_R[start:end]]
            u = linear(x_cD, up, up_b)
            a = u if gate is None else linear(x_cD, gate, gate_b)
            h = act(a) if gate is None else (act(a) if keep else _over(activation, act, a)) * u
            if dropout is not None:
                h = dropout.rows(slice(start, end)).drop(h)
            y_cD = _down(h, down) if down_b is None else _down(h, down) + down_b
            if y_RD is not None:
                y_RD[start:end] = y_cD
            elif token_R is not None and w_R1 is not None:
                y.index_add_(0, token_R[start:end], (y_cD * w_R1[start:end]).to(y.dtype))
            if keep:
                held += [a, u] if gate is not None else [u]
        if token_R is not None and w_R1 is not None and y_RD is not None:
            y.index_add_(0, token_R, (y_RD * w_R1).to(y.dtype))
        if keep:
            ctx.save_for_backward(tokens, order_R, routing_TA, *stacks, *held)
            ctx.activation, ctx.busy, ctx.dropout = activation, busy, dropout
        return y.to(tokens.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, order_R, routing_TA, *rest) = grads, ctx.saved_tensors
        weights, held = Weights(*rest[:6]), iter(rest[6:])
        act, needs = ACTIVATIONS[ctx.activation], ctx.needs_input_grad
        of_weights, token_R, w_R1, dw_R = any(needs[7:]), None, None, None
        if order_R is not None:
            token_R, w_R1 = order_R // routing_TA.shape[1], routing_TA.flatten()[order_R].unsqueeze(1)
            dw_R = torch.zeros_like(w_R1).squeeze(1)
        dx = torch.zeros_like(x) if needs[0] else None
        d_stacks = [None if w is None or not of_weights else torch.empty_like(w) for w in weights]
        d = Weights(*d_stacks)  # type: ignore[arg-type]
        busy = {e: (start, end) for e, start, end in ctx.busy}
        for e in range(len(weights.up_EFD)) if of_weights else busy:
            if e not in busy:
                for stack in d:
                    if stack is not None:
                        stack[e].zero_()
                continue
            start, end = busy[e]
            up, down, gate, _, _, down_b = weights.of(e)
            token_c = None if token_R is None else token_R[start:end]
            dy_cD, a, u = dy[start:end] if token_c is None else dy[token_c], next(held), None
            if gate is not None:
                u = next(held)
            dh = dy_cD @ down.T
            h = act(a) if u is None else act(a) * u
            if ctx.dropout is not None:
                of_rows = ctx.dropout.rows(slice(start, end))
                dh, h = of_rows.drop(dh), of_rows.drop(h)
            if w_R1 is not None and dw_R is not None:
                w = w_R1[start:end]
                dw_R[start:end] = (h * dh).sum(1, dtype=w.dtype)
                if down_b is not None:
                    dw_R[start:end] += (dy_cD @ down_b).to(w.dtype)
                dh, dy_cD = (dh * w).to(x.dtype), (dy_cD * w).to(x.dtype)
            du = _slopes(ctx.activation, dh, a) if u is None else dh * act(a)
            da = None if u is None else _slopes(ctx.activation, dh * u, a)
            if dx is not None:
                dx_cD = du @ up
                if da is not None and gate is not None:
                    dx_cD = dx_cD.addmm_(da, gate)
                if token_c is None:
                    dx[start:end] = dx_cD
                else:
                    dx.index_add_(0, token_c, dx_cD)
            if of_weights:
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


def _over(activation: str, act: Any, a: Tensor) -> Tensor:
    """act(a), over a where there is such an operation: nobody needs a again."""
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


def batched_experts(
    x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str, dropout: HiddenDropout | None = None
) -> Tensor:
    """y_RD (see :func:`reference.experts`)."""
    E, D, R = len(ends_E), x_RD.shape[1], len(x_RD)
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    longest = int(sizes_E.max()) if E else 0
    row = torch.arange(R, device=x_RD.device)
    expert_R = torch.searchsorted(ends_E, row, right=True)
    kept = row[expert_R < E]
    expert_c = expert_R[kept]
    slot_c = expert_c * longest + kept - (ends_E - sizes_E)[expert_c]
    x_ECD = x_RD.new_zeros(E * longest, D).index_copy(0, slot_c, x_RD[kept]).view(E, longest, D)

    def product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.bmm(x, w) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, w)

    u = product(x_ECD, weights.up_EFD.transpose(1, 2), weights.up_bias_EF)
    act = ACTIVATIONS[activation]
    if weights.gate_EFD is None:
        h = act(u)
    else:
        h = act(product(x_ECD, weights.gate_EFD.transpose(1, 2), weights.gate_bias_EF)) * u
    if dropout is not None:
        row_EC = dropout.row_R.new_zeros(E * longest).index_copy(0, slot_c, dropout.row_R[kept]).view(E, longest)
        h = dropout._replace(row_R=row_EC).drop(h)
    y_ECD = product(h, weights.down_EFD, weights.down_bias_ED)
    return torch.zeros_like(x_RD).index_copy(0, kept, y_ECD.flatten(0, 1)[slot_c])


SMALL_BF16 = 1 << 19
"""Numbers of a matrix, up to which experts go together in a batch."""
MOST, PADDED = 128, 4
"""Rows of the busiest of these, and all rows, padded, for one that is there."""
BUFFER_BF16 = 1 << 22
"""Numbers of all experts' rows together, D or F wide, up to which they are laid out one after another: of more, only
those of one expert stay in a cache.
"""
ALIGNED_BF16 = 8
"""Numbers in 16 bytes, of which the grouped product wants whole ones."""


def routed_bf16(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`); by the loop where it is faster or a gradient is wanted."""
    differs = torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, weights_TA, *weights.tensors))
    widest = max(weights.up_EFD.shape[1:])
    if differs or not 0 < len(order_R) * widest <= BUFFER_BF16 or not len(ends_E):
        return routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    if weights.up_EFD[0].numel() <= SMALL_BF16 and _most_have_rows(ends_E):
        run = batched_experts
    elif grouped_mm.available and _plain(weights):
        run = grouped_mm.experts
    else:
        return routed(x_TD, order_R, ends_E, weights_TA, weights, activation)
    x_RD = permute.gather(x_TD, order_R, weights_TA.shape[1])
    return permute.combine(run(x_RD, ends_E, weights, activation), order_R, weights_TA)


def _most_have_rows(ends_E: Tensor) -> bool:
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    most, E = int(sizes_E.max()), len(ends_E)
    return 0 < most <= MOST and 2 * int(sizes_E.count_nonzero()) > E and most * E <= PADDED * int(ends_E[-1])


def _plain(weights: Weights) -> bool:
    """Whether a grouped product takes these as they are, with nothing to be filled up."""
    biased = any(bias is not None for bias in weights[3:])
    return not biased and all(n % ALIGNED_BF16 == 0 for n in weights.up_EFD.shape[1:])
