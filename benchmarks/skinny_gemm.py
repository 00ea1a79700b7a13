"""Products of a few rows on a GPU with norm, gate or residual beside them: TB/s of the weights, ours and a library's.

    python benchmarks/skinny_gemm.py                # Llama-2-7B's matrices, 1 to 16 rows, in bfloat16, int8, int4
    python benchmarks/skinny_gemm.py --tune         # measures candidates of tiles, about four minutes
    python benchmarks/skinny_gemm.py --tune --units # only those for the matrix units, beside the table's. Two minutes
    python benchmarks/skinny_gemm.py --tiny         # a CPU, to see that it runs

A timing is of a graph of calls, each on another copy of the weights, so that none finds them in the level-2 cache;
divided by their number. What stands beside ours is what it replaces: the norm, the library's products (for quantised
weights our older kernels), the gate, with the residual added by the library's product where it can.

With ``--tune`` kernels are compiled by one process a core first, into the cache on disk that they share; then they are
measured one by one. A cell in which the library is faster gets no tiles.
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
from colonnade.kernels.linear.reference import Gate, Matrix, RmsNorm
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles
from decoding.decode_cells import read_bandwidth, replayed
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import line

COLD_BYTES = 2**28
SHAPES = {
    "qkv": (12288, 4096, "norm"), "out": (4096, 4096, "more"), "gate and up": (11008, 4096, "gate"),
    "down": (4096, 11008, "more"), "unembed": (32000, 4096, ""),
}  # fmt: skip
"""Outputs, inputs, and what stands beside the product."""
KINDS = "plain", "int8", "int4"


class Product(NamedTuple):
    """A cell of the table."""

    name: str
    kind: str
    rows: int

    @property
    def gated(self) -> bool:
        return SHAPES[self.name][2] == "gate"


CELLS = [
    Product(name, kind, rows)
    for rows, kind, name in itertools.product((1, 2, 4, 8, 16), KINDS, SHAPES)
    # An output projection of four bits has eight; of bfloat16 the library multiplies more rows well.
    if (name != "unembed" or (rows == 1 and kind != "int4"))
    and (kind != "plain" or rows <= skinny_gemm_tiles.MAX_CUDA_CORE_ROWS)
]


def candidates(cell: Product) -> list[SkinnyTiles]:
    """Ways to cut it up, in registers for few rows, and on the matrix units for quantised weights."""
    return (in_registers(cell) if cell.rows <= skinny_gemm_tiles.MAX_CUDA_CORE_ROWS else []) + on_units(cell)


def in_registers(cell: Product) -> list[SkinnyTiles]:
    """Threads that together read a row, and few or many rows of weights at once."""
    columns, each = SHAPES[cell.name][1], {"plain": 8, "int8": 16, "int4": 4}[cell.kind]
    columns = columns // 8 if cell.kind == "int4" else columns
    found = []
    for warps, times, rows in itertools.product((2, 4, 8), (1, 2), (2, 4, 8, 16)):
        BK = 32 * warps * each * times
        tile_bytes = rows * BK * {"plain": 2, "int8": 1, "int4": 4}[cell.kind] * (1 + cell.gated)
        twice = columns == BK or (warps < 8 and (cell.kind == "plain" or cell.rows == 1))
        if 4096 <= tile_bytes <= 32768 and columns > BK // 2 and (times == 1 or twice):
            # Five were never best for quantised weights, which wait for arithmetic.
            deep = (4,) if cell.rows > 1 else (3, 5) if cell.kind == "plain" else (3,)
            found += [SkinnyTiles(rows, BK, warps, stages) for stages in deep]
    return found


def on_units(cell: Product) -> list[SkinnyTiles]:
    """All inputs at once in the registers of eight or sixteen warps, one program a multiprocessor or two; or in steps,
    also in four warps, of which several programs wait while another multiplies.

    Of two to four stages those that keep memory busy and fit into shared memory.
    """
    if cell.kind == "plain":
        return []
    inputs, found = SHAPES[cell.name][1], []
    ways = ((8, 1), (8, 2), (16, 1), (4, 2), (4, 3))
    for step, (warps, stays), rows, stages in itertools.product((4096, 2048, 1024), ways, (16, 32), (2, 3, 4)):
        at_once = step >= inputs
        # Inputs in steps are made ready anew in each: that should be for many weights. Four warps hold few of them.
        if not (at_once or rows == 32) or (warps == 4 and step > 1024):
            continue
        # Sixteen rows of x take the registers of a multiprocessor.
        if cell.rows > 8 and (stays > 1 or not (at_once or step <= 1024)):
            continue
        held = rows * step // (2 if cell.kind == "int4" else 1)
        if not at_once:  # a gate's other matrix, x, and a norm's gain
            held += held * cell.gated + 2 * step * (cell.rows + (SHAPES[cell.name][2] in ("norm", "gate")))
        if 60_000 <= (stages - 1) * held * stays <= 200_000:
            found.append(
                SkinnyTiles(rows, step // 8 if cell.kind == "int4" else step, warps, stages, stays, tensor_cores=True)
            )
    return found


def tensors(
    cell: Product, device: str, copies: int = 0, shape: tuple[int, int, str] | None = None
) -> tuple[Tensor, list[tuple[Matrix, dict[str, Any]]], int]:
    """(x, for each copy the weight and what stands beside the product, bytes of one copy's weights)."""
    (F, D, beside), dtype = shape or SHAPES[cell.name], torch.bfloat16 if device == "cuda" else torch.float32
    x, on = torch.randn(cell.rows, D, device=device, dtype=dtype), {"device": device, "dtype": dtype}
    plain = [torch.randn(F, D, **on) / D**0.5 for _ in range(1 + cell.gated)]
    made: list[Matrix] = [w if cell.kind == "plain" else quantise(w, cell.kind, 64) for w in plain]  # type: ignore[arg-type]
    size = sum(w.nbytes for w in made)
    norm, more = RmsNorm(torch.ones(D, **on), 1e-5), torch.randn(cell.rows, F, **on)
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
    """Have the kernels of some tiles in the cache on disk; how many the chip takes."""
    from colonnade.kernels.linear import skinny_gemm

    x, ((weight, parts),), _ = tensors(cell, "cuda", copies=1)
    done = 0
    for how in tiles:
        try:
            skinny_gemm.launch(x, weight, tiles=how, **parts)
            done += 1
        except Exception as why:  # noqa: BLE001 - too large a tile for the chip is one of many
            print(cell, how, str(why).splitlines()[0][:80], flush=True)
    return done


def tuned(cell: Product, hows: Sequence[SkinnyTiles]) -> dict[str, Any]:
    """The cell's row of the table: the best tiles, or none."""
    from triton.runtime.errors import OutOfResources

    from colonnade.kernels.linear import skinny_gemm

    x, copies, size = tensors(cell, "cuda")

    def seconds(how: SkinnyTiles) -> float:
        def run(copy: int) -> Tensor:
            weight, parts = copies[copy]
            return skinny_gemm.launch(x, weight, tiles=how, **parts)

        try:
            return replayed(run, len(copies), "cuda", rounds=7)
        except OutOfResources:
            return float("inf")

    library_s = replayed(
        lambda copy: skinny_gemm.separate_kernels(x, copies[copy][0], **copies[copy][1]), len(copies), "cuda"
    )
    took = {how: seconds(how) for how in hows}
    for how in sorted(took, key=lambda how: took[how])[:2]:
        for programs in () if how.tensor_cores else (1, 2, 3, 4):
            stays = how._replace(programs_per_sm=programs)
            took[stays] = seconds(stays)
    first, *others = sorted(took, key=lambda how: took[how])[:4]
    F, D, _ = SHAPES[cell.name]
    print(
        f"{cell.name}, {cell.kind}, {cell.rows} rows: {1e6 * took[first]:.2f} µs, {size / took[first] / 1e12:.2f} TB/s "
        f"{tuple(first)}; then {[(tuple(how), round(1e6 * took[how], 2)) for how in others]}; library "
        f"{1e6 * library_s:.2f} µs",
        flush=True,
    )
    tiles = first._asdict() if took[first] <= library_s else None
    return {
        "kind": cell.kind, "gated": cell.gated, "rows": cell.rows, "outputs": F, "inputs": D, "tiles": tiles,
    }  # fmt: skip


def to_measure(
    cells: Sequence[Product], *, units: bool
) -> tuple[list[dict[str, Any]], dict[Product, list[SkinnyTiles]]]:
    """(rows of the table that stay, candidates of each cell that is measured)."""
    if not units:
        return [], {cell: candidates(cell) for cell in cells}
    ways = {cell: on_units(cell) + present(cell) for cell in cells if cell.kind != "plain"}
    measured = {"float8", *(cell.kind for cell in ways)}
    return [row for row in skinny_gemm_tiles.table() if row["kind"] not in measured], ways


def tune(path: Path, cells: Sequence[Product], *, units: bool) -> None:
    """Measure all cells and write the table; float8 has int8's sizes, which it shares but for its conversion.

    With ``units`` a cell's candidates are those for the matrix units and what the table has; other cells' rows stay.
    """
    began, (kept, ways) = time.perf_counter(), to_measure(cells, units=units)
    spread = [(cell, hows[i::3]) for cell, hows in ways.items() for i in range(3)]
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        compiled = sum(pool.map(compile_all, *zip(*spread, strict=True)))
    print(f"{compiled} kernels in {time.perf_counter() - began:.0f} s", flush=True)
    rows = kept + [tuned(cell, hows) for cell, hows in ways.items()]
    rows += [row | {"kind": "float8"} for row in rows if row["kind"] == "int8"]
    path.write_text(written(torch.cuda.get_device_name(), rows), encoding="utf-8")
    print(f"{path} in {time.perf_counter() - began:.0f} s", flush=True)


def present(cell: Product) -> list[SkinnyTiles]:
    """The table's own tiles for a cell, if they are not the library's."""
    F, D, _ = SHAPES[cell.name]
    tiles = skinny_gemm_tiles.table_tiles(cell.kind, cell.rows, F, D, gated=cell.gated)
    return [tiles] if tiles and tiles not in on_units(cell) else []


def written(measured_on: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table as text, a row on one line."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    return f'{{\n  "measured_on": {json.dumps(measured_on)},\n  "rows": [\n{lines}\n  ]\n}}\n'


def measure() -> list[dict[str, Cell]]:
    from colonnade.kernels.linear import skinny_gemm

    bandwidth, found = read_bandwidth("cuda"), []
    for cell in CELLS:
        x, copies, size = tensors(cell, "cuda")
        ours, theirs = (
            replayed(lambda i, run=run: run(x, copies[i][0], **copies[i][1]), len(copies), "cuda")  # noqa: B023 - called at once
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
        print(line(found[-1]), flush=True)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="measure tiles, not the table")
    parser.add_argument("--units", action="store_true", help="to tune, the matrix units' tiles only")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="to tune, for a look; else all")
    parser.add_argument(
        "--tiles", type=Path, default=Path(skinny_gemm_tiles.__file__).with_name("skinny_gemm_tiles.json")
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="the reference on a CPU; nothing is kept")
    args = parser.parse_args(argv)
    if args.tiny:
        x, ((weight, parts), _), _ = tensors(Product("qkv", "int4", 2), "cpu", copies=2, shape=(48, 64, "norm"))
        print(reference.fused_linear(x, weight, **parts).shape, candidates(Product("down", "int4", 1))[0])
        return
    if not torch.cuda.is_available():
        print("skinny_gemm.py needs a GPU, and this machine has none; --tiny shows that it runs")
        return
    if args.tune:
        tune(args.tiles, [cell for cell in CELLS if cell.kind in args.kinds], units=args.units)
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
