"""Scoring lm-eval requests: our packed forward pass against lm-eval's own ``hf`` model.

    python benchmarks/evaluate.py [--device cuda] [--shape smollm2-135m smollm2-1.7b --tokenizer FOLDER]

SmolLM2-135M, or random weights of the shapes of presets, which are scored as fast; the requests of ``sotu_next`` and
``sotu_century``: real questions of unequal lengths with four answers. Both score the same requests in turns, from texts
to log-likelihoods; on a CPU the times are CPU seconds of one thread, in float32.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

import colonnade
from colonnade.api import Model
from colonnade.config import ServeConfig
from colonnade.config.presets import preset
from colonnade.data.tokenizer import Tokenizer
from colonnade.evaluate.harness import HarnessModel
from colonnade.evaluate.scorer import Scorer
from colonnade.evaluate.tasks import speeches
from colonnade.model import Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from harness.report import Cell, Headline, folder_of, report


class Request:
    """As much of lm-eval's Instance as models use."""

    def __init__(self, context: str, continuation: str):
        self.args = (context, continuation)


def requests(each: int) -> dict[str, list[Request]]:
    """The answers of ``each`` questions of two tasks."""
    following, century = speeches.following()["test"][:each], speeches.century()["test"][:each]
    return {
        "four sentences": [Request(row["context"], f" {choice}") for row in following for choice in row["choices"]],
        "four words": [
            Request(f"{row['passage']}\n\nThis was said in the", f" {choice}")
            for row in century
            for choice in row["choices"]
        ],
    }


def random_model(shape: str, tokenizer: Tokenizer, device: str, dtype: str) -> Model:
    """Random weights of a preset's shape."""
    place = torch.device(device)
    transformer = initialise(Transformer(preset(shape), SOLO_AXES, device=place, dtype=getattr(torch, dtype)), seed=0)
    return Model(transformer, tokenizer, DistributedContext.solo(place), shape)


def measure(model: Model, each: int, turns: int, device: str, dtype: str, batch: int) -> list[dict[str, Cell]]:
    """A row for each task: seconds of both, and the largest difference of a log-likelihood."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    ours = HarnessModel(Scorer(model.transformer), model.tokenizer, ServeConfig(), "ours")
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = colonnade.save(model, Path(folder) / "hf", format="hf")
        theirs = HFLM(str(path), device=device, dtype=dtype, batch_size=batch)
        for task, asked in requests(each).items():
            times: dict[str, list[float]] = {"ours": [], "hf": []}
            scores: dict[str, list[Any]] = {}
            for _ in range(turns):  # the first turn of each on a GPU also warms up
                for name, lm in (("ours", ours), ("hf", theirs)):
                    started_s = clock()
                    scores[name] = lm.loglikelihood(asked, disable_tqdm=True)
                    times[name].append(clock() - started_s)
            own_s, hf_s = statistics.median(times["ours"]), statistics.median(times["hf"])
            worst = max(abs(a[0] - b[0]) for a, b in zip(scores["ours"], scores["hf"], strict=True))
            same = sum(a[1] == b[1] for a, b in zip(scores["ours"], scores["hf"], strict=True))
            rows.append(
                {"model": model.source, "task": task, "requests": len(asked), "ours_s": round(own_s, 3),
                 "hf_s": round(hf_s, 3), "speed": round(hf_s / own_s, 3), "largest_difference_nats": worst,
                 "same_greedy": same}
            )  # fmt: skip
    return rows


def main(argv: list[str] | None = None, model: Any = None) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", nargs="*", default=[])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    on_cpu = args.device == "cpu"
    dtype, batch = ("float32", 8) if on_cpu else ("bfloat16", 64)
    rows = list[dict[str, Cell]]()
    for name in args.shape or ["smollm2"]:
        if args.shape:
            model = random_model(name, Tokenizer.from_file(args.tokenizer), args.device, dtype)
        model = model or colonnade.load(name, device=args.device, dtype=dtype)
        rows += measure(
            model,
            2 if args.tiny else 12 if on_cpu else 200,
            1 if args.tiny else 3 if on_cpu else 5,
            args.device,
            dtype,
            batch,
        )
        model = None
    heads = [
        Headline(f"{row['model']}: scoring requests with {row['task']} (lower is better)", float(row["ours_s"] or 0),
                 "s", "lm-eval's hf", float(row["hf_s"] or 0))
        for row in rows
    ]  # fmt: skip
    notes = "CPU seconds of one thread, median of turns" if on_cpu else "seconds, median of turns"
    if args.shape:
        notes += "; random weights, SmolLM2's tokenizer"
    name = "evaluate_cpu" if on_cpu else "evaluate_gpu"
    return report(name, rows, notes, headlines=heads, folder=folder_of(args.out, toy=args.tiny))


if __name__ == "__main__":
    main()
