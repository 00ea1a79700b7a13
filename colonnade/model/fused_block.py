"""Fused inference step of a block: as few kernel launches as its arithmetic allows.

    qkv = W_qkv norm(x)      q ← place(qkv)      o = attend(q)      x ← x + W_out o
    q = W_q norm(x)          o = across(q)       x ← x + W_out o                        on a CPU
    h = act(W_gate norm(x)) ⊙ W_up norm(x)       x ← x + W_down h
    q, kv = W_q norm(x), W_kv norm(x)            latent attention (:mod:`~colonnade.kernels.cpu.latent`), on a CPU

A step of one row launches one kernel for each of these, and about two for attention; the modules alone launch about
twenty, and at two microseconds each that takes as long as reading a third of the weights. With many rows, such as a
prompt's, norms and products are library kernels, and fusion saves reading and writing x in between. The result is the
same, rounded less often. Serving enables it (:func:`enable`); a block with anything else runs its modules.

On a CPU the kernels are C++ (:mod:`colonnade.kernels.cpu`), also for experts with a softmax router; many rows are fused
only if weights are quantised.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels.cpu import experts as cpu_experts
from colonnade.kernels.cpu import kernels as cpu_kernels
from colonnade.kernels.cpu import latent as cpu_latent
from colonnade.kernels.cpu.huge_pages import Arena, arena_bytes
from colonnade.kernels.linear.quantise import Quantised, can_block, to_blocks
from colonnade.kernels.linear.reference import Gate, NormWeights
from colonnade.kernels.registry import TRITON, choose
from colonnade.kernels.rotary import Rotation
from colonnade.model.attend import Attend, PagedView
from colonnade.model.attention import Attention, LatentAttention
from colonnade.model.cross_attention import EncoderDecoderView
from colonnade.model.embedding import Embedding
from colonnade.model.ffn import FeedForward
from colonnade.model.moe.experts import Experts
from colonnade.model.moe.layer import MixtureOfExperts
from colonnade.model.moe.router import Gate as RouterGate
from colonnade.model.norm import Norm
from colonnade.model.tensor_parallel_linear import Linear, QuantisableMatrix

CPU_KERNELS = ("native", "batch_invariant")
"""Names of the C++ kernels, for few rows and for any number (:mod:`~colonnade.model.batch_invariant`)."""

if TYPE_CHECKING:
    from colonnade.model.transformer import Block, Transformer


def enable(model: "Transformer") -> str:
    """Enable fused steps in all blocks of ``model``, where there are kernels; returns the name of attention's."""
    weight = next(model.parameters())
    if weight.is_cuda:
        if TRITON and weight.dtype != torch.float64:
            _select(model, "skinny", "auto")
        return "auto"
    if weight.device.type == "cpu" and model.axes.cp.size == 1 and cpu_kernels.available(weight.dtype):
        _select(model, "native", "native")
        store_in_blocks(model)
        for module in (model.embed, model.norm):
            if isinstance(module, Embedding | Norm) and module.kernels == "auto":
                module.kernels = "native"
        return "native"
    return "auto"


def store_in_blocks(model: "Transformer") -> None:
    """Store weights as the C++ kernels read them fastest: quantised ones in blocks, in huge pages."""
    rows: list[tuple[Callable[[Quantised], None], Quantised]] = []
    for module in model.modules():
        if isinstance(module, QuantisableMatrix) and module.quantised is not None:
            rows.append((partial(setattr, module, "quantised"), module.quantised))
        elif isinstance(module, Experts) and module.fetch is None:
            stacks = module.quantised
            rows += [(partial(stacks.__setitem__, part), weight) for part, weight in stacks.items()]
            if isinstance(getattr(module, "down", None), nn.Parameter):  # the inputs of an output are adjacent
                module.down.data = module.down.data.mT.contiguous().mT
    rows = [(store, weight) for store, weight in rows if not weight.blocked and can_block(weight)]
    arena = Arena(arena_bytes([x for _, weight in rows for x in (weight.values, weight.scales)]))
    while rows:
        store, weight = rows.pop(0)
        blocks = to_blocks(weight)
        store(blocks._replace(values=arena.copy(blocks.values), scales=arena.copy(blocks.scales)))


