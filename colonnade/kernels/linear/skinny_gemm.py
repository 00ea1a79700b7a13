"""Products of a few rows on a GPU, with norm, gate and residual in the same launch
(:mod:`~colonnade.kernels.linear.triton_skinny_gemm`,
:mod:`~colonnade.kernels.linear.triton_skinny_gemm_tensor_core`), or without.

With more rows than the table has (:mod:`~colonnade.kernels.linear.skinny_gemm_tiles`) the library multiplies, and a
gate is one kernel. Nothing here has a gradient: where one is wanted, plain torch computes
(:mod:`~colonnade.kernels.linear.reference`).
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

from typing import Any

import torch
import triton
from torch import Tensor

from colonnade.kernels import norm as norm_reference
from colonnade.kernels.device import multiprocessors, shared_memory_bytes
from colonnade.kernels.linear import (
    quantised_gpu,
    reference,
    skinny_gemm_tensor_core,
    skinny_gemm_tiles,
    triton_skinny_gemm,
)
from colonnade.kernels.linear import reference as fused
from colonnade.kernels.linear.quantise import NIBBLES, Quantised
from colonnade.kernels.linear.reference import Gate, Matrix, Scale
from colonnade.kernels.linear.skinny_gemm_tiles import Tiles


def linear(x_TD: Tensor, weight: Matrix, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.linear`), of any number of rows."""
    x = x_TD if x_TD.dim() == 2 else x_TD.reshape(-1, x_TD.shape[-1])
    tiles = _tiles(x, weight, gated=False)
    if tiles is None:
        return _library(x_TD, weight, bias_F)
    return launch(x, weight, bias_F, tiles=tiles).view(*x_TD.shape[:-1], _outputs(weight))


def product(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    norm: Scale | None = None,
    gate: Gate | None = None,
    more_TF: Tensor | None = None,
    own: bool = False,
) -> Tensor:
    """y_TF (see :func:`reference.linear`)."""
    parts: dict[str, Any] = {"norm": norm, "gate": gate, "more_TF": more_TF}
    if _differentiated(x_TD, weight):
        return fused.fused_linear(x_TD, weight, bias_F, **parts)
    tiles = _tiles(x_TD, weight, gated=gate is not None)
    if tiles is not None:
        return launch(x_TD, weight, bias_F, tiles=tiles, **parts)
    return composed(x_TD, weight, bias_F, **parts, own=own)


def composed(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    norm: Scale | None = None,
    gate: Gate | None = None,
    more_TF: Tensor | None = None,
    own: bool = False,
) -> Tensor:
    """y_TF by the library's product, and a kernel for each of what it cannot take along."""
    if norm is not None:
        x_TD = norm_reference.norm(x_TD, norm.weight_D, None, norm.eps)
    if own and gate is None and bias_F is None and more_TF is not None and isinstance(weight, Tensor):
        return more_TF.addmm_(x_TD, weight.T)
    y_TF = _library(x_TD, weight, bias_F)
    if gate is not None:
        y_TF = gated(_library(x_TD, gate.weight, gate.bias_F), y_TF, gate.activation)
    return y_TF if more_TF is None else y_TF.add_(more_TF)


def gated(gate_TF: Tensor, up_TF: Tensor, activation: str) -> Tensor:
    """act(g) ⊙ u in one kernel."""
    out = torch.empty_like(up_TF)
    if out.numel():
        triton_skinny_gemm.gated[triton.cdiv(out.numel(), 1024),](
            gate_TF, up_TF, out, out.numel(), ACT=activation, BLOCK=1024
        )
    return out


