"""Pipeline bubble of each schedule, measured against theory.

    python benchmarks/bubble.py                  needs 4 GPUs; --worlds 2 with two
    python benchmarks/bubble.py --tiny           toy sizes on a CPU

If no rank waited, a step of m micro-batches over p ranks would take m t / p, where t is the time of one micro-batch
through the whole model on one rank. Ranks wait while the pipeline fills and drains, so a step takes

    (m + b) t / p

    gpipe, 1f1b      b = p - 1               Huang et al., arXiv 1811.06965; Narayanan et al., arXiv 2104.04473, 2.2.1
    interleaved      b = (p - 1) / v         v stages on each rank; the same, 2.2.2
    zero_bubble      b = (p - 1) / 3 v       ZB-H1 (Qi et al., arXiv 2401.10241, table 2): (p - 1)(T_F + T_B - T_W)
                                             instead of (p - 1)(T_F + T_B + T_W), which is a third of it where
                                             T_F = T_B = T_W (each of a GEMM's two gradients costs as much as the
                                             GEMM itself); with v stages, 1/v of that

``bubble_by_slope`` is (T(m) - s m) / (s m), where s is the cost of one more micro-batch in the same pipeline, from the
two largest m; ``over_theory_by_slope`` compares the step with (m + b) s. These leave out costs that one rank alone does
not have (messages, uneven stages, Python). The timing covers the forward and backward passes of all micro-batches on
the slowest rank, without the optimizer.

The model is a GPT-2 of 16 x 2048 with micro-batches of 8 sequences of 1,024 tokens in bfloat16. Its vocabulary is 512,
so that the first and last stages cost little more than the others (with 4,096 the loss makes the last stage 5% longer).
Blocks are not compiled: a compiled block's backward pass cannot be split, and zero_bubble computes weight gradients
separately.
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
from colonnade.train.train_step import PipelineStep, forward
from harness.report import Headline, report
from harness.training_jobs import (
    Row,
    device_and_folder,
    durations,
    free_memory,
    has_gpus,
    make_parser,
    random_batch,
    random_weights,
    read_rows,
)

STAGES = 2
"""v, for schedules with several stages per rank."""


@dataclass(frozen=True)
class Sizes:
    """Model and workload."""

    config: ModelConfig
    sequence: int
    batch: int
    """Sequences per micro-batch."""
    counts: tuple[int, ...]
    """Micro-batches per step, in multiples of p."""
    dtype: torch.dtype
    steps: int


def sizes(tiny: bool) -> Sizes:
    """Full or tiny sizes."""
    shape = {"layers": 16, "vocab_size": 512, "width": 2048, "heads": 16, "ffn_width": 8192}
    if tiny:
        small = {"layers": 4, "vocab_size": 211, "width": 32, "heads": 4, "ffn_width": 64, "context": 32}
        return Sizes(preset("gpt2").replace(**small), 32, 2, (1, 2), torch.float32, 2)
    return Sizes(preset("gpt2").replace(**shape), 1024, 8, (2, 4, 8), torch.bfloat16, 4)


def plans(world: int) -> list[Plan]:
    """A plan for each schedule that this torch supports over ``world`` ranks; for one rank, the baseline."""
    if world == 1:
        return [Plan()]
    names = ("gpipe", "1f1b", *MULTI_STAGE_SCHEDULES)
    made = [Plan(pp=world, schedule=name, stages=STAGES if name in MULTI_STAGE_SCHEDULES else 1) for name in names]
    return [plan for plan in made if schedule_supported(plan)]


def waits(plan: Plan) -> float:
    """b in the formula."""
    return (plan.pp - 1) / plan.stages / (3 if plan.schedule == "zero_bubble" else 1)


def work(world: int, size: Sizes, device: str) -> list[Row]:
    """Runs on every rank: step times of each schedule at each number of micro-batches."""
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
            free_memory(whole.device)
    return rows


def whole_world(world: int, size: Sizes, device: str, keep: Path | None) -> list[Row]:
    """The rows of one world size, read from the file ``keep`` if they are in it, else measured and appended."""
    key, recorded = f"{world} ranks of {size}", read_rows(keep)
    if key not in recorded:
        recorded[key] = launch(work, (world, size, device), Plan(dp=world))
        if keep is not None:
            with keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, recorded[key]]) + "\n")
    return recorded[key]


def timed(size: Sizes, context: DistributedContext) -> list[tuple[int, float]]:
    """(micro-batches, seconds per step) of one schedule."""
    config, plan = size.config, context.plan
    spans = [span for _, span in context.stages(config.layers)]
    model = random_weights(Transformer(config, context.axes, spans=spans, device=context.device))
    pipeline = PipelineStep(model, context, size.dtype) if plan.pp > 1 else None
    weights = masters(model, context, size.dtype, pipeline and pipeline.stages)
    one = torch.ones((), device=context.device)
    found = []
    for times in size.counts:
        m = times * max(plan.pp, 2)
        batches = [random_batch(config, size.sequence, size.batch, seed, context.device) for seed in range(m)]

        def step(_: int, batches=batches) -> None:
            if pipeline is None:
                for batch in batches:
                    (forward(model, batch) / one).backward()
            else:
                pipeline.step(batches, one, VALIDATION)
            weights.collect()
            for weight in weights.local.values():
                weight.grad = None
            world_axis().sum_(one)  # waits for the slowest rank

        step(0)
        found.append((m, statistics.median(durations(step, size.steps, context.device))))
    return found


def with_bubbles(rows: Sequence[Row]) -> tuple[list[Row], list[Headline]]:
    """Rows with the theoretical step time and both bubbles; a headline per schedule at the largest m."""
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
    options = make_parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", help="pipeline ranks; 2 4, with --tiny 2")
    args = options.parse_args(argv)
    worlds = args.worlds or ([2] if args.tiny else [2, 4])
    if not has_gpus(args, max(worlds)):
        return
    device, folder, name = device_and_folder(args)
    rows: list[Row] = []
    for world in (1, *worlds):
        rows += whole_world(world, sizes(args.tiny), device, args.keep)
    rows, heads = with_bubbles(rows)
    report(f"bubble_{name}", rows, __doc__ or "", headlines=heads, folder=folder)


if __name__ == "__main__":
    main()
