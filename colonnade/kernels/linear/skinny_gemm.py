"""Linear layers on a GPU without gradients: skinny GEMMs (few rows), fused with norm, gate and residual, or quantised.

    rows         weights       kernel
    1 to 16      any           as the table says (:mod:`~colonnade.kernels.linear.skinny_gemm_tiles`): with CUDA cores
                               (``triton_skinny_gemm.py``), tensor cores (``triton_skinny_gemm_tensor_core.py``), or
                               as below, with norm, gate and residual as kernels of their own
    any          16, 32 bits   the library's GEMM
    to 64        quantised     split-K, with weights dequantised in registers (``triton_quantised.py``)
    more         float8        x quantised to float8, row-wise scales, float8 tensor cores (as in float8 training)
    more         quantised     W dequantised once to memory, then the library's GEMM
    to 64        ternary       words looked up in tables (``cuda_ternary.py`` on Hopper, else ``triton_ternary.py``)
    more         ternary       the reference

So float8 weights round x to e4m3 for prompts but not for single tokens, and near ties can resolve differently. Where a
gradient is needed, plain torch computes (:mod:`~colonnade.kernels.linear.reference`).
"""

from typing import Any, TypeGuard

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels import norm as norm_reference
from colonnade.kernels.device import multiprocessors, shared_memory_bytes
from colonnade.kernels.linear import (
    reference,
    scaled_mm,
    skinny_gemm_tiles,
    triton_quantised,
    triton_skinny_gemm,
    triton_skinny_gemm_tensor_core,
    triton_ternary,
)
from colonnade.kernels.linear.quantise import INT4_PER_WORD, Quantised, power_of_two_scale
from colonnade.kernels.linear.reference import Gate, Matrix, NormWeights
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles, SplitKTiles, select_tiles
from colonnade.kernels.triton_constants import constexprs

MAX_SPLIT_K_ROWS = 64
"""Rows up to which reading quantised weights is the limit."""
PROGRAMS_PER_SM = 4
"""Programs per SM that splitting the inputs aims at."""


