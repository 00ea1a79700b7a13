"""A weight and perhaps a bias, for this rank's share of the rows and columns."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from colonnade.errors import CheckpointError, ConfigError
from colonnade.kernels.experts.grouped_mm import SCALED_CAPABILITY, scaled_available
from colonnade.kernels.linear import float8
from colonnade.kernels.linear.quantise import Kind, Quantised, quantise
from colonnade.kernels.registry import choose

Float8 = Literal["tensorwise", "rowwise"]


Matrix = Tensor | Quantised
"""A weight as it is multiplied with."""


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None, kernels: str = "auto") -> Tensor:
    """x Wᵀ + b, (…, inputs) to (…, outputs)."""
    operation = "quantised_linear" if isinstance(weight, Quantised) else "linear"
    return choose(operation, x.device.type, x.dtype, kernels)(x, weight, bias)


class InFloat8(nn.Module):
    """What has products that may be in float8."""

    float8: Float8 | None = None
    """How they are scaled, where they are (:func:`in_float8`)."""
    grouped = False
    """Whether they are grouped products, of which there is one kind in float8: a scale a row, on Hopper."""


class Linear(InFloat8):
    """y = x Wᵀ + b, uninitialised: weights come from :mod:`initialise` or from a file, never from here."""

    quantised: Quantised | None = None
    """What stands in the place of :attr:`weight`; no buffer, so that a cast of the model leaves it alone."""
    kernels = "auto"
    """Which implementation multiplies (:mod:`~colonnade.kernels.registry`)."""
    as_stored = False
    """Whether :attr:`weight` is never quantised: somebody multiplies with parts of it, or it decides about a token."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        if self.float8 is None:
            return linear(x, self.matrix, self.bias, self.kernels)
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ alone: where the ranks' products are summed, the bias comes after the sum."""
        if self.float8 is None:
            return linear(x, self.matrix, None, self.kernels)
        return float8.linear(x, self.weight, row_wise=self.float8 == "rowwise")

    @property
    def matrix(self) -> Matrix:
        """W."""
        return self.weight if self.quantised is None else self.quantised

    def quantise(self, weight: Tensor, kind: Kind, group: int, over: Callable[[Tensor], Tensor]) -> None:
        """From now on multiply with ``weight``, in ``kind``, and have no other (:func:`in_fewer_bits`)."""
        self.quantised = in_fewer_bits(weight, kind, group, over)
        del self.weight


def in_fewer_bits(weight: Tensor, kind: Kind, group: int, over: Callable[[Tensor], Tensor]) -> Quantised:
    """``weight`` in ``kind`` (:mod:`.kernels.linear.quantise`); :class:`CheckpointError` for one that is not finite."""
    made = quantise(weight, kind, group, over)
    if not made.scales.isfinite().all():
        raise CheckpointError(
            f"a weight of {len(weight)} × {weight.shape[1]} is not finite and cannot be put into {kind}; "
            "use another checkpoint, or --serve.weights stored to see where it shows"
        )
    return made


def in_float8(blocks: nn.Module, scaling: Float8, device: torch.device | None = None) -> None:
    """Compute the products of every :class:`InFloat8` within ``blocks`` in float8 from now on; experts' have a scale a
    row whatever the ``scaling``. A gate of one number a token stays as it is. ``device`` is where they will be, if they
    are not there yet.

    Raises :class:`ConfigError` on a GPU that has no such matrix units.
    """
    device, needs = device or next(blocks.parameters()).device, (8, 9) if scaling == "tensorwise" else (9, 0)
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < needs:
        raise ConfigError(
            f"float8 {scaling} needs compute capability {needs[0]}.{needs[1]}, and this "
            f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}; set train.float8 none"
        )
    modules = [module for module in blocks.modules() if isinstance(module, InFloat8)]
    if device.type == "cuda" and any(module.grouped for module in modules):
        has = torch.cuda.get_device_capability(device)
        if has != SCALED_CAPABILITY or not scaled_available:
            raise ConfigError(
                "float8 experts need torch's grouped product for compute capability "
                f"{SCALED_CAPABILITY[0]}.{SCALED_CAPABILITY[1]} (Hopper), and this "
                f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]} and torch "
                f"{torch.__version__} {'has it' if scaled_available else 'lacks it'}; set train.float8 none"
            )
    for module in modules:
        if not isinstance(module, Linear) or len(module.weight) > 1:
            module.float8 = scaling
