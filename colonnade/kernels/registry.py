"""Kernel registry: which implementation runs an operation for a device and dtype.

Implementations are listed in order of preference; the first that fits is used. ``kernels="reference"`` selects the
plain one, which tells a kernel's bug from a model's. The contract tests are parametrised over this table, so a kernel
that is listed is tested.
"""

import difflib
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from colonnade.errors import ConfigError
from colonnade.kernels import adamw as adamw_reference
from colonnade.kernels import dropout, routing
from colonnade.kernels import dropout as dropout_reference
from colonnade.kernels import norm as norm_reference
from colonnade.kernels import permute as permute_reference
from colonnade.kernels import rotary as rotary_reference
from colonnade.kernels import routing as routing_reference
from colonnade.kernels import sampling as sample_reference
from colonnade.kernels.attention import cache_write, chunk, reference, sdpa, sharded_cache
from colonnade.kernels.attention import chunk as chunk_flash
from colonnade.kernels.attention import sdpa as varlen
from colonnade.kernels.experts import grouped_mm, loop
from colonnade.kernels.experts import loop as batched
from colonnade.kernels.experts import loop as bf16
from colonnade.kernels.experts import quantised as quantised_experts
from colonnade.kernels.experts import reference as experts_reference
from colonnade.kernels.linear import reference as fused
from colonnade.kernels.linear import reference as linear_reference
from colonnade.kernels.linear import reference as quantised
from colonnade.kernels.linear import reference as scaled
from colonnade.kernels.linear import scaled_mm, skinny_gemm_cpu

Operation = Literal[
    "packed_attention",
    "dropout_attention",
    "paged_attention",
    "rope_and_kv_write",
    "sharded_attention",
    "merge_states",
    "mla_cache_write",
    "chunk_forward",
    "chunk_backward",
    "dropout",
    "linear",
    "norm",
    "quantised_linear",
    "fused_linear",
    "scaled_mm",
    "scaled_grouped_mm",
    "grouped_wgrad",
    "routed_experts",
    "routed_experts_deferred_wgrad",
    "few_token_experts",
    "quantised_experts",
    "experts",
    "dropout_experts",
    "router_scores",
    "top_experts",
    "count_by_expert",
    "sort_by_expert",
    "gather_rows",
    "combine_rows",
    "greedy_tokens",
    "write_next_tokens",
    "rope_cos_sin",
    "adamw",
]
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Implementation:
    """An implementation of an operation, with the devices and dtypes it supports."""

    operation: Operation
    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATS


TRITON = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
"""False in torch builds without CUDA, where importing triton would cost a second for nothing."""


def _triton() -> tuple[Implementation, ...]:
    if not TRITON:
        return ()
    from colonnade.kernels import triton_adamw, triton_permute, triton_routing, triton_sampling, triton_sort
    from colonnade.kernels import triton_dropout as triton_elements
    from colonnade.kernels.attention import triton_cache_write, triton_dropout
    from colonnade.kernels.experts import triton_experts, triton_few_tokens
    from colonnade.kernels.experts import triton_quantised as quantised_experts_gpu
    from colonnade.kernels.linear import quantised_gpu, skinny_gemm

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Implementation("dropout_attention", "triton", triton_dropout.packed, **on),
        Implementation("dropout", "triton", triton_elements.dropout, **on),
        Implementation("quantised_linear", "triton", quantised_gpu.linear, **on),
        Implementation("fused_linear", "triton", skinny_gemm.product, **on),
        Implementation("rope_and_kv_write", "triton", triton_cache_write.rope_and_kv_write, **on),
        Implementation("routed_experts", "triton", triton_experts.routed, **on),
        Implementation("routed_experts_deferred_wgrad", "triton", triton_experts.routed_later, **on),
        Implementation(
            "few_token_experts", "triton", triton_few_tokens.few, **on
        ),  # without it, "routed_experts" sorts the token choices first
        Implementation("quantised_experts", "triton", quantised_experts_gpu.routed, **on),
        Implementation("experts", "triton", triton_experts.experts, **on),
        Implementation("top_experts", "triton", triton_routing.top_experts, **on),
        Implementation("count_by_expert", "triton", triton_sort.count, devices=("cuda",), dtypes=(torch.int64,)),
        Implementation("sort_by_expert", "triton", triton_sort.sort, devices=("cuda",)),
        Implementation("gather_rows", "triton", triton_permute.gather, **on),
        Implementation("combine_rows", "triton", triton_permute.combine, **on),
        Implementation("greedy_tokens", "triton", triton_sampling.greedy, **on),
        Implementation(
            "write_next_tokens", "triton", triton_sampling.write_next_tokens_, devices=("cuda",), dtypes=(torch.int64,)
        ),
        Implementation("adamw", "triton", triton_adamw.adamw, devices=("cuda",), dtypes=(torch.float32,)),
    )


