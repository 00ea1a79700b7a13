"""The cache-aware Conformer encoder (Noroozi et al., arXiv 2312.17279), for both whole recordings and streams.

    x += ½ ffn1(norm x)      x += attention(norm x)      x += conv(norm x)      x += ½ ffn2(norm x)      x = norm x

A frame attends to its segment and to whole segments before it, so there is look-ahead within a segment only. Scores
have relative positions (Transformer-XL, arXiv 1901.02860, section 3.3), d the distance from key to query:

    score = ((q + u)·k + (q + v)·W_r pe(d)) / √H        pe(d): sine and cosine of d / 10000^(2i/D), side by side

    conv    W_out silu(norm(depthwise(glu(W_in x))))    depthwise: causal, of the K frames that end with its own

Heads and hidden units are tensor-parallel; the convolution module, a small part, is replicated.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.model.ffn import FeedForward
from colonnade.model.initialise import fill
from colonnade.model.norm import Norm
from colonnade.model.segment_cache import SegmentCache, SegmentStep, SegmentStepView
from colonnade.model.segments import RelativeKeys, SegmentBatch, Segments
from colonnade.model.tensor_parallel_linear import Linear, column_parallel, row_parallel
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.layout import WHOLE, Placement, residual_placement

SegmentView = SegmentBatch | SegmentStepView


def relative_positions(distances: range, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """pe_PD of each distance; angles in float32, as in the authors' code."""
    rates = 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = torch.arange(distances.start, distances.stop, device=device)[:, None].float() * (1.0 / rates)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1).to(dtype)


