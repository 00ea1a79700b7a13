"""Time of sampling one token for each of R rows of logits on a GPU, compared with sorting the vocabulary.

    python benchmarks/sampling.py             # 151,936 bfloat16 logits per row
    python benchmarks/sampling.py --tiny      # few logits on a CPU, where both sides sort: a smoke test

``ours`` is the engine's sampler, with the upload of its arguments; the peer sorts whole rows in torch
(:func:`colonnade.kernels.sampling.sample`), which also draws the same tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from colonnade.kernels import sampling
from colonnade.kernels.device import upload
from colonnade.serve import SamplingParams
from colonnade.serve.sample_args import SampleArgs
from colonnade.serve.sampler import NOT_FINITE, kernel_args, sample
from harness.paired_timing import run_interleaved
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row, round_significant

FILTERS = {"none": {}, "top-p 0.9": {"top_p": 0.9}, "top-k 50": {"top_k": 50}, "both": {"top_k": 50, "top_p": 0.9}}
VOCAB, REPEATS = 151_936, 10


def call_us(run: Callable[[], torch.Tensor], repeats: int, _: int) -> float:
    """Time of one call; calls are queued one after another."""
    run()
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter() - began) / repeats * 1e6


def measure(tiny: bool, rounds: int) -> tuple[list[dict[str, Cell]], list[Headline]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Cell]] = []
    heads = []
    for R in (1, 3) if tiny else (1, 64, 256):
        logits_RV = (torch.randn(R, 300 if tiny else VOCAB) * 3).to(device, torch.bfloat16)
        for name, filters in FILTERS.items():
            args = [SampleArgs.of(SamplingParams(**filters), seed, 0) for seed in range(R)]
            args_RA = upload([kernel_args(each) for each in args], torch.float64, device)
            runs = {
                "ours": partial(sample, logits_RV, args),
                "sorting": partial(sampling.sample, logits_RV, args_RA, NOT_FINITE),
            }
            same = (runs["ours"]() == runs["sorting"]()).float().mean().item()
            times = run_interleaved(
                {who: partial(call_us, run, 1 if tiny else REPEATS) for who, run in runs.items()}, rounds
            )
            ours, theirs = (statistics.median(times[who]) for who in runs)
            rows.append(
                {"rows": R, "filter": name, "ours_us": round_significant(ours, 3),
                 "sorting_us": round_significant(theirs, 3), "ratio": round_significant(theirs / ours, 3),
                 "same_tokens": round_significant(same, 4)}
            )  # fmt: skip
            print(format_row(rows[-1]), flush=True)
            heads.append(Headline(f"Sampling of {R} rows, filter: {name}", ours, "µs", "sorting", theirs))
    return rows, heads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few logits; writes no record")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("needs a GPU; --tiny runs on a CPU")
        return
    rows, heads = measure(args.tiny, 1 if args.tiny else args.rounds)
    if not args.tiny:
        report("sampling_h200", rows, f"medians of {args.rounds} rounds, in turns", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
