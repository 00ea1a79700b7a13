"""Measures the tiles of the experts' Triton kernels on this GPU, and writes the table that ``tiles.py`` reads.

    python benchmarks/tune_experts.py                    # gated layers, training and decoding: 4 minutes of an H200
    python benchmarks/tune_experts.py --kernels up down --rows 16 64 0

For each kernel and each number of rows an expert (16: decoding; 64; 0: training), every candidate is timed in a whole
layer at the widths of Qwen3-30B-A3B and Mixtral, everything else left as the table has it; the candidate with the least
geometric mean over the two wins, if it beats what stands there by 1%. All are compiled first, many at once; those that
do not fit the chip are passed over. Nothing is tuned while a model runs.
"""

import argparse
import functools
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton

from _clock import Clock
from colonnade.kernels.choose import choose
from colonnade.kernels.experts import tiles
from colonnade.kernels.experts.tiles import Tiles
from moe_layer import Shape, choices, ours, stacks

TABLE = Path(tiles.__file__).with_name("tiles.json")
LAYERS = (Shape(128, 8, 2048, 768), Shape(8, 2, 4096, 14336))
DEPTHS = {16: 4, 64: 48, None: 1024}
"""Rows an expert at which each row of the table is measured, by its bound."""
BACKWARD = ("hidden_back", "rows_back", "weights_back", "gated_weights_back")


def candidates(kernel: str, most: int | None) -> list[Tiles]:
    """What may be best, from what is known of the chip: see the docstring of ``tiles.py``."""
    if kernel in ("weights_back", "gated_weights_back"):
        shapes = [(128, 128, 64, 8), (128, 128, 32, 8), (128, 64, 64, 4), (64, 128, 64, 4)]
        if kernel == "weights_back":
            shapes += [(128, 256, 64, 8), (128, 256, 32, 8), (256, 128, 64, 8)]
        return [Tiles(*shape, stages) for shape in shapes for stages in (3, 4)]
    if most == 16:
        shapes = [(16, n, k, 4) for n in (32, 64, 128) for k in (128, 256)]
        ways = [(stages, 8, 0, tma) for stages in (3, 5) for tma in (False, True)]
    elif most == 64:
        shapes = [(m, n, 64, 4) for m in (32, 64) for n in (64, 128)]
        ways = [(stages, 8, 0, tma) for stages in (3, 4) for tma in (False, True)]
    else:
        shapes = [(128, 128, 64, 8), (128, 256, 64, 8), (256, 128, 64, 8), (64, 256, 64, 4)]
        ways = [(stages, 8, stay, tma) for stages in (3, 4) for stay in (0, 1) for tma in (False, True)]
    if kernel == "gated_up":  # two sums: half the columns
        shapes = sorted({(m, max(n // 2, 16), k, warps) for m, n, k, warps in shapes})
    return [Tiles(*shape, stages, *way) for shape in shapes for stages, *way in ways]


class Layer:
    """A layer at so many rows an expert, of which one kernel is cut up anew."""

    def __init__(self, shape: Shape, depth: int, clock: Clock) -> None:
        T = max(1, depth * shape.E // shape.A)
        weights, _ = stacks(shape, "cuda", torch.bfloat16)
        self.clock, self.leaves = clock, [w for w in weights if w is not None]
        self.x_TD = torch.randn(T, shape.D, device="cuda").bfloat16().requires_grad_()
        self.ids_TA, self.w_TA = choices(T, shape, "uniform", "cuda"), torch.rand(T, shape.A, device="cuda")
        self.run = ours(shape, weights)

    def once(self, *, backward: bool) -> None:
        if backward:
            torch.autograd.grad(self.run(self.x_TD, self.ids_TA, self.w_TA).sum(), [self.x_TD, *self.leaves])
            return
        with torch.no_grad():
            self.run(self.x_TD, self.ids_TA, self.w_TA)

    def seconds(self, *, backward: bool, budget_s: float) -> float:
        def run() -> None:
            self.once(backward=backward)

        return self.clock.median(run if backward else self.clock.graphed(run), budget_s)


@functools.cache
def _small(shape: Shape) -> Layer:
    return Layer(shape, 1, Clock("cuda"))


def compiled(kernel: str, how: Tiles) -> str | None:
    """Leave a candidate in Triton's cache on disk; why it is none, or None."""
    tiles.CHOSEN[kernel] = how
    try:
        for shape in LAYERS:
            _small(shape).once(backward=kernel in BACKWARD)
    except (triton.runtime.errors.OutOfResources, RuntimeError) as why:
        return str(why).splitlines()[0][:100]
    return None


def tune(kernel: str, row: dict, layers: list[Layer], pool: ProcessPoolExecutor) -> None:
    """Replace ``row``'s tiles by the best found."""
    now = Tiles(**row["tiles"])
    found: dict[Tiles, float] = {}
    hows = list(dict.fromkeys((now, *candidates(kernel, row["rows_an_expert"]))))
    for how, why in zip(hows, pool.map(compiled, [kernel] * len(hows), hows), strict=True):
        if why:
            print(f"  {tuple(how)}: {why}", flush=True)
            continue
        tiles.CHOSEN[kernel] = how
        took = [layer.seconds(backward=kernel in BACKWARD, budget_s=0.02) for layer in layers]
        found[how] = math.prod(took) ** (1 / len(took))
    del tiles.CHOSEN[kernel]
    best = min(found, key=lambda how: found[how])
    if found[best] < 0.99 * found.get(now, math.inf):
        row["tiles"] = best._asdict()
    print(
        f"{kernel} {row['rows_an_expert']}: {found.get(now, math.inf):.3e} s -> {found[best]:.3e} s {best}", flush=True
    )


def written(record: dict) -> str:
    """The table as text, a row's tiles on one line."""
    kernels = [
        f'    "{kernel}": [\n'
        + ",\n".join(
            f'      {{ "rows_an_expert": {json.dumps(row["rows_an_expert"])}, "tiles": {json.dumps(row["tiles"])} }}'
            for row in rows
        )
        + "\n    ]"
        for kernel, rows in record["kernels"].items()
    ]
    measured = json.dumps(record["measured_on"])
    return f'{{\n  "measured_on": {measured},\n  "kernels": {{\n' + ",\n".join(kernels) + "\n  }\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record = json.loads(TABLE.read_text(encoding="utf-8"))
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=list(record["kernels"]),
        default=[kernel for kernel in record["kernels"] if kernel != "up"],
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[0, 16], help="rows of the table; 0 the last")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    parser.add_argument("--out", type=Path, default=TABLE, help="where to write the table")
    args = parser.parse_args()
    if choose("routed_experts", "cuda", torch.bfloat16).__module__.rpartition(".")[2] != "triton_experts":
        parser.error("no Triton here")
    clock = Clock("cuda")
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for most in (most or None for most in args.rows):
            layers = [Layer(shape, DEPTHS[most], clock) for shape in LAYERS]
            for kernel in args.kernels:
                if most == 16 and kernel in BACKWARD:
                    continue  # decoding has no way back
                for row in record["kernels"][kernel]:
                    if row["rows_an_expert"] == most:
                        tune(kernel, row, layers, pool)
                record["measured_on"] = torch.cuda.get_device_name()
                args.out.write_text(written(record), encoding="utf-8")


if __name__ == "__main__":
    main()
