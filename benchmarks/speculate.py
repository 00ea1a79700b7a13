"""Speculative decoding by prompt look-up beside plain decoding: text that repeats, and text that does not.

    python benchmarks/speculate.py              # SmolLM2-135M on a CPU, or on a GPU a Qwen3-0.6B with random weights
    python benchmarks/speculate.py --tiny       # few tokens: a smoke test

Repeating: on a CPU the model continues a list that its prompt has twice; on a GPU greedy decoding of random weights,
which ends in a loop. Other: sampled text at temperature 1. Both engines run in turns, one request or eight at once, and
their texts are compared. ``accepted`` is the share of drafted tokens that were generated.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch

import colonnade
from colonnade.config import ServeConfig
from colonnade.config.presets import preset
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError
from colonnade.model import Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES
from colonnade.serve import Engine, SamplingParams
from harness.engine_load import words
from harness.paired_timing import Neighbours, turns
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import figures, line

LIST = "".join(f"{i}. {name} lives in {city}.\n" for i, (name, city) in enumerate(
    [("Ada", "London"), ("Grace", "New York"), ("Emmy", "Erlangen"), ("Sofia", "Stockholm"), ("Mary", "Edinburgh")], 1
))  # fmt: skip


def load() -> tuple[str, Transformer, Tokenizer]:
    """(name, model, tokenizer)."""
    if torch.cuda.is_available():
        config = preset("qwen3-0.6b")
        model = Transformer(config, SOLO_AXES, device="cuda", dtype=torch.bfloat16)
        return "Qwen3-0.6B, random weights, bfloat16", initialise(model, seed=1), words(config.vocab_size)
    try:
        loaded = colonnade.load("smollm2", device="cpu", dtype="float32")
    except ColonnadeError as error:
        raise SystemExit(f"needs SmolLM2 (make install): {error}") from None
    return "SmolLM2-135M, float32", loaded.transformer, loaded.tokenizer


def run(engine: Engine, prompts: list, params: list[SamplingParams], _: int) -> tuple[float, list[tuple[int, ...]]]:
    """(tokens per second, tokens)."""
    began = time.perf_counter()
    texts = [each.token_ids for each in engine.generate(prompts, params)]
    return sum(map(len, texts)) / (time.perf_counter() - began), texts


def measure(tiny: bool, rounds: int) -> tuple[list[dict[str, Cell]], list[Headline]]:
    name, model, tokenizer = load()
    gpu = torch.cuda.is_available()
    tokens = 16 if tiny else 256 if gpu else 96
    rows: list[dict[str, Cell]] = []
    heads = []
    limits = ServeConfig(pages=64 if gpu else 512, max_requests=64)
    engines = {
        "plain": Engine(model, tokenizer, limits),
        "ngram": Engine(model, tokenizer, limits.replace(draft="ngram")),
    }
    for text in ("repeating", "other"):
        for requests in (1, 8):
            prompts = [[i + 1, 5, 9] if gpu else LIST * (3 if text == "repeating" else 1) for i in range(requests)]
            temperature = 0 if text == "repeating" else 1
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True)
                for i in range(requests)
            ]
            before = engines["ngram"].stats.draft_tokens, engines["ngram"].stats.accepted_draft_tokens
            results = turns({who: partial(run, engine, prompts, params) for who, engine in engines.items()}, rounds)
            after = engines["ngram"].stats
            drafted, accepted = after.draft_tokens - before[0], after.accepted_draft_tokens - before[1]
            speed = {who: statistics.median(one[0] for one in each) for who, each in results.items()}
            same = statistics.mean(a == b for a, b in zip(results["plain"][0][1], results["ngram"][0][1], strict=True))
            rows.append(
                {
                    "text": text,
                    "requests": requests,
                    "plain_tokens_per_s": figures(speed["plain"], 3),
                    "ngram_tokens_per_s": figures(speed["ngram"], 3),
                    "ratio": figures(speed["ngram"] / speed["plain"], 3),
                    "drafted": drafted,
                    "accepted": figures(accepted / drafted, 3) if drafted else None,
                    "same_texts": same,
                }
            )
            print(line(rows[-1]), flush=True)
            what = f"{name}: {text} text, {requests} at once, prompt look-up"
            heads.append(Headline(what, speed["ngram"], "tokens/s", "without", speed["plain"]))
    return rows, heads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few tokens; writes no record")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    around = Neighbours()
    rows, heads = measure(args.tiny, 1 if args.tiny else args.rounds)
    if not args.tiny:
        stem = "speculate_h200" if torch.cuda.is_available() else "speculate_cpu"
        report(stem, rows, f"medians of {args.rounds} rounds, in turns; {around}", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
