"""Skinny GEMMs on a GPU, fused with norm, gate or residual: TB/s of the weights, against library kernels.

    python benchmarks/skinny_gemm.py                # Llama-2-7B's matrices, 1 to 16 rows, in bfloat16, int8, int4
    python benchmarks/skinny_gemm.py --tune         # measures candidate tiles, about four minutes
    python benchmarks/skinny_gemm.py --tune --units # only tensor-core tiles, against the table's: two minutes
    python benchmarks/skinny_gemm.py --tune --34b   # CodeLlama-34B's matrices, one row in bfloat16: a minute
    python benchmarks/skinny_gemm.py --tiny         # the reference on a CPU: a smoke test

A CUDA graph of several calls is timed, each call on another copy of the weights, so that none finds them in the L2
cache; the time is per call. The peer is the separate kernels that ours replaces: the norm, the library's GEMMs (for
quantised weights our split-K kernels) and the gate, with the residual added by the library's GEMM where it can.

With ``--tune`` kernels are first compiled by one process per core into their shared disk cache, then measured one by
one. A cell in which the library is faster gets no tiles.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.linear import reference, skinny_gemm_tiles
from colonnade.kernels.linear.quantise import quantise
from colonnade.kernels.linear.reference import Gate, Matrix, NormWeights
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles
from decoding.decode_cells import graph_seconds, read_bandwidth
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row

COLD_BYTES = 2**28
SHAPES = {
    "qkv": (12288, 4096, "norm"), "out": (4096, 4096, "more"), "gate and up": (11008, 4096, "gate"),
    "down": (4096, 11008, "more"), "unembed": (32000, 4096, ""),
    "34B qkv": (10240, 8192, "norm"), "34B out": (8192, 8192, "more"), "34B gate and up": (22016, 8192, "gate"),
    "34B down": (8192, 22016, "more"), "34B unembed": (32000, 8192, ""),
}  # fmt: skip
"""Outputs, inputs, and the operation fused with the GEMM: Llama-2-7B's matrices, and CodeLlama-34B's."""
KINDS = "plain", "int8", "int4"


class Product(NamedTuple):
    """One GEMM: matrix, weight format and number of rows."""

    name: str
    kind: str
    rows: int

    @property
    def gated(self) -> bool:
        return SHAPES[self.name][2] == "gate"


LARGE = [Product(name, "plain", 1) for name in SHAPES if name.startswith("34B")]
CELLS = [
    Product(name, kind, rows)
    for rows, kind, name in itertools.product((1, 2, 4, 8, 16), KINDS, SHAPES)
    # Output projections of 4-bit models are int8; in bfloat16 the library is fast for more rows.
    if not name.startswith("34B")
    and (name != "unembed" or (rows == 1 and kind != "int4"))
    and (kind != "plain" or rows <= skinny_gemm_tiles.MAX_CUDA_CORE_ROWS)
]


def candidates(cell: Product) -> list[SkinnyTiles]:
    """Candidate tiles: CUDA-core ones for few rows, tensor-core ones for quantised weights."""
    return (cuda_core_tiles(cell) if cell.rows <= skinny_gemm_tiles.MAX_CUDA_CORE_ROWS else []) + tensor_core_tiles(
        cell
    )


def cuda_core_tiles(cell: Product) -> list[SkinnyTiles]:
    """Candidates of the CUDA-core kernel, which multiplies in registers."""
    columns, each = SHAPES[cell.name][1], {"plain": 8, "int8": 16, "int4": 4}[cell.kind]
    columns = columns // 8 if cell.kind == "int4" else columns
    found = []
    for warps, times, rows in itertools.product((2, 4, 8), (1, 2), (2, 4, 8, 16)):
        BK = 32 * warps * each * times
        tile_bytes = rows * BK * {"plain": 2, "int8": 1, "int4": 4}[cell.kind] * (1 + cell.gated)
        twice = columns == BK or (warps < 8 and (cell.kind == "plain" or cell.rows == 1))
        if 4096 <= tile_bytes <= 32768 and columns > BK // 2 and (times == 1 or twice):
            # Five stages were never best for quantised weights, which are bound by arithmetic.
            deep = (4,) if cell.rows > 1 else (3, 5) if cell.kind == "plain" else (3,)
            found += [SkinnyTiles(rows, BK, warps, stages) for stages in deep]
    return found


def tensor_core_tiles(cell: Product) -> list[SkinnyTiles]:
    """Candidates of the tensor-core kernel: all inputs at once, or in steps.

    All inputs at once fill the registers of 8 or 16 warps, with one or two programs per SM; steps also work with 4
    warps and several programs per SM. Stages must keep enough bytes in flight and fit into shared memory.
    """
    if cell.kind == "plain":
        return []
    inputs, found = SHAPES[cell.name][1], []
    occupancies = ((8, 1), (8, 2), (16, 1), (4, 2), (4, 3))
    for step, (warps, programs), rows, stages in itertools.product(
        (4096, 2048, 1024), occupancies, (16, 32), (2, 3, 4)
    ):
        at_once = step >= inputs
        # Inputs are prepared again in each step, which pays only for many rows of weights; four warps hold few inputs.
        if not (at_once or rows == 32) or (warps == 4 and step > 1024):
            continue
        # Sixteen rows of x fill the registers of an SM.
        if cell.rows > 8 and (programs > 1 or not (at_once or step <= 1024)):
            continue
        tile_bytes = rows * step // (2 if cell.kind == "int4" else 1)
        if not at_once:  # a gate's other matrix, x, and a norm's gain
            tile_bytes += tile_bytes * cell.gated + 2 * step * (cell.rows + (SHAPES[cell.name][2] in ("norm", "gate")))
        if 60_000 <= (stages - 1) * tile_bytes * programs <= 200_000:
            found.append(
                SkinnyTiles(
                    rows, step // 8 if cell.kind == "int4" else step, warps, stages, programs, tensor_cores=True
                )
            )
    return found


def tensors(
    cell: Product, device: str, copies: int = 0, shape: tuple[int, int, str] | None = None
) -> tuple[Tensor, list[tuple[Matrix, dict[str, Any]]], int]:
    """(x, weight and fused operands of each copy, bytes of one copy's weights)."""
    (F, D, beside), dtype = shape or SHAPES[cell.name], torch.bfloat16 if device == "cuda" else torch.float32
    x, on = torch.randn(cell.rows, D, device=device, dtype=dtype), {"device": device, "dtype": dtype}
    plain = [torch.randn(F, D, **on) / D**0.5 for _ in range(1 + cell.gated)]
    made: list[Matrix] = [w if cell.kind == "plain" else quantise(w, cell.kind, 64) for w in plain]  # type: ignore[arg-type]
    size = sum(w.nbytes for w in made)
    norm, more = NormWeights(torch.ones(D, **on), 1e-5), torch.randn(cell.rows, F, **on)
    found = []
    for _ in range(copies or max(2, -(-COLD_BYTES // size))):
        own: list[Matrix] = [
            w.clone() if isinstance(w, Tensor) else w._replace(values=w.values.clone(), scales=w.scales.clone())
            for w in made
        ]
        parts: dict[str, Any] = {}
        if beside in ("norm", "gate"):
            parts["norm"] = norm
        if beside == "gate":
            parts["gate"] = Gate(own[1], None, "silu")
        if beside == "more":
            parts["residual_TF"] = more
        found.append((own[0], parts))
    return x, found, size


def compile_all(cell: Product, tiles: Sequence[SkinnyTiles]) -> int:
    """Compile the kernels into the disk cache; returns how many run on this GPU."""
    from colonnade.kernels.linear import skinny_gemm

    x, ((weight, parts),), _ = tensors(cell, "cuda", copies=1)
    done = 0
    for candidate in tiles:
        try:
            skinny_gemm.launch(x, weight, tiles=candidate, **parts)
            done += 1
        except Exception as why:  # noqa: BLE001 - some tiles are too large for the GPU
            print(cell, candidate, str(why).splitlines()[0][:80], flush=True)
    return done


def tuned(cell: Product, tile_candidates: Sequence[SkinnyTiles]) -> dict[str, Any]:
    """The cell's row of the table, with the best tiles or none."""
    from triton.runtime.errors import OutOfResources

    from colonnade.kernels.linear import skinny_gemm

    x, copies, size = tensors(cell, "cuda")

    def seconds(candidate: SkinnyTiles) -> float:
        def run(copy: int) -> Tensor:
            weight, parts = copies[copy]
            return skinny_gemm.launch(x, weight, tiles=candidate, **parts)

        try:
            return graph_seconds(run, len(copies), "cuda", rounds=7)
        except OutOfResources:
            return float("inf")

    library_s = graph_seconds(
        lambda copy: skinny_gemm.separate_kernels(x, copies[copy][0], **copies[copy][1]), len(copies), "cuda"
    )
    took = {candidate: seconds(candidate) for candidate in tile_candidates}
    for candidate in sorted(took, key=lambda candidate: took[candidate])[:2]:
        for programs in () if candidate.tensor_cores else (1, 2, 3, 4):
            variant = candidate._replace(programs_per_sm=programs)
            took[variant] = seconds(variant)
    first, *others = sorted(took, key=lambda candidate: took[candidate])[:4]
    F, D, _ = SHAPES[cell.name]
    print(
        f"{cell.name}, {cell.kind}, {cell.rows} rows: {1e6 * took[first]:.2f} µs, {size / took[first] / 1e12:.2f} TB/s "
        f"{tuple(first)}; then {[(tuple(candidate), round(1e6 * took[candidate], 2)) for candidate in others]}; "
        f"library {1e6 * library_s:.2f} µs",
        flush=True,
    )
    tiles = first._asdict() if took[first] <= library_s else None
    return {
        "kind": cell.kind, "gated": cell.gated, "rows": cell.rows, "outputs": F, "inputs": D, "tiles": tiles,
    }  # fmt: skip


def to_measure(
    cells: Sequence[Product], *, units: bool
) -> tuple[list[dict[str, Any]], dict[Product, list[SkinnyTiles]]]:
    """(table rows to keep, candidates of each cell to measure)."""
    sizes = {SHAPES[cell.name][:2] for cell in cells}
    others = [row for row in skinny_gemm_tiles.table() if (row["outputs"], row["inputs"]) not in sizes]
    if not units:
        return others, {cell: candidates(cell) for cell in cells}
    ways = {cell: tensor_core_tiles(cell) + present(cell) for cell in cells if cell.kind != "plain"}
    measured = {"float8", *(cell.kind for cell in ways)}
    return [row for row in skinny_gemm_tiles.table() if row["kind"] not in measured or row in others], ways


def tune(path: Path, cells: Sequence[Product], *, units: bool) -> None:
    """Measure all cells and write the table; float8 has int8's sizes, which it shares except for its conversion.

    With ``units`` the candidates are tensor-core tiles and the table's own; rows of other cells are kept.
    """
    began, (kept, ways) = time.perf_counter(), to_measure(cells, units=units)
    spread = [(cell, tile_candidates[i::3]) for cell, tile_candidates in ways.items() for i in range(3)]
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        compiled = sum(pool.map(compile_all, *zip(*spread, strict=True)))
    print(f"{compiled} kernels in {time.perf_counter() - began:.0f} s", flush=True)
    rows = [tuned(cell, tile_candidates) for cell, tile_candidates in ways.items()]
    rows = kept + rows + [row | {"kind": "float8"} for row in rows if row["kind"] == "int8"]
    path.write_text(written(torch.cuda.get_device_name(), rows), encoding="utf-8")
    print(f"{path} in {time.perf_counter() - began:.0f} s", flush=True)


def present(cell: Product) -> list[SkinnyTiles]:
    """The table's own tiles for a cell, if it has any."""
    F, D, _ = SHAPES[cell.name]
    tiles = skinny_gemm_tiles.table_tiles(cell.kind, cell.rows, F, D, gated=cell.gated)
    return [tiles] if tiles and tiles not in tensor_core_tiles(cell) else []


def written(measured_on: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table as JSON text, one row per line."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    return f'{{\n  "measured_on": {json.dumps(measured_on)},\n  "rows": [\n{lines}\n  ]\n}}\n'


def measure() -> list[dict[str, Cell]]:
    from colonnade.kernels.linear import skinny_gemm

    bandwidth, found = read_bandwidth("cuda"), []
    for cell in CELLS:
        x, copies, size = tensors(cell, "cuda")
        ours, theirs = (
            graph_seconds(lambda i, run=run: run(x, copies[i][0], **copies[i][1]), len(copies), "cuda")  # noqa: B023 - called at once
            for run in (skinny_gemm.fused_linear, skinny_gemm.separate_kernels)
        )
        tiles = skinny_gemm_tiles.table_tiles(cell.kind, cell.rows, *SHAPES[cell.name][:2], gated=cell.gated)
        found.append(
            {
                "matrix": cell.name, "beside": SHAPES[cell.name][2], "weights": cell.kind, "rows": cell.rows,
                "mb": round(size / 1e6, 2), "us": round(1e6 * ours, 2), "tb_per_s": round(size / ours / 1e12, 3),
                "of_read": round(size / ours / bandwidth, 3), "library_us": round(1e6 * theirs, 2),
                "tiles": str(tuple(tiles)) if tiles else "the library's",
            }
        )  # fmt: skip
        print(format_row(found[-1]), flush=True)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="measure candidate tiles and write the table")
    parser.add_argument("--units", action="store_true", help="with --tune: tensor-core tiles only")
    parser.add_argument("--34b", dest="large", action="store_true", help="with --tune: CodeLlama-34B's matrices")
    parser.add_argument(
        "--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="with --tune: weight formats to measure"
    )
    parser.add_argument(
        "--tiles", type=Path, default=Path(skinny_gemm_tiles.__file__).with_name("skinny_gemm_tiles.json")
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="the reference on a CPU; writes no record")
    args = parser.parse_args(argv)
    if args.tiny:
        x, ((weight, parts), _), _ = tensors(Product("qkv", "int4", 2), "cpu", copies=2, shape=(48, 64, "norm"))
        print(reference.fused_linear(x, weight, **parts).shape, candidates(Product("down", "int4", 1))[0])
        return
    if not torch.cuda.is_available():
        print("skinny_gemm.py needs a GPU, and this machine has none; --tiny shows that it runs")
        return
    if args.tune:
        cells = LARGE if args.large else [cell for cell in CELLS if cell.kind in args.kinds]
        tune(args.tiles, cells, units=args.units)
        return
    rows = measure()
    first = next(row for row in rows if row["matrix"] == "gate and up")
    heads = [
        Headline("One row, gate and up of Llama-2-7B, bfloat16", float(first["us"] or 0), "µs", "the library",
                 float(first["library_us"] or 0))
    ]  # fmt: skip
    report("skinny_gemm_h200", rows, notes=__doc__ or "", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
