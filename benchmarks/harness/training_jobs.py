"""Training jobs on several ranks and their speed, shared by the benchmarks of parallel layouts.

    rows = series([Job("GPT-2 1.2B", config, Plan(dp=2), sequence=1024, batch=32), …], device="cuda")

Jobs of the same world size run one after another in the same processes, in the order of the list. Each row is printed
at once and, with --keep, appended to a file, so that an interrupted series can resume. Tokens are random, dropout is 0,
and a step is forward, backward, norm, clip and AdamW. Weights are drawn on the device, seeded by the parameter's name,
because ``initialise`` takes minutes to draw 8 billion values on a CPU.
"""

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from colonnade.config import ModelConfig, Plan, TrainConfig
from colonnade.data import Batch
from colonnade.model import Packed, Transformer
from colonnade.model.activation_checkpointing import set_recompute
from colonnade.model.tensor_parallel_linear import enable_float8
from colonnade.parallel.axis import world_axis
from colonnade.parallel.cuda_graphs import capture
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.parallel.launch import launch
from colonnade.train.profiler import Breakdown, breakdown
from colonnade.train.train_step import PipelineStep, TrainStep
from colonnade.train.training_state import make_optimizer
from harness.report import folder_of

Row = dict[str, Any]
"""A row of a table."""
FAST = TrainConfig(steps=1000, lr=1e-4, min_lr=0, warmup=0, weight_decay=0.01, dtype="bfloat16", compile=True)
"""Settings for GPUs: float32 masters, bfloat16 compute, each block compiled."""
PLAIN = FAST.replace(dtype="float32", compile=False)
"""Settings for tiny sizes, which are a smoke test."""


@dataclass(frozen=True)
class Job:
    """One model, trained under one plan."""

    name: str
    config: ModelConfig
    plan: Plan
    sequence: int
    batch: int
    """Sequences per data-parallel rank and step, in one micro-batch."""
    train: TrainConfig = FAST
    warm: int = 3
    """Warm-up steps, in which kernels are compiled and memory is allocated."""
    steps: int = 8
    traced: int = 0
    """Steps traced by the profiler after the timed ones, for the breakdown."""

    @property
    def key(self) -> str:
        """Identifies the job in the file of --keep."""
        return repr(self)

    def start(self, context: DistributedContext) -> Callable[[int], Tensor]:
        """``step(i)`` runs a training step and returns the mean loss of its tokens."""
        self.plan.check(self.config)
        config, train = self.config, self.train
        spans = [span for _, span in context.stages(config.layers)]
        model = random_weights(self.model(context, spans))
        if train.float8 != "none":
            enable_float8(model.blocks, train.float8)
        assert train.recompute != "budget", "a benchmark sets recomputation explicitly"
        set_recompute(model.blocks, [train.recompute for _ in model.blocks])
        self.ready(model, context)
        compute: torch.dtype = getattr(torch, train.dtype)
        pipeline = PipelineStep(model, context, compute) if context.plan.pp > 1 else None
        weights = masters(
            model, context, compute, pipeline and pipeline.stages, single=train.fused_adamw and pipeline is None
        )
        optimizer = make_optimizer(weights, train)
        run = TrainStep(model, weights, optimizer, train, world_axis(), pipeline, cuda_graph=train.cuda_graph)
        seeds = (2 * context.axes.dp.rank, 2 * context.axes.dp.rank + 1)
        batches = [random_batch(config, self.sequence, self.batch, seed, context.device) for seed in seeds]

        def step(i: int) -> Tensor:
            outcome = run(i, [batches[i % 2]])
            return context.axes.global_sum(outcome.loss_sum) / outcome.count

        return step

    def model(self, context: DistributedContext, spans: Sequence[range]) -> Transformer:
        """The uninitialised model."""
        return Transformer(self.config, context.axes, spans=spans, device=context.device)

    def ready(self, model: Transformer, context: DistributedContext) -> None:
        """Compile the blocks, if the settings say so."""
        if self.train.compile:
            for block in model.blocks:
                block.compile()


def run_jobs(jobs: Sequence[Job], device: str, keep: Path | None = None) -> list[Row]:
    """A row per job, smallest world first; rows in the file ``keep`` are not measured again."""
    recorded = read_rows(keep)
    for world in sorted({job.plan.world for job in jobs}):
        missing = tuple(job for job in jobs if job.plan.world == world and job.key not in recorded)
        if missing:
            rows = launch(run_on_rank, (missing, device, keep), Plan(dp=world))
            recorded |= {job.key: row for job, row in zip(missing, rows, strict=True)}
    return [recorded[job.key] for job in sorted(jobs, key=lambda job: job.plan.world)]


def read_rows(keep: Path | None) -> dict[str, Any]:
    """Recorded rows by key."""
    lines = keep.read_text(encoding="utf-8").splitlines() if keep is not None and keep.exists() else []
    return dict(json.loads(line) for line in lines)


def run_on_rank(jobs: Sequence[Job], device: str, keep: Path | None = None) -> list[Row]:
    """Runs the jobs of one world on every rank, one after another."""
    rows: list[Row] = []
    with DistributedContext.build(Plan(dp=jobs[0].plan.world), device) as context:
        for job in jobs:
            with DistributedContext.build(job.plan, device) as layout:
                row: Row = {
                    "what": job.name,
                    "plan": str(job.plan),
                    "ranks": job.plan.world,
                    **measure_job(job, layout),
                }
            rows.append(row)
            if context.rank == 0:
                print(json.dumps(row), flush=True)
                if keep is not None:
                    with keep.open("a", encoding="utf-8") as file:
                        file.write(json.dumps([job.key, row]) + "\n")
            free_memory(context.device)
    return rows


