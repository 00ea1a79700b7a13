"""Tunes the experts' grouped GEMMs on this GPU: implementation and tiles of each, for ``tiles.json``.

    python benchmarks/tune_experts.py --shape mixtral --out "$OUT/mixtral.json"     # under 4 minutes on one H200
    CUDA_VISIBLE_DEVICES=1 python benchmarks/tune_experts.py --shape qwen3 --out "$OUT/qwen3.json" &    # in parallel
    python benchmarks/tune_experts.py --merge mixtral.json qwen3.json               # into tiles.json, on any machine

Each GEMM (forward: gate and up, down; backward: data gradients through down and through gate and up, weight gradients)
is timed alone on a layer of that shape: at 16,384 tokens, at 1, 16, 64 and 256 (a decode step: forward only), and the
best of the first again at 4096. Candidates are tiles of our kernels with all load methods, and torch's grouped GEMM;
separate gathers, or epilogues that ours fuses, count in the time of those that need them. The lowest median wins if it
beats the table's entry by 1%. Candidates are rejected if their result differs from torch's (or else the table entry's)
by 2% of the norm, or if they do not compile, do not fit, or end their process.

Worker processes compile candidates in parallel on narrow layers with the same Triton kernels, the most important first,
while this process times the compiled ones. After ``--minutes`` no further one is started, and entries that were not
measured keep the table's values; the file is written after each GEMM.

Time: 25 s to start the processes; 400 candidates at 3 s, 12 at once: 100 s; timed meanwhile at 0.1 s each. Memory: 12
processes of 1 GiB, and 12 GiB at Mixtral's widths.
"""

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.experts import tiles
from colonnade.kernels.experts.tiles import GroupedTiles, Kernel
from harness.clock import Clock
from moe.products import BACKWARD, DECODE, FORWARD, Layer, Sizes, candidates
from moe.tuning_table import merge_tables, table_json
from moe_layer import FAILURES, SHAPES, reason

TABLE = Path(tiles.__file__).with_name("tiles.json")
TOKENS = (1, 16, 64, 256, 4096, 16384)
FIRST: tuple[Kernel, ...] = (
    "gated_wgrad", "hidden_dgrad", "wgrad", "gated_up", "input_dgrad", "down"
)  # fmt: skip
"""Order at many tokens: the most expensive first, and GEMMs that gather tokens before those that reuse them."""
PERSISTENT_MARGIN = 1.03
"""Factor by which persistent programs must win: while an exchange of tokens occupies some SMs, programs without an SM
start only when others end."""
MAX_ERROR = 2e-2
"""Largest accepted relative error of a candidate, by norm."""
REPEATS = 6
"""Number of best candidates that are timed again at fewer tokens."""
Submit = Callable[[Kernel, GroupedTiles, Sizes], Any]


class Measurements(NamedTuple):
    """Measured times of one GEMM at one number of tokens."""

    kernel: Kernel
    sizes: Sizes
    seconds: dict[GroupedTiles, float]

    def best(self, count: int) -> list[GroupedTiles]:
        return sorted(
            self.seconds, key=lambda how: self.seconds[how] * (PERSISTENT_MARGIN if how.programs_per_sm else 1)
        )[:count]


@functools.cache
def _small(sizes: Sizes) -> Layer:
    return Layer(sizes.small())


def compiled(kernel: Kernel, how: GroupedTiles, sizes: Sizes) -> str | None:
    """Compile a candidate into Triton's disk cache; returns the reason of a failure, or None."""
    tiles.OVERRIDES[kernel] = how
    try:
        _small(sizes).run(kernel)
        torch.cuda.synchronize()
    except FAILURES as why:
        if "CUDA error" in str(why):  # the CUDA context is lost; the pool starts another process
            os._exit(1)
        return f"{type(why).__name__}: {(str(why).splitlines() or [''])[0][:100]}"
    return None


