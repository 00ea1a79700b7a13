"""Operations of a decode step through the C++ library, with the signatures of their references.

Each function runs the library's kernel if it fits (few rows, a supported dtype, contiguous tensors) and what a CPU uses
otherwise. A kernel's arguments are checked here, before the library gets addresses.

Quantised products round a row of x to int8, with a scale per group of inputs; :func:`round_inputs` is that rounding, so
that ``reference.quantised_linear(round_inputs(x, weight), weight)`` is the same product up to float32's rounding.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.kernels import norm as norm_reference
from colonnade.kernels import rotary
from colonnade.kernels.attention import cache_write, sdpa
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.cpu import calls, library
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.kernels.linear import reference, skinny_gemm_cpu
from colonnade.kernels.linear.quantise import X_GROUP, Quantised, can_block
from colonnade.kernels.linear.quantise import round_inputs as round_to_int8
from colonnade.kernels.linear.reference import Gate, Matrix, NormWeights
from colonnade.kernels.rotary import Rotation

MAX_ROWS = 64
"""More rows times unquantised weights are products for torch, which multiplies in larger tiles."""
MAX_QUERIES = 16
"""More new tokens of a request are for torch's attention, which has larger tiles too."""


def available(dtype: torch.dtype) -> bool:
    """Whether the library has kernels for ``dtype`` and this processor; compiles it at the first call."""
    return dtype in calls.DTYPES and library.load() is not None


def round_inputs(x: Tensor, weight: Quantised) -> Tensor:
    """``x`` (…, D) as the kernels round it for ``weight``: to int8 with a scale per group."""
    return round_to_int8(x.float(), weight.group if weight.kind == "int4" else X_GROUP).to(x.dtype)


# -- products ----------------------------------------------------------------------------------------------------------


def linear(
    x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, *, most_rows: int | None = MAX_ROWS
) -> Tensor:
    """y_TF (see :func:`reference.linear`)."""
    if fits(x_TD, weight_FD, most_rows):
        return _run_linear(x_TD, weight_FD, bias_F)
    return _torch_linear(x_TD, weight_FD, bias_F)


def quantised_linear(x_TD: Tensor, weight: Quantised, bias_F: Tensor | None = None) -> Tensor:
    """y_TF (see :func:`reference.quantised_linear`) of :func:`round_inputs` of x."""
    if fits(x_TD, weight):
        return _run_linear(x_TD, weight, bias_F)
    return _torch_linear(x_TD, weight, bias_F)


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
    most_rows: int | None = MAX_ROWS,
) -> Tensor:
    """y_TF (see :func:`reference.fused_linear`)."""
    parts: dict[str, Any] = {"norm": norm, "gate": gate, "activation": activation, "residual_TF": residual_TF}
    native = fits(x_TD, weight, most_rows)
    if gate is not None:
        native = native and fits(x_TD, gate.weight, most_rows) and _same_format(weight, gate.weight)
    if native and (residual_TF is None or (residual_TF.is_contiguous() and residual_TF.dtype == x_TD.dtype)):
        return _run_linear(x_TD, weight, bias_F, **parts, inplace=inplace)
    if norm is not None:
        x_TD = norm_reference.norm(x_TD, norm.weight_D, norm.bias_D, norm.eps)
    y_TF = _torch_linear(x_TD, weight, bias_F)
    if activation is not None:
        y_TF = ACTIVATIONS[activation](y_TF)
    if gate is not None:
        y_TF = ACTIVATIONS[gate.activation](_torch_linear(x_TD, gate.weight, gate.bias_F)) * y_TF
    if residual_TF is None:
        return y_TF
    return residual_TF.add_(y_TF) if inplace else residual_TF + y_TF


def fits(x_TD: Tensor, weight: Matrix, most_rows: int | None = MAX_ROWS) -> bool:
    """Whether the library multiplies these rows with ``weight``; at most ``most_rows`` if that is not quantised."""
    T, D = x_TD.shape if x_TD.dim() == 2 else (0, 0)
    if not T or not D or x_TD.stride(1) != 1 or not _no_gradient(x_TD) or not available(x_TD.dtype):
        return False
    if isinstance(weight, Quantised):
        grouped = weight.kind in ("int8", "int8_dynamic") or weight.group in (32, 64, 128)
        grouped = grouped and not weight.needs_reference
        return weight.kind in calls.KINDS and grouped and weight.values.dim() == 2 and (T <= MAX_ROWS or _is_fast())
    few = most_rows is None or most_rows >= T
    return few and weight.dtype == x_TD.dtype and weight.is_contiguous() and _no_gradient(weight)


@functools.cache
def _is_fast() -> bool:
    """Whether integer products are faster than torch's of dequantised weights."""
    loaded = library.load()
    return loaded is not None and loaded.colonnade_lanes() > 4


