"""One Transformer: GPT-2, the Llama line, and whatever else differs from them by a field of its config.

    out = model(stream, attend, head)

is training, scoring, prefill and decoding: ``stream`` is a flat run of tokens, ``attend`` decides which keys each
query sees and where they live, ``head`` what comes out. Collectives are written where they happen, on plain local
tensors, through the axes that a module is built with.
"""

from typing import Any

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.model.attend import Attend, Attending
from colonnade.model.attention import Attention
from colonnade.model.embedding import Embedding
from colonnade.model.ffn import FeedForward
from colonnade.model.head import Head
from colonnade.model.linear import Linear
from colonnade.model.norm import Norm
from colonnade.model.rotary import Rotation, frequencies, rotation
from colonnade.model.stream import Stream
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.layout import Placement, on_rows


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)) (pre-norm, Radford 2019)."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.norm1 = Norm(config, config.width, device=device, dtype=dtype, placement=on_rows(axes))
        self.attention = Attention(config, axes, device=device, dtype=dtype)
        self.norm2 = Norm(config, config.width, device=device, dtype=dtype, placement=on_rows(axes))
        self.ffn = FeedForward(config, axes, device=device, dtype=dtype)

    def forward(self, x_tD: Tensor, T: int, turn: Rotation | None, attend: Attend) -> Tensor:
        """x_tD to x_tD: the residual stream of T tokens, or this rank's rows of it."""
        x_tD = x_tD + self.attention(self.norm1(x_tD), T, turn, attend)
        return x_tD + self.ffn(self.norm2(x_tD), T)


class Transformer(nn.Module):
    """The model of ``config``, this rank's share of it by ``axes``; parameters are uninitialised."""

    def __init__(
        self,
        config: ModelConfig,
        axes: Axes = SOLO_AXES,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.config, self.axes = config, axes
        device = torch.device(device)
        self.embed = Embedding(config, axes, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(config, axes, device=device, dtype=dtype) for _ in range(config.layers))
        self.norm = Norm(config, config.width, device=device, dtype=dtype, placement=on_rows(axes))
        self.unembed = None
        self.layout: dict[str, Placement] = {}
        if not config.tied:
            start, stop = axes.tp.part(config.vocab_size)
            self.unembed = Linear(config.width, stop - start, bias=False, device=device, dtype=dtype)
            self.layout["unembed.weight"] = 0
        # Plain attributes, not buffers: a model built on the meta device has its frequencies all the same, and a
        # cast to bf16 leaves them in float32.
        self._theta, self._turn_factor = frequencies(config)

    def forward(self, stream: Stream, attend: Attending, head: Head) -> Any:
        """What ``head`` makes of the last residual stream."""
        T = len(stream.tokens_T)
        x_tD = self.embed(stream)
        turn = self._turn(stream.positions_T, x_tD.dtype)
        for i, block in enumerate(self.blocks):
            x_tD = block(x_tD, T, turn, attend.at(i, self.config.window_of(i)))
        weight_vD = self.embed.tokens.weight if self.unembed is None else self.unembed.weight
        return head(self.norm(x_tD), T, weight_vD, self.axes, self.config.vocab_size)

    def _turn(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation | None:
        if self.config.positions != "rotary":
            return None
        if self._theta.device != positions_T.device:
            self._theta = self._theta.to(positions_T.device)
        return rotation(positions_T, self._theta, self._turn_factor, dtype)

    def whole_shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter over all tp ranks, by name."""
        whole = Transformer(self.config, device="meta")
        return {name: p.shape for name, p in whole.named_parameters()}
