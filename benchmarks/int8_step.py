"""A decoding step with int8 weights and inputs (``--int8``) against float32, on a CPU, with random weights.

    python benchmarks/int8_step.py           # SmolLM2-135M and GPT-2 medium
    python benchmarks/int8_step.py --tiny    # two layers; writes no record

One request, greedy; both engines take their steps in turns, and ``ratio`` is the median of the ratios of neighbouring
steps. ``head``: whether the output projection is in int8 too (it is, for both). The issue's aim: at most 0.75 for
SmolLM2-135M and 0.5 from GPT-2 medium up.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from colonnade import api
from colonnade.config import ModelConfig, ServeConfig
from colonnade.config.presets import preset
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.sampling_params import SamplingParams
from harness.engine_load import word_tokenizer
from harness.report import Cell, Headline, folder_of, report
from harness.rows import format_row, round_significant

MODELS = ("smollm2-135m", "gpt2-medium")
TINY = ModelConfig(vocab_size=300, layers=2, width=64, heads=4, kv_heads=2, ffn_width=128, context=128)
FORMATS = ("stored", "int8_dynamic")
PROMPT = 16


def measure(config: ModelConfig, steps: int) -> dict[str, Cell]:
    context = DistributedContext.solo(torch.device("cpu"))
    whole = initialise(Transformer(config), 0).requires_grad_(False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        api.save(api.Model(whole, word_tokenizer(config.vocab_size), context, "random"), folder)
        del whole
        models = {form: api.load(folder, device="cpu", dtype="float32", weights=form) for form in FORMATS}
    params = SamplingParams(temperature=0, max_tokens=steps + 4, ignore_eos=True)
    streams = {}
    for form, model in models.items():
        engine = api.Engine(model, ServeConfig(max_requests=1, pages=-(-(PROMPT + steps + 8) // 16)))
        streams[form] = engine.stream([i % 97 + 1 for i in range(PROMPT)], params)
    took: dict[str, list[float]] = {form: [] for form in FORMATS}
    for step in range(steps + 3):
        for form, stream in streams.items():
            began = time.perf_counter()
            next(stream)
            if step >= 3:  # the prompt, and the recording of a step
                took[form].append(time.perf_counter() - began)
    ratios = [fast / slow for slow, fast in zip(took["stored"], took["int8_dynamic"], strict=True)]
    return {
        **{f"{form}_ms": round_significant(1e3 * statistics.median(times)) for form, times in took.items()},
        "ratio": round_significant(statistics.median(ratios)),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    out = folder_of(args.out, toy=args.tiny)
    rows: list[dict[str, Cell]] = []
    for name in ("tiny",) if args.tiny else MODELS:
        for threads in args.threads:
            torch.set_num_threads(threads)
            measured = measure(TINY if args.tiny else preset(name), 4 if args.tiny else 40)
            rows.append({"model": name, "threads": threads, **measured})
            print(format_row(rows[-1]), flush=True)
            heads = [
                Headline(f"Step with --int8, {row['model']}, one thread", float(row["int8_dynamic_ms"] or 0), "ms",
                         "float32", float(row["stored_ms"] or 0))
                for row in rows if row["threads"] == 1
            ]  # fmt: skip
            report("int8_step_cpu", rows, notes="random weights; medians of 40 steps", headlines=heads, folder=out)


if __name__ == "__main__":
    main()