def _no_gradient(x: Tensor) -> bool:
    return not (torch.is_grad_enabled() and x.requires_grad)


def _same_format(weight: Matrix, gate: Matrix) -> bool:
    if isinstance(weight, Quantised) and isinstance(gate, Quantised):
        return (weight.kind, weight.group, weight.blocked) == (gate.kind, gate.group, gate.blocked)
    return not isinstance(weight, Quantised) and not isinstance(gate, Quantised)


def _torch_linear(x_TD: Tensor, weight: Matrix, bias_F: Tensor | None) -> Tensor:
    """The kernels of a CPU without the library (:mod:`~colonnade.kernels.linear.skinny_gemm_cpu`)."""
    if isinstance(weight, Quantised):
        return skinny_gemm_cpu.quantised_linear(x_TD, weight, bias_F)
    run = skinny_gemm_cpu.skinny_linear if x_TD.dtype in (torch.float32, torch.float64) else reference.linear
    return run(x_TD, weight, bias_F)


def _run_linear(
    x_TD: Tensor,
    weight: Matrix,
    bias_F: Tensor | None,
    *,
    norm: NormWeights | None = None,
    gate: Gate | None = None,
    activation: str | None = None,
    residual_TF: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    T, D = x_TD.shape
    matrix, tensors = matrix_of(weight, bias_F, D, x_TD.dtype)
    outputs = matrix.outputs
    gate_matrix = calls.Matrix()
    if gate is not None:
        gate_matrix, more = matrix_of(gate.weight, gate.bias_F, D, x_TD.dtype)
        require(gate_matrix.outputs == outputs, f"a gate of {gate_matrix.outputs} outputs for {outputs}")
        tensors, activation = [*tensors, *more], gate.activation
    norm_weights = calls.NormWeights()
    if norm is not None:
        norm_weights = norm_of(norm.weight_D, norm.bias_D, norm.eps, D, x_TD.dtype)
        tensors += [x for x in (norm.weight_D, norm.bias_D) if x is not None]
    if residual_TF is not None:
        require(residual_TF.shape == (T, outputs), f"a residual of {tuple(residual_TF.shape)} for {(T, outputs)}")
        tensors.append(residual_TF)
    y_TF = residual_TF if inplace and residual_TF is not None else x_TD.new_empty(T, outputs)
    arguments = calls.Linear(
        x_TD.data_ptr(), 0 if residual_TF is None else residual_TF.data_ptr(), y_TF.data_ptr(), norm_weights, matrix,
        gate_matrix, T, x_TD.stride(0), calls.DTYPES[x_TD.dtype], calls.ACTIVATIONS[activation] if activation else 0,
    )  # fmt: skip
    calls.run(arguments, x_TD, y_TF, *tensors)
    return y_TF


def matrix_of(
    weight: Matrix, bias_F: Tensor | None, inputs: int, dtype: torch.dtype
) -> tuple[calls.Matrix, list[Tensor]]:
    """The library's form of ``weight``, and its tensors."""
    if isinstance(weight, Quantised):
        F_, D, tensors = weight.outputs, weight.inputs, [weight.values, weight.scales]
        groups = -(-D // weight.group)
        if weight.kind == "int4":
            wanted = ((F_, groups * weight.group // 8), torch.int32), ((F_, groups, 2), torch.bfloat16)
        else:
            wanted = ((F_, D), torch.int8), ((F_, 1), torch.float32)
        for x, (shape, of) in zip(tensors, wanted, strict=True):
            require(
                tuple(x.shape) == shape and x.dtype == of and x.is_contiguous(),
                f"{weight.kind} weights {tuple(x.shape)} {x.dtype} where {shape} {of} belong",
            )
        require(not weight.blocked or can_block(weight), f"blocks of {F_} × {D}")
        kind = calls.KINDS[weight.kind] + (calls.BLOCKS if weight.blocked else 0)
        group, scales = weight.group, weight.scales.data_ptr()
    else:
        (F_, D), tensors, kind, group, scales = weight.shape, [weight], 0, 0, 0
    require(inputs == D, f"rows of {inputs} inputs for a weight of {D}")
    if bias_F is not None:
        require(
            bias_F.shape == (F_,) and bias_F.dtype == dtype and bias_F.is_contiguous(),
            f"a bias {tuple(bias_F.shape)} {bias_F.dtype} for {F_} outputs in {dtype}",
        )
        tensors = [*tensors, bias_F]
    bias = 0 if bias_F is None else bias_F.data_ptr()
    return calls.Matrix(tensors[0].data_ptr(), scales, bias, kind, F_, D, group), tensors


def norm_of(weight_D: Tensor, bias_D: Tensor | None, eps: float, width: int, dtype: torch.dtype) -> calls.NormWeights:
    """The library's form of a norm of rows of ``width``."""
    for x in (weight_D, bias_D):
        require(
            x is None or (x.shape == (width,) and x.dtype == dtype and x.is_contiguous()),
            f"a norm of {None if x is None else (tuple(x.shape), x.dtype)} for rows of {width} in {dtype}",
        )
    return calls.NormWeights(weight_D.data_ptr(), 0 if bias_D is None else bias_D.data_ptr(), eps)


def require(condition: bool, what: str) -> None:
    """Raise :class:`ConfigError` unless ``condition``; ``what`` describes the mismatch."""
    if not condition:
        raise ConfigError(f"{what}; pass matching tensors")


# -- the rest of a step ------------------------------------------------------------------------------------------------


def embedding(tokens_T: Tensor, table: Matrix, dtype: torch.dtype, *, residual_TD: Tensor | None = None) -> Tensor:
    """x_TD (see :func:`reference.embedding`)."""
    if not (available(dtype) and tokens_T.dim() == 1 and len(tokens_T) and tokens_T.device.type == "cpu"):
        return reference.embedding(tokens_T, table, dtype, residual_TD=residual_TD)
    if isinstance(table, Quantised):
        fits = table.kind in ("int8", "int8_dynamic") and not table.needs_reference
    else:
        fits = table.dtype == dtype and table.is_contiguous() and _no_gradient(table)
    if residual_TD is not None:
        fits = fits and _no_gradient(residual_TD) and residual_TD.dtype == dtype and residual_TD.is_contiguous()
    if not fits or tokens_T.dtype != torch.int64 or not tokens_T.is_contiguous():
        return reference.embedding(tokens_T, table, dtype, residual_TD=residual_TD)
    inputs = table.inputs if isinstance(table, Quantised) else table.shape[1]
    matrix, tensors = matrix_of(table, None, inputs, dtype)
    x_TD = torch.empty(len(tokens_T), inputs, dtype=dtype)
    if residual_TD is not None:
        require(residual_TD.shape == x_TD.shape, f"a residual of {tuple(residual_TD.shape)} for {tuple(x_TD.shape)}")
        tensors = [*tensors, residual_TD]
    residual = 0 if residual_TD is None else residual_TD.data_ptr()
    arguments = calls.Embedding(
        tokens_T.data_ptr(), matrix, residual, x_TD.data_ptr(), len(tokens_T), calls.DTYPES[dtype]
    )
    calls.run(arguments, tokens_T, x_TD, *tensors)
    return x_TD


def norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """As :func:`~colonnade.kernels.norm.norm`."""
    fits = _no_gradient(x) and _no_gradient(weight_D) and x.is_contiguous() and x.numel() and x.device.type == "cpu"
    if not fits or not available(x.dtype):
        return norm_reference.norm(x, weight_D, bias_D, eps)
    y, D = torch.empty_like(x), x.shape[-1]
    arguments = calls.Norm(
        x.data_ptr(), norm_of(weight_D, bias_D, eps, D, x.dtype), y.data_ptr(), x.numel() // D, D, calls.DTYPES[x.dtype]
    )
    calls.run(arguments, x, y, weight_D, *(() if bias_D is None else (bias_D,)))
    return y


def rotation(positions_T: Tensor, theta: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
    """As :func:`~colonnade.kernels.rotary.rotation`."""
    fits = theta.dtype == torch.float32 and positions_T.dtype == torch.int64 and len(positions_T) > 0
    contiguous = theta.is_contiguous() and positions_T.is_contiguous() and positions_T.device.type == "cpu"
    if not fits or not contiguous or not available(dtype):
        return rotary.rotation(positions_T, theta, factor, dtype)
    own, other = (torch.empty(len(positions_T), 1, 2 * len(theta), dtype=dtype) for _ in range(2))
    arguments = calls.Rotation(
        positions_T.data_ptr(), theta.data_ptr(), own.data_ptr(), other.data_ptr(), factor, len(positions_T),
        len(theta), calls.DTYPES[dtype],
    )  # fmt: skip
    calls.run(arguments, positions_T, theta, own, other)
    return Rotation(own, other)


def rope_and_kv_write(
    qkv_Tz: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    slots_T: Tensor,
    *,
    turn: Rotation | None = None,
    norms: tuple[NormWeights, NormWeights] | None = None,
) -> Tensor:
    """q_TnH (see :func:`cache_write.rope_and_kv_write`)."""
    T, dtype, (K, H) = len(qkv_Tz), qkv_Tz.dtype, k_PpKH.shape[2:]
    fits = _no_gradient(qkv_Tz) and k_PpKH.dtype == v_PpKH.dtype == dtype and T > 0 and qkv_Tz.is_contiguous()
    if not fits or H % 2 or not available(dtype):
        return cache_write.rope_and_kv_write(qkv_Tz, k_PpKH, v_PpKH, slots_T, turn=turn, norms=norms)
    require(K > 0 and H > 0, f"a cache of {K} × {H}")
    group = qkv_Tz.shape[1] // (K * H) - 2
    require(qkv_Tz.shape[1] == K * (group + 2) * H and group > 0, f"a projection of {qkv_Tz.shape[1]} for {K} × {H}")
    require(k_PpKH.shape == v_PpKH.shape and k_PpKH.is_contiguous() and v_PpKH.is_contiguous(), "a strided cache")
    require(slots_T.shape == (T,) and slots_T.dtype == torch.int64 and slots_T.is_contiguous(), "slots as int64")
    tensors = [qkv_Tz, k_PpKH, v_PpKH, slots_T]
    own = other = 0
    if turn is not None:
        for x in turn:
            require(
                x.numel() == T * H and x.shape[-1] == H and x.dtype == dtype and x.is_contiguous(),
                f"rotary factors {tuple(x.shape)} {x.dtype} for {T} × {H} in {dtype}",
            )
        tensors, own, other = [*tensors, *turn], turn.own.data_ptr(), turn.other.data_ptr()
    q_norm = k_norm = calls.NormWeights()
    if norms is not None:
        q_norm, k_norm = (norm_of(each.weight_D, None, each.eps, H, dtype) for each in norms)
        tensors += [each.weight_D for each in norms]
    q_TnH = qkv_Tz.new_empty(T, K * group, H)
    arguments = calls.RopeWrite(
        qkv_Tz.data_ptr(), own, other, q_norm, k_norm, slots_T.data_ptr(), k_PpKH.data_ptr(), v_PpKH.data_ptr(),
        q_TnH.data_ptr(), T, K, group, H, k_PpKH.shape[0] * k_PpKH.shape[1], calls.DTYPES[dtype],
    )  # fmt: skip
    calls.run(arguments, q_TnH, *tensors)
    return q_TnH


def paged(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    window: int | None = None,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
    most_queries: int | None = MAX_QUERIES,
) -> Tensor:
    """o_TNH (see :func:`~colonnade.kernels.attention.reference.paged`) of few new tokens per request."""
    T, dtype = len(q_TNH), q_TNH.dtype
    plain = scales_Pp2 is None and k_PpKH.dtype == v_PpKH.dtype == dtype
    few = T > 0 and (most_queries is None or table.longest_query <= most_queries) and _no_gradient(q_TNH)
    if not plain or not few or not available(dtype):
        return sdpa.paged(q_TNH, k_PpKH, v_PpKH, table, window=window, values=values, scales_Pp2=scales_Pp2)
    (_, N, H), (P, page_tokens, K, _), R = q_TNH.shape, k_PpKH.shape, len(table.lengths_R)
    require(
        min(N, K, H, page_tokens) > 0 and N % K == 0 and k_PpKH.shape == v_PpKH.shape == (P, page_tokens, K, H),
        f"{N} × {H} queries for a cache of {tuple(k_PpKH.shape)}",
    )
    require(page_tokens == table.page_tokens, f"pages of {page_tokens} tokens in a table of {table.page_tokens}")
    require(table.cu_queries.shape == (R + 1,), f"{len(table.cu_queries)} query offsets for {R} requests")
    q_TNH = q_TNH.contiguous()
    tensors = (q_TNH, k_PpKH, v_PpKH, table.pages_RP, table.lengths_R, table.cu_queries)
    require(all(x.is_contiguous() for x in tensors), "strided tensors")
    require(all(x.dtype == torch.int32 for x in tensors[3:]), "tables and lengths as int32")
    most_splits = max(1, math.ceil(table.max_keys / calls.SPLIT))
    value_width = H if values is None else values
    require(
        values is None or (k_PpKH.data_ptr() == v_PpKH.data_ptr() and 0 < values <= H), f"values of {values} in {H}"
    )
    key = ("native", T, N, value_width)
    if key not in table.plan_cache:  # for all layers
        table.plan_cache[key] = torch.empty(T, N, most_splits, value_width + 2)
    partial, o_TNH = table.plan_cache[key], q_TNH.new_empty(T, N, value_width)
    arguments = calls.Attention(
        *(x.data_ptr() for x in (*tensors, partial, o_TNH)), T, R, N, K, H, page_tokens, P, table.pages_RP.shape[1],
        most_splits, window or 0, calls.DTYPES[dtype], value_width,
    )  # fmt: skip
    calls.run(arguments, *tensors, partial, o_TNH)
    return o_TNH