def _decode_attention() -> tuple[Implementation, ...]:
    """Flash-Decoding; ``dispatch`` uses SDPA for long prompts and Flash-Decoding for the rest, as measured."""
    if not TRITON:
        return ()
    from colonnade.kernels.attention import dispatch, triton_cache_write, triton_decode, triton_merge

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Implementation("paged_attention", "dispatch", dispatch.paged, **on),
        Implementation("paged_attention", "cuda", functools.partial(triton_decode.paged, kernels="auto"), **on),
        Implementation("paged_attention", "triton", triton_decode.paged, **on),
        Implementation("sharded_attention", "triton", triton_decode.sharded_state, **on),
        Implementation("merge_states", "triton", triton_merge.merge_states, devices=("cuda",), dtypes=(torch.float32,)),
        Implementation("mla_cache_write", "triton", triton_cache_write.write_latents, **on),
    )


def _skinny() -> tuple[Implementation, ...]:
    """GEMMs of a few rows, and rotary tables in one launch; serving selects them by name."""
    if not TRITON:
        return ()
    from colonnade.kernels import triton_rotary
    from colonnade.kernels.linear import skinny_gemm

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Implementation("linear", "skinny", skinny_gemm.linear, **on),
        Implementation("quantised_linear", "skinny", skinny_gemm.linear, **on),
        Implementation("rope_cos_sin", "skinny", triton_rotary.rotation, **on),
    )


def _batch_invariant() -> tuple[Implementation, ...]:
    """Kernels whose result for a row does not depend on the number of rows; selected by name only."""
    if not TRITON:
        return ()
    from colonnade.kernels import triton_norm
    from colonnade.kernels.attention import batch_invariant
    from colonnade.kernels.linear import triton_batch_invariant

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Implementation("paged_attention", "batch_invariant", batch_invariant.paged, **on),
        Implementation("linear", "batch_invariant", triton_batch_invariant.linear, **on),
        Implementation("norm", "batch_invariant", triton_norm.norm, **on),
        Implementation("rope_cos_sin", "batch_invariant", rotary_reference.rotation, devices=("cuda",)),
    )


