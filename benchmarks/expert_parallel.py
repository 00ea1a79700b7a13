"""Expert parallelism on 2 and 4 GPUs: share of the all-to-all hidden, choice of ``plan.adaptive_r auto``.

    python benchmarks/expert_parallel.py --worlds 4 --out "$OUT"   4 GPUs: 5 minutes, half of it Triton's compiler
    python benchmarks/expert_parallel.py --out "$OUT"              2 and 4 GPUs: 8 minutes of four H200s
    python benchmarks/expert_parallel.py --worlds 2 --quick        one shape, one load: 100 s
    python benchmarks/expert_parallel.py --tiny                    toy sizes over gloo on a CPU

One MoE layer without its router, in bfloat16, with 16,384 tokens per rank and the widths of Mixtral-8x7B,
DeepSeek-V2-Lite and Qwen3-30B-A3B. The load is uniform or Zipf-distributed; in the latter the first rank's experts are
the busiest. Layouts: ep = W with whole experts, and ep = W/2 with each expert split in two; in each, every degree r
(r = 0 gathers weights instead of exchanging tokens) with p = 1, 2, 3, 4 and 6 overlapped parts. Per configuration,
medians on the slowest rank:

    t(r, p)        the layer
    t_compute(r)   the layer at p = 1 without exchanges of rows, whose results are replaced by existing memory. It
                   includes sorting, the exchange of counts and the wait for it, gathers of weights and all GEMMs
    t_a2a(r)       the exchanges of rows alone, of the same sizes, one after another: 2 forward, 4 with the backward
    hidden(r, p) = 1 − (t(r, p) − t_compute(r)) / t_a2a(r)
    t_cut(r, p)    t_compute with the rows in p parts: the cost of splitting alone (``--cut``)

p parts, of sizes 1, 2, 4, 4, 2, 1, can hide all but the first part's dispatch and the last part's combine (50, 75, 83
and 93% for p of 2, 3, 4 and 6), and no more than the GEMMs take. Then ``auto`` chooses for this load, and its choice is
compared with the best configuration, forward and backward. Two configurations of different r alternate, and their mean
time is compared with the mean of each alone. The peer (torch_only.py) is all_to_all_single and grouped_mm without
overlap. Each row is written to disk at once; after ``--minutes`` no further load is started.
"""

import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from colonnade.config import ModelConfig, MoeConfig, Plan
from colonnade.kernels.experts import grouped_mm
from colonnade.model import Transformer
from colonnade.model.moe import DispatchOptions, MixtureOfExperts
from colonnade.model.moe.dispatch import run_experts
from colonnade.model.moe.losses import expert_load as load_of
from colonnade.parallel import collectives
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch
from colonnade.train.moe_autotune import OVERLAPS, MoeAutotuner
from harness.report import Headline, report
from harness.rows import Row, Rows
from harness.training_jobs import device_and_folder, free_memory, has_gpus, make_parser, random_weights, synchronize
from moe import torch_only
from moe_layer import SHAPES, TINY, Shape, choices

TIMEOUT = datetime.timedelta(seconds=90)
"""Timeout of collectives; rows measured before a hang are on disk."""
PASSES = ("forward", "forward+backward")


class Task(NamedTuple):
    """Settings for every rank of a world."""

    shapes: tuple[str, ...]
    loads: tuple[str, ...]
    overlaps: tuple[int, ...]
    split: bool
    """Whether to measure experts split in two as well."""
    tokens: int
    cut: bool
    """Whether to measure the cost of parts without exchanges."""
    tiny: bool
    repeats: int
    folder: Path
    name: str
    seconds: float
    """Time after which no further load is started in this world."""


