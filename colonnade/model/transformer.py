"""One Transformer for all model families: GPT-2, Llama, DeepSeek, BERT and others differ by their config only.

    out = model(stream, attend, head)

is training, scoring, prefill and decoding: ``stream`` has the tokens of all sequences, ``attend`` decides which keys
each query sees and where they are stored, ``head`` makes the result. Modules call collectives explicitly, on plain
local tensors, through the axes that they are built with.

With pipeline parallelism a rank builds only its ``spans`` of blocks, with the embedding before the first block and the
head after the last. Parameter names are those of the whole model, so initialisation, checkpoints and the gradient norm
do not depend on the pipeline. ``run`` is the forward pass of one span; the whole model is one span, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels.registry import choose
from colonnade.kernels.rotary import Rotation
from colonnade.model import fused_block
from colonnade.model.activation_checkpointing import checkpointed
from colonnade.model.attend import Attend, AttendBackend, Packed
from colonnade.model.attention import Attention, LatentAttention
from colonnade.model.cross_attention import (
    Bridge,
    CrossAttention,
    EncoderDecoderAttend,
    EncoderDecoderView,
    with_relative_bias,
)
from colonnade.model.dropout import ATTENTION, CROSS, EMBEDDING, FFN, BlockDropout, apply_dropout
from colonnade.model.embedding import Embedding, Stream
from colonnade.model.encoder import AudioFrontEnd, Source
from colonnade.model.ffn import FeedForward
from colonnade.model.moe import LayerReport, LayerRouting, MixtureOfExperts
from colonnade.model.moe.losses import attach_model_balance
from colonnade.model.moe.router import needs_sequences
from colonnade.model.moe.routing_context import Routing, TokenGroups
from colonnade.model.norm import Norm
from colonnade.model.output_heads import BertLayers, Head, OutputProjection
from colonnade.model.relative_positions import RelativeBias
from colonnade.model.rotary import frequencies
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.parallel.axis import SOLO, SOLO_AXES, Axes
from colonnade.parallel.layout import Placement, residual_placement


class Block(nn.Module):
    """Attention, cross attention in the decoder of an encoder–decoder, then the feed-forward part.

    Each is added to the residual stream after dropout.

    pre   x + f(norm(x))      Radford 2019; for BERT Megatron-LM, arXiv 1909.08053, figure 7b
    post  norm(x + f(x))      Vaswani 2017, the original BERT; figure 7a
    """

    def __init__(
        self,
        config: ModelConfig,
        axes: Axes,
        moe: MoeConfig | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        experts_on: torch.device | None = None,
    ):
        """``moe``: experts instead of the feed-forward part, stored on ``experts_on`` if not on ``device``."""
        super().__init__()
        self.norm1 = Norm(config, config.width, device=device, dtype=dtype, placement=residual_placement(axes))
        attention = Attention if config.latent is None else LatentAttention
        self.attention = attention(config, axes, device=device, dtype=dtype)
        self.cross = self.norm_cross = None
        if config.encoder is not None:
            self.norm_cross = Norm(config, config.width, device=device, dtype=dtype, placement=residual_placement(axes))
            self.cross = CrossAttention(config, axes, device=device, dtype=dtype)
        self.norm2 = Norm(config, config.width, device=device, dtype=dtype, placement=residual_placement(axes))
        self.ffn = (
            FeedForward(config, axes, device=device, dtype=dtype)
            if moe is None
            else MixtureOfExperts(config, moe, axes, device=device, dtype=dtype, experts_on=experts_on)
        )
        self.axes, self.post = axes, config.norm_order == "post"
        self.recompute = False
        self.fused = False
        """Whether inference steps use :mod:`~colonnade.model.fused_block` where possible; serving sets it."""
        self.kernels = "auto"
        """The implementation of fused steps (:mod:`~colonnade.kernels.registry`)."""

    def forward(
        self,
        x_tD: Tensor,
        T: int,
        rotation: Rotation | None,
        attend: Attend,
        dropout: BlockDropout | None = None,
        routing: LayerRouting | None = None,
    ) -> tuple[Tensor, LayerReport | None]:
        """(x_tD, the report of the experts if any): the residual stream of T tokens, or this rank's rows of it.

        ``dropout`` has the rows of ``x_tD``; ``routing`` is for a block with experts.
        """
        if self.recompute:
            return checkpointed(self._run, x_tD, T, rotation, attend, dropout, routing)
        return self._run(x_tD, T, rotation, attend, dropout, routing)

    def _run(
        self,
        x_tD: Tensor,
        T: int,
        rotation: Rotation | None,
        attend: Attend,
        dropout: BlockDropout | None,
        routing: LayerRouting | None,
    ) -> tuple[Tensor, LayerReport | None]:
        if self.post:
            x_tD = self.norm1(x_tD + apply_dropout(self.attention(x_tD, T, rotation, attend), dropout, ATTENTION))
            y_tD, report = self._feed_forward(x_tD, T, dropout, routing)
            return self.norm2(x_tD + apply_dropout(y_tD, dropout, FFN)), report
        fuse = self.fused and dropout is None
        own = attend.own if isinstance(attend, EncoderDecoderView) else attend
        fused_attention = fuse and fused_block.can_fuse_attention(self, x_tD, own)
        if fused_attention:
            x_tD = fused_block.attention_step(self, x_tD, rotation, own)
        else:
            x_tD = x_tD + apply_dropout(self.attention(self.norm1(x_tD), T, rotation, attend), dropout, ATTENTION)
        if self.cross is not None and self.norm_cross is not None:
            assert isinstance(attend, EncoderDecoderView), (
                "a decoder with an encoder needs EncoderDecoderAttend(own, source, memory)"
            )
            if fuse and fused_block.can_fuse_cross(self, x_tD, attend):
                x_tD = fused_block.cross_step(self, x_tD, attend)
            else:
                x_tD = x_tD + apply_dropout(self.cross(self.norm_cross(x_tD), T, attend), dropout, CROSS)
        if fuse and fused_block.can_fuse_ffn(self, x_tD, attend):
            return fused_block.ffn_step(self, x_tD, in_place=fused_attention), None
        y_tD, report = self._feed_forward(self.norm2(x_tD), T, dropout, routing)
        return x_tD + apply_dropout(y_tD, dropout, FFN), report

    def _feed_forward(
        self, x_tD: Tensor, T: int, dropout: BlockDropout | None, routing: LayerRouting | None
    ) -> tuple[Tensor, LayerReport | None]:
        if isinstance(self.ffn, FeedForward):
            return self.ffn(x_tD, T), None
        assert routing is not None, "a block with experts needs the tokens"
        return self.ffn(x_tD, T, routing, dropout)


class Transformer(nn.Module):
    """The model of ``config``, this rank's share of it by ``axes``; parameters are uninitialised."""

    kernels = "auto"
    """The implementation of rotary angles and of the output projection (:mod:`~colonnade.kernels.registry`)."""

    def __init__(
        self,
        config: ModelConfig,
        axes: Axes = SOLO_AXES,
        *,
        spans: Sequence[range] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        experts_on: torch.device | None = None,
    ):
        """``experts_on``: where experts are stored, if not on ``device``
        (:mod:`colonnade.model.moe.expert_offload`).
        """
        super().__init__()
        self.config, self.axes = config, axes
        on = {"device": torch.device(device), "dtype": dtype}
        self.whole = range(config.layers)
        spans = [self.whole] if spans is None else spans
        first, last = any(span.start == 0 for span in spans), any(span.stop == config.layers for span in spans)
        self.copies: frozenset[str] = frozenset()
        """Parameters that an earlier pipeline stage has too, which counts them in the gradient norm."""
        self.embed = None
        if first or (last and config.tied):
            # On the last pipeline stage a tied weight is a copy: the two gradients are summed.
            self.embed = Embedding(config, axes, positions=first, **on)
            self.embed.tokens.never_quantise = not config.tied
            self.copies = frozenset() if first else frozenset({"embed.tokens.weight"})
        self.blocks = nn.ModuleList()
        for i in (i for span in spans for i in span):
            self.blocks.add_module(str(i), Block(config, axes, config.experts_of(i), **on, experts_on=experts_on))
        self._add_encoder(config, axes, on, experts_on)
        self.norm = None
        if last:  # in post-norm order the last block ends with its norm
            pre = config.norm_order == "pre"
            self.norm = Norm(config, config.width, placement=residual_placement(axes), **on) if pre else nn.Identity()
        self.top = BertLayers(config, axes, **on) if last and config.task_head != "unembed" else None
        self.unembed = None
        self.layout: dict[str, Placement] = {}
        if last and not config.tied:
            start, stop = axes.tp.part(config.vocab_size)
            self.unembed = Linear(config.width, stop - start, bias=False, **on)
            self.layout["unembed.weight"] = 0
        # Plain attributes, not buffers: they are real on the meta device too, and stay float32 in a cast to bf16.
        self._theta, self._rotation_factor = frequencies(config)

    def _add_encoder(
        self, config: ModelConfig, axes: Axes, on: dict[str, Any], experts_on: torch.device | None
    ) -> None:
        """The encoder's parts, and the tables of relative positions."""
        self.front_end = self.encoder_norm = self.bridge = None
        self.relative = self.encoder_relative = None
        self.encoder_blocks = nn.ModuleList()
        near = config.relative_positions
        if near is not None:
            self.relative = RelativeBias(near, config.heads, axes, causal=config.causal, **on)
        if config.encoder is None:
            return
        stack = config.encoder_stack
        if config.encoder.reads == "audio":
            self.front_end = AudioFrontEnd(config, axes, **on)
        for i in range(stack.layers):
            self.encoder_blocks.append(Block(stack, axes, stack.experts_of(i), **on, experts_on=experts_on))
        if near is not None:
            self.encoder_relative = RelativeBias(near, config.heads, axes, causal=False, **on)
        self.encoder_norm = Norm(stack, stack.width, placement=residual_placement(axes), **on)
        self.bridge = Bridge(config, axes, **on)

    def encode(self, source: Source, attend: AttendBackend) -> Tensor:
        """x_sD, the encoder's normalised output for the sources, each of which attends to itself in ``attend``."""
        assert self.encoder_norm is not None, "this model has no encoder"
        S = len(source.positions_S)
        dropout = source.dropout and source.dropout.rows(self.axes.rows(S))
        if self.front_end is not None:
            x_sD = self.front_end(source)
            x_sD = x_sD[self.axes.rows(S)] if self.axes.sequence_parallel else x_sD
        else:
            assert self.embed is not None
            x_sD = self.embed.of_source(source.tokens_S, source.positions_S)
        x_sD = apply_dropout(x_sD, dropout.at_embedding if dropout else None, EMBEDDING)
        rotation = self.rotation_of(source.positions_S, x_sD.dtype)
        if self.encoder_relative is not None:
            attend = with_relative_bias(attend, self.encoder_relative.expand())
        for i, block in enumerate(self.encoder_blocks):
            number, routing = self.config.layers + i, None
            if self.config.experts_of(number) is not None:
                routing = self._source_routing(number, source, attend)
            x_sD, report = block(x_sD, S, rotation, attend.at(i, None), dropout and dropout.at(i), routing)
            if report is not None and source.routing is not None:
                source.routing.record(number, report)
        return self.encoder_norm(x_sD)

    def _source_routing(self, number: int, source: Source, attend: AttendBackend) -> LayerRouting:
        """The routing of encoder block ``number``; sources are whole, also in inference, and so drop as trained."""
        if source.routing is not None:
            return LayerRouting.at(number, source.tokens_S, source.routing)
        routing, moe = None, self.config.moe
        if moe is not None and needs_sequences(moe):
            assert isinstance(attend, Packed), "sources are packed"
            S, device = len(source.tokens_S), source.tokens_S.device
            groups = TokenGroups.sequences(attend.cu_seqlens, S, SOLO)
            routing = Routing(torch.arange(S, device=device), token_groups=groups)
        return LayerRouting(source.tokens_S, routing, None)

    def expert_layer(self, number: int) -> MixtureOfExperts:
        """The experts of a block; those of an encoder are numbered after the decoder's."""
        layers = self.config.layers
        stack, i = (self.blocks, number) if number < layers else (self.encoder_blocks, number - layers)
        ffn = stack.get_submodule(str(i)).get_submodule("ffn")
        assert isinstance(ffn, MixtureOfExperts), f"block {number} has no experts"
        return ffn

    def _with_memory(self, stream: Stream, attend: AttendBackend) -> AttendBackend:
        """``attend`` with the keys and values of this pass's sources in its memory."""
        if self.bridge is None or stream.source is None:
            return attend
        assert isinstance(attend, EncoderDecoderAttend), (
            "a decoder with an encoder needs EncoderDecoderAttend(own, source, memory)"
        )
        assert attend.source is not None, "the sources of a pass need their attention"
        x_sD = self.encode(stream.source, attend.source)
        memory = attend.memory.write(self.bridge(x_sD, len(stream.source.positions_S)))
        return replace(attend, memory=memory)

    def forward(self, stream: Stream, attend: AttendBackend, head: Head) -> Any:
        """The result of ``head`` on the last residual stream."""
        return self.run(self.whole, None, stream, attend, head)

    def run(self, span: range, x_tD: Tensor | None, stream: Stream, attend: AttendBackend, head: Head) -> Any:
        """Run the blocks of ``span`` on x_tD (None: on the embedding) to x_tD, or to the head's result."""
        if self.axes.row_transfer is not None:
            self.axes.row_transfer.reset()
        T = len(stream.tokens_T)
        dropout = stream.dropout and stream.dropout.rows(self.axes.rows(T))
        if x_tD is None:
            assert self.embed is not None, "the first span begins with the embedding"
            x_tD = apply_dropout(self.embed(stream), dropout.at_embedding if dropout else None, EMBEDDING)
        assert x_tD is not None
        rotation = self.rotation_of(stream.positions_T, x_tD.dtype)
        attend = self._with_memory(stream, attend)
        if self.relative is not None:
            attend = with_relative_bias(attend, self.relative.expand())
        for i in span:
            block, view = self.blocks.get_submodule(str(i)), attend.at(i, self.config.window_of(i))
            routing = LayerRouting.at(i, stream.tokens_T, stream.routing) if self.config.experts_of(i) else None
            x_tD, report = block(x_tD, T, rotation, view, dropout and dropout.at(i), routing)
            if report is not None and stream.routing is not None:
                stream.routing.record(i, report)
        if span.stop < self.config.layers:
            return x_tD
        assert self.norm is not None, "the last span ends with the head"
        normed_tD: Tensor = self.norm(x_tD)
        if stream.routing is not None and self.config.moe is not None:
            moe = stream.routing.moe or self.config.moe
            layers = moe.count_expert_layers(self.config.layers)
            normed_tD = attach_model_balance(normed_tD, stream.routing, moe, layers, self.axes.experts.tokens)
        return head(normed_tD, T, self.output)

    @property
    def output(self) -> OutputProjection:
        """The parts of the model that heads use; read in each pass, because FSDP gathers the weights."""
        if self.unembed is not None:
            weight_vD = self.unembed.matrix
        else:
            assert self.embed is not None
            weight_vD = self.embed.tokens.matrix
        scale = self.config.width**-0.5 if self.config.scale_decoder_outputs else 1.0
        return OutputProjection(weight_vD, self.axes, self.config.vocab_size, self.top, self.kernels, scale)

    def rotation_of(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation | None:
        """Rotary angles of these positions; None for other kinds of positions."""
        if self.config.positions != "rotary":
            return None
        if self._theta.device != positions_T.device:
            self._theta = self._theta.to(positions_T.device)
        run = choose("rope_cos_sin", positions_T.device.type, dtype, self.kernels)
        return run(positions_T, self._theta, self._rotation_factor, dtype)

    def global_shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter and buffer over all ranks, by name."""
        whole = Transformer(self.config, device="meta")
        return {name: x.shape for name, x in (*whole.named_parameters(), *whole.named_buffers())}
