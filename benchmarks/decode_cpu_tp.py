"""Decoding on the cores of a CPU: one rank with all threads, or two tensor-parallel ranks with half of them each.

    python benchmarks/decode_cpu_tp.py --threads 8
    python benchmarks/decode_cpu_tp.py --tiny               # a smoke test, no record

A Llama of 12 layers of 1,024 with random weights in int8. One rank records its decode steps and replays them in one
call of C++; two ranks run each operation from Python, since collectives over gloo come between them. Rates are medians
of the steps by the wall clock, with the CPU time of all ranks beside them. ``collectives`` is the time of a step's
all-reduces alone, by two ranks that do nothing else: a step of two ranks cannot be shorter, however its kernels run.
``bound`` is one rank's step with half of the threads, halved, plus the collectives: what two ranks could reach if they
recorded everything between collectives at no cost.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed as dist

from colonnade import api
from colonnade.api import Model
from colonnade.config import ModelConfig, Plan, ServeConfig
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch
from colonnade.serve.engine import Engine
from colonnade.serve.sampling_params import SamplingParams
from harness.engine_load import word_tokenizer
from harness.paired_timing import OtherProcesses
from harness.report import RESULTS, Cell, report
from harness.rows import format_row, round_significant

CONFIG = ModelConfig(layers=12, width=1024, heads=16, kv_heads=4, ffn_width=2816, vocab_size=32_000, context=1024)
PROMPT_TOKENS, WARM_UP_STEPS = 64, 8
Measured = tuple[float, float, float]


def decode(folder: str, plan: Plan, threads: int, batch: int, steps: int) -> Measured | None:
    """(median step, CPU time a step of all ranks, median of a step's collectives) [s]; None on other ranks."""
    torch.set_num_threads(threads)
    with DistributedContext.build(plan) as context:
        loaded = api.load(folder, dtype="float32", context=context, weights="int8")
        model, width = loaded.transformer, loaded.config.width
        collectives_s = _collectives(batch, width, loaded.config.layers) if plan.world > 1 else 0.0
        engine = Engine(
            model, word_tokenizer(loaded.config.vocab_size), ServeConfig(max_requests=batch, token_budget=2048)
        )
        began_s = time.process_time()
        if context.rank:
            engine.follow()
            _sum(time.process_time() - began_s)
            return None
        params = SamplingParams(max_tokens=steps + WARM_UP_STEPS + 2, temperature=0, ignore_eos=True)
        for r in range(batch):
            engine.add([(7 * r + i) % 1000 for i in range(PROMPT_TOKENS)], params)
        for _ in range(WARM_UP_STEPS):  # the prompts, and the step that is recorded
            engine.step()
        cpu_s, took = time.process_time(), list[float]()
        for _ in range(steps):
            start_s = time.perf_counter()
            assert len(engine.step()) == batch, "every request decodes a token"
            took.append(time.perf_counter() - start_s)
        cpu_s = time.process_time() - cpu_s
        engine.stop()
        others_s = _sum(0.0) * len(took) / (steps + WARM_UP_STEPS) if plan.world > 1 else 0.0
        return statistics.median(took), (cpu_s + others_s) / len(took), collectives_s


def _collectives(batch: int, width: int, layers: int) -> float:
    """The median time of the all-reduces of one step: two a layer."""
    x_BD, took = torch.ones(batch, width), list[float]()
    for _ in range(30):
        start_s = time.perf_counter()
        for _ in range(2 * layers):
            dist.all_reduce(x_BD)
        took.append(time.perf_counter() - start_s)
    return statistics.median(took)


def _sum(x: float) -> float:
    total = torch.tensor([x])
    dist.all_reduce(total)
    return float(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of one rank; two ranks have half of them each")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="a small model; writes no record")
    args = parser.parse_args()
    config = CONFIG.replace(layers=2, width=128, ffn_width=256) if args.tiny else CONFIG
    half, rows, neighbours = max(1, args.threads // 2), list[dict[str, Cell]](), OtherProcesses()
    with tempfile.TemporaryDirectory() as folder:
        model = initialise(Transformer(config), seed=0).requires_grad_(False)
        api.save(Model(model, None, DistributedContext.solo(torch.device("cpu")), "m"), f"{folder}/m")
        del model
        for batch in (1, 8):
            steps = 16 if args.tiny else args.steps
            sides = {
                "one rank": (Plan(), args.threads),
                "one rank, half of the threads": (Plan(), half),
                "two ranks": (Plan(tp=2), half),
            }
            took: dict[str, Measured] = {}
            for who, (plan, threads) in sides.items():
                measured = launch(decode, (f"{folder}/m", plan, threads, batch, steps), plan)
                assert measured is not None, "rank 0's result"
                took[who] = measured
            collectives_s = took["two ranks"][2]
            bound_s = took["one rank, half of the threads"][0] / 2 + collectives_s
            for who, (step_s, cpu_s, _) in took.items():
                of_two = who == "two ranks"
                rows.append(
                    {
                        "who": who,
                        "batch": batch,
                        "threads_each": sides[who][1],
                        "step_ms": round_significant(1e3 * step_s),
                        "cpu_ms_per_step": round_significant(1e3 * cpu_s),
                        "collectives_ms": round_significant(1e3 * collectives_s) if of_two else None,
                        "bound_ms": round_significant(1e3 * bound_s) if of_two else None,
                        "over_one_rank": round_significant(step_s / took["one rank"][0], 3),
                    }
                )
                print(format_row(rows[-1]), flush=True)
    if not args.tiny:
        report("decode_cpu_tp", rows, notes=f"{__doc__}\n{neighbours}", folder=args.out)


if __name__ == "__main__":
    main()
