"""The experts of one layer: this rank's share of them, and of each one's hidden units."""

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels.choose import choose
from colonnade.kernels.experts.reference import Weights
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Experts as Stack
from colonnade.parallel.layout import Placement


class Experts(nn.Module):
    """Stacks of weights, hidden units first: (e, f, D) with e = E/ep experts and f = F/sh hidden units."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.activation = config.activation
        first, stop = axes.grid.ep.part(moe.experts)
        start, end = axes.grid.sh.part(moe.ffn_width)
        e, f, D = stop - first, end - start, config.width

        def stack(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate = stack(e, f, D) if config.gated else None
        self.up, self.down = stack(e, f, D), stack(e, f, D)
        self.layout: dict[str, Placement] = {"up": Stack(1), "down": Stack(1)}
        self.up_bias = self.gate_bias = self.down_bias = None
        if config.gated:
            self.layout["gate"] = Stack(1)
        if config.ffn_bias:
            self.up_bias, self.down_bias = stack(e, f), stack(e, D)
            self.layout |= {"up_bias": Stack(1), "down_bias": Stack()}
            if config.gated:
                self.gate_bias = stack(e, f)
                self.layout["gate_bias"] = Stack(1)

    @property
    def weights(self) -> Weights:
        """This rank's, as the kernels take them."""
        return Weights(self.up, self.down, self.gate, self.up_bias, self.gate_bias, self.down_bias)

    def forward(self, x_RD: Tensor, ends_e: Tensor, weights: Weights) -> Tensor:
        """y_RD of rows in the order of ``weights``' experts."""
        return choose("experts", x_RD.device.type, x_RD.dtype)(x_RD, ends_e, weights, self.activation)
