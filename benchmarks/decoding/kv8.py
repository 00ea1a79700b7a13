"""8-bit KV caches against bfloat16, read by the same kernel (benchmarks/flash_decoding.py).

float8 without scales is the format of ``serve.cache float8``; the kernel also supports float8 and int8 with a scale per
head. ``times_stored`` is the speedup over bfloat16 in keys per second. ``error`` is the relative error of rounding the
cache to 8 bits, by norm; the kernel's own result on the rounded values is checked.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colonnade.kernels.attention import reference, triton_decode
from colonnade.kernels.attention.decode_plan import KernelLayout, Kernels
from decoding.decode_cells import Cell, Run, Tensors, graph_seconds, reference_output, relative_error
from harness.rows import format_row, round_significant

CELLS = ((256, 256), (32, 2048), (4, 16_384), (1, 65_536), (1, 131_072), (16, 65_536))
TINY = ((2, 60),)
TOLERANCE = 4e-3
Scales = tuple[Tensor, Tensor] | None


def to_8_bits(x: Tensor, kind: torch.dtype, *, scaled: bool) -> tuple[Tensor, Tensor | None]:
    """``x`` (…, K, H) in 8 bits, and the scale of each head."""
    most = 127.0 if kind == torch.int8 else torch.finfo(kind).max
    if not scaled:
        return x.clamp(-most, most).to(kind), None
    scale_K = x.abs().amax(dim=[d for d in range(x.dim()) if d != x.dim() - 2]).float() / most
    y = x.float() / scale_K[:, None]
    return (y.round() if kind == torch.int8 else y).clamp(-most, most).to(kind), scale_K


def call(
    tensors: Tensors, k: Tensor, v: Tensor, scales: Scales, *, in_order: bool = False, kernels: Kernels = "auto"
) -> Run:
    """Our kernel on an 8-bit cache; on a CPU the plain executor of the same plan."""
    cell, q = tensors.cell, tensors.q_BNH
    k, v = (x.flatten(0, 2).unflatten(0, (-1, cell.page)) for x in (k, v))
    layout = KernelLayout.of(q, k, 1, kernels=kernels)
    plan = layout.plan(cell.lengths, [1] * len(cell.lengths))
    pages = tensors.pages if in_order else tensors.scattered
    tables = [tensors.table(i, pages) for i in range(tensors.copies)]
    if tensors.device == "cpu":
        k, v = (dequantised(x, scale_K) for x, scale_K in zip((k, v), scales or (None, None), strict=True))
        return lambda i: reference.run_plan(plan, layout.shape, q.float(), k, v, tables[i]).o
    ready = layout.prepare(plan, tensors.device)
    return lambda i: triton_decode.attend(q, k, v, tables[i], ready, scales_K=scales).o


def dequantised(x: Tensor, scale_K: Tensor | None) -> Tensor:
    """The dequantised values in float32."""
    return x.float() if scale_K is None else x.float() * scale_K[:, None]


def rows(cells: Sequence[tuple[int, int]], device: str, read: float) -> list[dict[str, Any]]:
    """A row for each cache format on each cell."""
    found = []
    for B, S in cells:
        cell = Cell((S,) * B, page=16 if device == "cpu" else 256, dtype=torch.bfloat16)
        tensors = Tensors(cell, device)
        right, stored_s = reference_output(tensors), 0.0
        kinds: list[tuple[str, torch.dtype | None, bool]] = [
            ("bfloat16", None, False), ("float8", torch.float8_e4m3fn, False),
            ("float8, scales", torch.float8_e4m3fn, True), ("int8, scales", torch.int8, True),
        ]  # fmt: skip
        for name, kind, scaled in kinds:
            k, v, scales = tensors.k, tensors.v, None
            if kind is not None:
                (k, k_scale), (v, v_scale) = (to_8_bits(x, kind, scaled=scaled) for x in (k, v))
                scales = None if k_scale is None or v_scale is None else (k_scale, v_scale)
            held = copy.copy(tensors)
            held.k, held.v = (dequantised(x[:1], s) for x, s in zip((k, v), scales or (None, None), strict=True))
            run = call(tensors, k, v, scales, in_order=True)
            mistake = relative_error(run, reference_output(held))
            assert mistake < TOLERANCE, f"{cell.name} {name}: {mistake:.1e} off"
            took = graph_seconds(call(tensors, k, v, scales), tensors.copies, device)
            stored_s = stored_s or took
            count = 2 * B * S * cell.K * cell.H * k.element_size()
            found.append(
                {
                    "B": B, "S": S, "cache": name, "us": round(took * 1e6, 2),
                    "times_stored": round_significant(stored_s / took),
                    "tb_per_s": round_significant(count / took / 1e12),
                    "of_read": round_significant(count / took / read), "error": round(relative_error(run, right), 5),
                }
            )  # fmt: skip
            print(format_row(found[-1]), flush=True)
    return found
