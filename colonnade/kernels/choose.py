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
from colonnade.kernels.adamw import reference as adamw_reference
from colonnade.kernels.attention import chunk, chunk_flash, held, latents, place, reference, sdpa, varlen
from colonnade.kernels.dropout import recompute
from colonnade.kernels.dropout import reference as dropout_reference
from colonnade.kernels.experts import batched, bf16, grouped, loop, scaled_grouped, scaled_grouped_mm
from colonnade.kernels.experts import quantised as quantised_experts
from colonnade.kernels.experts import reference as experts_reference
from colonnade.kernels.linear import few, fused, quantised, scaled, scaled_mm, thin
from colonnade.kernels.linear import reference as linear_reference
from colonnade.kernels.norm import reference as norm_reference
from colonnade.kernels.permute import reference as permute_reference
from colonnade.kernels.rotary import reference as rotary_reference
from colonnade.kernels.routing import reference as routing_reference
from colonnade.kernels.routing import wide
from colonnade.kernels.sample import reference as sample_reference

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
    "experts",
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
    from colonnade.kernels.adamw import triton_adamw
    from colonnade.kernels.attention import triton_dropout, triton_place
    from colonnade.kernels.dropout import triton_elements
    from colonnade.kernels.experts import quantised_gpu as quantised_experts_gpu
    from colonnade.kernels.experts import triton_experts, triton_few
    from colonnade.kernels.linear import quantised_gpu, thin_gpu
    from colonnade.kernels.permute import triton_moves, triton_sort
    from colonnade.kernels.routing import triton_best
    from colonnade.kernels.sample import triton_greedy, triton_tell

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Row("dropout_attention", "triton", triton_dropout.packed, **on),
        Row("dropout", "triton", triton_elements.dropout, **on),
        Row("quantised_linear", "triton", quantised_gpu.linear, **on),
        Row("fused_linear", "triton", thin_gpu.product, **on),
        Row("place_heads", "triton", triton_place.place, **on),
        Row("routed_experts", "triton", triton_experts.routed, **on),
        Row("routed_later", "triton", triton_experts.routed_later, **on),
        Row("few_experts", "triton", triton_few.few, **on),  # elsewhere choices are sorted for "routed_experts"
        Row("quantised_experts", "triton", quantised_experts_gpu.routed, **on),
        Row("experts", "triton", triton_experts.experts, **on),
        Row("best_experts", "triton", triton_best.best, **on),
        Row("count_choices", "triton", triton_sort.count, devices=("cuda",), dtypes=(torch.int64,)),
        Row("sort_choices", "triton", triton_sort.sort, devices=("cuda",)),
        Row("gather_rows", "triton", triton_moves.gather, **on),
        Row("combine_rows", "triton", triton_moves.combine, **on),
        Row("greedy_tokens", "triton", triton_greedy.greedy, **on),
        Row("told_tokens", "triton", triton_tell.tell_, devices=("cuda",), dtypes=(torch.int64,)),
        Row("adamw", "triton", triton_adamw.adamw, devices=("cuda",), dtypes=(torch.float32,)),
    )


def _decoding() -> tuple[Row, ...]:
    """Flash-Decoding; ``mixed`` takes SDPA for prompts, each of the two for what it is faster at by measurement."""
    if not TRITON:
        return ()
    from colonnade.kernels.attention import mixed, triton_decode, triton_held, triton_keep

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Row("paged_attention", "mixed", mixed.paged, **on),
        Row("paged_attention", "cuda", functools.partial(triton_decode.paged, kernels="auto"), **on),
        Row("paged_attention", "triton", triton_decode.paged, **on),
        Row("held_attention", "triton", triton_decode.held_state, **on),
        Row("merge_states", "triton", triton_held.merged, devices=("cuda",), dtypes=(torch.float32,)),
        Row("store_latents", "triton", triton_keep.store, **on),
    )


def _thin() -> tuple[Row, ...]:
    """Products that are ours up to a few rows, and angles in one launch: for serving, which asks for them by name."""
    if not TRITON:
        return ()
    from colonnade.kernels.linear import thin_gpu
    from colonnade.kernels.rotary import triton_rotary

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Row("linear", "thin", thin_gpu.linear, **on),
        Row("quantised_linear", "thin", thin_gpu.linear, **on),
        Row("rotation", "thin", triton_rotary.rotation, **on),
    )


