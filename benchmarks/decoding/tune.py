"""Tunes tiles and costs of the decode kernels, for benchmarks/flash_decoding.py.

The results are written to ``decode_tiles.json``: a row for each number of query rows and head width, and the costs by
which the split planner plans.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from colonnade.kernels.attention import decode_tiles
from colonnade.kernels.attention.decode_plan import DECODE_ROWS
from colonnade.kernels.attention.decode_tiles import Tiles
from decoding import chunked_prefill, kv8
from decoding.decode_cells import Cell, Tensors, cell_seconds, graph_seconds, ours

CANDIDATES = [
    Tiles(tile, warps, stages, workers, 64, 32)
    for tile, warps, stages, workers in (
        (64, 4, 3, 2), (64, 4, 2, 3), (64, 4, 4, 1), (64, 4, 4, 2), (64, 4, 6, 1), (64, 8, 6, 1), (64, 8, 3, 2),
        (64, 2, 3, 2), (32, 4, 4, 3), (32, 4, 6, 2), (32, 2, 4, 4), (32, 4, 3, 4), (128, 4, 2, 1), (128, 8, 3, 1),
        (128, 4, 3, 1), (16, 2, 5, 4), (64, 8, 3, 1), (128, 4, 3, 2), (64, 4, 3, 3), (32, 4, 3, 2),
    )
]  # fmt: skip
"""Candidate tiles; for the best, other merge sizes and an overlapped merge are tried next."""
TILES_8_BIT = (
    (64, 3, 2), (64, 3, 3), (64, 3, 4), (64, 4, 2), (64, 4, 3), (64, 6, 2), (128, 2, 3), (128, 3, 2), (128, 3, 3),
)  # fmt: skip
"""Keys per tile, stages and workers per SM, for 8-bit caches."""
CELLS_8_BIT = ((256, 256), (32, 2048), (1, 65_536), (16, 65_536))
MERGED_AT = ((139, 200, 1, 16), (186, 844, 1, 5), (32, 303, 7, 8), (10, 472, 11, 7), (222, 15_265, 1, 8))
"""(requests, keys, heads, group) where lines are split into at most two or three."""
TUNED_AT = ((256, 256), (32, 2048), (4, 16384), (1, 65536), (1, 4096), (7, 900))


def out_of_resources() -> tuple[type[Exception], ...]:
    """Exceptions that Triton raises for tiles that do not fit into shared memory or registers."""
    from triton.runtime.errors import OutOfResources

    return (OutOfResources,)


def mean_s(cells: Sequence[Tensors]) -> float:
    """The geometric mean of our times; infinite if tiles do not fit."""
    try:
        return statistics.geometric_mean(
            cell_seconds(ours(tensors, kernels="triton"), tensors, rounds=7) for tensors in cells
        )
    except out_of_resources():
        return math.inf


def tune(read: float, out: Path, widths: Sequence[int]) -> None:
    """Measure candidates for each row of the tile table, then the costs with the best plans; write both."""
    record = json.loads(json.dumps(decode_tiles.table()))
    record["costs"]["bytes_a_ns"] = round(read / 1e9)
    decode_tiles.table()["costs"]["bytes_a_ns"] = record["costs"]["bytes_a_ns"]
    for row in (row for row in record["rows"] if row["width"] in widths and row["rows"] > DECODE_ROWS):
        tune_prefill(row, record["costs"])
    for row in (row for row in record["rows"] if row["width"] in widths and row["rows"] <= DECODE_ROWS):
        group = 8 if row["rows"] == 16 else 64
        cells = [Tensors(Cell((S,) * B, K=2, group=group, H=row["width"]), "cuda") for B, S in TUNED_AT]
        took: dict[Tiles, float] = {}

        def best_of(
            hows: Sequence[Tiles], took: dict[Tiles, float] = took, cells: Sequence[Tensors] = cells, row: dict = row
        ) -> Tiles:
            for how in (how for how in hows if how not in took):
                decode_tiles.OVERRIDE[:] = [how]
                took[how] = mean_s(cells)
                print(f"  {row['rows']} rows, width {row['width']}, {tuple(how)}: {took[how] * 1e6:.2f} µs", flush=True)
            decode_tiles.OVERRIDE.clear()
            return min(took, key=lambda how: took[how])

        best = best_of((Tiles(**row["tiles"]), *CANDIDATES))
        best = best_of([best._replace(overlap=True), best._replace(pieces=16), best._replace(pieces=128)])
        best = best_of([best._replace(overlap=True), best._replace(part=16), best._replace(part=64)])
        row["tiles"] = best._asdict()
        print(f"{row['rows']} rows, width {row['width']}: {best}", flush=True)
        del cells
    decode_tiles.table()["rows"] = record["rows"]
    cells = [Tensors(Cell((S,) * B), "cuda") for B, S in (*TUNED_AT, (140, 700), (70, 1500), (2, 600), (1, 300))]
    times: dict[tuple[int, int], float] = {}
    for prices in [(start, merge) for start in (500, 1000, 2000) for merge in (1000, 2000, 4000, 8000)]:
        decode_tiles.table()["costs"] |= {"start_ns": prices[0], "merge_ns": prices[1]}
        times[prices] = mean_s(cells)
        print(f"  start {prices[0]} ns, merge {prices[1]} ns: {times[prices] * 1e6:.2f} µs", flush=True)
    start, merge = min(times, key=lambda prices: times[prices])
    decode_tiles.table()["costs"] |= {"start_ns": start, "merge_ns": merge}
    cells = [Tensors(Cell((S,) * B, K=K, group=group), "cuda") for B, S, K, group in MERGED_AT]
    rows: dict[int, float] = {}
    for row_ns in (0, 1, 2, 3, 4, 6):
        decode_tiles.table()["costs"]["row_ns"] = row_ns
        rows[row_ns] = mean_s(cells)
        print(f"  a merged row {row_ns} ns: {rows[row_ns] * 1e6:.2f} µs", flush=True)
    record["costs"] |= {"start_ns": start, "merge_ns": merge, "row_ns": min(rows, key=lambda price: rows[price])}
    record["measured_on"] = torch.cuda.get_device_name()
    out.write_text(table_json(record), encoding="utf-8")


def tune_8_bit(out: Path, widths: Sequence[int]) -> None:
    """Measure tiles for 8-bit caches, for each decode row of the table."""
    record = json.loads(json.dumps(decode_tiles.table()))
    for row in (row for row in record["rows"] if row["width"] in widths and row["rows"] <= DECODE_ROWS):
        group = 8 if row["rows"] == 16 else 64
        tensors = [
            Tensors(Cell((S,) * B, group=group, H=row["width"], dtype=torch.bfloat16), "cuda") for B, S in CELLS_8_BIT
        ]
        caches = [[kv8.to_8_bits(x, torch.float8_e4m3fn, scaled=False)[0] for x in (t.k, t.v)] for t in tensors]
        base, took = Tiles(**row["tiles"]), dict[Tiles, float]()
        for tile, stages, workers in TILES_8_BIT:
            how = base._replace(tile=tile, stages=stages, workers=workers)
            decode_tiles.OVERRIDE[:] = [how]
            try:
                times = [
                    graph_seconds(kv8.call(t, k, v, None, kernels="triton"), t.copies, "cuda", rounds=7)
                    for t, (k, v) in zip(tensors, caches, strict=True)
                ]
            except out_of_resources():
                continue
            took[how] = statistics.geometric_mean(times)
            print(f"  {tuple(how)}: {' '.join(f'{1e6 * s:.2f}' for s in times)} µs", flush=True)
        decode_tiles.OVERRIDE.clear()
        row["eight"] = min(took, key=lambda how: took[how])._asdict()
        print(f"8 bits, {row['rows']} rows, width {row['width']}: {row['eight']}", flush=True)
    out.write_text(table_json(record), encoding="utf-8")


def tune_prefill(row: dict[str, Any], prices: dict[str, Any]) -> None:
    """Tune prefill tiles on prompt chunks; the longest one gives the rate of the tensor cores."""
    cells = [replace(cell, H=row["width"]) for cell in chunked_prefill.CELLS]
    tensors = [(cell, chunked_prefill.make_tensors(cell, "cuda")) for cell in cells]
    took: dict[Tiles, float] = {}
    for how in (Tiles(**row["tiles"]), *chunked_prefill.CANDIDATES):
        decode_tiles.OVERRIDE[:] = [how]
        took[how] = chunked_prefill.mean_s(tensors)
        print(f"  {row['rows']} rows, width {row['width']}, {tuple(how)}: {took[how] * 1e6:.2f} µs", flush=True)
    best = min(took, key=lambda how: took[how])
    decode_tiles.OVERRIDE[:] = [best]
    cell, held = max(tensors, key=lambda made: made[0].known)
    rate = round(cell.flops / chunked_prefill.seconds(chunked_prefill.ours(*held)) / 1e9)
    decode_tiles.OVERRIDE.clear()
    row["tiles"] = best._asdict()
    prices["flops_a_ns"] = decode_tiles.table()["costs"]["flops_a_ns"] = rate
    print(f"{row['rows']} rows, width {row['width']}: {best}, {rate / 1e3:.0f} TFLOP/s", flush=True)


def table_json(record: dict[str, Any]) -> str:
    """The tile table as JSON text, one row per line."""
    rows = ",\n".join(
        f'    {{ "rows": {row["rows"]}, "width": {row["width"]}, '
        + ", ".join(f'"{name}": {json.dumps(row[name])}' for name in ("tiles", "eight") if name in row)
        + " }"
        for row in record["rows"]
    )
    costs = "".join(f'  "{name}": {json.dumps(record[name])},\n' for name in ("costs", "cuda_costs"))
    head = f'{{\n  "measured_on": {json.dumps(record["measured_on"])},\n{costs}'
    return f'{head}  "rows": [\n{rows}\n  ]\n}}\n'
