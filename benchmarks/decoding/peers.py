"""One cell of benchmarks/flash_decoding.py: ours and every peer that runs, checked against float32."""

import math
from collections.abc import Sequence
from typing import Any

from decoding.decode_cells import (
    Cell,
    Run,
    Tensors,
    cell_seconds,
    flashinfer,
    loads_only,
    ours,
    peers,
    reference_output,
    relative_error,
)
from harness.rows import format_row, round_significant

TOLERANCE = 6e-4
NEAR_TIE = 1.2
"""A sweep times ours and the best peer twice if the peer takes at most so many times as long."""


def measure_cell(
    cell: Cell, device: str, read: float, *, flex: bool, chunk: int | None = None, floor: bool = False,
    far: float = math.inf, rounds: int = 15,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of one cell: ours and all peers that run; with ``floor`` the loads of ours alone, too.

    Peers that take more than ``far`` times as long as ours are replayed once, others ``rounds`` times.
    """
    tensors = Tensors(cell, device)
    right = reference_output(tensors)
    # Scattered pages hold other keys than the contiguous cache, so the check uses pages in order.
    mistake = relative_error(ours(tensors, in_order=True), right)
    # On a CPU plain torch rounds intermediate results.
    assert mistake < TOLERANCE * (1 if device == "cuda" else 3), f"{cell.name}: ours is {mistake:.1e} off"
    who = [("colonnade", ours(tensors))]
    if chunk:
        who.append(("colonnade, fixed cuts", ours(tensors, chunk=chunk)))
    if floor and (run := loads_only(tensors)):
        who += [("colonnade, loads alone", run), ("colonnade, Triton", ours(tensors, kernels="triton"))]
    rows, runs = [], dict[str, Run]()
    in_order = dict(flashinfer(tensors, in_order=True)) if device == "cuda" else {}
    for name, run in [*who, *(peers(tensors, flex=flex) if device == "cuda" else [])]:
        try:
            # "not <=" also rejects NaN.
            if (
                not name.startswith("colonnade")
                and not relative_error(in_order.get(name, run), right) <= 10 * TOLERANCE
            ):
                print(f"{cell.name} {name}: computes something else", flush=True)
                continue
            took = cell_seconds(run, tensors, rounds=rounds, at_most=far * rows[0]["us"] / 1e6 if rows else math.inf)
        except RuntimeError as why:
            print(f"{cell.name} {name}: {str(why).splitlines()[0][:90]}", flush=True)
            continue
        runs[name] = run
        rows.append(_row(cell, name, took, read))
        print(format_row(rows[-1]), flush=True)
    peer = best_peer(rows)
    if math.isfinite(far) and peer and peer["us"] < NEAR_TIE * rows[0]["us"]:
        # Ours ran first, while the clocks rose: both again in turns, the best of two each.
        for row in (rows[0], peer):
            row.update(_row(cell, row["who"], min(row["us"] / 1e6, cell_seconds(runs[row["who"]], tensors)), read))
    return rows


def _row(cell: Cell, who: str, took: float, read: float) -> dict[str, Any]:
    return {
        "B": len(cell.lengths), "S": max(cell.lengths), "lengths": cell.kind, "kv_heads": cell.K, "group": cell.group,
        "width": cell.H, "page": cell.page, "who": who, "us": round(took * 1e6, 2),
        "tb_per_s": round_significant(cell.bytes / took / 1e12), "of_read": round_significant(cell.bytes / took / read),
    }  # fmt: skip


def best_peer(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return min((row for row in rows if not row["who"].startswith("colonnade")), key=lambda row: row["us"], default=None)


def speedup(rows: Sequence[dict[str, Any]]) -> float | None:
    """The best peer's time over ours; None where no peer ran."""
    peer = best_peer(rows)
    us = next(row["us"] for row in rows if row["who"] == "colonnade")
    return round(peer["us"] / us, 3) if peer else None
