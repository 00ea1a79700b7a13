"""One Transformer: GPT-2, the Llama line, DeepSeek, BERT, and whatever else differs from them by a field of its config.

    out = model(stream, attend, head)

is training, scoring, prefill and decoding: ``stream`` is a flat run of tokens, ``attend`` decides which keys each
query sees and where they live, ``head`` what comes out. Collectives are written where they happen, on plain local
tensors, through the axes that a module is built with.

Under a pipeline a rank builds only the ``spans`` of blocks that it has, with the embedding beside the first block and
the head beside the last; names are those of the whole model, so that initialisation, checkpoints and the gradient norm
need not know. ``run`` is the forward pass of one span, which the whole model is too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels.registry import choose
from colonnade.kernels.rotary import Rotation
from colonnade.model import fused_block
from colonnade.model.activation_checkpointing import again
from colonnade.model.attend import Attend, Attending
from colonnade.model.attention import Attention, LatentAttention
from colonnade.model.bert_heads import BertLayers
from colonnade.model.dropout import ATTENTION, EMBEDDING, FFN, BlockDropout, drop
from colonnade.model.embedding import Embedding
from colonnade.model.ffn import FeedForward
from colonnade.model.head import Head, Projection
from colonnade.model.linear import Linear
from colonnade.model.moe import MixtureOfExperts, Report, Routed
from colonnade.model.moe.losses import attach_pooled
from colonnade.model.norm import Norm
from colonnade.model.rotary import frequencies
from colonnade.model.stream import Stream
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.layout import Placement, on_rows


class Block(nn.Module):
    """Attention, then the feed-forward part, each beside the residual stream; dropout before each addition.

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
        """``moe``: experts in the place of the feed-forward part, stored on ``experts_on`` if not on ``device``."""
        super().__init__()
        self.norm1 = Norm(config, config.width, device=device, dtype=dtype, placement=on_rows(axes))
        attention = Attention if config.latent is None else LatentAttention
        self.attention = attention(config, axes, device=device, dtype=dtype)
        self.norm2 = Norm(config, config.width, device=device, dtype=dtype, placement=on_rows(axes))
        self.ffn = (
            FeedForward(config, axes, device=device, dtype=dtype)
            if moe is None
            else MixtureOfExperts(config, moe, axes, device=device, dtype=dtype, experts_on=experts_on)
        )
        self.axes, self.post = axes, config.norm_order == "post"
        self.recompute = False
        self.fused = False
        """Whether steps go by :mod:`~colonnade.model.fused_block`, where they can: serving asks for it."""

    def forward(
        self,
        x_tD: Tensor,
        T: int,
        turn: Rotation | None,
        attend: Attend,
        noise: BlockDropout | None = None,
        routed: Routed | None = None,
    ) -> tuple[Tensor, Report | None]:
        """x_tD to x_tD: the residual stream of T tokens, or this rank's rows of it, which ``noise`` is of too; beside
        it what the experts did, in a block that has some, to which ``routed`` speaks.
        """
        if self.recompute:
            return again(self._run, x_tD, T, turn, attend, noise, routed)
        return self._run(x_tD, T, turn, attend, noise, routed)

    def _run(
        self,
        x_tD: Tensor,
        T: int,
        turn: Rotation | None,
        attend: Attend,
        noise: BlockDropout | None,
        routed: Routed | None,
    ) -> tuple[Tensor, Report | None]:
        if self.post:
            x_tD = self.norm1(x_tD + drop(self.attention(x_tD, T, turn, attend), noise, ATTENTION))
            y_tD, report = self._feed_forward(x_tD, T, noise, routed)
            return self.norm2(x_tD + drop(y_tD, noise, FFN)), report
        own = self.fused and noise is None and fused_block.attends(self, x_tD, attend)
        if own:
            x_tD = fused_block.attended(self, x_tD, turn, attend)
        else:
            x_tD = x_tD + drop(self.attention(self.norm1(x_tD), T, turn, attend), noise, ATTENTION)
        if self.fused and noise is None and fused_block.feeds(self, x_tD, attend):
            return fused_block.fed(self, x_tD, own=own), None
        y_tD, report = self._feed_forward(self.norm2(x_tD), T, noise, routed)
        return x_tD + drop(y_tD, noise, FFN), report

    def _feed_forward(
        self, x_tD: Tensor, T: int, noise: BlockDropout | None, routed: Routed | None
    ) -> tuple[Tensor, Report | None]:
        if isinstance(self.ffn, FeedForward):
            return self.ffn(x_tD, T), None
        assert routed is not None, "a block with experts needs the tokens"
        return self.ffn(x_tD, T, routed, noise)


