"""Kernel registry: which implementation runs an operation for a device and dtype.

Implementations are listed in order of preference; the first that fits is used. ``kernels="reference"`` selects the
plain one, to distinguish a kernel's bug from a model's. The contract tests of attention, linear, dropout and experts
are parametrised over this table.
"""

import difflib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from colonnade.errors import ConfigError
from colonnade.kernels import adamw, dropout, host_rows, norm, permute, rotary, routing, sampling
from colonnade.kernels.attention import cache_write, chunk, cross, reference, sdpa, shared_prefix
from colonnade.kernels.cpu import experts as cpu_experts
from colonnade.kernels.cpu import kernels as cpu_kernels
from colonnade.kernels.experts import grouped_mm, loop
from colonnade.kernels.experts import quantised as quantised_experts
from colonnade.kernels.experts import reference as experts_reference
from colonnade.kernels.linear import gptq_columns, scaled_mm, skinny_gemm_cpu
from colonnade.kernels.linear import reference as linear_reference
from colonnade.kernels.transducer import joint, lattice

Operation = Literal[
    "packed_attention",
    "dropout_attention",
    "paged_attention",
    "cross_attention",
    "shared_prefix_attention",
    "relative_attention",
    "relative_paged_attention",
    "rope_and_kv_write",
    "sharded_attention",
    "merge_states",
    "mla_cache_write",
    "chunk_forward",
    "chunk_backward",
    "dropout",
    "linear",
    "embedding",
    "norm",
    "quantised_linear",
    "fused_linear",
    "gptq_columns",
    "scaled_mm",
    "scaled_grouped_mm",
    "grouped_wgrad",
    "routed_experts",
    "routed_experts_deferred_wgrad",
    "few_token_experts",
    "quantised_experts",
    "dropout_experts",
    "router_scores",
    "top_experts",
    "count_by_expert",
    "sort_by_expert",
    "queue_positions",
    "gather_rows",
    "combine_rows",
    "greedy_tokens",
    "sampled_tokens",
    "write_next_tokens",
    "rope_cos_sin",
    "adamw",
    "host_rows",
    "transducer_scores",
    "transducer_lattice",
    "transducer_gradients",
]
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ON_GPU: dict[str, Any] = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
JOINT: dict[str, Any] = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16)}
ON_GPU_16_BIT: dict[str, Any] = {"devices": ("cuda",), "dtypes": (torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operation, with the devices and dtypes it supports."""

    operation: Operation
    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATS


TRITON = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
"""False in torch builds without CUDA, where importing triton would cost a second for nothing."""


def _triton() -> tuple[Kernel, ...]:
    if not TRITON:
        return ()
    from colonnade.kernels import (
        triton_adamw,
        triton_dropout,
        triton_host_rows,
        triton_permute,
        triton_routing,
        triton_sampled_tokens,
        triton_sampling,
        triton_sort,
    )
    from colonnade.kernels.attention import cudnn_relative, triton_cache_write
    from colonnade.kernels.experts import triton_experts, triton_few_tokens
    from colonnade.kernels.experts import triton_quantised as quantised_experts_gpu
    from colonnade.kernels.linear import skinny_gemm, triton_gptq
    from colonnade.kernels.transducer import triton_joint, triton_lattice

    return (
        Kernel("dropout_attention", "triton", triton_dropout.packed, **ON_GPU),
        Kernel("dropout", "triton", triton_dropout.dropout, **ON_GPU),
        Kernel("quantised_linear", "triton", skinny_gemm.linear, **ON_GPU),
        Kernel("fused_linear", "triton", skinny_gemm.fused_linear, **ON_GPU),
        Kernel("gptq_columns", "triton", triton_gptq.round_columns, ("cuda",), (torch.float32,)),
        Kernel("relative_attention", "cudnn", cudnn_relative.relative, **ON_GPU_16_BIT),
        Kernel("rope_and_kv_write", "triton", triton_cache_write.rope_and_kv_write, **ON_GPU),
        Kernel("routed_experts", "triton", triton_experts.routed, **ON_GPU),
        Kernel("routed_experts_deferred_wgrad", "triton", triton_experts.routed_deferred, **ON_GPU),
        # Where this one does not run, choices are sorted for "routed_experts".
        Kernel("few_token_experts", "triton", triton_few_tokens.routed_unsorted, **ON_GPU),
        Kernel("quantised_experts", "triton", quantised_experts_gpu.routed, **ON_GPU),
        Kernel("top_experts", "triton", triton_routing.top_experts, **ON_GPU),
        Kernel("count_by_expert", "triton", triton_sort.count, devices=("cuda",), dtypes=(torch.int64,)),
        Kernel("sort_by_expert", "triton", triton_sort.sort, devices=("cuda",)),
        Kernel("queue_positions", "triton", triton_sort.positions, devices=("cuda",), dtypes=(torch.int64,)),
        Kernel("gather_rows", "triton", triton_permute.gather, **ON_GPU),
        Kernel("combine_rows", "triton", triton_permute.combine, **ON_GPU),
        Kernel("greedy_tokens", "triton", triton_sampling.greedy, **ON_GPU),
        Kernel("sampled_tokens", "triton", triton_sampled_tokens.sample, **ON_GPU),
        Kernel(
            "write_next_tokens", "triton", triton_sampling.write_next_tokens_, devices=("cuda",), dtypes=(torch.int64,)
        ),
        Kernel("adamw", "triton", triton_adamw.adamw, devices=("cuda",), dtypes=(torch.float32,)),
        Kernel("host_rows", "triton", triton_host_rows.copy_rows, **ON_GPU),
        Kernel("transducer_scores", "triton", triton_joint.scores, **JOINT),
        Kernel("transducer_gradients", "triton", triton_joint.gradients, **JOINT),
        Kernel("transducer_lattice", "triton", triton_lattice.transducer_lattice, ("cuda",), (torch.float32,)),
    )


def _decode_attention() -> tuple[Kernel, ...]:
    """Flash-Decoding; ``dispatch`` uses SDPA for long prompts and Flash-Decoding for the rest, as measured."""
    if not TRITON:
        return ()
    from colonnade.kernels.attention import dispatch, triton_cache_write, triton_decode, triton_merge

    return (
        Kernel("paged_attention", "dispatch", dispatch.paged, **ON_GPU),
        Kernel("paged_attention", "cuda", functools.partial(triton_decode.paged, kernels="auto"), **ON_GPU),
        Kernel("paged_attention", "triton", triton_decode.paged, **ON_GPU),
        Kernel("relative_paged_attention", "triton", triton_decode.relative_paged, **ON_GPU),
        Kernel("sharded_attention", "triton", triton_decode.sharded_state, **ON_GPU),
        Kernel("merge_states", "triton", triton_merge.merge_states, devices=("cuda",), dtypes=(torch.float32,)),
        Kernel("mla_cache_write", "triton", triton_cache_write.write_latents, **ON_GPU),
    )


def _skinny() -> tuple[Kernel, ...]:
    """GEMMs of a few rows, and rotary tables in one launch; serving selects them by name."""
    if not TRITON:
        return ()
    from colonnade.kernels import triton_rotary
    from colonnade.kernels.linear import skinny_gemm

    return (
        Kernel("linear", "skinny", skinny_gemm.linear, **ON_GPU),
        Kernel("quantised_linear", "skinny", skinny_gemm.linear, **ON_GPU),
        Kernel("rope_cos_sin", "skinny", triton_rotary.rotation, **ON_GPU),
    )


NATIVE: dict[str, Any] = {"devices": ("cpu",), "dtypes": (torch.float32, torch.bfloat16)}


def _native() -> tuple[Kernel, ...]:
    """Decode steps in C++; serving selects them by name, if the library is available."""
    return (
        Kernel("embedding", "native", cpu_kernels.embedding, **NATIVE),
        Kernel("rope_cos_sin", "native", cpu_kernels.rotation, **NATIVE),
        Kernel("norm", "native", cpu_kernels.norm, **NATIVE),
        Kernel("linear", "native", cpu_kernels.linear, **NATIVE),
        Kernel("quantised_linear", "native", cpu_kernels.quantised_linear, **NATIVE),
        Kernel("fused_linear", "native", cpu_kernels.fused_linear, **NATIVE),
        Kernel("rope_and_kv_write", "native", cpu_kernels.rope_and_kv_write, **NATIVE),
        Kernel("paged_attention", "native", cpu_kernels.paged, **NATIVE),
        Kernel("quantised_experts", "native", cpu_experts.routed, **NATIVE),
    )


def _batch_invariant() -> tuple[Kernel, ...]:
    """Kernels whose result for a row does not depend on the number of rows; selected by name only."""
    partial, name = functools.partial, "batch_invariant"
    on_cpu = (
        Kernel("rope_cos_sin", name, cpu_kernels.rotation, **NATIVE),
        Kernel("norm", name, cpu_kernels.norm, **NATIVE),
        Kernel("linear", name, partial(cpu_kernels.linear, most_rows=None), **NATIVE),
        Kernel("fused_linear", name, partial(cpu_kernels.fused_linear, most_rows=None), **NATIVE),
        Kernel("rope_and_kv_write", name, cpu_kernels.rope_and_kv_write, **NATIVE),
        Kernel("paged_attention", name, partial(cpu_kernels.paged, most_queries=None), **NATIVE),
    )
    if not TRITON:
        return on_cpu
    from colonnade.kernels import triton_batch_invariant
    from colonnade.kernels.attention import triton_cache_write

    return (
        *on_cpu,
        Kernel("rope_and_kv_write", "batch_invariant", triton_cache_write.rope_and_kv_write, **ON_GPU),
        Kernel("paged_attention", "batch_invariant", triton_batch_invariant.paged, **ON_GPU),
        Kernel("linear", "batch_invariant", triton_batch_invariant.linear, **ON_GPU),
        Kernel("norm", "batch_invariant", triton_batch_invariant.norm, **ON_GPU),
        Kernel("rope_cos_sin", "batch_invariant", rotary.rotation, devices=("cuda",)),
    )


def _grouped_mm(device: str) -> tuple[Kernel, ...]:
    """torch's grouped GEMM where available; it has no float64, and on a CPU a loop over experts is faster."""
    if not grouped_mm.available:
        return ()
    return (Kernel("dropout_experts", "grouped", grouped_mm.experts, (device,), ON_GPU["dtypes"]),)


def _float8_experts() -> tuple[Kernel, ...]:
    """Scaled grouped GEMMs for float8 experts, where this torch has them."""
    rows: tuple[Kernel, ...] = ()
    if grouped_mm.scaled_available:
        run = grouped_mm.scaled_product
        rows += (Kernel("scaled_grouped_mm", "scaled_grouped_mm", run, ("cuda",), (torch.float8_e4m3fn,)),)
    if grouped_mm.available:
        rows += (Kernel("grouped_wgrad", "grouped", grouped_mm.wgrad, ("cuda",), (torch.bfloat16,)),)
    return rows


KERNELS: tuple[Kernel, ...] = (
    *_triton(),
    Kernel("packed_attention", "varlen", sdpa.packed_varlen, **ON_GPU_16_BIT),
    Kernel("packed_attention", "sdpa", sdpa.packed),
    Kernel("packed_attention", "reference", reference.packed),
    *_decode_attention(),
    Kernel("paged_attention", "sdpa", sdpa.paged),
    Kernel("paged_attention", "reference", reference.paged),
    Kernel("cross_attention", "varlen", cross.cross_varlen, **ON_GPU_16_BIT),
    Kernel("cross_attention", "sdpa", cross.cross_sdpa),
    Kernel("cross_attention", "reference", cross.cross_reference),
    Kernel("shared_prefix_attention", "flash", shared_prefix.shared_prefix_flash, **ON_GPU_16_BIT),
    Kernel("shared_prefix_attention", "sdpa", shared_prefix.shared_prefix_sdpa),
    Kernel("shared_prefix_attention", "reference", shared_prefix.shared_prefix_reference),
    Kernel("relative_attention", "sdpa", cross.relative_sdpa),
    Kernel("relative_attention", "reference", cross.relative_reference),
    Kernel("relative_paged_attention", "sdpa", cross.relative_paged_sdpa),
    Kernel("relative_paged_attention", "reference", cross.relative_paged_reference),
    Kernel("sharded_attention", "reference", reference.sharded),
    Kernel("merge_states", "reference", reference.merge_states),
    Kernel("mla_cache_write", "reference", cache_write.write_latents),
    Kernel("chunk_forward", "flash", chunk.flash_forward, **ON_GPU_16_BIT),
    Kernel("chunk_backward", "flash", chunk.flash_backward, **ON_GPU_16_BIT),
    Kernel("chunk_forward", "reference", chunk.forward),
    Kernel("chunk_backward", "reference", chunk.backward),
    # Library kernels draw their dropout masks from a generator; ours are hashes.
    Kernel("dropout_attention", "reference", reference.packed),
    Kernel("dropout", "recompute", dropout.recomputed_dropout),
    Kernel("dropout", "reference", dropout.dropout),
    Kernel("embedding", "reference", linear_reference.embedding),
    # In bfloat16 torch uses oneDNN, which is fast enough.
    Kernel("linear", "skinny", skinny_gemm_cpu.skinny_linear, devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    Kernel("linear", "reference", linear_reference.linear),
    Kernel("norm", "reference", norm.norm),
    Kernel("quantised_linear", "skinny", skinny_gemm_cpu.quantised_linear, devices=("cpu",)),
    Kernel("quantised_linear", "reference", linear_reference.quantised_linear),
    Kernel("fused_linear", "reference", linear_reference.fused_linear),
    Kernel("gptq_columns", "reference", gptq_columns.round_columns, dtypes=(torch.float32,)),
    Kernel("rope_and_kv_write", "reference", cache_write.rope_and_kv_write),
    Kernel("scaled_mm", "scaled_mm", scaled_mm.scaled_product, devices=("cuda",), dtypes=FLOATS8),
    Kernel("scaled_mm", "reference", linear_reference.scaled_product, dtypes=FLOATS8),
    *_float8_experts(),
    Kernel("scaled_grouped_mm", "reference", grouped_mm.scaled_product_reference, dtypes=FLOATS8),
    Kernel("grouped_wgrad", "reference", grouped_mm.wgrad_reference),
    *_grouped_mm("cuda"),
    # The loop on a CPU, and another formulation in bfloat16 where it is faster; see their docstrings for measurements.
    Kernel("routed_experts", "bf16", loop.routed_bf16, devices=("cpu",), dtypes=(torch.bfloat16,)),
    Kernel("routed_experts", "loop", loop.routed),
    Kernel("routed_experts", "reference", experts_reference.routed),
    Kernel("quantised_experts", "reference", quantised_experts.routed),
    # These apply dropout between the gather and the sum; kernels that fuse the whole expert do not support dropout.
    Kernel("dropout_experts", "loop", loop.experts),
    *_grouped_mm("cpu"),
    Kernel("dropout_experts", "reference", experts_reference.experts),
    Kernel("router_scores", "tensor_core", routing.scores_tensor_core, **ON_GPU_16_BIT),
    Kernel("router_scores", "reference", routing.scores),
    Kernel("top_experts", "reference", routing.top_experts),
    Kernel("count_by_expert", "reference", permute.count, dtypes=(torch.int64,)),
    Kernel("sort_by_expert", "reference", permute.sort),
    Kernel("queue_positions", "reference", permute.positions, dtypes=(torch.int64,)),
    Kernel("gather_rows", "reference", permute.gather),
    Kernel("combine_rows", "reference", permute.combine),
    Kernel("greedy_tokens", "reference", sampling.greedy),
    Kernel("sampled_tokens", "reference", sampling.sample),
    Kernel("write_next_tokens", "reference", sampling.write_next_tokens_, dtypes=(torch.int64,)),
    Kernel("rope_cos_sin", "reference", rotary.rotation),
    Kernel("adamw", "reference", adamw.adamw, dtypes=(torch.float64, torch.float32)),
    Kernel("host_rows", "reference", host_rows.copy_rows),
    Kernel("transducer_scores", "reference", joint.scores),
    Kernel("transducer_gradients", "reference", joint.gradients),
    Kernel("transducer_lattice", "reference", lattice.transducer_lattice),
    *_skinny(),
    *_native(),
    *_batch_invariant(),
)
"""All kernels, the preferred ones first."""

LOOKUP = {
    (row.operation, device, dtype, kernels): row.run
    for row in reversed(KERNELS)
    for device in row.devices
    for dtype in row.dtypes
    for kernels in ("auto", row.name)
}
"""The table by (operation, device, dtype, name), since it is queried many times per forward; earlier rows win."""


def choose(operation: Operation, device: str, dtype: torch.dtype, kernels: str = "auto") -> Callable[..., Any]:
    """The implementation for ``device`` ("cpu" or "cuda") and ``dtype``; ``kernels`` is a name or "auto"."""
    if run := LOOKUP.get((operation, device, dtype, kernels)):
        return run
    names = kernel_names(operation, device, dtype)
    close = difflib.get_close_matches(kernels, names, n=1, cutoff=0.5)
    known = f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names) or 'none'}"
    raise ConfigError(f"no kernel '{kernels}' for {operation} on {device} in {dtype}{known}")


def kernel_names(operation: Operation, device: str, dtype: torch.dtype) -> list[str]:
    """Names of the implementations of ``operation`` for ``device`` and ``dtype``, in order of preference."""
    fits = (row for row in KERNELS if row.operation == operation and device in row.devices and dtype in row.dtypes)
    return list(dict.fromkeys(row.name for row in fits))