def linear(x_TD: Tensor, weight: Matrix, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.linear` and :func:`reference.quantised_linear`), for any number of rows."""
    if _needs_reference(weight):
        if weight.kind == "ternary" and x_TD.numel() // weight.inputs <= triton_ternary.MAX_ROWS:
            return _ternary_linear(x_TD, weight, bias_F)
        return reference.quantised_linear(x_TD, weight, bias_F)
    x = x_TD if x_TD.dim() == 2 else x_TD.reshape(-1, x_TD.shape[-1])
    tiles = None if _needs_grad(x, weight) else select_tiles(x, weight, gated=False)
    if tiles is None:
        return _unfused_linear(x_TD, weight, bias_F)
    return launch(x, weight, bias_F, tiles=tiles).view(*x_TD.shape[:-1], _outputs(weight))


def fused_linear(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    norm: NormWeights | None = None,
    gate: Gate | None = None,
    activation: str | None = None,
    residual_TF: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """y_TF (see :func:`reference.fused_linear`); an activation without a gate and a LayerNorm are not fused."""
    parts: dict[str, Any] = {"norm": norm, "gate": gate, "residual_TF": residual_TF}
    unfused = activation is not None or (norm is not None and norm.bias_D is not None)
    reference_only = _needs_reference(weight) or (gate is not None and _needs_reference(gate.weight))
    if _needs_grad(x_TD, weight) or unfused or reference_only:
        return reference.fused_linear(x_TD, weight, bias_F, activation=activation, **parts)
    tiles = select_tiles(x_TD, weight, gated=gate is not None)
    if tiles is not None:
        return launch(x_TD, weight, bias_F, tiles=tiles, **parts)
    return separate_kernels(x_TD, weight, bias_F, **parts, inplace=inplace)


def separate_kernels(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    norm: NormWeights | None = None,
    gate: Gate | None = None,
    residual_TF: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """y_TF with an unfused GEMM, and a kernel for each of norm, gate and residual."""
    if norm is not None:
        x_TD = norm_reference.norm(x_TD, norm.weight_D, None, norm.eps)
    if inplace and gate is None and bias_F is None and residual_TF is not None and isinstance(weight, Tensor):
        return residual_TF.addmm_(x_TD, weight.T)
    y_TF = _unfused_linear(x_TD, weight, bias_F)
    if gate is not None:
        y_TF = gated_activation(_unfused_linear(x_TD, gate.weight, gate.bias_F), y_TF, gate.activation)
    return y_TF if residual_TF is None else y_TF.add_(residual_TF)


def gated_activation(gate_TF: Tensor, up_TF: Tensor, activation: str) -> Tensor:
    """act(g) ⊙ u in one kernel."""
    out = torch.empty_like(up_TF)
    if out.numel():
        triton_skinny_gemm.gated_activation_kernel[triton.cdiv(out.numel(), 1024),](
            gate_TF, up_TF, out, out.numel(), ACT=activation, BLOCK=1024
        )
    return out


def launch(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None = None,
    *,
    tiles: SkinnyTiles,
    norm: NormWeights | None = None,
    gate: Gate | None = None,
    residual_TF: Tensor | None = None,
) -> Tensor:
    """y_TF of 1 to :data:`skinny_gemm_tiles.MAX_ROWS` rows, in one kernel launch."""
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    (T, inputs), outputs = x_TD.shape, _outputs(weight)
    y_TF = x_TD.new_empty(T, outputs)
    # The kernel activates the product with its first matrix.
    first, bias, second, second_bias = weight, bias_F, weight, None
    if gate is not None:
        first, bias, second_bias = gate.weight, gate.bias_F, bias_F
        assert (bias is None) == (second_bias is None), "both projections have a bias, or neither"
    unused = y_TF  # placeholder for a tensor that is not read
    stored = _pointers(first, bias, unused), _pointers(second, second_bias, unused)
    blocks = triton.cdiv(outputs, tiles.BN)
    grid = (min(blocks, tiles.programs_per_sm * multiprocessors(x_TD.device) or blocks),)
    gain = unused if norm is None else norm.weight_D
    residual = unused if residual_TF is None else residual_TF.contiguous()
    sizes = T, outputs, inputs, x_TD.stride(0)
    eps = 0.0 if norm is None else norm.eps
    scaled, groups, words = False, 0, 1
    if isinstance(weight, Quantised):
        _, groups, words = _scales(weight)
        scaled = not groups
    constants: dict[str, Any] = {
        "SCALED": scaled, "NORM": norm is not None, "ACT": "" if gate is None else gate.activation,
        "BIASED": bias is not None, "RESIDUAL": residual_TF is not None, "BN": tiles.BN, "STAGES": tiles.stages,
    }  # fmt: skip
    w = stored[0].stored
    if tiles.tensor_cores:
        assert isinstance(weight, Quantised), "the tensor core kernel is for quantised weights"
        constants |= skinny_gemm_tiles.tensor_core_constants(
            weight, T, tiles, gated=gate is not None, normed=norm is not None, shared=shared_memory_bytes(x_TD.device)
        )
        units = (each._replace(stored=each.stored.view(torch.int16)) for each in stored)
        triton_skinny_gemm_tensor_core.tensor_core_kernel[grid](
            x_TD, gain, *units, residual, y_TF, *sizes, w.stride(0) * w.element_size() // 2, groups, eps,
            constexprs(triton_skinny_gemm_tensor_core.Constants(**constants, ASM=x_TD.is_cuda)),
            num_warps=tiles.warps, **skinny_gemm_tiles.register_limit(tiles),
        )  # fmt: skip
        return y_TF
    columns = w.shape[1]
    BK = max(16, min(tiles.BK, triton.next_power_of_2(columns)))
    constants |= {"STEPS": triton.cdiv(columns, BK), "M": triton.next_power_of_2(T), "BK": BK}
    arguments = (x_TD, gain, *stored, residual, y_TF, *sizes, w.stride(0))
    if groups:  # int4
        even = columns % BK == 0 and inputs == columns * INT4_PER_WORD
        triton_skinny_gemm.skinny_int4_kernel[grid](
            *arguments, groups, eps, triton_skinny_gemm.NIBBLE_BITS,
            constexprs(triton_skinny_gemm.Constants(**constants, EVEN=even, WORDS=words)), num_warps=tiles.warps,
        )  # fmt: skip
    else:
        neighbours = min(BK, 16 // w.element_size())
        triton_skinny_gemm.skinny_kernel[grid](
            *arguments, eps,
            constexprs(triton_skinny_gemm.Constants(**constants, EVEN=inputs % BK == 0, V=neighbours)),
            num_warps=tiles.warps,
        )  # fmt: skip
    return y_TF


def quantised_linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.quantised_linear`), of any number of rows, with an unfused GEMM."""
    x = x_TD if x_TD.dim() == 2 else x_TD.reshape(-1, weight.inputs)
    if 0 < len(x) <= MAX_SPLIT_K_ROWS and x.numel():
        y = split_k(x, weight)
    elif _float8_fits(x, weight):
        y = _float8_gemm(x, weight)
    else:
        y = F.linear(x, dequantise(weight, x.dtype))
    y = y if bias_F is None else y + bias_F
    return y if x_TD.dim() == 2 else y.view(*x_TD.shape[:-1], weight.outputs)


def split_k(x_TD: Tensor, weight: Quantised, tiles: SplitKTiles | None = None, splits: int | None = None) -> Tensor:
    """y_TF of 1 to :data:`MAX_SPLIT_K_ROWS` rows; ``tiles`` and ``splits`` override the choice made here."""
    T, outputs = len(x_TD), weight.outputs
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    tiles = tiles or skinny_gemm_tiles.SPLIT_K_TILES[weight.kind]
    columns = weight.values.shape[1]
    blocks = triton.cdiv(outputs, tiles.outputs)
    if splits is None:
        most = triton.cdiv(columns, 2 * tiles.columns)
        splits = max(1, min(most, PROGRAMS_PER_SM * multiprocessors(x_TD.device) // blocks))
    step = triton.cdiv(triton.cdiv(columns, splits), tiles.columns) * tiles.columns
    splits = triton.cdiv(columns, step)
    out = parts = x_TD.new_empty(T, outputs)
    if splits > 1:
        parts = x_TD.new_empty(splits, T, outputs, dtype=torch.float32)
    scales, groups, words = _scales(weight)
    triton_quantised.split_k_kernel[blocks, splits](
        x_TD, weight.values, scales, parts, T, outputs, weight.inputs, columns, groups, x_TD.stride(0), step,
        KIND=weight.kind, WORDS=words, BM=max(16, triton.next_power_of_2(T)), BN=tiles.outputs, BK=tiles.columns,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        triton_quantised.sum_splits_kernel[triton.cdiv(T * outputs, 1024),](
            parts, out, T * outputs, splits, BLOCK=1024
        )  # fmt: skip
    return out


def dequantise(weight: Quantised, dtype: torch.dtype) -> Tensor:
    """The dequantised matrix (see :func:`quantise.dequantise`)."""
    out = weight.values.new_empty(weight.outputs, weight.inputs, dtype=dtype)
    columns = weight.values.shape[1]
    scales, groups, words = _scales(weight)
    BN, BK = 16, 64 if weight.kind == "int4" else 256
    triton_quantised.dequantise_kernel[triton.cdiv(weight.outputs, BN), triton.cdiv(columns, BK)](
        weight.values, scales, out, weight.outputs, weight.inputs, columns, groups,
        KIND=weight.kind, WORDS=words, BN=BN, BK=BK, num_warps=4,
    )  # fmt: skip
    return out


def _needs_reference(weight: Matrix) -> TypeGuard[Quantised]:
    return isinstance(weight, Quantised) and weight.needs_reference


def _needs_grad(x_TD: Tensor, weight: Matrix) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (x_TD, weight) if isinstance(x, Tensor))


def _ternary_linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None) -> Tensor:
    if _needs_grad(x_TD, weight):
        return reference.quantised_linear(x_TD, weight, bias_F)
    x = x_TD.reshape(-1, weight.inputs)
    y = triton_ternary.linear(x if x.stride(1) == 1 else x.contiguous(), weight)
    return (y if bias_F is None else y + bias_F).view(*x_TD.shape[:-1], weight.outputs)


def _unfused_linear(x_TD: Tensor, weight: Matrix, bias_F: Tensor | None) -> Tensor:
    if isinstance(weight, Quantised):
        return quantised_linear(x_TD, weight, bias_F)
    return F.linear(x_TD, weight, bias_F)


def _float8_fits(x_TD: Tensor, weight: Quantised) -> bool:
    """Whether the float8 tensor cores can multiply these."""
    hopper = x_TD.is_cuda and torch.cuda.get_device_capability(x_TD.device) >= (9, 0)
    whole = weight.inputs % scaled_mm.SIZE_MULTIPLE == weight.outputs % scaled_mm.SIZE_MULTIPLE == 0
    return weight.kind == "float8" and hopper and whole and x_TD.dtype == torch.bfloat16 and x_TD.numel() > 0


def _float8_gemm(x_TD: Tensor, weight: Quantised) -> Tensor:
    inverse_T1 = power_of_two_scale(x_TD.abs().amax(1, keepdim=True), weight.values.dtype)
    x8_TD = (x_TD * inverse_T1.to(x_TD.dtype)).to(weight.values.dtype)
    return scaled_mm.scaled_product(x8_TD, weight.values, inverse_T1.reciprocal(), weight.scales, x_TD.dtype)


def _outputs(weight: Matrix) -> int:
    return len(weight) if isinstance(weight, Tensor) else weight.outputs


def _pointers(weight: Matrix, bias_F: Tensor | None, unused: Tensor) -> triton_skinny_gemm.Weight:
    """The tensors of a projection as the kernels read them, with ``unused`` for those that it lacks."""
    stored, scales = (weight, unused) if isinstance(weight, Tensor) else (weight.values, _scales(weight)[0])
    return triton_skinny_gemm.Weight(stored, scales, unused if bias_F is None else bias_F)


def _scales(weight: Quantised) -> tuple[Tensor, int, int]:
    """(scales as the kernels read them, groups per row, words per group); int4's pairs are read as one int32."""
    if weight.kind != "int4":
        return weight.scales, 0, 1
    return weight.scales.view(torch.int32), weight.scales.shape[1], weight.group // INT4_PER_WORD
