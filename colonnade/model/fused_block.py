"""A block's step without a gradient in as few kernels as its arithmetic allows.

    qkv = W_qkv norm(x)      q ← place(qkv)      o = attend(q)      x ← x + W_out o
    h = act(W_gate norm(x)) ⊙ W_up norm(x)       x ← x + W_down h

A step of one row launches a kernel for each of these, and two or so for attention, where the modules by themselves
launch some twenty: at two microseconds each they take as long as a third of the weights. With many rows, such as a
prompt's, norm and products are the library's, and what is saved is reading and writing x in between. What is computed
is the same, rounded less often. Serving asks for it (:func:`prepare`); whatever a block has that is not in these lines
goes through the modules.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from colonnade.kernels.linear.reference import Gate, Scale
from colonnade.kernels.registry import TRITON, choose
from colonnade.kernels.rotary import Rotation
from colonnade.model.attend import Attend, PagedView
from colonnade.model.attention import Attention
from colonnade.model.ffn import FeedForward
from colonnade.model.linear import Linear
from colonnade.model.norm import Norm

if TYPE_CHECKING:
    from colonnade.model.transformer import Block, Transformer


def prepare(model: "Transformer") -> None:
    """Have the blocks of ``model`` take their steps so from now on, on a GPU that has the kernels."""
    weight = next(model.parameters())
    if not TRITON or not weight.is_cuda or weight.dtype == torch.float64:
        return
    for block in model.blocks:
        block.fused = True  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Linear) and module.kernels == "auto":
            module.kernels = "skinny"
    if model.kernels == "auto":
        model.kernels = "skinny"


def attends(block: "Block", x_tD: Tensor, attend: Attend) -> bool:
    """Whether :func:`attended` is for this block, these rows and these keys."""
    it = block.attention
    plain = isinstance(it, Attention) and it.clip is None and it.out.bias is None and _per_head(it.q_norm)
    return plain and isinstance(attend, PagedView) and _fits(block, block.norm1, x_tD, it)


def feeds(block: "Block", x_tD: Tensor, attend: Attend) -> bool:
    """Whether :func:`fed` is for this block, these rows and a server's step, which keeps its keys."""
    it = block.ffn
    plain = isinstance(it, FeedForward) and it.gate is not None and it.down.bias is None
    return plain and attend.keeps and _fits(block, block.norm2, x_tD, it)


def attended(block: "Block", x_TD: Tensor, turn: Rotation | None, attend: Attend) -> Tensor:
    """x + attention(norm(x))."""
    it = block.attention
    assert isinstance(it, Attention)
    assert isinstance(attend, PagedView)
    norms = None
    if isinstance(it.q_norm, Norm) and isinstance(it.k_norm, Norm):
        norms = _scale(it.q_norm), _scale(it.k_norm)
    qkv_Tz = _product(x_TD, it.qkv, norm=_scale(block.norm1))
    o_Tz = attend.of_product(qkv_Tz, turn, norms).flatten(1)
    return _added(block, o_Tz, it.out, x_TD)


def fed(block: "Block", x_TD: Tensor, *, own: bool) -> Tensor:
    """x + ffn(norm(x)); in the place of x where that is the caller's ``own``, which nobody else sees."""
    it = block.ffn
    assert isinstance(it, FeedForward)
    assert it.gate is not None
    gate = Gate(it.gate.matrix, it.gate.bias, it.activation)
    h_Tf = _product(x_TD, it.up, norm=_scale(block.norm2), gate=gate)
    return _added(block, h_Tf, it.down, x_TD, own=own)


def _fits(block: "Block", norm: nn.Module, x_tD: Tensor, part: nn.Module) -> bool:
    if not len(x_tD) or block.post or block.axes.sequence_parallel:
        return False
    if not isinstance(norm, Norm) or norm.bias is not None or norm.kernels != "auto":
        return False
    layers = [layer for layer in part.modules() if isinstance(layer, Linear)]
    if any(layer.float8 is not None for layer in layers):
        return False
    return not (torch.is_grad_enabled() and (x_tD.requires_grad or any(x.requires_grad for x in part.parameters())))


def _per_head(norm: nn.Module | None) -> bool:
    return norm is None or (isinstance(norm, Norm) and norm.bias is None)


def _scale(norm: nn.Module) -> Scale:
    assert isinstance(norm, Norm)
    return Scale(norm.weight, norm.eps)


def _product(
    x_TD: Tensor,
    layer: Linear,
    *,
    norm: Scale | None = None,
    gate: Gate | None = None,
    more_TF: Tensor | None = None,
    own: bool = False,
) -> Tensor:
    run = choose("fused_linear", x_TD.device.type, x_TD.dtype)
    return run(x_TD, layer.matrix, layer.bias, norm=norm, gate=gate, more_TF=more_TF, own=own)


def _added(block: "Block", y_Tz: Tensor, layer: Linear, x_TD: Tensor, *, own: bool = False) -> Tensor:
    """x + W y, summed over the ranks of the block."""
    if block.axes.tp.size == 1:
        return _product(y_Tz, layer, more_TF=x_TD, own=own)
    return x_TD + block.axes.leave(_product(y_Tz, layer))
