"""Linear layers, also quantised and in float8; column- and row-parallel products on the residual stream.

    column_parallel    x_tD to products with all T tokens             all-gather (or nothing), then W_0, W_1, …
    row_parallel       the ranks' partial products, summed, to y_tD    W, then all-reduce or reduce-scatter

A :class:`Linear` has this rank's share of the rows or columns. With ``Axes.row_transfer`` (plan.tp_overlap)
communication overlaps with the products (:mod:`~colonnade.parallel.overlapped_matmul`), if all ranks have the same
number of rows.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function

from colonnade.errors import CheckpointError, ConfigError
from colonnade.kernels.experts.grouped_mm import SCALED_CAPABILITY, scaled_available
from colonnade.kernels.linear import float8
from colonnade.kernels.linear.quantise import Kind, Quantised, dequantise, quantise
from colonnade.kernels.registry import choose
from colonnade.parallel.axis import Axes

if TYPE_CHECKING:
    from colonnade.parallel.overlapped_matmul import RowTransfer


Float8 = Literal["tensorwise", "rowwise"]

Matrix = Tensor | Quantised
"""A weight matrix, quantised or not."""


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None, kernels: str = "auto") -> Tensor:
    """x Wᵀ + b, (…, inputs) to (…, outputs)."""
    if isinstance(weight, Quantised) and x.requires_grad and torch.is_grad_enabled():
        y = _FrozenProduct.apply(x, weight, kernels)
        return y if bias is None else y + bias
    operation = "quantised_linear" if isinstance(weight, Quantised) else "linear"
    return choose(operation, x.device.type, x.dtype, kernels)(x, weight, bias)


class _FrozenProduct(Function):
    """x Wᵀ with a quantised W, which has no gradient; the backward pass dequantises it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantised, kernels: str) -> Tensor:
        ctx.weight = weight
        return choose("quantised_linear", x.device.type, x.dtype, kernels)(x, weight, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ dequantise(ctx.weight, grad.dtype), None, None


class Float8Module(nn.Module):
    """A module with products that may be in float8."""

    float8: Float8 | None = None
    """How inputs and weights are scaled; None: not in float8 (:func:`enable_float8`)."""
    grouped = False
    """Whether they are grouped products, which have float8 scales by row only, on Hopper."""


class QuantisableMatrix(nn.Module):
    """A module with a matrix, ``weight``, that may be quantised."""

    weight: nn.Parameter
    quantised: Quantised | None = None
    """Replaces :attr:`weight`; not a buffer, so that a cast of the model does not touch it."""
    dequantised_dtype: torch.dtype
    """That of :attr:`weight` before it was quantised."""
    never_quantise = False
    """Keep :attr:`weight` unquantised: its parts are used elsewhere, or it routes tokens."""

    @property
    def matrix(self) -> Matrix:
        """W, quantised or not."""
        return self.weight if self.quantised is None else self.quantised

    def quantise(self, weight: Tensor, kind: Kind, group: int, over: Callable[[Tensor], Tensor]) -> None:
        """Replace :attr:`weight` by ``weight``, quantised to ``kind`` (:func:`quantise_finite`)."""
        self.quantised, self.dequantised_dtype = quantise_finite(weight, kind, group, over), self.weight.dtype
        del self.weight


class Linear(Float8Module, QuantisableMatrix):
    """y = x Wᵀ + b, with uninitialised weights (:mod:`~colonnade.model.initialise`)."""

    kernels = "auto"
    """The implementation of the product (:mod:`~colonnade.kernels.registry`)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype)) if bias else None
        self.adapter: nn.Module | None = None
        """x to what is added to x Wᵀ (:mod:`~colonnade.model.lora`), or to None for nothing."""

    @property
    def adapts(self) -> bool:
        """Whether an adapter adds to the product now; one for serving does only in steps that use it."""
        return self.adapter is not None and bool(getattr(self.adapter, "active", True))

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        if self.float8 is None and not self.adapts:
            return linear(x, self.matrix, self.bias, self.kernels)
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ without the bias, which a row-parallel layer adds after the sum over ranks."""
        if self.float8 is None:
            y = linear(x, self.matrix, None, self.kernels)
        else:
            y = float8.linear(x, self.weight, row_wise=self.float8 == "rowwise")
        added = None if self.adapter is None else self.adapter(x)
        return y if added is None else y + added


def quantise_finite(weight: Tensor, kind: Kind, group: int, over: Callable[[Tensor], Tensor]) -> Quantised:
    """Quantise ``weight`` to ``kind``; raises :class:`CheckpointError` for one that is not finite."""
    quantised = quantise(weight, kind, group, over)
    if not quantised.scales.isfinite().all():
        raise CheckpointError(
            f"a weight of {len(weight)} × {weight.shape[1]} is not finite and cannot be quantised to {kind}; "
            "use another checkpoint, or --serve.weights stored to find where it shows up"
        )
    return quantised


def enable_float8(blocks: nn.Module, scaling: Float8, device: torch.device | None = None) -> None:
    """Compute the products of every :class:`Float8Module` within ``blocks`` in float8 from now on.

    Experts have one scale per row for any ``scaling``; a gate with one output stays unquantised. ``device``: where
    the blocks will be, if they are not there yet. Raises :class:`ConfigError` on a GPU without float8 tensor cores.
    """
    device, needs = device or next(blocks.parameters()).device, (8, 9) if scaling == "tensorwise" else (9, 0)
    if device.type == "cuda" and (has := torch.cuda.get_device_capability(device)) < needs:
        raise ConfigError(
            f"float8 {scaling} needs compute capability {needs[0]}.{needs[1]}, and this "
            f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}; set train.float8 none"
        )
    modules = [module for module in blocks.modules() if isinstance(module, Float8Module)]
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


def column_parallel(axes: Axes, x_tD: Tensor, T: int, *linears: Linear) -> list[Tensor]:
    """y_Tz of each of ``linears`` for the T tokens of the residual stream."""
    mover = _mover(axes, T, linears)
    if mover is None:
        x_TD = axes.enter_tp_region(x_tD, T)
        return [linear(x_TD) for linear in linears]
    from colonnade.parallel.overlapped_matmul import all_gather_matmul

    ys = all_gather_matmul(x_tD, [linear.weight for linear in linears], mover)
    return [y if linear.bias is None else y + linear.bias for y, linear in zip(ys, linears, strict=True)]


def row_parallel(axes: Axes, x_Tz: Tensor, linear: Linear) -> Tensor:
    """y_tD of ``linear``; the bias is added once, after the sum over ranks."""
    mover = _mover(axes, len(x_Tz), (linear,))
    if mover is None:
        y_tD = axes.leave_tp_region(linear.product(x_Tz))
    else:
        from colonnade.parallel.overlapped_matmul import matmul_reduce_scatter

        y_tD = matmul_reduce_scatter(x_Tz, linear.weight, mover)
    return y_tD if linear.bias is None else y_tD + linear.bias


def _mover(axes: Axes, T: int, linears: tuple[Linear, ...]) -> "RowTransfer | None":
    """The mover for these products, if they can overlap."""
    if axes.row_transfer is None or T == 0 or T % axes.tp.size:
        return None
    ordinary = any(linear.float8 or linear.quantised or linear.adapter is not None for linear in linears)
    return None if ordinary else axes.row_transfer