class Bench:
    """One layer under one plan, at one load."""

    def __init__(self, task: Task, shape: Shape, context: DistributedContext, model: Transformer, load: str):
        layer = model.blocks.get_submodule("0.ffn")
        assert isinstance(layer, MixtureOfExperts)
        self.task, self.context, self.experts = task, context, layer.experts
        rank, device, dtype = context.rank, context.device, layer.experts.up.dtype
        draw = torch.Generator(device).manual_seed(rank)
        on = {"device": device, "generator": draw}
        self.x_tD = torch.randn(task.tokens, shape.D, dtype=dtype, **on).requires_grad_()
        self.ids_tA = choices(task.tokens, shape, load, str(device), rank)
        self.weights_tA = torch.rand(task.tokens, shape.A, **on).softmax(1).requires_grad_()
        self.leaves = [self.x_tD, self.weights_tA, *self.experts.matrices]
        self.spare = torch.empty(0, dtype=dtype, device=device)

    def run(self, way: DispatchOptions) -> Tensor:
        return run_experts(self.x_tD, self.ids_tA, self.weights_tA, self.experts, way)

    def plain(self, both_egD: Tensor) -> Tensor:
        return torch_only.layer(self.x_tD, self.ids_tA, self.weights_tA, both_egD, self.experts.down)

    def ms(self, run: Callable[[], Tensor], what: str, leaves: Sequence[Tensor]) -> float:
        """Median of ``run`` on the slowest rank, forward alone or with backward."""

        def once() -> None:
            if what == "forward":
                with torch.no_grad():
                    run()
            else:
                torch.autograd.grad(run(), leaves, self.x_tD.detach())

        return timed(once, self.context.device, self.task.repeats)

    def compute_ms(self, way: DispatchOptions, what: str) -> float:
        """Time without exchanges of rows."""
        with self._without_exchanges():
            return self.ms(lambda: self.run(way), what, self.leaves)

    def exchange_ms(self, degree: int, what: str) -> float:
        """Time of the exchanges of rows alone."""
        sizes: list[tuple[list[int], list[int]]] = []
        with self._recorded_sizes(sizes):
            self.ms(lambda: self.run(DispatchOptions(degree)), what, self.leaves)
        calls = sizes[-(2 if what == "forward" else 4) :]
        rows_RD = self._rows(max(sum(send) for _, send in calls)).normal_()
        group = self.context.axes.experts.all.group

        def once() -> None:
            for receive, send in calls:
                collectives.all_to_all(rows_RD[: sum(send)], receive, send, group)

        return timed(once, self.context.device, self.task.repeats)

    def _rows(self, rows: int) -> Tensor:
        """Random rows in the same memory every time; not an autograd view, as the result of an exchange is not."""
        D = self.x_tD.shape[1]
        if self.spare.numel() < rows * D:
            self.spare = torch.randn(rows * D, device=self.context.device).to(self.spare.dtype)
        return self.spare.new_empty(0).set_(self.spare.untyped_storage(), 0, (rows, D))  # pyrefly: ignore[no-matching-overload]

    @contextmanager
    def _without_exchanges(self) -> Iterator[None]:
        original = collectives.begin_all_to_all

        def begin(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
            return self._rows(sum(receive)) if x.is_floating_point() else original(x, receive, send, group)

        collectives.begin_all_to_all = begin
        try:
            yield
        finally:
            collectives.begin_all_to_all = original

    @contextmanager
    def _recorded_sizes(self, sizes: list[tuple[list[int], list[int]]]) -> Iterator[None]:
        original = collectives.begin_all_to_all

        def begin(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
            if x.is_floating_point():
                sizes.append((receive, send))
            return original(x, receive, send, group)

        collectives.begin_all_to_all = begin
        try:
            yield
        finally:
            collectives.begin_all_to_all = original


def timed(once: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds: the median on the slowest rank, after two runs to warm up."""
    for _ in range(2):
        once()
    synchronize(device)
    took_s: list[float] = []
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            once()
            mark.record()
        synchronize(device)
        took_s = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    else:
        for _ in range(repeats):
            began = time.perf_counter()
            once()
            took_s.append(time.perf_counter() - began)
    mine = torch.tensor(statistics.median(took_s), dtype=torch.float64)
    return 1e3 * world_axis().max_(mine).item()


def config_of(shape: Shape, tiny: bool) -> ModelConfig:
    """A model of one block with experts of ``shape``."""
    moe = MoeConfig(experts=shape.E, active=shape.A, ffn_width=shape.F)
    heads = 4 if tiny else shape.D // 128
    return ModelConfig(
        vocab_size=64, layers=1, width=shape.D, heads=heads, ffn_width=shape.F, context=64, moe=moe
    )  # fmt: skip


def plans(world: int, task: Task) -> list[Plan]:
    """Whole experts, then experts split in two."""
    made = [Plan(dp=world, ep=world)]
    return [*made, Plan(dp=world, ep=world // 2, etp=2)] if task.split and world > 1 else made


def work(world: int, task: Task, device: str) -> list[Row]:
    """Runs all shapes, plans and loads on every rank; rank 0 records the rows."""
    rows: list[Row] = []
    began = time.perf_counter()
    with DistributedContext.build(Plan(dp=world), device, TIMEOUT) as context:
        recorder = Rows(f"{task.name}_{world}", task.folder) if context.rank == 0 else None
        for name in task.shapes:
            shape = (TINY if task.tiny else SHAPES)[name]
            for plan in plans(world, task):
                with DistributedContext.build(plan, device, TIMEOUT) as layout:
                    config = config_of(shape, task.tiny)
                    dtype = torch.float32 if task.tiny else torch.bfloat16
                    model = random_weights(Transformer(config, layout.axes, device=layout.device, dtype=dtype))
                    for load in task.loads:
                        spent_s = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                        if world_axis().max_(spent_s) > task.seconds:  # the same decision on all ranks
                            if recorder is not None:
                                print(f"{name}, {plan}, {load}: skipped, its time is over", flush=True)
                            continue
                        bench = Bench(task, shape, layout, model, load)
                        for row in measured(bench, name, shape, plan, load, model):
                            rows.append(row)
                            if recorder is not None:
                                recorder.add(row)
                        del bench
                    del model
                free_memory(context.device)
    return rows


def measured(bench: Bench, name: str, shape: Shape, plan: Plan, load: str, model: Transformer) -> Iterator[Row]:
    """Rows of all our configurations, the peer, the choice of auto, and alternating configurations."""
    task, world = bench.task, plan.world
    head: Row = {"shape": name, "ranks": world, "plan": f"ep={plan.ep} etp={plan.etp}", "load": load}
    degrees = [0] + [r for r in (1, 2) if plan.etp % r == 0]
    both: dict[DispatchOptions, float] = {}
    for what in PASSES:
        flops = (6 if what == "forward" else 18) * task.tokens * shape.A * shape.D * shape.F
        for r in degrees:
            parts: dict[str, float] = {}
            if r:
                parts = {
                    "compute_ms": bench.compute_ms(DispatchOptions(r), what),
                    "exchange_ms": bench.exchange_ms(r, what),
                }
            for p in task.overlaps if r else (1,):
                way = DispatchOptions(r, p)
                ms = bench.ms(lambda way=way: bench.run(way), what, bench.leaves)
                if what != "forward":
                    both[way] = ms
                hidden = 1 - (ms - parts["compute_ms"]) / parts["exchange_ms"] if r else None
                row = head | {"pass": what, "who": "colonnade", "r": r, "p": p, "ms": ms} | parts
                if task.cut and p > 1:
                    row["cut_ms"] = bench.compute_ms(way, what)
                yield rounded(row | {"hidden": hidden, "tflops_per_rank": flops / ms / 1e9})
        if plan.etp == 1 and grouped_mm.available:
            yield rounded(head | {"pass": what} | measure_peer(bench, what) | {"tflops_per_rank": None})
    yield rounded(head | {"pass": PASSES[1]} | measure_auto(bench, model, both))
    ways = [
        min((way for way in both if (way.adaptive_r == 0) == gathers), key=both.__getitem__)
        for gathers in (True, False)
    ]
    turns = iter(range(10**9))
    mixed = bench.ms(lambda: bench.run(ways[next(turns) % 2]), PASSES[1], bench.leaves)
    apart = sum(both[way] for way in ways) / 2
    yield rounded(head | {"pass": PASSES[1], "who": "taking turns", "ms": mixed, "alone_ms": apart,
                          "switch_cost": mixed / apart - 1})  # fmt: skip


def measure_peer(bench: Bench, what: str) -> Row:
    """The peer's cells, after a check of its result; all ranks reach the same verdict."""
    who = "all_to_all_single + grouped_mm"
    experts = bench.experts
    assert experts.gate is not None
    both_egD = torch.cat([experts.gate, experts.up], 1).detach().requires_grad_()
    with torch.no_grad():
        ours, theirs = bench.run(DispatchOptions(1)).float(), bench.plain(both_egD).float()
    error = world_axis().max_((ours - theirs).norm().double().cpu() / ours.norm().double().cpu()).item()
    if not error < 2e-2:
        return {"who": who, "ms": None, "failed": f"computes something else: {error:.1e}"}
    leaves = [bench.x_tD, bench.weights_tA, both_egD, experts.down]
    return {"who": who, "ms": bench.ms(lambda: bench.plain(both_egD), what, leaves)}


def measure_auto(bench: Bench, model: Transformer, both: dict[DispatchOptions, float]) -> Row:
    """The choice of auto for this load, and how much slower it is than the best configuration."""
    began = time.perf_counter()
    adaptive = MoeAutotuner(model)
    mine_E = load_of(bench.ids_tA, bench.experts.count)
    load_E = bench.context.axes.experts.tokens.sum_(mine_E).tolist()
    for _ in range(2):
        adaptive.update([0], [load_E], 1)
    took_s, way = time.perf_counter() - began, adaptive.spread[0]
    best = min(both, key=lambda it: both[it])
    # A quick run leaves some configurations out: measure the chosen one now.
    ms = both.get(way) or bench.ms(lambda: bench.run(way), PASSES[1], bench.leaves)
    return {
        "who": "auto", "r": way.adaptive_r, "p": way.overlap, "ms": ms,
        "best_r": best.adaptive_r, "best_p": best.overlap,
        "best_ms": both[best], "over_best": ms / both[best] - 1, "decided_in_s": took_s,
    }  # fmt: skip


def rounded(row: Row) -> Row:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def of(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """By world and shape at uniform load: the largest hidden share, the layer against the peer; auto's worst case."""
    lines: list[Headline] = []
    for world in sorted({int(row["ranks"] or 0) for row in rows}):
        for name in dict.fromkeys(str(row["shape"]) for row in rows):
            even = of(rows, ranks=world, shape=name, load="uniform", plan=f"ep={world} etp=1")
            for what in PASSES:
                ours = [row for row in of(even, who="colonnade") if row["pass"] == what and row["r"]]
                peer = [
                    row for row in even if row["pass"] == what and row["ms"] and str(row["who"]).startswith("all_to")
                ]
                if ours:
                    best = max(ours, key=lambda row: float(row["hidden"] or 0))
                    text = f"{name} experts on {world} GPUs, {what}: all-to-all hidden, p={best['p']}"
                    lines.append(Headline(text, round(100 * float(best["hidden"] or 0), 1), "%"))
                if ours and peer:
                    least = min(float(row["ms"] or 0) for row in ours)
                    text = f"{name} experts on {world} GPUs, {what}"
                    lines.append(Headline(text, least, "ms", str(peer[0]["who"]), float(peer[0]["ms"] or 0)))
    for who, key, text in (("auto", "over_best", "auto over the best fixed configuration"),
                           ("taking turns", "switch_cost", "changing the degree between steps")):  # fmt: skip
        found = [float(row[key] or 0) for row in of(rows, who=who)]
        if found:
            lines.append(
                Headline(f"expert parallelism: {text}, worst of {len(found)}", round(100 * max(found), 1), "%")
            )
    return lines


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each layer, load, pass and degree: milliseconds and hidden share by p; then the other rows."""
    keys = ("ranks", "plan", "shape", "load", "pass")
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in keys) == key]
        ours = of(mine, who="colonnade")
        yield " ".join(str(word) for word in key)
        for r in dict.fromkeys(row["r"] for row in ours):
            ways = " ".join(
                f"p={row['p']} {row['ms']:.2f}" + ("" if row["hidden"] is None else f" ({row['hidden']:.0%})")
                for row in of(ours, r=r)
            )
            parts = of(ours, r=r)[0]
            alone = f"; compute {parts['compute_ms']:.2f}, exchange {parts['exchange_ms']:.2f}" if r else ""
            yield f"    r={r}: {ways}{alone} ms"
        for row in mine:
            if row["who"] != "colonnade":
                yield "    " + ", ".join(f"{name} {value}" for name, value in row.items() if name not in keys)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the hidden share by p: a panel per pass, a line per world, shape and load of whole experts."""
    figure = Figure(figsize=(9, 4.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for panel, what in zip(figure.subplots(1, 2, sharey=True), PASSES, strict=True):
        mine = [
            row for row in of(rows, who="colonnade", r=1) if row["pass"] == what and str(row["plan"]).endswith("etp=1")
        ]
        names = list(dict.fromkeys(str(row["shape"]) for row in mine))
        for key in dict.fromkeys((row["shape"], row["ranks"], row["load"]) for row in mine):
            line = [row for row in mine if (row["shape"], row["ranks"], row["load"]) == key]
            style = "-" if key[2] == "uniform" else "--"
            colour = ("#2f6fb3", "#d98e04", "#d1495b")[names.index(str(key[0])) % 3]
            marker = {2: "o", 4: "s"}.get(int(key[1] or 0), "^")
            label = f"{key[0]}, {key[1]} ranks, {key[2]}"
            panel.plot(
                [str(row["p"]) for row in line], [row["hidden"] for row in line], style, color=colour, marker=marker,
                label=label, linewidth=1.2,
            )  # fmt: skip
        panel.axhline(0.7, color="#8a94a0", linewidth=0.8, linestyle=":")
        panel.set_title(what, loc="left", fontsize=10)
        panel.set_xlabel("p, parts")
    figure.axes[0].set_ylabel("share of the all-to-all hidden")
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    options = make_parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", help="ranks; 2 4, with --tiny 2")
    options.add_argument("--shapes", nargs="+", choices=SHAPES, help="which experts; all")
    options.add_argument("--loads", nargs="+", choices=("uniform", "zipf"), help="which loads; both")
    options.add_argument("--tokens", type=int, default=16384, help="tokens per rank")
    options.add_argument("--quick", action="store_true", help="Qwen3's experts, whole, uniform load, p of 1 and 4")
    options.add_argument("--whole", action="store_true", help="no layout that splits experts in two")
    options.add_argument("--cut", action="store_true", help="also the cost of parts without exchanges")
    options.add_argument(
        "--minutes", type=float, default=8.5, help="time limit for all worlds, after which no load is started"
    )
    args = options.parse_args(argv)
    few = args.tiny or args.quick
    worlds = args.worlds or ([2] if args.tiny else [2, 4])
    if not has_gpus(args, max(worlds)):
        return
    device, folder, name = device_and_folder(args)
    until = time.perf_counter() + 60 * args.minutes
    task = Task(
        tuple(args.shapes or (("qwen3",) if few else SHAPES)),
        tuple(args.loads or (("uniform",) if few else ("uniform", "zipf"))), (1, 4) if few else OVERLAPS,
        not (args.quick or args.whole), 24 if args.tiny else args.tokens, args.cut, args.tiny, 2 if args.tiny else 16,
        folder,
        f"expert_parallel_{max(worlds)}_{name}", 60 * args.minutes,
    )  # fmt: skip
    rows: list[Row] = []
    for world in sorted(worlds):
        left = task._replace(seconds=until - time.perf_counter())
        rows += launch(work, (world, left, device), Plan(dp=world))
    lines = headlines(rows)
    print(*table(rows), sep="\n")
    for line in lines:
        print(f"{line.what}: {line.value} {line.unit}" + (f" ({line.peer}: {line.peer_value})" if line.peer else ""))
    picture = folder / f"{task.name}.png"
    draw(rows, picture)
    report(task.name, rows, __doc__ or "", headlines=lines, folder=folder)
    for world in worlds:
        (folder / f"{task.name}_{world}.partial.jsonl").unlink(missing_ok=True)
    print(picture, flush=True)


if __name__ == "__main__":
    main()
