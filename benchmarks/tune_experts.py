"""Measures the tiles of the experts' Triton kernels on this GPU, and writes the table that ``tiles.py`` reads.

    python benchmarks/tune_experts.py --out "$OUT/tiles.json"     # gated layers, training and decoding: 4 minutes
    python benchmarks/tune_experts.py --kernels up down --rows 16 64 0
    python benchmarks/tune_experts.py --quick                     # two kernels, a few candidates: 80 s

For each kernel and each number of rows an expert (16: decoding; 64; 0: training), every candidate is timed in a whole
layer at the widths of Qwen3-30B-A3B and Mixtral, everything else left as the table has it; the candidate with the least
geometric mean over the two wins, if it beats what stands there by 1%. All are compiled first, many at once, in other
processes and on narrow layers of the same kind, for which Triton makes the same kernels. Those that do not fit the
chip, take too long to compile, end their process, or compute something else are passed over, and said so. The table is
written after each kernel; after ``--minutes`` no further one is begun. Nothing is tuned while a model runs.

Time: 60 s until all processes stand and the table's own kernels are compiled; some 200 candidates for two layers at 3 s
each, compiled 12 at once, 100 s; timed at 0.2 s each, 40 s. Memory: 12 processes of 1 GiB, and 12 GiB for the layers
that are timed.
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import time
from multiprocessing.pool import Pool
from pathlib import Path

import torch
from torch import Tensor

from _clock import Clock
from colonnade.kernels.choose import choose
from colonnade.kernels.experts import tiles
from colonnade.kernels.experts.tiles import Tiles
from moe_layer import FAILURES, Shape, choices, ours, reason, stacks

TABLE = Path(tiles.__file__).with_name("tiles.json")
LAYERS = (Shape(128, 8, 2048, 768), Shape(8, 2, 4096, 14336))
DEPTHS = {16: 4, 64: 48, None: 1024}
"""Rows an expert at which each row of the table is measured, by its bound."""
NARROW, ROWS = 512, 16
"""The widths and the rows an expert for which candidates are compiled: multiples of every tile's, as the layers' are,
so that Triton, which looks at whether a size divides by 16, makes the kernels that the layers will ask for."""
KERNELS: tuple[tiles.Kernel, ...] = (
    "up", "gated_up", "down", "hidden_back", "rows_back", "weights_back", "gated_weights_back"
)  # fmt: skip
PATIENCE_S = 90.0
"""For the candidates of one kernel after another; a compilation that takes longer is given up."""
STAYING = 1.03
"""A program that stays for many tiles must win by this: where an exchange of tokens holds some processors, those that
found none begin when the others are through."""
WRONG = 2e-2
"""The relative norm by which a candidate's results may differ."""
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

    def once(self, *, backward: bool) -> list[Tensor]:
        if backward:
            y_TD = self.run(self.x_TD, self.ids_TA, self.w_TA)
            return list(torch.autograd.grad(y_TD, [self.x_TD, *self.leaves], self.x_TD.detach()))
        with torch.no_grad():
            return [self.run(self.x_TD, self.ids_TA, self.w_TA)]

    def seconds(self, *, backward: bool, budget_s: float) -> float:
        def run() -> None:
            self.once(backward=backward)

        return self.clock.median(run if backward else self.clock.graphed(run), budget_s)


@functools.cache
def _small(shape: Shape) -> Layer:
    return Layer(shape._replace(D=NARROW, F=NARROW), ROWS, Clock("cuda"))


def as_at(most: int | None) -> None:
    """All kernels of this process's layers as the table has them for the depth at which a row of it is measured."""
    tiles.CHOSEN.clear()
    for kernel in KERNELS:
        tiles.CHOSEN[kernel] = tiles.pick(kernel, DEPTHS[most], 1, 2)


def warmed(shape: Shape, backward: bool, most: int | None) -> None:
    """Leave all kernels of a layer in Triton's cache on disk."""
    as_at(most)
    _small(shape).once(backward=backward)
    torch.cuda.synchronize()


def compiled(kernel: str, how: Tiles, most: int | None) -> str | None:
    """Leave a candidate in Triton's cache on disk; why it is none, or None."""
    as_at(most)
    tiles.CHOSEN[kernel] = how
    try:
        for shape in LAYERS:
            _small(shape).once(backward=kernel in BACKWARD)
        torch.cuda.synchronize()
    except FAILURES as why:
        if "CUDA error" in str(why):  # this process can use the device no more; the pool starts another one
            os._exit(1)
        return f"{type(why).__name__}: {(str(why).splitlines() or [''])[0][:100]}"
    return None


