"""The Emformer encoder: blocks over frames, with segment attention (:mod:`colonnade.model.segments`).

    x += attention(norm1 x)        x = norm3(x + ffn(norm2 x))        m = tanh(attention(mean norm1 x))

Attention and feed-forward layers are the Transformer's, tensor-parallel by heads and hidden units. Whole sequences and
streams run the same lines; the attend is the only difference.
"""

from typing import Any

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.model.attend import Attend
from colonnade.model.attention import Attention
from colonnade.model.ffn import FeedForward
from colonnade.model.initialise import fill
from colonnade.model.norm import Norm
from colonnade.model.segment_cache import SegmentCache, SegmentStep
from colonnade.model.segments import SegmentBatch, SegmentRows, Segments
from colonnade.parallel.axis import SOLO_AXES, Axes


class SegmentBlock(nn.Module):
    """One layer over the rows of a batch, and its memories."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        on: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention, self.ffn = Attention(config, axes, **on), FeedForward(config, axes, **on)
        self.norm1, self.norm2, self.norm3 = (Norm(config, config.width, **on) for _ in range(3))

    def forward(
        self, x_TD: Tensor, memory_SD: Tensor | None, rows: SegmentRows, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """(x, memories of the next layer) from frames and copies and this layer's memories."""
        T, normed_TD = len(x_TD), self.norm1(x_TD)
        input_TD = normed_TD
        if memory_SD is not None:
            input_TD = torch.cat((normed_TD, rows.mean(normed_TD[: rows.frames]), memory_SD))
        y_TD = self.attention(input_TD, len(input_TD), None, attend)
        x_TD = x_TD + y_TD[:T]
        x_TD = self.norm3(x_TD + self.ffn(self.norm2(x_TD), T))
        return x_TD, None if memory_SD is None else torch.tanh(y_TD[T : T + rows.segments])


class SegmentEncoder(nn.Module):
    """``config.layers`` blocks; parameters are uninitialised until :meth:`initialise`."""

    def __init__(
        self,
        config: ModelConfig,
        axes: Axes = SOLO_AXES,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if config.latent is not None or config.moe is not None:
            raise ConfigError("segment attention supports neither latent attention nor experts; remove both")
        if axes.sequence_parallel:
            raise PlanError("segment attention does not shard frames over tp; set plan.sp to false")
        self.config, self.axes = config, axes
        on: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.blocks = nn.ModuleList(SegmentBlock(config, axes, **on) for _ in range(config.layers))

    def forward(self, x_TD: Tensor, attend: "SegmentBatch | SegmentStep") -> Tensor:
        """The encoded frames, T of them: without the copies of the right context.

        A :class:`SegmentStep` takes its frames, then its copies; a :class:`SegmentBatch` makes the copies itself.
        """
        rows = attend.rows
        if isinstance(attend, SegmentBatch):
            x_TD = torch.cat((x_TD, x_TD[rows.copy_of]))
        memory_SD = rows.mean(x_TD[: rows.frames]) if rows.memory else None
        for i, block in enumerate(self.blocks):
            x_TD, memory_SD = block(x_TD, memory_SD, rows, attend.at(i, None))
        return x_TD[: rows.frames]

    def cache(self, sizes: Segments, streams: int) -> SegmentCache:
        """Slots for ``streams`` streams of at most these sizes."""
        config, weight = self.config, next(self.parameters())
        on = {"device": weight.device, "dtype": weight.dtype}
        return SegmentCache(
            sizes, streams, config.layers, config.kv_heads // self.axes.tp.size, config.head_width, **on
        )

    def global_shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter over all ranks, by name."""
        return {name: x.shape for name, x in SegmentEncoder(self.config, device="meta").named_parameters()}

    def initialise(self, seed: int) -> "SegmentEncoder":
        """Initialise by name from ``seed``, the same for every plan; returns the encoder."""
        config = self.config
        std, residual_std = config.init_std, config.init_std / (2 * config.layers) ** 0.5
        fill(self, self.axes, self.global_shapes(), seed, std=std, residual_std=residual_std)
        return self
