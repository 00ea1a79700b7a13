"""Router scores and top-k expert selection, in plain torch and on tensor cores.

    logits   = x Wᵀ + b                                in at least float32, whatever the dtypes of x and W
    i        = top-A of the compared scores, highest first
    w_j      = s_{i_j} [/ max(Σ_j s_{i_j}, 10⁻²⁰)] · scale

NaN counts as the highest. Ties go to the lower index, which ``topk`` does not guarantee.

On a GPU, scores of 16-bit tokens and weights are computed on tensor cores with float32 accumulation and output. A
product of two 16-bit numbers is exact in float32, so only the order of the sum differs: the error is 2e-6 by norm,
against 6e-7 of a float32 GEMM without tensor cores, which takes six times as long. Tokens are not copied to float32,
nor is such a copy saved for the backward pass.

    dx = g W = [g₁ g₂ g₃] [W; W; W]        dW = gᵀ x = Σᵢ gᵢᵀ x        g = g₁ + g₂ + g₃

A float32 gradient has 24 significant bits, three times those of bfloat16, which has the same exponent range: it is
exactly the sum of three bfloat16 numbers, and each GEMM above accumulates in float32. float16 lacks the exponent range:
there the backward is a float32 GEMM.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_SCORE_SUM = 1e-20
"""Lower bound of the sum that normalises a token's weights."""


def scores(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """logits_TE."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(dtype), weight_ED.to(dtype), None if bias_E is None else bias_E.to(dtype))


def stable_topk(x_TE: Tensor, count: int) -> Tensor:
    """int64 (T, count): indices of each row's highest values, highest first, ties by lower index."""
    E = x_TE.shape[1]
    if x_TE.device.type != "cpu" or torch.compiler.is_compiling() or count >= E:
        return _stable_order(x_TE)[:, :count]
    # On a CPU a stable sort of 128 scores takes seven times as long as topk: only rows with ties are sorted.
    values_TA, ids_TA = x_TE.topk(count + 1, dim=1)
    tied_T = (values_TA[:, 1:] == values_TA[:, :-1]).any(1) | values_TA[:, 0].isnan()
    rows = tied_T.nonzero().squeeze(1)
    if len(rows):
        ids_TA[rows] = _stable_order(x_TE[rows])[:, : count + 1]
    return ids_TA[:, :count]


def _stable_order(x_TE: Tensor) -> Tensor:
    return x_TE.sort(dim=1, descending=True, stable=True).indices


def top_experts(
    compared_TE: Tensor, scores_TE: Tensor, active: int, *, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA); the weights are differentiable in ``scores_TE``."""
    ids_TA = stable_topk(compared_TE.detach(), active)
    weights_TA = scores_TE.gather(1, ids_TA)
    if normalise:
        weights_TA = weights_TA / weights_TA.sum(1, keepdim=True).clamp(min=MIN_SCORE_SUM)
    return ids_TA, weights_TA if scale == 1 else weights_TA * scale


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """a b of 16-bit tensors, with float32 output."""
    return torch.mm(a, b, out_dtype=torch.float32)


def split_into_bfloat16(g_TE: Tensor) -> Tensor:
    """(T, 3E): three bfloat16 terms whose sum is ``g_TE``, the first terms of all columns first."""
    parts_TE, rest_TE = list[Tensor](), g_TE
    for _ in range(3):
        parts_TE.append(rest_TE.bfloat16())
        rest_TE = rest_TE - parts_TE[-1]
    return torch.cat(parts_TE, 1)


@torch.library.custom_op("colonnade::router_scores", mutates_args=())
def _scores(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    if not len(x_TD):
        return x_TD.new_empty(0, len(weight_ED), dtype=torch.float32)
    return matmul_float32(x_TD, weight_ED.T)


@_scores.register_fake
def _(x_TD, weight_ED):
    return x_TD.new_empty(len(x_TD), len(weight_ED), dtype=torch.float32)


@torch.library.custom_op("colonnade::router_scores_backward", mutates_args=())
def _backward(
    g_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx, dW), empty if not needed."""
    dx, dw = x_TD.new_empty(0), weight_ED.new_empty(0)
    if not len(x_TD):
        return torch.zeros_like(x_TD) if need_x else dx, torch.zeros_like(weight_ED) if need_weight else dw
    if x_TD.dtype != torch.bfloat16:
        if need_x:
            dx = (g_TE @ weight_ED.to(g_TE.dtype)).to(x_TD.dtype)
        if need_weight:
            dw = (g_TE.T @ x_TD.to(g_TE.dtype)).to(weight_ED.dtype)
        return dx, dw
    parts_TP = split_into_bfloat16(g_TE)
    if need_x:
        dx = parts_TP @ weight_ED.repeat(3, 1)
    if need_weight:
        dw = matmul_float32(parts_TP.T, x_TD).view(3, *weight_ED.shape).sum(0).to(weight_ED.dtype)
    return dx, dw


@_backward.register_fake
def _(g_TE, x_TD, weight_ED, need_x, need_weight):
    return x_TD.new_empty(x_TD.shape if need_x else 0), weight_ED.new_empty(weight_ED.shape if need_weight else 0)


def _save_inputs(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _scores_grad(ctx, g_TE: Tensor):
    needed, (x_TD, weight_ED) = ctx.needs_input_grad, ctx.saved_tensors
    grads = _backward(g_TE, x_TD, weight_ED, needed[0], needed[1])
    return tuple(grad if need else None for grad, need in zip(grads, needed, strict=True))


_scores.register_autograd(_scores_grad, setup_context=_save_inputs)


def scores_tensor_core(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """logits_TE (see :func:`scores`)."""
    if weight_ED.dtype != x_TD.dtype:
        return scores(x_TD, weight_ED, bias_E)
    logits_TE = _scores(x_TD, weight_ED)
    return logits_TE if bias_E is None else logits_TE + bias_E.to(logits_TE.dtype)
