"""Decoding speed of SmolLM2-135M on a CPU against ``transformers``' generate with the same weights.

    python benchmarks/decode_cpu.py

Greedy, prompts of equal length, end tokens ignored. Ours runs through the real engine (pages, scheduler, detokenizer);
theirs is ``LlamaForCausalLM.generate`` with its KV cache and no padding. The decode rate covers the tokens after the
first; the time to the first token is ``first_token_ms``. The two alternate; ratios are medians of the per-round ratios.

A step must at least read the weights once: ``bandwidth_share`` is the weights' bytes over the step time, as a share of
the read bandwidth of the same threads in the same run (the best of several reductions of 256 MiB).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import colonnade
from colonnade.api import Model
from colonnade.bench.ceilings import read_bandwidth
from colonnade.config import ServeConfig
from colonnade.serve.sampling_params import SamplingParams
from harness.paired_timing import OtherProcesses, run_interleaved
from harness.report import Cell, Headline, report
from harness.rows import format_row

TEXT = """A colonnade is a row of columns that carries a roof or an arcade. In the cities of the ancient world it gave
shade to those who walked along the street, and shelter to those who sold there. The first were made of wood, and later
ones of stone; their proportions were written down, argued about, forgotten and found again. What a column must carry
decides how thick it is, how far the next one may stand from it, and what the builder may put on top. """
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RunTimes(NamedTuple):
    """Times and tokens of one run of one side."""

    first_s: float
    """Time until every request has its first token."""
    rest_s: float
    """Time from there to the last token."""
    ids: list[list[int]]


class Clock(StoppingCriteria):
    """Stopping criterion that never stops; records the time of each token."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.ticks.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def ours(model: Model, prompts: list[list[int]], new_tokens: int) -> Callable[[int], RunTimes]:
    engine = colonnade.Engine(model, ServeConfig(max_requests=len(prompts), token_budget=2048))
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)

    def run(_: int) -> RunTimes:
        began = time.perf_counter()
        ids: dict[str, list[int]] = {engine.add(prompt, params): [] for prompt in prompts}
        ticks = []
        while engine.busy:
            for output in engine.step():
                ids[output.id].append(output.token)
            ticks.append(time.perf_counter())
        assert len(ticks) == new_tokens, "every step must give every request a token"
        return RunTimes(ticks[0] - began, ticks[-1] - ticks[0], list(ids.values()))

    return run


def theirs(model: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int) -> Callable[[int], RunTimes]:
    prompts_BS = torch.tensor(prompts)

    def run(_: int) -> RunTimes:
        clock = Clock()
        began = time.perf_counter()
        ids_BS = model.generate(
            prompts_BS,
            attention_mask=torch.ones_like(prompts_BS),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        assert isinstance(ids_BS, torch.Tensor)
        ids = ids_BS[:, prompts_BS.shape[1] :].tolist()
        return RunTimes(clock.ticks[0] - began, clock.ticks[-1] - clock.ticks[0], ids)

    return run


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """The share of tokens before the first difference, over all requests."""

    def same(x: list[int], y: list[int]) -> int:
        return next((i for i in range(len(x)) if x[i] != y[i]), len(x))

    return sum(map(same, a, b)) / sum(map(len, a))


def measure(
    dtype: str, batch: int, args: argparse.Namespace, model: Model, peer: LlamaForCausalLM
) -> list[dict[str, Cell]]:
    text = model.tokenizer.encode(TEXT * 8)
    prompts = [text[7 * i : 7 * i + args.prompt] for i in range(batch)]
    sides = {"colonnade": ours(model, prompts, args.new), "transformers": theirs(peer, prompts, args.new)}
    took = run_interleaved(sides, args.rounds)
    weights_bytes = sum(p.nbytes for p in model.transformer.parameters())
    bandwidth = read_bandwidth("cpu", 1 << 28)
    rows: list[dict[str, Cell]] = []
    for name, runs in took.items():
        step_s = statistics.median(run.rest_s for run in runs) / (args.new - 1)
        pairs = list(zip(took["colonnade"], runs, strict=True))
        rows.append(
            {
                "who": name,
                "dtype": dtype,
                "batch": batch,
                "decode_tokens_per_s": round(batch / step_s, 2),
                "colonnade_speed_over_it": round(statistics.median(b.rest_s / a.rest_s for a, b in pairs), 3),
                "step_ms": round(1e3 * step_s, 2),
                "first_token_ms": round(1e3 * statistics.median(run.first_s for run in runs), 1),
                "bandwidth_share": round(weights_bytes / step_s / bandwidth, 3),
                "read_gb_per_s": round(bandwidth / 1e9, 1),
                "same_tokens_share": round(agreement(took["colonnade"][0].ids, runs[0].ids), 4),
            }
        )
        print(format_row(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="dtypes to measure"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="requests at once")
    parser.add_argument("--prompt", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens per request")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--no-report", action="store_true", help="print only; write no result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    neighbours = OtherProcesses()
    rows: list[dict[str, Cell]] = []
    for dtype in args.dtypes:
        model = colonnade.load("smollm2", dtype=dtype, device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            exported = colonnade.save(model, Path(folder) / "smollm2", format="hf")
            peer = LlamaForCausalLM.from_pretrained(exported, dtype=DTYPES[dtype], attn_implementation="sdpa")
        assert isinstance(peer, LlamaForCausalLM)
        assert peer.generation_config is not None
        peer.generation_config.eos_token_id = None
        for batch in args.batches:
            rows += measure(dtype, batch, args, model, peer)
    if args.no_report:
        return
    heads = [
        Headline(
            f"SmolLM2-135M decoding on a CPU, {mine['dtype']}, batch {mine['batch']}",
            float(mine["decode_tokens_per_s"] or 0),
            "tokens/s",
            "transformers",
            float(peer["decode_tokens_per_s"] or 0),
        )
        for mine, peer in zip(rows[::2], rows[1::2], strict=True)
    ]
    notes = (
        f"Greedy, prompts of {args.prompt} tokens, {args.new} new per request, {args.threads} threads; medians of "
        f"{args.rounds} alternating rounds; {neighbours}."
    )
    report("decode_cpu", rows, notes, headlines=heads)


if __name__ == "__main__":
    main()