class Transformer(nn.Module):
    """The model of ``config``, this rank's share of it by ``axes``; parameters are uninitialised."""

    kernels = "auto"
    """Which implementation turns positions into angles, and multiplies with the output projection
    (:mod:`~colonnade.kernels.registry`).
    """

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
        """Parameters that an earlier stage has too: theirs is the one that counts in the gradient's norm."""
        self.embed = None
        if first or (last and config.tied):
            # A tied weight at the other end of a pipeline is a copy, kept equal by summing the two gradients.
            self.embed = Embedding(config, axes, positions=first, **on)
            self.copies = frozenset() if first else frozenset({"embed.tokens.weight"})
        self.blocks = nn.ModuleList()
        for i in (i for span in spans for i in span):
            self.blocks.add_module(str(i), Block(config, axes, config.experts_of(i), **on, experts_on=experts_on))
        self.norm = None
        if last:  # in post-norm order the last block ends with a norm of its own
            pre = config.norm_order == "pre"
            self.norm = Norm(config, config.width, placement=on_rows(axes), **on) if pre else nn.Identity()
        self.top = BertLayers(config, axes, **on) if last and config.top != "unembed" else None
        self.unembed = None
        self.layout: dict[str, Placement] = {}
        if last and not config.tied:
            start, stop = axes.tp.part(config.vocab_size)
            self.unembed = Linear(config.width, stop - start, bias=False, **on)
            self.layout["unembed.weight"] = 0
        # Plain attributes, not buffers: a model built on the meta device has its frequencies all the same, and a
        # cast to bf16 leaves them in float32.
        self._theta, self._turn_factor = frequencies(config)

    def forward(self, stream: Stream, attend: Attending, head: Head) -> Any:
        """What ``head`` makes of the last residual stream."""
        return self.run(self.whole, None, stream, attend, head)

    def run(self, span: range, x_tD: Tensor | None, stream: Stream, attend: Attending, head: Head) -> Any:
        """The blocks of ``span``: x_tD, from the embedding where it begins with the first, to x_tD, or to what
        ``head`` makes of it where it ends with the last.
        """
        if self.axes.mover is not None:
            self.axes.mover.begin()
        T = len(stream.tokens_T)
        noise = stream.noise and stream.noise.rows(self.axes.rows(T))
        if x_tD is None:
            assert self.embed is not None, "the first span begins with the embedding"
            x_tD = drop(self.embed(stream), noise and noise.at_embedding, EMBEDDING)
        assert x_tD is not None
        turn = self._turn(stream.positions_T, x_tD.dtype)
        for i in span:
            block, sees = self.blocks.get_submodule(str(i)), attend.at(i, self.config.window_of(i))
            routed = Routed.at(i, stream.tokens_T, stream.routing) if self.config.experts_of(i) else None
            x_tD, report = block(x_tD, T, turn, sees, noise and noise.at(i), routed)
            if report is not None and stream.routing is not None:
                stream.routing.note(i, report)
        if span.stop < self.config.layers:
            return x_tD
        assert self.norm is not None, "the last span ends with the head"
        normed_tD: Tensor = self.norm(x_tD)
        if stream.routing is not None and self.config.moe is not None:
            moe = stream.routing.moe or self.config.moe
            layers = moe.layers_among(self.config.layers)
            normed_tD = attach_pooled(normed_tD, stream.routing, moe, layers, self.axes.grid.tokens)
        return head(normed_tD, T, self.output)

    @property
    def output(self) -> Projection:
        """What the heads need of the model; to be asked anew in each pass, for FSDP gathers the weights."""
        if self.unembed is not None:
            weight_vD = self.unembed.matrix
        else:
            assert self.embed is not None
            weight_vD = self.embed.tokens.weight
        return Projection(weight_vD, self.axes, self.config.vocab_size, self.top, self.kernels)

    def _turn(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation | None:
        if self.config.positions != "rotary":
            return None
        if self._theta.device != positions_T.device:
            self._theta = self._theta.to(positions_T.device)
        run = choose("rope_cos_sin", positions_T.device.type, dtype, self.kernels)
        return run(positions_T, self._theta, self._turn_factor, dtype)

    def whole_shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter and buffer over all ranks, by name."""
        whole = Transformer(self.config, device="meta")
        return {name: x.shape for name, x in (*whole.named_parameters(), *whole.named_buffers())}