def differs(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative error by norm; NaN counts as inf."""
    worst = max(
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6))
        for a, b in zip(found, exact, strict=True)
    )
    return math.inf if math.isnan(worst) else worst


class Tuner:
    """Tunes the GEMMs of one shape, the most important first."""

    def __init__(
        self, shape: tiles.LayerShape, active: int, clock: Clock, submit: Submit, until: float, layer=Layer
    ) -> None:
        self.shape, self.active, self.clock, self.submit, self.until = shape, active, clock, submit, until
        self.layer: Callable[[Sizes], Layer] = functools.lru_cache(maxsize=1)(layer)
        self.waiting: list[AsyncResult] = []
        self.chosen: dict[tuple[str, int], GroupedTiles] = {}

    def at(self, tokens: int) -> Sizes:
        return Sizes(self.shape.E, self.active, self.shape.D, self.shape.F, tokens)

    def now(self, kernel: Kernel, tokens: int) -> GroupedTiles:
        """The best tiles so far: measured in this run, else the table's."""
        known = self.chosen.get((kernel, tokens))
        return known or tiles.select_tiles(kernel, tokens * self.active, self.shape, 2)

    def over(self) -> bool:
        return time.perf_counter() > self.until

    def begin(
        self, kernel: Kernel, tokens: int, hows: list[GroupedTiles]
    ) -> list[tuple[GroupedTiles, AsyncResult | None]]:
        """Start compiling candidates."""
        jobs = [(how, None if how.library else self.submit(kernel, how, self.at(tokens))) for how in hows]
        self.waiting += [job for _, job in jobs if job is not None]
        return jobs

    def answer(self, job: AsyncResult | None) -> str | None:
        """Wait for a compilation; returns the reason of a failure, or None.

        A job whose process ended never answers; it counts as lost once much later jobs have answered.
        """
        if job is None:
            return None
        later = self.waiting[self.waiting.index(job) + 80 :]
        while not job.ready():
            if self.over() or any(it.ready() for it in later):
                return "no answer: compiling for too long, or its process ended"
            time.sleep(0.02)
        return job.get()

    def measure(self, kernel: Kernel, tokens: int, jobs: list[tuple[GroupedTiles, AsyncResult | None]]) -> Measurements:
        """Time the candidates; the best replaces the current tiles."""
        began, sizes, now = time.perf_counter(), self.at(tokens), self.now(kernel, tokens)
        found = Measurements(kernel, sizes, {})
        if self.over():
            print(f"{kernel} {tokens}: unchanged, the time is over", flush=True)
            return found
        layer, exact = self.layer(sizes), None
        if kernel == "wgrad":
            before = self.now("hidden_dgrad", tokens)
            layer.gathered_before = before.gather_first or before.library
        for how, job in jobs:
            why = self.answer(job)
            tiles.OVERRIDES[kernel] = how
            try:
                if why is None:
                    result = layer.run(kernel)
                    exact = result if exact is None else exact
                    error = differs(result, exact)
                    why = None if error <= MAX_ERROR else f"computes something else ({error:.1e})"
                    del result
                if why is None:
                    run = functools.partial(layer.run, kernel)
                    found.seconds[how] = self.clock.median(run if layer.back else self.clock.graphed(run), 0.02)
            except FAILURES as failure:
                why = reason(failure)
            if why is not None:
                print(f"  {tuple(how)}: {why}", flush=True)
            if self.over():
                break
        tiles.OVERRIDES.pop(kernel, None)
        self.decide(found, now, began, len(jobs))
        return found

    def decide(self, found: Measurements, now: GroupedTiles, began: float, count: int) -> None:
        def of(how: GroupedTiles) -> float:
            return found.seconds.get(how, math.inf) * (PERSISTENT_MARGIN if how.programs_per_sm else 1)

        best = next(iter(found.best(1)), now)
        if of(best) < 0.99 * of(now):
            ours = next((how for how in found.best(len(found.seconds)) if not how.library), now)
            # Our best tiles run where torch's GEMM does not support the operands (biases, unaligned widths).
            self.chosen[found.kernel, found.sizes.T] = ours._replace(library=True) if best.library else best
        kinds = {False: "ours", True: "torch's"}
        least = {
            kind: min((t for it, t in found.seconds.items() if it.library is kind), default=math.inf) for kind in kinds
        }
        both = ", ".join(f"{who} {least[kind]:.3e}" for kind, who in kinds.items())
        print(
            f"{found.kernel} {found.sizes.T}: {of(now):.3e} s -> {of(best):.3e} s {tuple(best)}; {both}; "
            f"{len(found.seconds)} of {count} in {time.perf_counter() - began:.0f} s", flush=True,
        )  # fmt: skip

    def hows(self, kernel: Kernel, tokens: int, more: list[GroupedTiles]) -> list[GroupedTiles]:
        """torch's GEMM, which is the reference, then the current tiles, then the others."""
        now = self.now(kernel, tokens)._replace(library=False)
        return list(dict.fromkeys([now._replace(library=True), now, *more]))

    def run(self, write: Callable[[], None]) -> None:
        most, decode = TOKENS[-1], [T for T in reversed(TOKENS) if T <= DECODE]
        order: list[tuple[Kernel, int]] = [(kernel, most) for kernel in FIRST]
        order.extend((kernel, T) for T in decode for kernel in FORWARD)
        jobs = {
            (kernel, tokens): self.begin(kernel, tokens, self.hows(kernel, tokens, candidates(kernel, self.at(tokens))))
            for kernel, tokens in order
        }
        found: dict[str, Measurements] = {}
        others: dict[Kernel, list] = {}
        for kernel, tokens in order:
            this = self.measure(kernel, tokens, jobs[kernel, tokens])
            if tokens == most:
                found[kernel] = this
                best = [how for how in this.best(2) if not how.library]
                groups = [how._replace(GROUP=group) for how in best for group in (4, 16)]
                others[kernel] = self.begin(kernel, most, self.hows(kernel, most, best + groups))
            write()
        for kernel, again in others.items():
            grouped = self.measure(kernel, most, again)
            found[kernel].seconds.update(grouped.seconds)
            write()
        fewer = TOKENS[-2]
        for kernel in FIRST:
            best = [how for how in found[kernel].best(REPEATS) if not how.library]
            self.measure(kernel, fewer, self.begin(kernel, fewer, self.hows(kernel, fewer, best)))
            write()

    def record(self) -> dict[str, Any]:
        """This shape's entry of the file; between measured token counts the nearer one in logarithms applies."""
        kernels: dict[str, list] = {}
        for kernel in FORWARD + BACKWARD:
            of = [T for T in TOKENS if kernel in FORWARD or T > DECODE]
            ends = [round(math.sqrt(self.at(a).mean * self.at(b).mean), 4) for a, b in itertools.pairwise(of)]
            kernels[kernel] = [
                {"rows_an_expert": end, "tiles": self.now(kernel, T)._asdict()}
                for T, end in zip(of, [*ends, None], strict=True)
            ]
        return {**self.shape._asdict(), "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="mixtral", help="widths to tune for")
    parser.add_argument("--processes", type=int, default=12, help="compiling processes")
    parser.add_argument("--minutes", type=float, default=3.8, help="time limit, after which the best so far is written")
    parser.add_argument("--out", type=Path, default=TABLE, help="output file of the measured or merged table")
    parser.add_argument("--merge", nargs="+", type=Path, help="only merge the shapes of these files into the table")
    args = parser.parse_args()
    began, record = time.perf_counter(), json.loads(TABLE.read_text(encoding="utf-8"))
    if args.merge:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in args.merge]
        args.out.write_text(table_json(merge_tables(record, parts)), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        print("skipped: needs a GPU, and this machine has none")
        return
    E, A, D, F = SHAPES[args.shape]
    pool = multiprocessing.get_context("spawn").Pool(args.processes)

    def submit(kernel: Kernel, how: GroupedTiles, sizes: Sizes) -> AsyncResult:
        return pool.apply_async(compiled, (kernel, how, sizes))

    tuner = Tuner(tiles.LayerShape(E, F, D), A, Clock("cuda"), submit, began + 60 * args.minutes)

    def write() -> None:
        found = {"measured_on": torch.cuda.get_device_name(), "shapes": [tuner.record()]}
        args.out.write_text(table_json(merge_tables(record, [found])), encoding="utf-8")

    try:
        tuner.run(write)
    finally:
        pool.terminate()
    print(f"{args.shape}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
