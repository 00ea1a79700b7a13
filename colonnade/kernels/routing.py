"""Scores of experts and the choice of the highest, in plain torch: the specification.

    logits   = x Wᵀ + b                                in float32 at least, whatever the types of x and W
    i        = top-A of what is compared, highest first
    w_j      = s_{i_j} [/ max(Σ_j s_{i_j}, 10⁻²⁰)] · scale

NaN counts as the highest. Equal scores go to the lower index, which ``topk`` does not promise.

Scores of tokens and weights in 16 bits on a GPU's matrix units, summed and given in float32.

A product of two numbers of 16 bits is exact in float32, so nothing is lost by leaving them in 16 bits but the order of
the sum: 2e-6 by norm where a product in float32, outside the matrix units, has 6e-7 and takes six times as long. No
copy of the tokens in float32 is made, nor kept for the way back.

    dx = g W = [g₁ g₂ g₃] [W; W; W]        dW = gᵀ x = Σᵢ gᵢᵀ x        g = g₁ + g₂ + g₃

A gradient in float32 has 24 significant bits, three times those of bfloat16, whose exponents are float32's: it is
exactly the sum of three such numbers, and each sum above runs in float32. float16 has not the exponents: there the way
back is a product in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 1e-20
"""What the sum of a token's scores counts as, where it is smaller."""


def scores(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """logits_TE."""
    exact = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(exact), weight_ED.to(exact), None if bias_E is None else bias_E.to(exact))


def top(x_TE: Tensor, count: int) -> Tensor:
    """int64 (T, count): indices of each row's highest, highest first, the lower index first of equals."""
    E = x_TE.shape[1]
    if x_TE.device.type != "cpu" or torch.compiler.is_compiling() or count >= E:
        return _sorted(x_TE)[:, :count]
    # On a CPU a stable sort of 128 scores takes seven times as long as topk: only rows with equal scores are sorted.
    values_TA, ids_TA = x_TE.topk(count + 1, dim=1)
    equal_T = (values_TA[:, 1:] == values_TA[:, :-1]).any(1) | values_TA[:, 0].isnan()
    rows = equal_T.nonzero().squeeze(1)
    if len(rows):
        ids_TA[rows] = _sorted(x_TE[rows])[:, : count + 1]
    return ids_TA[:, :count]


def _sorted(x_TE: Tensor) -> Tensor:
    return x_TE.sort(dim=1, descending=True, stable=True).indices


def best(
    compared_TE: Tensor, scores_TE: Tensor, active: int, *, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA), these differentiable in the scores."""
    ids_TA = top(compared_TE.detach(), active)
    weights_TA = scores_TE.gather(1, ids_TA)
    if normalise:
        weights_TA = weights_TA / weights_TA.sum(1, keepdim=True).clamp(min=LEAST)
    return ids_TA, weights_TA if scale == 1 else weights_TA * scale


def product_tensor_core(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, of 16 bits."""
    return torch.mm(a, b, out_dtype=torch.float32)


def split_float32(g_TE: Tensor) -> Tensor:
    """(T, 3E) in bfloat16: what three numbers add up to each of ``g_TE``, all the first before all the second."""
    found, rest_TE = list[Tensor](), g_TE
    for _ in range(3):
        found.append(rest_TE.bfloat16())
        rest_TE = rest_TE - found[-1]
    return torch.cat(found, 1)


@torch.library.custom_op("colonnade::scores", mutates_args=())
def _scores(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    if not len(x_TD):
        return x_TD.new_empty(0, len(weight_ED), dtype=torch.float32)
    return product_tensor_core(x_TD, weight_ED.T)


@_scores.register_fake
def _(x_TD, weight_ED):
    return x_TD.new_empty(len(x_TD), len(weight_ED), dtype=torch.float32)


@torch.library.custom_op("colonnade::scores_backward", mutates_args=())
def _backward(
    g_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx, dW), empty where none is wanted."""
    dx, dw = x_TD.new_empty(0), weight_ED.new_empty(0)
    if not len(x_TD):
        return torch.zeros_like(x_TD) if of_x else dx, torch.zeros_like(weight_ED) if of_weight else dw
    if x_TD.dtype != torch.bfloat16:
        if of_x:
            dx = (g_TE @ weight_ED.to(g_TE.dtype)).to(x_TD.dtype)
        if of_weight:
            dw = (g_TE.T @ x_TD.to(g_TE.dtype)).to(weight_ED.dtype)
        return dx, dw
    parts_TP = split_float32(g_TE)
    if of_x:
        dx = parts_TP @ weight_ED.repeat(3, 1)
    if of_weight:
        dw = product_tensor_core(parts_TP.T, x_TD).view(3, *weight_ED.shape).sum(0).to(weight_ED.dtype)
    return dx, dw


@_backward.register_fake
def _(g_TE, x_TD, weight_ED, of_x, of_weight):
    return x_TD.new_empty(x_TD.shape if of_x else 0), weight_ED.new_empty(weight_ED.shape if of_weight else 0)


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, g_TE: Tensor):
    wanted, (x_TD, weight_ED) = ctx.needs_input_grad, ctx.saved_tensors
    grads = _backward(g_TE, x_TD, weight_ED, wanted[0], wanted[1])
    return tuple(grad if need else None for grad, need in zip(grads, wanted, strict=True))


_scores.register_autograd(_differentiate, setup_context=_keep)


def scores_tensor_core(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """logits_TE (see :func:`routing.scores`)."""
    if weight_ED.dtype != x_TD.dtype:
        return scores(x_TD, weight_ED, bias_E)
    logits_TE = _scores(x_TD, weight_ED)
    return logits_TE if bias_E is None else logits_TE + bias_E.to(logits_TE.dtype)
