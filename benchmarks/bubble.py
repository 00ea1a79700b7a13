"""The bubble of each pipeline schedule, measured against theory.

    python benchmarks/bubble.py                  needs 4 GPUs; --worlds 2 with two
    python benchmarks/bubble.py --tiny           the same in small, on a CPU

A step of m micro-batches through p ranks would take m t / p if no rank ever waited, t being what one rank takes for a
micro-batch of the whole model. Ranks wait for the pipeline to fill and to drain, so that it takes

    (m + b) t / p

    gpipe, 1f1b      b = p - 1               Huang et al., arXiv 1811.06965; Narayanan et al., arXiv 2104.04473, 2.2.1
    interleaved      b = (p - 1) / v         v stages on each rank; the same, 2.2.2
    zero_bubble      b = (p - 1) / 3 v       ZB-H1 (Qi et al., arXiv 2401.10241, table 2): in the place of
                                             (p - 1)(T_F + T_B + T_W) it has (p - 1)(T_F + T_B - T_W), a third where
                                             T_F = T_B = T_W: a matrix product's two gradients cost what it cost
                                             itself; with v stages a v-th of each

Beside that stands the bubble by the slope: (T(m) - s m) / (s m), s being the cost of one more micro-batch in the same
pipeline, from the two largest m, and the step against (m + b) s. It leaves out what one rank never pays (messages,
uneven stages, Python). What is timed is the forward and the backward pass of all micro-batches, to the end of the
slowest rank; no optimizer.

A GPT-2 shape with a vocabulary of 512, so that the ends of the pipeline cost little more than its middle (with 4,096
the loss makes the last stage 5% longer than the others): 16 x 2048, micro-batches of 8 sequences of 1,024 tokens,
bfloat16. Blocks are not compiled: a compiled block's backward pass is one piece, and zero_bubble needs the gradients of
weights apart.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from colonnade.config import ModelConfig, Plan
from colonnade.config.plan import MULTI_STAGE_SCHEDULES
from colonnade.config.presets import preset
from colonnade.model import Transformer
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.parallel.launch import launch
from colonnade.parallel.pipeline import schedule_supported
from colonnade.train.model_inputs import VALIDATION
from colonnade.train.pipeline_step import PipelineStep
from colonnade.train.train_step import forward
from harness.report import Headline, report
from harness.training_jobs import Row, durations, enough, filled, forget, kept, parser, place, random_batch

STAGES = 2
"""v, of the schedules that have several."""


@dataclass(frozen=True)
class Sizes:
    """What goes through the pipeline."""

    config: ModelConfig
    sequence: int
    batch: int
    """Sequences of a micro-batch."""
    counts: tuple[int, ...]
    """Micro-batches of a step, times p."""
    dtype: torch.dtype
    steps: int


def sizes(tiny: bool) -> Sizes:
    """The full or the tiny setting."""
    shape = {"layers": 16, "vocab_size": 512, "width": 2048, "heads": 16, "ffn_width": 8192}
    if tiny:
        small = {"layers": 4, "vocab_size": 211, "width": 32, "heads": 4, "ffn_width": 64, "context": 32}
        return Sizes(preset("gpt2").replace(**small), 32, 2, (1, 2), torch.float32, 2)
    return Sizes(preset("gpt2").replace(**shape), 1024, 8, (2, 4, 8), torch.bfloat16, 4)


def plans(world: int) -> list[Plan]:
    """Each schedule over ``world`` ranks that this torch knows; one rank for comparison."""
    if world == 1:
        return [Plan()]
    names = ("gpipe", "1f1b", *MULTI_STAGE_SCHEDULES)
    made = [Plan(pp=world, schedule=name, stages=STAGES if name in MULTI_STAGE_SCHEDULES else 1) for name in names]
    return [plan for plan in made if schedule_supported(plan)]


def waits(plan: Plan) -> float:
    """b of the formula."""
    return (plan.pp - 1) / plan.stages / (3 if plan.schedule == "zero_bubble" else 1)


def work(world: int, size: Sizes, device: str) -> list[Row]:
    """On every rank of one world: the step time of each schedule at each number of micro-batches."""
    rows: list[Row] = []
    with DistributedContext.build(Plan(dp=world), device) as whole:
        for plan in plans(world):
            with DistributedContext.build(plan, device) as context:
                for m, seconds in timed(size, context):
                    rows.append({"schedule": plan.schedule if world > 1 else "one rank", "ranks": world,
                                 "stages": plan.stages, "micro_batches": m, "step_ms": round(1e3 * seconds, 2),
                                 "waits": round(waits(plan), 4)})  # fmt: skip
                    if whole.rank == 0:
                        print(json.dumps(rows[-1]), flush=True)
            forget(whole.device)
    return rows


def whole_world(world: int, size: Sizes, device: str, keep: Path | None) -> list[Row]:
    """The rows of one world, from the file ``keep`` where it has them all; added to it where it has not."""
    key, there = f"{world} ranks of {size}", kept(keep)
    if key not in there:
        there[key] = launch(work, (world, size, device), Plan(dp=world))
        if keep is not None:
            with keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, there[key]]) + "\n")
    return there[key]


def timed(size: Sizes, context: DistributedContext) -> list[tuple[int, float]]:
    """(micro-batches, seconds of a step) of one schedule."""
    config, plan = size.config, context.plan
    spans = [span for _, span in context.stages(config.layers)]
    model = filled(Transformer(config, context.axes, spans=spans, device=context.device))
    piped = PipelineStep(model, context, size.dtype) if plan.pp > 1 else None
    held = masters(model, context, size.dtype, piped and piped.stages)
    one = torch.ones((), device=context.device)
    found = []
    for times in size.counts:
        m = times * max(plan.pp, 2)
        batches = [random_batch(config, size.sequence, size.batch, seed, context.device) for seed in range(m)]

        def step(_: int, batches=batches) -> None:
            if piped is None:
                for batch in batches:
                    (forward(model, batch) / one).backward()
            else:
                piped.step(batches, one, VALIDATION)
            held.collect()
            for weight in held.local.values():
                weight.grad = None
            world_axis().sum_(one)  # to the end of the slowest rank

        step(0)
        found.append((m, statistics.median(durations(step, size.steps, context.device))))
    return found


def judged(rows: Sequence[Row]) -> tuple[list[Row], list[Headline]]:
    """Each row with theory's step and both bubbles, and the worst of the largest m as a headline."""
    alone = [row for row in rows if row["ranks"] == 1]
    each_ms = min(row["step_ms"] / row["micro_batches"] for row in alone)
    found: list[Row] = []
    for row in rows:
        m, p, took, b = (row[key] for key in ("micro_batches", "ranks", "step_ms", "waits"))
        ideal = m * each_ms / p
        same = [r for r in rows if (r["schedule"], r["ranks"]) == (row["schedule"], row["ranks"])]
        slope_ms = (same[-1]["step_ms"] - same[-2]["step_ms"]) / (same[-1]["micro_batches"] - same[-2]["micro_batches"])
        found.append(
            row
            | {
                "theory_ms": round((m + b) * each_ms / p, 2),
                "over_theory": round(took / ((m + b) * each_ms / p) - 1, 4),
                "bubble_theory": round(b / m, 4),
                "bubble": round(took / ideal - 1, 4),
                "over_theory_by_slope": round(took / ((m + b) * slope_ms) - 1, 4) if slope_ms > 0 else None,
                "bubble_by_slope": round(took / (slope_ms * m) - 1, 4) if slope_ms > 0 else None,
            }
        )
    heads = []
    for p in sorted({row["ranks"] for row in found} - {1}):
        most = max(row["micro_batches"] for row in found if row["ranks"] == p)
        for row in (row for row in found if (row["ranks"], row["micro_batches"]) == (p, most)):
            what = f"pipeline step, {row['schedule']} over {p} GPUs, {most} micro-batches (lower is better)"
            heads.append(Headline(what, row["step_ms"], "ms", "theory, from one GPU's speed,", row["theory_ms"]))
    return found, heads


def main(argv: list[str] | None = None) -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", help="pipeline ranks; 2 4, with --tiny 2")
    args = options.parse_args(argv)
    worlds = args.worlds or ([2] if args.tiny else [2, 4])
    if not enough(args, max(worlds)):
        return
    device, folder, name = place(args)
    rows: list[Row] = []
    for world in (1, *worlds):
        rows += whole_world(world, sizes(args.tiny), device, args.keep)
    rows, heads = judged(rows)
    report(f"bubble_{name}", rows, __doc__ or "", headlines=heads, folder=folder)


if __name__ == "__main__":
    main()
