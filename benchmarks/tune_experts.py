"""Measures the tiles of the experts' Triton kernels on this GPU, and writes the table that ``tiles.py`` reads.

    python benchmarks/tune_experts.py                    # all kernels: about 10 minutes of an H200
    python benchmarks/tune_experts.py --kernels gated_up down --rows 16 --seconds 60

For each kernel and each number of rows an expert (decode, a small batch, training), every candidate is timed in a whole
layer at the widths of Qwen3-30B-A3B and Mixtral (smaller E), everything else left as the table has it; the candidate
with the least geometric mean over the two wins, if it beats what stands there by 1%. Candidates that do not fit the
chip are passed over. Nothing is tuned while a model runs.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import triton

from colonnade.kernels.choose import choose
from colonnade.kernels.experts import tiles
from colonnade.kernels.experts.tiles import Tiles
from moe_layer import Clock, Shape, choices, ours, stacks

TABLE = Path(tiles.__file__).with_name("tiles.json")
LAYERS = (Shape(128, 8, 2048, 768), Shape(8, 2, 4096, 14336))
DEPTHS = {16: 4, 64: 48, None: 1024}
"""Rows an expert at which each row of the table is measured, by its bound."""
BACKWARD = ("hidden_back", "rows_back", "weights_back", "gated_weights_back")


def candidates(kernel: str, most: int | None) -> list[Tiles]:
    """What may be best, from what is known of the chip: see the docstring of ``tiles.py``."""
    if kernel in ("weights_back", "gated_weights_back"):
        both = kernel.startswith("gated")
        shapes = [(128, 128, 64, 8), (128, 128, 32, 8), (128, 64, 64, 4)]
        shapes += [(64, 128, 64, 4)] if both else [(128, 256, 64, 8), (128, 256, 32, 8), (256, 128, 64, 8)]
        return [Tiles(*shape, stages, GROUP=group) for shape in shapes for stages in (3, 4) for group in (4, 8)]
    if most == 16:
        shapes = [(16, n, k, warps) for n in (32, 64, 128) for k in (64, 128, 256) for warps in (2, 4)]
        ways = [(stages, 8, 0, tma) for stages in (3, 4, 6) for tma in (False, True)]
    elif most == 64:
        shapes = [(m, n, 64, 4) for m in (32, 64) for n in (64, 128, 256)]
        ways = [(stages, 8, 0, tma) for stages in (3, 4) for tma in (False, True)]
    else:
        shapes = [(128, 128, 64, 8), (128, 128, 64, 4), (128, 256, 64, 8), (256, 128, 64, 8), (64, 256, 64, 4)]
        ways = [(s, g, p, t) for s in (3, 4) for g in (4, 8, 16) for p in (0, 1) for t in (False, True)]
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

    def seconds(self, *, backward: bool, budget_s: float) -> float:
        def forward() -> None:
            with torch.no_grad():
                self.run(self.x_TD, self.ids_TA, self.w_TA)

        def both() -> None:
            torch.autograd.grad(self.run(self.x_TD, self.ids_TA, self.w_TA).sum(), [self.x_TD, *self.leaves])

        return self.clock.median(both if backward else self.clock.graphed(forward), budget_s)


def tune(kernel: str, row: dict, layers: list[Layer], seconds: float) -> None:
    """Replace ``row``'s tiles by the best found within the time given."""
    now, until = Tiles(**row["tiles"]), time.monotonic() + seconds
    found: dict[Tiles, float] = {}
    for how in (now, *candidates(kernel, row["rows_an_expert"])):
        if found and time.monotonic() > until:
            print(f"  time is up after {len(found)} candidates", flush=True)
            break
        tiles.CHOSEN[kernel] = how
        try:
            took = [layer.seconds(backward=kernel in BACKWARD, budget_s=0.02) for layer in layers]
        except (triton.runtime.errors.OutOfResources, RuntimeError) as why:
            print(f"  {tuple(how)}: {str(why).splitlines()[0][:80]}", flush=True)
            continue
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
    parser.add_argument("--kernels", nargs="+", choices=list(record["kernels"]), default=list(record["kernels"]))
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 0], help="rows of the table; 0 the last")
    parser.add_argument("--seconds", type=float, default=40, help="at most so long for a row of the table")
    parser.add_argument("--out", type=Path, default=TABLE, help="where to write the table")
    args = parser.parse_args()
    if choose("routed_experts", "cuda", torch.bfloat16).__module__.rpartition(".")[2] != "triton_experts":
        parser.error("no Triton here")
    clock = Clock("cuda")
    for most in (most or None for most in args.rows):
        layers = [Layer(shape, DEPTHS[most], clock) for shape in LAYERS]
        for kernel in args.kernels:
            for row in record["kernels"][kernel]:
                if row["rows_an_expert"] == most:
                    tune(kernel, row, layers, args.seconds)
            record["measured_on"] = torch.cuda.get_device_name()
            args.out.write_text(written(record), encoding="utf-8")


if __name__ == "__main__":
    main()