def launch(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    tiles: Tiles,
    norm: Scale | None = None,
    gate: Gate | None = None,
    more_TF: Tensor | None = None,
) -> Tensor:
    """y_TF of 1 to :data:`skinny_gemm_tiles.MOST` rows, cut up like this."""
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, inputs), outputs, kind = x_TD.shape, _outputs(weight), _kind(weight)
    y_TF = x_TD.new_empty(T, outputs)
    # The kernel's first matrix is the one whose product is activated.
    first, bias, second, second_bias = weight, bias_F, weight, None
    if gate is not None:
        first, bias, second_bias = gate.weight, gate.bias_F, bias_F
        assert (bias is None) == (second_bias is None), "both products have a bias, or neither"
    (w, w_scale), (u, u_scale) = _stored(first, y_TF), _stored(second, y_TF)
    blocks = triton.cdiv(outputs, tiles.BN)
    programs = min(blocks, tiles.a_processor * multiprocessors(x_TD.device) or blocks)
    constants: dict[str, Any] = {
        "NORM": norm is not None, "ACT": "" if gate is None else gate.activation, "BIASED": bias is not None,
        "ADDED": more_TF is not None, "BN": tiles.BN, "STAGES": tiles.stages, "num_warps": tiles.warps,
    }  # fmt: skip
    none = y_TF  # in place of a tensor that is not read
    tensors = (
        x_TD, none if norm is None else norm.weight_D, w, w_scale, none if bias is None else bias, u, u_scale,
        none if second_bias is None else second_bias, none if more_TF is None else more_TF.contiguous(), y_TF,
    )  # fmt: skip
    sizes = T, outputs, inputs, x_TD.stride(0)
    eps = 0.0 if norm is None else norm.eps
    groups = weight.scales.shape[1] if isinstance(weight, Quantised) and kind == "int4" else 0
    if tiles.units:
        assert isinstance(weight, Quantised), "the matrix units of this kernel multiply quantised weights"
        room = shared_memory_bytes(x_TD.device)
        constants |= skinny_gemm_tensor_core.cut(
            weight, T, tiles, gated=gate is not None, normed=norm is not None, room=room
        )
        skinny_gemm_tensor_core.launch(
            programs, tensors, (*sizes, w.stride(0) * w.element_size() // 2, groups), eps, constants
        )
        return y_TF
    columns = w.shape[1]
    BK = max(16, min(tiles.BK, triton.next_power_of_2(columns)))
    constants |= {"STEPS": triton.cdiv(columns, BK), "M": triton.next_power_of_2(T), "BK": BK}
    if isinstance(weight, Quantised) and kind == "int4":
        even = columns % BK == 0 and inputs == columns * NIBBLES
        triton_skinny_gemm.thin4[programs,](
            *tensors, *sizes, w.stride(0), groups, eps, *triton_skinny_gemm.BITS, WORDS=weight.group // NIBBLES,
            EVEN=even,
            **constants,
        )  # fmt: skip
    else:
        neighbours = min(BK, 16 // w.element_size())
        triton_skinny_gemm.thin[programs,](
            *tensors, *sizes, w.stride(0), eps, SCALED=kind != "plain", EVEN=inputs % BK == 0, V=neighbours, **constants
        )
    return y_TF


def _tiles(x_TD: Tensor, weight: Matrix, *, gated: bool) -> Tiles | None:
    T = len(x_TD)
    if not 0 < T <= skinny_gemm_tiles.MOST or not x_TD.numel() or _differentiated(x_TD, weight):
        return None
    if isinstance(weight, Tensor) and (weight.dtype != x_TD.dtype or weight.stride(1) != 1):
        return None
    tiles = skinny_gemm_tiles.pick(_kind(weight), T, _outputs(weight), x_TD.shape[1], gated=gated)
    if tiles is None or not tiles.units or skinny_gemm_tensor_core.fits(x_TD, weight):
        return tiles
    return skinny_gemm_tiles.WIDE if T <= skinny_gemm_tiles.IN_REGISTERS else None


def _differentiated(x_TD: Tensor, weight: Matrix) -> bool:
    """Whether a gradient of a product is wanted."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, weight) if isinstance(x, Tensor))


def _library(x_TD: Tensor, weight: Matrix, bias_F: Tensor | None) -> Tensor:
    run = quantised_gpu if isinstance(weight, Quantised) else reference
    return run.linear(x_TD, weight, bias_F)


def _outputs(weight: Matrix) -> int:
    return len(weight) if isinstance(weight, Tensor) else weight.outputs


def _kind(weight: Matrix) -> str:
    return "plain" if isinstance(weight, Tensor) else weight.kind


def _stored(weight: Matrix, none: Tensor) -> tuple[Tensor, Tensor]:
    """(what is multiplied, its scales)."""
    if isinstance(weight, Tensor):
        return weight, none
    return weight.values, weight.scales.view(torch.int32) if weight.kind == "int4" else weight.scales