def _select(model: "Transformer", linears: str, fused: str) -> None:
    """Fuse all blocks with kernels ``fused``; rotary angles, products and the head use ``linears``."""
    for block in model.blocks:
        block.fused, block.kernels = True, fused  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, Linear) and module.kernels == "auto":
            module.kernels = linears
        elif isinstance(module, Experts) and fused == "native":
            module.kernels = fused
    if model.kernels == "auto":
        model.kernels = linears


def can_fuse_attention(block: "Block", x_tD: Tensor, attend: Attend) -> bool:
    """Whether :func:`attention_step` supports this block, these rows and this ``attend``."""
    attention = block.attention
    if isinstance(attention, LatentAttention):
        return _can_fuse_latent(block, attention, x_tD, attend)
    if not isinstance(attention, Attention) or attention.clip is not None or not _can_add_bias(block, attention.out):
        return False
    if attention.q_factor != 1.0 or (isinstance(attend, PagedView) and attend.near_Rn is not None):
        return False
    per_head = attention.q_norm is None or (isinstance(attention.q_norm, Norm) and attention.q_norm.bias is None)
    return per_head and isinstance(attend, PagedView) and _can_fuse(block, block.norm1, x_tD, attention)


def can_fuse_ffn(block: "Block", x_tD: Tensor, attend: Attend) -> bool:
    """Whether :func:`ffn_step` supports this block and these rows, in a serving step (a cache)."""
    ffn = block.ffn
    if isinstance(ffn, MixtureOfExperts):
        return _can_fuse_experts(block, ffn, x_tD) and attend.caches and _can_fuse(block, block.norm2, x_tD, ffn)
    if not isinstance(ffn, FeedForward) or (ffn.gate is None and block.kernels not in CPU_KERNELS):
        return False
    return _can_add_bias(block, ffn.down) and attend.caches and _can_fuse(block, block.norm2, x_tD, ffn)


