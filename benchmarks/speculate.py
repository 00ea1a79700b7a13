"""Speculative decoding compared with plain decoding: by prompt look-up, and by draft models, useful and useless.

    python benchmarks/speculate.py              # SmolLM2-135M on a CPU, or on a GPU a Qwen3-0.6B with random weights
    python benchmarks/speculate.py --tiny       # few tokens: a smoke test

Prompt look-up (ngram) has text that repeats, and text that does not. Repeating: on a CPU the model continues a list
that its prompt has twice; on a GPU greedy decoding of random weights, which ends in a loop. Other: sampled text at
temperature 1. The draft models have sampled text too:

    truncated   the target is the model; its first third of layers, untrained as a separate model, drafts. Few
                drafts are right: the cost of noticing that
    agrees      the target is the model with twice as many layers more, whose outputs are zero; the model itself drafts.
                Every draft is right: the most that a draft of a third of the cost can save, not what a real pair does

Engines run in turns, one request or eight at once, and their texts are compared. ``accepted`` is the share of drafted
tokens that were generated.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
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
from harness.engine_load import word_tokenizer
from harness.paired_timing import OtherProcesses, run_interleaved
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row, round_significant

LIST = "".join(f"{i}. {name} lives in {city}.\n" for i, (name, city) in enumerate(
    [("Ada", "London"), ("Grace", "New York"), ("Emmy", "Erlangen"), ("Sofia", "Stockholm"), ("Mary", "Edinburgh")], 1
))  # fmt: skip

DRAFTS = {
    "ngram": "prompt look-up",
    "truncated": "drafts by its first third of layers",
    "agrees": "a draft model of a third of the layers that always agrees",
}


def load() -> tuple[str, Transformer, Tokenizer]:
    """(name, model, tokenizer)."""
    if torch.cuda.is_available():
        config = preset("qwen3-0.6b")
        model = Transformer(config, SOLO_AXES, device="cuda", dtype=torch.bfloat16)
        return "Qwen3-0.6B, random weights, bfloat16", initialise(model, seed=1), word_tokenizer(config.vocab_size)
    try:
        loaded = colonnade.load("smollm2", device="cpu", dtype="float32")
    except ColonnadeError as error:
        raise SystemExit(f"needs SmolLM2 (make install): {error}") from None
    return "SmolLM2-135M, float32", loaded.transformer, loaded.tokenizer


@torch.no_grad()
def with_layers(model: Transformer, layers: int) -> Transformer:
    """The model with fewer layers, the first ones, or with more, whose outputs are zero."""
    weight = next(model.parameters())
    config = model.config.replace(layers=layers)
    other = Transformer(config, SOLO_AXES, device=weight.device, dtype=weight.dtype)
    other = initialise(other, seed=1).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict(), strict=False)
    for block in list(other.blocks)[model.config.layers :]:
        block.attention.out.weight.zero_()
        block.ffn.down.weight.zero_()
    return other


@dataclass(frozen=True)
class Case:
    """A way to draft, and what it is measured on."""

    draft: str
    texts: tuple[str, ...]
    plain: Engine
    drafted: Engine


def cases(model: Transformer, tokenizer: Tokenizer, limits: ServeConfig) -> Iterator[Case]:
    """One after another, since each has its own models."""
    layers, plain = model.config.layers, Engine(model, tokenizer, limits)
    yield Case("ngram", ("repeating", "other"), plain, Engine(model, tokenizer, limits.replace(draft="ngram")))
    small = with_layers(model, layers // 3)
    yield Case("truncated", ("other",), plain, Engine(model, tokenizer, limits.replace(draft="truncated"), small))
    large = with_layers(model, 3 * layers)
    drafted = Engine(large, tokenizer, limits.replace(draft="agrees"), model)
    yield Case("agrees", ("other",), Engine(large, tokenizer, limits), drafted)


def run(engine: Engine, prompts: list, params: list[SamplingParams], _: int) -> tuple[float, list[tuple[int, ...]]]:
    """(tokens per second, tokens)."""
    began = time.perf_counter()
    texts = [each.token_ids for each in engine.generate(prompts, params)]
    return sum(map(len, texts)) / (time.perf_counter() - began), texts


def measure(tiny: bool, rounds: int) -> tuple[list[dict[str, Cell]], list[Headline]]:
    name, model, tokenizer = load()
    gpu = torch.cuda.is_available()
    rows: list[dict[str, Cell]] = []
    heads = []
    for case in cases(model, tokenizer, ServeConfig(pages=64 if gpu else 512, max_requests=64)):
        for text, requests in product(case.texts, (1, 8)):
            rows.append(measure_case(case, text, requests, 16 if tiny else 256 if gpu else 96, rounds))
            print(format_row(rows[-1]), flush=True)
            what = f"{name}: {text} text, {requests} at once, {DRAFTS[case.draft]}"
            speed, peer = (float(rows[-1][f"{who}_tokens_per_s"]) for who in ("drafted", "plain"))  # type: ignore[arg-type]
            heads.append(Headline(what, speed, "tokens/s", "without drafts", peer))
    return rows, heads


def measure_case(case: Case, text: str, requests: int, tokens: int, rounds: int) -> dict[str, Cell]:
    """Both engines in turns; the first round is not counted by :func:`run_interleaved`."""
    gpu = torch.cuda.is_available()
    prompts = [[i + 1, 5, 9] if gpu else LIST * (3 if text == "repeating" else 1) for i in range(requests)]
    temperature = 0 if text == "repeating" else 1
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True) for i in range(requests)
    ]
    before = case.drafted.stats.draft_tokens, case.drafted.stats.accepted_draft_tokens
    engines = {"plain": case.plain, "drafted": case.drafted}
    results = run_interleaved({who: partial(run, engine, prompts, params) for who, engine in engines.items()}, rounds)
    after = case.drafted.stats
    drafted, accepted = after.draft_tokens - before[0], after.accepted_draft_tokens - before[1]
    speed = {who: statistics.median(one[0] for one in each) for who, each in results.items()}
    return {
        "draft": case.draft,
        "text": text,
        "requests": requests,
        "plain_tokens_per_s": round_significant(speed["plain"], 3),
        "drafted_tokens_per_s": round_significant(speed["drafted"], 3),
        "ratio": round_significant(speed["drafted"] / speed["plain"], 3),
        "drafted": drafted,
        "accepted": round_significant(accepted / drafted, 3) if drafted else None,
        "same_texts": statistics.mean(
            a == b for a, b in zip(results["plain"][0][1], results["drafted"][0][1], strict=True)
        ),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few tokens; writes no record")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    around = OtherProcesses()
    rows, heads = measure(args.tiny, 1 if args.tiny else args.rounds)
    if not args.tiny:
        stem = "speculate_h200" if torch.cuda.is_available() else "speculate_cpu"
        report(stem, rows, f"medians of {args.rounds} rounds, in turns; {around}", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