def _grouped_mm(device: str) -> tuple[Implementation, ...]:
    """torch's grouped GEMM where available; it has no float64, and on a CPU a loop over experts is faster."""
    on = {"devices": (device,), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    if not grouped_mm.available:
        return ()
    return tuple(
        Implementation(operation, "grouped", grouped_mm.experts, **on) for operation in ("experts", "dropout_experts")
    )


def _float8_experts() -> tuple[Implementation, ...]:
    """Scaled grouped GEMMs for float8 experts, where this torch has them."""
    rows: tuple[Implementation, ...] = ()
    if grouped_mm.scaled_available:
        run = grouped_mm.scaled_product
        rows += (Implementation("scaled_grouped_mm", "scaled_grouped_mm", run, ("cuda",), (torch.float8_e4m3fn,)),)
    if grouped_mm.available:
        rows += (Implementation("grouped_wgrad", "grouped", grouped_mm.sums, ("cuda",), (torch.bfloat16,)),)
    return rows


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *_triton(),
    Implementation(
        "packed_attention", "varlen", varlen.packed_varlen, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)
    ),
    Implementation("packed_attention", "sdpa", sdpa.packed),
    Implementation("packed_attention", "reference", reference.packed),
    *_decode_attention(),
    Implementation("paged_attention", "sdpa", sdpa.paged),
    Implementation("paged_attention", "reference", reference.paged),
    Implementation("sharded_attention", "reference", sharded_cache.attend),
    Implementation("merge_states", "reference", sharded_cache.merge_states),
    Implementation("mla_cache_write", "reference", cache_write.write_latents),
    Implementation(
        "chunk_forward", "flash", chunk_flash.flash_forward, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)
    ),
    Implementation(
        "chunk_backward", "flash", chunk_flash.flash_backward, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)
    ),
    Implementation("chunk_forward", "reference", chunk.forward),
    Implementation("chunk_backward", "reference", chunk.backward),
    # Library kernels draw their dropout masks from a generator; ours are hashes.
    Implementation("dropout_attention", "reference", reference.packed),
    Implementation("dropout", "recompute", dropout.recomputed_dropout),
    Implementation("dropout", "reference", dropout_reference.dropout),
    # In bfloat16 torch uses oneDNN, which is fast enough.
    Implementation(
        "linear", "skinny", skinny_gemm_cpu.skinny_linear, devices=("cpu",), dtypes=(torch.float64, torch.float32)
    ),
    Implementation("linear", "reference", linear_reference.linear),
    Implementation("norm", "reference", norm_reference.norm),
    Implementation("quantised_linear", "skinny", skinny_gemm_cpu.quantised_linear, devices=("cpu",)),
    Implementation("quantised_linear", "reference", quantised.quantised_linear),
    Implementation("fused_linear", "reference", fused.fused_linear),
    Implementation("rope_and_kv_write", "reference", cache_write.rope_and_kv_write),
    Implementation("scaled_mm", "scaled_mm", scaled_mm.product, devices=("cuda",), dtypes=FLOATS8),
    Implementation("scaled_mm", "reference", scaled.scaled_product, dtypes=FLOATS8),
    *_float8_experts(),
    Implementation("scaled_grouped_mm", "reference", grouped_mm.scaled_product_reference, dtypes=FLOATS8),
    Implementation("grouped_wgrad", "reference", grouped_mm.sums_reference),
    *_grouped_mm("cuda"),
    # The loop on a CPU, and another formulation in bfloat16 where it is faster; see their docstrings for measurements.
    Implementation("routed_experts", "bf16", bf16.routed_bf16, devices=("cpu",), dtypes=(torch.bfloat16,)),
    Implementation("routed_experts", "loop", loop.routed),
    Implementation("routed_experts", "reference", experts_reference.routed),
    Implementation("quantised_experts", "reference", quantised_experts.routed),
    Implementation("experts", "loop", loop.experts),
    # These apply dropout between the gather and the sum; kernels that fuse the whole expert do not support dropout.
    Implementation("dropout_experts", "loop", loop.experts),
    *_grouped_mm("cpu"),
    Implementation("experts", "batched", batched.batched_experts),
    Implementation("experts", "reference", experts_reference.experts),
    Implementation("dropout_experts", "batched", batched.batched_experts),
    Implementation("dropout_experts", "reference", experts_reference.experts),
    Implementation(
        "router_scores",
        "tensor_core",
        routing.scores_tensor_core,
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
    ),
    Implementation("router_scores", "reference", routing_reference.scores),
    Implementation("top_experts", "reference", routing_reference.top_experts),
    Implementation("count_by_expert", "reference", permute_reference.count, dtypes=(torch.int64,)),
    Implementation("sort_by_expert", "reference", permute_reference.sort),
    Implementation("gather_rows", "reference", permute_reference.gather),
    Implementation("combine_rows", "reference", permute_reference.combine),
    Implementation("greedy_tokens", "reference", sample_reference.greedy),
    Implementation("write_next_tokens", "reference", sample_reference.write_next_tokens_, dtypes=(torch.int64,)),
    Implementation("rope_cos_sin", "reference", rotary_reference.rotation),
    Implementation("adamw", "reference", adamw_reference.adamw, dtypes=(torch.float64, torch.float32)),
    *_skinny(),
    *_batch_invariant(),
)

LOOKUP = {
    (row.operation, device, dtype, kernels): row.run
    for row in reversed(IMPLEMENTATIONS)
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
    fits = (
        row for row in IMPLEMENTATIONS if row.operation == operation and device in row.devices and dtype in row.dtypes
    )
    return list(dict.fromkeys(row.name for row in fits))
