"""The feed-forward layer, tensor-parallel by hidden units.

    plain   y = W_down act(W_up x)                    GPT-2
    gated   y = W_down (act(W_gate x) ⊙ W_up x)       SwiGLU (Shazeer, arXiv 2002.05202)

W_up and W_gate are column-parallel and W_down row-parallel, so that the activation needs no communication: one
collective before, one after (Megatron-LM, arXiv 1909.08053, section 3, figure 3a). The output bias is added once, after
the sum.
"""

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.model.lora import linear_adapter
from colonnade.model.tensor_parallel_linear import Linear, column_parallel, row_parallel
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement, residual_placement


class FeedForward(nn.Module):
    """x_tD to y_tD, through f = F/tp hidden units on this rank."""

    def __init__(
        self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype, width: int | None = None
    ):
        """``width``: F, if it is not the model's."""
        super().__init__()
        self.axes, self.activation, self.act = axes, config.activation, ACTIVATIONS[config.activation]
        F, D = width or config.ffn_width, config.width
        start, stop = axes.tp.part(F)
        on = {"device": device, "dtype": dtype}
        self.gate = Linear(config.width, stop - start, bias=config.ffn_bias, **on) if config.gated else None
        self.up = Linear(config.width, stop - start, bias=config.ffn_bias, **on)
        self.down = Linear(stop - start, config.width, bias=config.ffn_bias, **on)
        f = stop - start
        self.up.adapter = linear_adapter("up", config, D, f, D, row=False, **on)
        self.down.adapter = linear_adapter("down", config, f, D, F, row=True, **on)
        if self.gate is not None:
            self.gate.adapter = linear_adapter("gate", config, D, f, D, row=False, **on)
        self.layout: dict[str, Placement] = {"up.weight": 0, "down.weight": 1}
        if config.gated:
            self.layout["gate.weight"] = 0
        if config.ffn_bias:
            self.layout |= {"up.bias": 0, "down.bias": residual_placement(axes)} | (
                {"gate.bias": 0} if config.gated else {}
            )

    def forward(self, x_tD: Tensor, T: int) -> Tensor:
        """y_tD for the residual stream of T tokens."""
        if self.gate is None:
            (up_Tf,) = column_parallel(self.axes, x_tD, T, self.up)
            return row_parallel(self.axes, self.act(up_Tf), self.down)
        gate_Tf, up_Tf = column_parallel(self.axes, x_tD, T, self.gate, self.up)
        gate_Tf = self.act(gate_Tf)  # reuse the name: three such tensors live at once, not four
        return row_parallel(self.axes, gate_Tf * up_Tf, self.down)