def attention_step(block: "Block", x_TD: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
    """x + attention(norm(x))."""
    attention = block.attention
    if isinstance(attention, LatentAttention):
        return _latent_step(block, attention, x_TD, rotation, attend)
    assert isinstance(attention, Attention)
    assert isinstance(attend, PagedView)
    norms = None
    if isinstance(attention.q_norm, Norm) and isinstance(attention.k_norm, Norm):
        norms = _scale(attention.q_norm), _scale(attention.k_norm)
    qkv_Tz = _linear(block, x_TD, attention.qkv, norm=_scale(block.norm1))
    o_Tz = attend.from_qkv(qkv_Tz, rotation, norms).flatten(1)
    return _linear_residual(block, o_Tz, attention.out, x_TD)


def _can_fuse_latent(block: "Block", attention: LatentAttention, x_tD: Tensor, attend: Attend) -> bool:
    """Whether the C++ kernels support this latent attention and its cache."""
    if block.kernels != "native" or not isinstance(attend, PagedView) or attend.kernels != "native":
        return False
    if attend.pools.scales_Pp2 is not None or attend.near_Rn is not None or not _can_add_bias(block, attention.out):
        return False
    up_zR, pool_Pp1z = attention.kv_up.weight, attend.pools.k_PpKH
    plain = isinstance(attention.kv_norm, Norm) and cpu_latent.fits(x_tD, up_zR, pool_Pp1z, attention.rope)
    return plain and _can_fuse(block, block.norm1, x_tD, attention)


def _latent_step(
    block: "Block", attention: LatentAttention, x_TD: Tensor, rotation: Rotation | None, attend: Attend
) -> Tensor:
    assert isinstance(attend, PagedView)
    assert rotation is not None, "latent attention has rotary positions"
    norm, up_zR = _scale(block.norm1), attention.kv_up.weight
    if attention.q is not None:
        q_Tz = _linear(block, x_TD, attention.q, norm=norm)
    else:
        assert attention.q_down is not None
        assert attention.q_norm is not None
        assert attention.q_up is not None
        down_Tz = _linear(block, x_TD, attention.q_down, norm=norm)
        q_Tz = _linear(block, down_Tz, attention.q_up, norm=_scale(attention.q_norm))
    kv_Tz = _linear(block, x_TD, attention.kv_down, norm=norm)
    widths = {"plain": attention.plain, "value_width": attention.v_width}
    q_Tnz = cpu_latent.queries(
        q_Tz, kv_Tz, up_zR, attend.pools.k_PpKH, attend.slots_T, rotation, _scale(attention.kv_norm),
        **widths, factor=attention.absorbed_factor,
    )  # fmt: skip
    o_TnR = attend.of_written(q_Tnz).contiguous()  # torch's attention to long prompts returns strided ones
    o_Tz = cpu_latent.values(o_TnR, up_zR, **widths)
    return _linear_residual(block, o_Tz, attention.out, x_TD)


def can_fuse_cross(block: "Block", x_tD: Tensor, attend: EncoderDecoderView) -> bool:
    """Whether :func:`cross_step` supports this block and these rows, in a serving step (a cache)."""
    cross = block.cross
    if cross is None or block.norm_cross is None or block.kernels not in CPU_KERNELS or not attend.caches:
        return False
    return _can_add_bias(block, cross.out) and _can_fuse(block, block.norm_cross, x_tD, cross)


def cross_step(block: "Block", x_TD: Tensor, attend: EncoderDecoderView) -> Tensor:
    """x + cross(norm(x))."""
    assert block.cross is not None
    assert block.norm_cross is not None
    q_Tz = _linear(block, x_TD, block.cross.q, norm=_scale(block.norm_cross))
    return _linear_residual(block, block.cross.attend(q_Tz, attend), block.cross.out, x_TD)


def ffn_step(block: "Block", x_TD: Tensor, *, in_place: bool) -> Tensor:
    """x + ffn(norm(x)), written over x if ``in_place``: only for a tensor that nothing else uses."""
    ffn = block.ffn
    if isinstance(ffn, MixtureOfExperts):
        return _experts_step(block, ffn, x_TD)
    assert isinstance(ffn, FeedForward)
    h_Tf = _hidden(block, ffn, x_TD, _scale(block.norm2))
    return _linear_residual(block, h_Tf, ffn.down, x_TD, in_place=in_place)


def _hidden(block: "Block", ffn: FeedForward, x_TD: Tensor, norm: NormWeights) -> Tensor:
    if ffn.gate is None:
        return _linear(block, x_TD, ffn.up, norm=norm, activation=ffn.activation)
    return _linear(block, x_TD, ffn.up, norm=norm, gate=Gate(ffn.gate.matrix, ffn.gate.bias, ffn.activation))


def _can_fuse_experts(block: "Block", ffn: MixtureOfExperts, x_tD: Tensor) -> bool:
    """Whether the C++ kernels support these experts: a softmax router, and all experts on this rank."""
    experts = ffn.experts
    if block.kernels != "native" or not fuses_experts(ffn.moe) or ffn.router.bias_E is not None:
        return False
    if experts.fetch is not None or experts.adapter is not None or experts.float8:
        return False
    alone = block.axes.experts.all.size == block.axes.tp.size == 1
    return alone and cpu_experts.fits(x_tD, _softmax_router(ffn), experts.stored)


def fuses_dense_steps(config: ModelConfig) -> bool:
    """Whether the C++ kernels compute all of a pass, except experts."""
    pre = config.norm_order == "pre" and not config.embed_norm and not config.segments
    plain = config.positions in ("rotary", "learned") and config.score_scale is None
    plain = plain and config.encoder is None and config.relative_positions is None and config.qkv_clip is None
    return pre and plain and (not config.qk_norm or (config.norm == "rmsnorm" and config.qk_norm_over == "head"))


def fuses_experts(moe: MoeConfig) -> bool:
    """Whether the C++ kernels compute such experts."""
    router = moe.router
    simple = router.kind == "softmax" and router.gates == router.groups == 1 and router.dtype == "float32"
    return simple and moe.capacity is None and not (moe.shared_gate or moe.bias_rate or moe.merged)


def _softmax_router(ffn: MixtureOfExperts) -> cpu_experts.SoftmaxRouter:
    gate, moe = ffn.router.gates[0], ffn.moe
    assert isinstance(gate, RouterGate)
    assert gate.weight is not None
    scale = moe.router.scale * (1 - moe.output_mask)  # all experts are used, at the mean of training's mask
    return cpu_experts.SoftmaxRouter(gate.weight, gate.bias, moe.active, moe.normalises_weights, scale)


def _experts_step(block: "Block", ffn: MixtureOfExperts, x_TD: Tensor) -> Tensor:
    norm, experts = _scale(block.norm2), ffn.experts
    y_TD = cpu_experts.experts_step(x_TD, norm, _softmax_router(ffn), experts.stored, experts.activation)
    if ffn.shared is None:
        return y_TD
    return _linear_residual(block, _hidden(block, ffn.shared, x_TD, norm), ffn.shared.down, y_TD, in_place=True)


def _can_fuse(block: "Block", norm: nn.Module, x_tD: Tensor, part: nn.Module) -> bool:
    if not len(x_tD) or block.post or block.axes.sequence_parallel:
        return False
    most_rows, linears = cpu_kernels.MAX_ROWS if block.kernels == "native" else None, _linears_of(part)
    if block.kernels in CPU_KERNELS and not all(cpu_kernels.fits(x_tD, layer.matrix, most_rows) for layer in linears):
        return False
    biased = isinstance(norm, Norm) and norm.bias is not None
    if not isinstance(norm, Norm) or (biased and block.kernels not in CPU_KERNELS) or norm.kernels != "auto":
        return False
    if any(layer.float8 or layer.adapts for layer in linears):
        return False
    return not (torch.is_grad_enabled() and (x_tD.requires_grad or any(x.requires_grad for x in part.parameters())))


_LINEARS: WeakKeyDictionary[nn.Module, list[Linear]] = WeakKeyDictionary()


def _linears_of(part: nn.Module) -> list[Linear]:
    """The linear layers of a part of a block; searched once, because every step asks."""
    if part not in _LINEARS:
        _LINEARS[part] = [layer for layer in part.modules() if isinstance(layer, Linear)]
    return _LINEARS[part]


def _can_add_bias(block: "Block", layer: Linear) -> bool:
    """Whether a fused product can add the bias of a row-parallel ``layer``, if it has one."""
    return layer.bias is None or (block.kernels in CPU_KERNELS and block.axes.tp.size == 1)


def _scale(norm: nn.Module) -> NormWeights:
    assert isinstance(norm, Norm)
    return NormWeights(norm.weight, norm.eps, norm.bias)


def _linear(
    block: "Block",
    x_TD: Tensor,
    layer: Linear,
    *,
    norm: NormWeights | None = None,
    gate: Gate | None = None,
    activation: str | None = None,
    residual_TF: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    run = choose("fused_linear", x_TD.device.type, x_TD.dtype, block.kernels)
    return run(
        x_TD, layer.matrix, layer.bias,
        norm=norm, gate=gate, activation=activation, residual_TF=residual_TF, inplace=in_place,
    )  # fmt: skip


def _linear_residual(block: "Block", y_Tz: Tensor, layer: Linear, x_TD: Tensor, *, in_place: bool = False) -> Tensor:
    """x + W y, summed over the block's tp ranks."""
    if block.axes.tp.size == 1:
        return _linear(block, y_Tz, layer, residual_TF=x_TD, in_place=in_place)
    return x_TD + block.axes.leave_tp_region(_linear(block, y_Tz, layer))