class RelativeAttention(nn.Module):
    """Attention with relative positions, over heads of this rank."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.axes, self.H = axes, config.head_width
        n, on = config.heads // axes.tp.size, {"device": device, "dtype": dtype}
        self.qkv = Linear(config.width, 3 * n * self.H, bias=config.qkv_bias, **on)
        self.out = Linear(n * self.H, config.width, bias=config.out_bias, **on)
        self.relative = Linear(config.width, n * self.H, bias=False, **on)
        self.key_bias, self.position_bias = (nn.Parameter(torch.empty(n, self.H, **on)) for _ in range(2))
        self.layout: dict[str, Placement] = {"qkv.weight": 0, "out.weight": 1, "relative.weight": 0}
        self.layout |= {"key_bias": 0, "position_bias": 0}
        self.layout |= {"qkv.bias": 0} if config.qkv_bias else {}
        self.layout |= {"out.bias": residual_placement(axes)} if config.out_bias else {}

    def forward(self, x_TD: Tensor, position_PD: Tensor, attend: SegmentView) -> Tensor:
        """y_TD; ``position_PD`` are the positions of ``attend.distances``."""
        (qkv_Tz,) = column_parallel(self.axes, x_TD, len(x_TD), self.qkv)
        q_TnH, k_TnH, v_TnH = qkv_Tz.unflatten(-1, (-1, 3, self.H)).unbind(2)
        r_PnH = self.relative(position_PD).unflatten(-1, (-1, self.H))
        o_TnH = attend(q_TnH + self.key_bias, k_TnH, v_TnH, RelativeKeys(q_TnH + self.position_bias, r_PnH))
        return row_parallel(self.axes, o_TnH.flatten(1), self.out)


class ConvolutionModule(nn.Module):
    """Pointwise, gate, causal depthwise convolution, LayerNorm, SiLU, pointwise; the same on all ranks."""

    def __init__(self, config: ModelConfig, kernel: int, bias: bool, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        D, on = config.width, {"device": device, "dtype": dtype}
        self.kernel = kernel
        self.expand, self.project = Linear(D, 2 * D, bias=bias, **on), Linear(D, D, bias=bias, **on)
        self.depthwise = nn.Parameter(torch.empty(D, kernel, **on))
        self.depthwise_bias = nn.Parameter(torch.empty(D, **on)) if bias else None
        self.norm = Norm(config, D, **on)
        self.layout: dict[str, Placement] = dict.fromkeys(("expand.weight", "project.weight", "depthwise"), WHOLE)
        if bias:
            self.layout |= dict.fromkeys(("expand.bias", "project.bias", "depthwise_bias"), WHOLE)
        self.uniform = {"depthwise": kernel**-0.5}

    def forward(self, x_TD: Tensor, attend: SegmentView) -> Tensor:
        """y_TD."""
        if not len(x_TD):
            return x_TD  # conv1d refuses fewer rows than its kernel
        x_ED, place_T = attend.history(F.glu(self.expand(x_TD), 1), self.kernel)
        y_DE = F.conv1d(x_ED.T[None], self.depthwise[:, None], self.depthwise_bias, groups=len(self.depthwise))[0]
        return self.project(F.silu(self.norm(y_DE.T.index_select(0, place_T))))


class ConformerBlock(nn.Module):
    """One layer."""

    def __init__(
        self, config: ModelConfig, kernel: int, conv_bias: bool, axes: Axes, *, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        on: dict[str, Any] = {"device": device, "dtype": dtype}
        self.ffn1, self.ffn2 = (FeedForward(config, axes, **on) for _ in range(2))
        self.attention = RelativeAttention(config, axes, **on)
        self.conv = ConvolutionModule(config, kernel, conv_bias, **on)
        self.norm1, self.norm2, self.norm3, self.norm4, self.norm5 = (
            Norm(config, config.width, **on) for _ in range(5)
        )

    def forward(self, x_TD: Tensor, position_PD: Tensor, attend: SegmentView) -> Tensor:
        """x_TD of the next layer."""
        T = len(x_TD)
        x_TD = x_TD + 0.5 * self.ffn1(self.norm1(x_TD), T)
        x_TD = x_TD + self.attention(self.norm2(x_TD), position_PD, attend)
        x_TD = x_TD + self.conv(self.norm3(x_TD), attend)
        x_TD = x_TD + 0.5 * self.ffn2(self.norm4(x_TD), T)
        return self.norm5(x_TD)


class ConformerEncoder(nn.Module):
    """``config.layers`` blocks; parameters are uninitialised until :meth:`initialise`."""

    def __init__(
        self,
        config: ModelConfig,
        kernel: int,
        conv_bias: bool = True,
        axes: Axes = SOLO_AXES,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if config.latent is not None or config.moe is not None or config.kv_heads != config.heads:
            raise ConfigError("the Conformer supports no latent attention, experts or grouped heads; remove them")
        if axes.sequence_parallel:
            raise PlanError("the Conformer does not shard frames over tp; set plan.sp to false")
        self.config, self.kernel, self.conv_bias, self.axes = config, kernel, conv_bias, axes
        on: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.blocks = nn.ModuleList(ConformerBlock(config, kernel, conv_bias, axes, **on) for _ in range(config.layers))

    def forward(self, x_TD: Tensor, attend: SegmentBatch | SegmentStep) -> Tensor:
        """The encoded frames."""
        position_PD = relative_positions(attend.distances, x_TD.shape[1], x_TD.dtype, x_TD.device)
        for i, block in enumerate(self.blocks):
            x_TD = block(x_TD, position_PD, attend.at(i, None))
        return x_TD

    def cache(self, sizes: Segments, streams: int) -> SegmentCache:
        """Slots for ``streams`` streams of at most these sizes."""
        config, weight = self.config, next(self.parameters())
        if sizes.right or sizes.memory:
            raise ConfigError(f"right {sizes.right} and memory {sizes.memory}; the Conformer has neither, use 0")
        return SegmentCache(
            sizes, streams, config.layers, config.heads // self.axes.tp.size, config.head_width,
            history=self.kernel - 1, width=config.width, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip

    def global_shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter over all ranks, by name."""
        whole = ConformerEncoder(self.config, self.kernel, self.conv_bias, device="meta")
        return {name: x.shape for name, x in whole.named_parameters()}

    def initialise(self, seed: int) -> "ConformerEncoder":
        """Initialise by name from ``seed``, the same for every plan; returns the encoder."""
        config = self.config
        std, residual_std = config.init_std, config.init_std / (2 * config.layers) ** 0.5
        fill(self, self.axes, self.global_shapes(), seed, std=std, residual_std=residual_std)
        return self
