"""One table: which implementation serves an operation on a device and a dtype.

Rows stand in order of preference; the first that fits is taken. ``kernels="reference"`` asks for the plain version,
which is how anyone can tell a kernel's bug from a model's. The contract test is parametrised over this table, so a new
kernel is tested by being listed.
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
    "place_heads",
    "held_attention",
    "merge_states",
    "store_latents",
    "chunk_forward",
    "chunk_backward",
    "dropout",
    "linear",
    "norm",
    "quantised_linear",
    "fused_linear",
    "scaled_product",
    "scaled_grouped_product",
    "expert_sums",
    "routed_experts",
    "routed_later",
    "few_experts",
    "quantised_experts",
    "dropout_experts",
    "scores",
    "best_experts",
    "count_choices",
    "sort_choices",
    "gather_rows",
    "combine_rows",
    "greedy_tokens",
    "told_tokens",
    "rotation",
    "adamw",
]
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Row:
    """One implementation of an operation, and where it runs."""

    operation: Operation
    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATS


TRITON = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
"""Where torch was built for no GPU, triton costs a second to import and serves nobody."""


def _written_in_triton() -> tuple[Row, ...]:
    """Kernels of ours for GPUs."""
    if not TRITON:
        return ()
    from colonnade.kernels import triton_adamw, triton_permute, triton_routing, triton_sampling, triton_sort
    from colonnade.kernels import triton_dropout as triton_elements
    from colonnade.kernels.attention import triton_cache_write, triton_dropout
    from colonnade.kernels.experts import triton_experts, triton_few_tokens
    from colonnade.kernels.experts import triton_quantised as quantised_experts_gpu
    from colonnade.kernels.linear import skinny_gemm

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Row("dropout_attention", "triton", triton_dropout.packed, **on),
        Row("dropout", "triton", triton_elements.dropout, **on),
        Row("quantised_linear", "triton", skinny_gemm.linear, **on),
        Row("fused_linear", "triton", skinny_gemm.fused_linear, **on),
        Row("place_heads", "triton", triton_cache_write.place, **on),
        Row("routed_experts", "triton", triton_experts.routed, **on),
        Row("routed_later", "triton", triton_experts.routed_deferred, **on),
        # Elsewhere choices are sorted for "routed_experts".
        Row("few_experts", "triton", triton_few_tokens.routed_unsorted, **on),
        Row("quantised_experts", "triton", quantised_experts_gpu.routed, **on),
        Row("best_experts", "triton", triton_routing.best, **on),
        Row("count_choices", "triton", triton_sort.count, devices=("cuda",), dtypes=(torch.int64,)),
        Row("sort_choices", "triton", triton_sort.sort, devices=("cuda",)),
        Row("gather_rows", "triton", triton_permute.gather, **on),
        Row("combine_rows", "triton", triton_permute.combine, **on),
        Row("greedy_tokens", "triton", triton_sampling.greedy, **on),
        Row("told_tokens", "triton", triton_sampling.tell_, devices=("cuda",), dtypes=(torch.int64,)),
        Row("adamw", "triton", triton_adamw.adamw, devices=("cuda",), dtypes=(torch.float32,)),
    )


def _decoding() -> tuple[Row, ...]:
    """Flash-Decoding; ``mixed`` takes SDPA for prompts, each of the two for what it is faster at by measurement."""
    if not TRITON:
        return ()
    from colonnade.kernels.attention import dispatch, triton_cache_write, triton_decode, triton_merge

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Row("paged_attention", "mixed", dispatch.paged, **on),
        Row("paged_attention", "cuda", functools.partial(triton_decode.paged, kernels="auto"), **on),
        Row("paged_attention", "triton", triton_decode.paged, **on),
        Row("held_attention", "triton", triton_decode.held_state, **on),
        Row("merge_states", "triton", triton_merge.merge_states, devices=("cuda",), dtypes=(torch.float32,)),
        Row("store_latents", "triton", triton_cache_write.store, **on),
    )


def _thin() -> tuple[Row, ...]:
    """Products that are ours up to a few rows, and angles in one launch: for serving, which asks for them by name."""
    if not TRITON:
        return ()
    from colonnade.kernels import triton_rotary
    from colonnade.kernels.linear import skinny_gemm

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Row("linear", "thin", skinny_gemm.linear, **on),
        Row("quantised_linear", "thin", skinny_gemm.linear, **on),
        Row("rotation", "thin", triton_rotary.rotation, **on),
    )


def _fixed() -> tuple[Row, ...]:
    """A row's bits whatever the number of rows: only for those who ask for it by name."""
    if not TRITON:
        return ()
    from colonnade.kernels import triton_norm
    from colonnade.kernels.attention import batch_invariant
    from colonnade.kernels.linear import triton_batch_invariant

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Row("paged_attention", "fixed", batch_invariant.paged, **on),
        Row("linear", "fixed", triton_batch_invariant.linear, **on),
        Row("norm", "fixed", triton_norm.norm, **on),
        Row("rotation", "fixed", rotary_reference.rotation, devices=("cuda",)),
    )