def measure_job(job: Job, context: DistributedContext) -> Row:
    """The speed of one job, the same on every rank except for this rank's breakdown."""
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)
    step = job.start(context)
    began = time.perf_counter()
    first, *_ = [float(step(i)) for i in range(job.warm)]
    synchronize(context.device)
    warm_s = time.perf_counter() - began
    step_s = statistics.median(durations(lambda i: step(job.warm + i), job.steps, context.device))
    tokens = job.batch * job.sequence * job.plan.data_ranks
    rate = tokens / step_s
    row: Row = {
        "step_ms": round(1e3 * step_s, 2),
        "tokens_per_s": round(rate),
        "tokens_per_s_per_rank": round(rate / context.world),
        "tflops_per_rank_all_scores": tflops(rate, job, causal=False),
        "tflops_per_rank_causal": tflops(rate, job, causal=True),
        "first_loss": round(first, 4),
        "peak_gib": peak_gib(context.device),
        "warm_up_s": round(warm_s, 1),
    }
    return row | (breakdown_cells(trace_steps(step, job.traced, context.device)) if job.traced else {})


def tflops(rate: float, job: Job, *, causal: bool) -> float:
    """TFLOP/s per rank, without recomputation."""
    return round(rate * job.config.flops_per_token(job.sequence, causal=causal) / 1e12 / job.plan.world, 1)


@torch.no_grad()
def random_weights(model: Transformer) -> Transformer:
    """``model`` with random matrices and biases of 0; an unsharded weight is the same on every rank."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            parameter.normal_(0.0, model.config.init_std, generator=generator)
    return model


def random_batch(config: ModelConfig, sequence: int, count: int, seed: int, device: torch.device) -> Batch:
    """``count`` random sequences of equal length with next-token targets."""
    ids = torch.randint(config.vocab_size, (count, sequence + 1), generator=torch.Generator().manual_seed(seed))
    packed = Packed.of([sequence] * count)
    positions_T = torch.arange(sequence).repeat(count)
    tokens_T, targets_T = ids[:, :-1].flatten().contiguous(), ids[:, 1:].flatten().contiguous()
    return Batch(tokens_T, positions_T, targets_T, packed.cu_seqlens, sequence, equal=True).to(device)


# -- time and memory ---------------------------------------------------------------------------------------------------


def durations(step: Callable[[int], Any], steps: int, device: torch.device) -> list[float]:
    """Seconds of each of ``steps`` steps, by CUDA events or the wall clock."""
    if device.type != "cuda":
        marks_s = [time.perf_counter()]
        for i in range(steps):
            step(i)
            marks_s.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks_s)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for i in range(steps):
        step(i)
        marks[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def replays(run: Callable[[], Any], times: int, device: torch.device) -> list[float]:
    """Seconds of each of ``times`` replays of ``run``, captured as one CUDA graph after three warm-up runs."""
    torch.cuda.synchronize()  # its inputs were written on another stream
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    with capture() as graph:
        run()
    found = durations(lambda _: graph.replay(), times, device)
    graph.reset()
    return found


def synchronize(device: torch.device) -> None:
    """Synchronize with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float | None:
    """Peak allocated memory of any rank; None on a CPU."""
    if device.type != "cuda":
        return None
    mine = torch.tensor(torch.cuda.max_memory_allocated(device) / 2**30, dtype=torch.float64)
    return round(world_axis().max_(mine).item(), 1)


def free_memory(device: torch.device) -> None:
    """Free the last job's model and graphs."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def trace_steps(step: Callable[[int], Any], steps: int, device: torch.device) -> Breakdown:
    """Breakdown of the time of a few steps on this rank."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda it: it.export_chrome_trace(str(path)),
            acc_events=True,
        ) as watched:
            for i in range(1 + steps):
                step(i)
                if i in (0, steps):  # so that the trace contains all device work of the traced steps
                    synchronize(device)
                watched.step()
        return breakdown(json.loads(path.read_text(encoding="utf-8")))


def breakdown_cells(found: Breakdown) -> Row:
    """A breakdown as cells [ms]; the traced steps are slower than the timed ones."""
    names = ("step", "compute", "matmul", "attention", "communication_exposed", "communication_hidden", "idle")
    return {f"traced_{name}_ms": round(1e3 * found.row[f"{name}_s"], 2) for name in names}


# -- what the scripts' command lines share -------------------------------------------------------------------------


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with --tiny, --keep and --out."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tiny", action="store_true", help="tiny models over gloo on a CPU: a smoke test")
    made.add_argument("--keep", type=Path, help="file to append each row to; rows in it are not measured again")
    made.add_argument(
        "--out", type=Path, help="folder of the results; default benchmarks/results, with --tiny a temporary one"
    )
    return made


def device_and_folder(args: argparse.Namespace) -> tuple[str, Path, str]:
    """(device, folder, suffix of the result's name) from the command line."""
    if args.tiny:
        return "cpu", folder_of(args.out, toy=True), "tiny"
    return "cuda", folder_of(args.out, toy=False), torch.cuda.get_device_name().split()[-1].lower()


def has_gpus(args: argparse.Namespace, gpus: int) -> bool:
    """Whether this machine has enough GPUs; prints a message otherwise."""
    has = torch.cuda.device_count()
    if not args.tiny and has < gpus:
        print(f"skipped: needs {gpus} GPUs, and this machine has {has} (--tiny runs toy sizes on a CPU)")
    return args.tiny or has >= gpus


def share_of_linear(rows: Sequence[Row], rate: str = "tokens_per_s") -> list[Row]:
    """``rows`` of one model with the rate per rank relative to the first row's."""
    base = rows[0][rate] / rows[0]["ranks"]
    return [row | {"share_of_linear": round(row[rate] / row["ranks"] / base, 4)} for row in rows]
