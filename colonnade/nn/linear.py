"""Column- and row-parallel linear layers (Megatron-LM, arXiv 1909.08053, section 3).

column   y_Tf = x_TD W_fDᵀ + b_f             outputs sharded: no communication forward, an all-reduce backward
row      y_TD = Σ_ranks x_Tf W_Dfᵀ + b_D     inputs sharded: an all-reduce forward, none backward
"""

import torch
from torch import Tensor, nn

from colonnade.model.initialise import fill
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.parallel.axis import SOLO, Axes, Axis
from colonnade.parallel.layout import WHOLE, Placement


def shared_seed(axis: Axis) -> int:
    """Draw a seed from torch's generator; all ranks of ``axis`` get that of the first."""
    return int(axis.from_rank_0_(torch.randint(0, 2**62, (1,))))


class ColumnParallelLinear(Linear):
    """y = x Wᵀ + b with W's rows sharded over ``axis``; each rank returns its own outputs."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axis: Axis = SOLO,
        *,
        bias: bool = True,
        gather_output: bool = False,
        init_std: float = 0.02,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """``gather_output``: every rank returns all outputs. Weights are N(0, ``init_std``), biases 0."""
        start, stop = axis.part(outputs)
        super().__init__(inputs, stop - start, bias=bias, device=torch.device(device), dtype=dtype)
        self.axis, self.outputs, self.gather_output = axis, outputs, gather_output
        table: dict[str, Placement] = {"weight": 0, "bias": 0}
        self.layout = table if bias else {"weight": 0}
        _initialise(self, (outputs, inputs), outputs, init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs), equal on all ranks, to (…, outputs) of this rank, or of all."""
        y = super().forward(self.axis.fan_out(x))
        return self.axis.join(y, y.dim() - 1, self.outputs) if self.gather_output else y


class RowParallelLinear(Linear):
    """y = x Wᵀ + b with W's columns sharded over ``axis``; every rank returns the sum."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axis: Axis = SOLO,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        init_std: float = 0.02,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """``input_is_parallel``: x holds this rank's inputs only, as :class:`ColumnParallelLinear` returns them."""
        start, stop = axis.part(inputs)
        super().__init__(stop - start, outputs, bias=bias, device=torch.device(device), dtype=dtype)
        self.axis, self.input_is_parallel = axis, input_is_parallel
        table: dict[str, Placement] = {"weight": 1, "bias": WHOLE}
        self.layout = table if bias else {"weight": 1}
        _initialise(self, (outputs, inputs), outputs, init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) of this rank, or of all, to (…, outputs)."""
        x = x if self.input_is_parallel else self.axis.split(x, x.dim() - 1)
        y = self.axis.fan_in(self.product(x))
        return y if self.bias is None else y + self.bias


def _initialise(module: nn.Module, weight: tuple[int, int], outputs: int, std: float) -> None:
    shapes = {"weight": torch.Size(weight), "bias": torch.Size((outputs,))}
    axis = module.axis
    assert isinstance(axis, Axis)
    fill(module, Axes(tp=axis), shapes, shared_seed(axis), std=std, residual_std=std)