def _grouped(device: str) -> tuple[Row, ...]:
    """torch's grouped product, where this torch has it; it knows no float64, and on a CPU is slower than a loop."""
    on = {"devices": (device,), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    if not grouped_mm.available:
        return ()
    return (Row("dropout_experts", "grouped", grouped_mm.experts, **on),)


def _scaled_grouped() -> tuple[Row, ...]:
    """What experts in float8 are made of on a GPU, where this torch has it."""
    rows: tuple[Row, ...] = ()
    if grouped_mm.scaled_available:
        run = grouped_mm.scaled_product
        rows += (Row("scaled_grouped_product", "scaled_grouped_mm", run, ("cuda",), (torch.float8_e4m3fn,)),)
    if grouped_mm.available:
        rows += (Row("expert_sums", "grouped", grouped_mm.wgrad, ("cuda",), (torch.bfloat16,)),)
    return rows


TABLE: tuple[Row, ...] = (
    *_written_in_triton(),
    Row("packed_attention", "varlen", varlen.packed_varlen, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)),
    Row("packed_attention", "sdpa", sdpa.packed),
    Row("packed_attention", "reference", reference.packed),
    *_decoding(),
    Row("paged_attention", "sdpa", sdpa.paged),
    Row("paged_attention", "reference", reference.paged),
    Row("held_attention", "reference", sharded_cache.attend),
    Row("merge_states", "reference", sharded_cache.merge_states),
    Row("store_latents", "reference", cache_write.store),
    Row("chunk_forward", "flash", chunk_flash.flash_forward, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)),
    Row(
        "chunk_backward", "flash", chunk_flash.flash_backward, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)
    ),
    Row("chunk_forward", "reference", chunk.forward),
    Row("chunk_backward", "reference", chunk.backward),
    # Library kernels do not drop: their masks would be a generator's.
    Row("dropout_attention", "reference", reference.packed),
    Row("dropout", "recompute", dropout.recomputed_dropout),
    Row("dropout", "reference", dropout_reference.dropout),
    # In bfloat16 torch takes oneDNN, which needs no help.
    Row("linear", "thin", skinny_gemm_cpu.skinny_linear, devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    Row("linear", "reference", linear_reference.linear),
    Row("norm", "reference", norm_reference.norm),
    Row("quantised_linear", "few", skinny_gemm_cpu.quantised_linear, devices=("cpu",)),
    Row("quantised_linear", "reference", quantised.quantised_linear),
    Row("fused_linear", "reference", fused.fused_linear),
    Row("place_heads", "reference", cache_write.place),
    Row("scaled_product", "scaled_mm", scaled_mm.scaled_product, devices=("cuda",), dtypes=FLOATS8),
    Row("scaled_product", "reference", scaled.scaled_product, dtypes=FLOATS8),
    *_scaled_grouped(),
    Row("scaled_grouped_product", "reference", grouped_mm.scaled_product_reference, dtypes=FLOATS8),
    Row("expert_sums", "reference", grouped_mm.wgrad_reference),
    *_grouped("cuda"),
    # On a CPU the loop, in bfloat16 other products where they are faster: their docstrings have the measurements.
    Row("routed_experts", "bf16", bf16.routed_bf16, devices=("cpu",), dtypes=(torch.bfloat16,)),
    Row("routed_experts", "loop", loop.routed),
    Row("routed_experts", "reference", experts_reference.routed),
    Row("quantised_experts", "reference", quantised_experts.routed),
    # Rows that carry their masks' hashes between a gather and a sum: kernels that do all of it in one do not drop.
    Row("dropout_experts", "loop", loop.experts),
    *_grouped("cpu"),
    Row("dropout_experts", "reference", experts_reference.experts),
    Row("scores", "wide", routing.scores_tensor_core, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)),
    Row("scores", "reference", routing_reference.scores),
    Row("best_experts", "reference", routing_reference.best),
    Row("count_choices", "reference", permute_reference.count, dtypes=(torch.int64,)),
    Row("sort_choices", "reference", permute_reference.sort),
    Row("gather_rows", "reference", permute_reference.gather),
    Row("combine_rows", "reference", permute_reference.combine),
    Row("greedy_tokens", "reference", sample_reference.greedy),
    Row("told_tokens", "reference", sample_reference.tell_, dtypes=(torch.int64,)),
    Row("rotation", "reference", rotary_reference.rotation),
    Row("adamw", "reference", adamw_reference.adamw, dtypes=(torch.float64, torch.float32)),
    *_thin(),
    *_fixed(),
)

CHOSEN = {
    (row.operation, device, dtype, kernels): row.run
    for row in reversed(TABLE)
    for device in row.devices
    for dtype in row.dtypes
    for kernels in ("auto", row.name)
}
"""The table as it is asked, many times a forward pass; an earlier row overwrites a later one."""


def choose(operation: Operation, device: str, dtype: torch.dtype, kernels: str = "auto") -> Callable[..., Any]:
    """The implementation for ``device`` ("cpu", "cuda") and ``dtype``; ``kernels`` names one, or is "auto"."""
    if run := CHOSEN.get((operation, device, dtype, kernels)):
        return run
    names = kernel_names(operation, device, dtype)
    close = difflib.get_close_matches(kernels, names, n=1, cutoff=0.5)
    known = f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names) or 'none'}"
    raise ConfigError(f"no kernel '{kernels}' for {operation} on {device} in {dtype}{known}")


def kernel_names(operation: Operation, device: str, dtype: torch.dtype) -> list[str]:
    """The implementations of ``operation`` for ``device`` and ``dtype``, in order of preference."""
    fits = (row for row in TABLE if row.operation == operation and device in row.devices and dtype in row.dtypes)
    return list(dict.fromkeys(row.name for row in fits))