def differs(layer: Layer, exact: list[Tensor], *, backward: bool) -> float:
    """The largest relative norm by which what a layer computes differs from ``exact``; NaN is inf."""
    found = layer.once(backward=backward)
    worst = max(
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6))
        for a, b in zip(found, exact, strict=True)
    )
    return math.inf if math.isnan(worst) else worst


def tune(kernel: str, row: dict, layers: list[Layer], pool: Pool, every: int) -> None:
    """Replace ``row``'s tiles by the best found of every so many candidates."""
    now, backward, began = Tiles(**row["tiles"]), kernel in BACKWARD, time.perf_counter()
    found: dict[Tiles, float] = {}
    hows = list(dict.fromkeys((now, *candidates(kernel, row["rows_an_expert"])[::every])))
    waiting = [pool.apply_async(compiled, (kernel, how, row["rows_an_expert"])) for how in hows]
    exact = [layer.once(backward=backward) for layer in layers]
    for how, answer in zip(hows, waiting, strict=True):
        try:
            why = answer.get(max(5.0, PATIENCE_S - (time.perf_counter() - began)))
        except multiprocessing.TimeoutError:
            why = f"no answer within {PATIENCE_S:.0f} s: compiling for too long, or its process ended"
        if why:
            print(f"  {tuple(how)}: {why}", flush=True)
            continue
        tiles.CHOSEN[kernel] = how
        try:
            error = max(differs(layer, it, backward=backward) for layer, it in zip(layers, exact, strict=True))
            if error > WRONG:
                print(f"  {tuple(how)}: computes something else ({error:.1e})", flush=True)
                continue
            took = [layer.seconds(backward=backward, budget_s=0.02) for layer in layers]
        except FAILURES as failure:
            print(f"  {tuple(how)}: {reason(failure)}", flush=True)
            continue
        found[how] = math.prod(took) ** (1 / len(took)) * (STAYING if how.a_processor else 1)
    tiles.CHOSEN.pop(kernel, None)
    best = min(found, key=lambda how: found[how], default=now)
    if found.get(best, math.inf) < 0.99 * found.get(now, math.inf):
        row["tiles"] = best._asdict()
    was_s, is_s = (found.get(it, math.inf) for it in (now, best))
    print(
        f"{kernel} {row['rows_an_expert']}: {was_s:.3e} s -> {is_s:.3e} s {best}, "
        f"{len(found)} of {len(hows)} candidates in {time.perf_counter() - began:.0f} s", flush=True,
    )  # fmt: skip


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
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no further kernel is begun")
    parser.add_argument("--quick", action="store_true", help="gated_up and down, for training, every fifth candidate")
    args = parser.parse_args()
    if args.quick:
        args.kernels, args.rows = ["gated_up", "down"], [0]
    if not torch.cuda.is_available():
        print("skipped: needs a GPU, and this machine has none")
        return
    if choose("routed_experts", "cuda", torch.bfloat16).__module__.rpartition(".")[2] != "triton_experts":
        parser.error("no Triton here")
    clock, began = Clock("cuda"), time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for most in (most or None for most in args.rows):
            # Else each process would compile the kernels that are not tuned, and so would this one, one by one.
            backs = [False] if most == 16 else [False, True]
            for answer in [pool.apply_async(warmed, (shape, back, most)) for shape in LAYERS for back in backs]:
                answer.get(240)
            print(f"the table's own kernels are compiled after {time.perf_counter() - began:.0f} s", flush=True)
            layers = [Layer(shape, DEPTHS[most], clock) for shape in LAYERS]
            for kernel in args.kernels:
                if most == 16 and kernel in BACKWARD:
                    continue  # decoding has no way back
                if time.perf_counter() - began > 60 * args.minutes:
                    print(f"{kernel} {most}: left as it is, {args.minutes:g} minutes are over", flush=True)
                    continue
                for row in record["kernels"][kernel]:
                    if row["rows_an_expert"] == most:
                        tune(kernel, row, layers, pool, 5 if args.quick else 1)
                record["measured_on"] = torch.cuda.get_device_name()
                args.out.write_text(written(record), encoding="utf-8")


if __name__ == "__main__":
    main()