def _fixed() -> tuple[Row, ...]:
    """A row's bits whatever the number of rows: only for those who ask for it by name."""
    if not TRITON:
        return ()
    from colonnade.kernels.attention import fixed
    from colonnade.kernels.linear import triton_fixed
    from colonnade.kernels.norm import triton_rows

    on = {"devices": ("cuda",), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    return (
        Row("paged_attention", "fixed", fixed.paged, **on),
        Row("linear", "fixed", triton_fixed.linear, **on),
        Row("norm", "fixed", triton_rows.norm, **on),
        Row("rotation", "fixed", rotary_reference.rotation, devices=("cuda",)),
    )


def _grouped(device: str) -> tuple[Row, ...]:
    """torch's grouped product, where this torch has it; it knows no float64, and on a CPU is slower than a loop."""
    on = {"devices": (device,), "dtypes": (torch.float32, torch.bfloat16, torch.float16)}
    if not grouped.available:
        return ()
    return tuple(Row(operation, "grouped", grouped.experts, **on) for operation in ("experts", "dropout_experts"))


def _scaled_grouped() -> tuple[Row, ...]:
    """What experts in float8 are made of on a GPU, where this torch has it."""
    rows: tuple[Row, ...] = ()
    if scaled_grouped_mm.available:
        run = scaled_grouped_mm.product
        rows += (Row("scaled_grouped_product", "scaled_grouped_mm", run, ("cuda",), (torch.float8_e4m3fn,)),)
    if grouped.available:
        rows += (Row("expert_sums", "grouped", grouped.sums, ("cuda",), (torch.bfloat16,)),)
    return rows


TABLE: tuple[Row, ...] = (
    *_written_in_triton(),
    Row("packed_attention", "varlen", varlen.packed, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)),
    Row("packed_attention", "sdpa", sdpa.packed),
    Row("packed_attention", "reference", reference.packed),
    *_decoding(),
    Row("paged_attention", "sdpa", sdpa.paged),
    Row("paged_attention", "reference", reference.paged),
    Row("held_attention", "reference", held.attend),
    Row("merge_states", "reference", held.merged),
    Row("store_latents", "reference", latents.store),
    Row("chunk_forward", "flash", chunk_flash.forward, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)),
    Row("chunk_backward", "flash", chunk_flash.backward, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)),
    Row("chunk_forward", "reference", chunk.forward),
    Row("chunk_backward", "reference", chunk.backward),
    # Library kernels do not drop: their masks would be a generator's.
    Row("dropout_attention", "reference", reference.packed),
    Row("dropout", "recompute", recompute.dropout),
    Row("dropout", "reference", dropout_reference.dropout),
    # In bfloat16 torch takes oneDNN, which needs no help.
    Row("linear", "thin", thin.linear, devices=("cpu",), dtypes=(torch.float64, torch.float32)),
    Row("linear", "reference", linear_reference.linear),
    Row("norm", "reference", norm_reference.norm),
    Row("quantised_linear", "few", few.linear, devices=("cpu",)),
    Row("quantised_linear", "reference", quantised.linear),
    Row("fused_linear", "reference", fused.linear),
    Row("place_heads", "reference", place.place),
    Row("scaled_product", "scaled_mm", scaled_mm.product, devices=("cuda",), dtypes=FLOATS8),
    Row("scaled_product", "reference", scaled.product, dtypes=FLOATS8),
    *_scaled_grouped(),
    Row("scaled_grouped_product", "reference", scaled_grouped.product, dtypes=FLOATS8),
    Row("expert_sums", "reference", scaled_grouped.sums),
    *_grouped("cuda"),
    # On a CPU the loop, in bfloat16 other products where they are faster: their docstrings have the measurements.
    Row("routed_experts", "bf16", bf16.routed, devices=("cpu",), dtypes=(torch.bfloat16,)),
    Row("routed_experts", "loop", loop.routed),
    Row("routed_experts", "reference", experts_reference.routed),
    Row("quantised_experts", "reference", quantised_experts.routed),
    Row("experts", "loop", loop.experts),
    # Rows that carry their masks' hashes between a gather and a sum: kernels that do all of it in one do not drop.
    Row("dropout_experts", "loop", loop.experts),
    *_grouped("cpu"),
    Row("experts", "batched", batched.experts),
    Row("experts", "reference", experts_reference.experts),
    Row("dropout_experts", "batched", batched.experts),
    Row("dropout_experts", "reference", experts_reference.experts),
    Row("scores", "wide", wide.scores, devices=("cuda",), dtypes=(torch.bfloat16, torch.float16)),
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
