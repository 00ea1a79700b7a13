"""Overhead of FSDP over a single rank against unsharded masters: the evidence for decision 0002.

    python benchmarks/masters.py

Two copies of one model take optimizer steps alternately, in one process on one thread. The two times of a pair are
measured under the same load of the machine, so other processes disturb the median of their ratio little. Times are CPU
time of the process (user and system), not wall-clock time.
"""

import statistics
import time
from collections.abc import Callable

import torch

from colonnade.config import ModelConfig, Plan, TrainConfig
from colonnade.data import Batch
from colonnade.model import Packed, Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters, ShardedMasters, UnshardedMasters
from colonnade.train.optimizer import AdamW
from colonnade.train.train_step import TrainStep
from harness.report import Cell, report
from harness.rows import format_row

MODEL = ModelConfig(vocab_size=4096, layers=6, width=192, heads=6, kv_heads=3, ffn_width=512, context=256, tied=True)
SHAPES = ((1, 2, 128), (1, 8, 256), (4, 2, 256))  # micro-batches, samples in each, tokens in each
PAIRS = 15


def batch(samples: int, sequence: int) -> Batch:
    tokens_T = torch.randint(0, MODEL.vocab_size, (samples * sequence,))
    packed = Packed.of([sequence] * samples)
    positions_T = torch.arange(sequence).repeat(samples)
    return Batch(tokens_T, positions_T, tokens_T.roll(-1), packed.cu_seqlens, packed.longest, packed.equal)


def trainer(context: DistributedContext, make: Callable[[Transformer], Masters]) -> Callable[[list[Batch]], float]:
    model = initialise(Transformer(MODEL), 0)
    weights = make(model)
    step = TrainStep(model, weights, AdamW(weights.local, TrainConfig()), TrainConfig(), context.axes.dp)

    def timed(batches: list[Batch]) -> float:
        start = time.process_time()
        step(0, batches)
        return time.process_time() - start

    return timed


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Cell]] = []
    with DistributedContext.build(Plan(), "cpu") as context:
        for compute in (torch.float32, torch.bfloat16):
            whole = trainer(context, lambda model, compute=compute: UnshardedMasters(model.named_parameters(), compute))
            sharded = trainer(context, lambda model, compute=compute: ShardedMasters(model, context, compute, [model]))
            for count, samples, sequence in SHAPES:
                pairs: list[tuple[float, float]] = []
                for i in range(PAIRS + 1):
                    batches = [batch(samples, sequence) for _ in range(count)]
                    first, second = (whole, sharded) if i % 2 else (sharded, whole)
                    a, b = first(batches), second(batches)
                    pairs.append((a, b) if i % 2 else (b, a))
                pairs = pairs[1:]  # the first allocates
                rows.append(
                    {
                        "compute": str(compute).removeprefix("torch."),
                        "micro_batches": count,
                        "samples": samples,
                        "sequence_tokens": sequence,
                        "whole_ms": round(1e3 * statistics.median(a for a, _ in pairs), 1),
                        "fsdp_ms": round(1e3 * statistics.median(b for _, b in pairs), 1),
                        "fsdp_over_whole": round(statistics.median(b / a for a, b in pairs), 3),
                    }
                )
                print(format_row(rows[-1]), flush=True)
    report("masters_cpu", rows, notes=f"{MODEL.parameters / 1e6:.2f} M parameters, one thread, median of {PAIRS} pairs")


if __name__ == "__main__":
    main()
