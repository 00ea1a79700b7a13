"""A weight and perhaps a bias, for this rank's share of the rows and columns."""

from typing import Literal

import torch
from torch import Tensor, nn

from colonnade.errors import ConfigError
from colonnade.kernels.choose import choose
from colonnade.kernels.linear import float8

Float8 = Literal["tensorwise", "rowwise"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, (…, inputs) to (…, outputs)."""
    return choose("linear", x.device.type, x.dtype)(x, weight, bias)


class Linear(nn.Module):
    """y = x Wᵀ + b, uninitialised: weights come from :mod:`initialise` or from a file, never from here."""

    float8: Float8 | None = None
    """How its product is scaled, where it is computed in float8 (:func:`in_float8`)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        if self.float8 is None:
            return linear(x, self.weight, self.bias)
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ alone: where the ranks' products are summed, the bias comes after the sum."""
        if self.float8 is None:
            return linear(x, self.weight)
        return float8.linear(x, self.weight, row_wise=self.float8 == "rowwise")


def in_float8(blocks: nn.Module, scaling: Float8) -> None:
    """Compute the products of every :class:`Linear` within ``blocks`` in float8 from now on.

    Raises :class:`ConfigError` on a GPU that has no such matrix units.
    """
    device, needs = next(blocks.parameters()).device, (8, 9) if scaling == "tensorwise" else (9, 0)
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < needs:
        raise ConfigError(
            f"float8 {scaling} needs compute capability {needs[0]}.{needs[1]}, and this "
            f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}; set train.float8 none"
        )
    for module in blocks.modules():
        if isinstance(module, Linear):
            module.float8 = scaling
