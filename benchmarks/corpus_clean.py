"""Cleaning a corpus: our whole recipe and its near-copy stages against datatrove's own deduplication.

    python benchmarks/corpus_clean.py

Passages of speeches with planted near copies. Both run in one process on one core, in turns; times are CPU seconds, so
other processes disturb them little. datatrove splits words with spaCy; where that is not installed, its word tokenizer
is replaced by the same regular expression as ours, which is several times faster than spaCy, and the row says so.
"""

import argparse
import importlib.util
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from datatrove.data import Document
from datatrove.pipeline.dedup import minhash
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)

from colonnade.config import Recipe
from colonnade.data.readers import sotu_documents
from colonnade.data.refine.run import run
from colonnade.data.refine.shingles import jaccard, shingles
from harness.report import Cell, Headline, folder_of, report


def texts_with_copies(passages: int, words: int = 250) -> tuple[list[str], list[tuple[int, int]]]:
    """Passages, every fifth with an edited copy at the end; and the pairs."""
    texts: list[str] = []
    for _, speech in sotu_documents():
        parts = speech.split(" ")
        texts += [" ".join(parts[i : i + words]) for i in range(0, len(parts) - words, words)]
    choose = random.Random(0)
    choose.shuffle(texts)
    texts = texts[:passages]
    pairs: list[tuple[int, int]] = []
    for i in range(0, len(texts), 5):
        parts = texts[i].split(" ")
        for at in choose.sample(range(len(parts)), choose.randrange(1, 12)):
            parts[at] = f"edit{at}"
        pairs.append((i, len(texts)))
        texts.append(" ".join(parts))
    return texts, pairs


class _Words:
    """Replaces spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        return re.findall(r"\w+", text)


def theirs(texts: list[str], folder: Path) -> set[int]:
    """datatrove's four stages with their defaults: numbers of the texts that stay."""
    documents = [Document(text, str(i)) for i, text in enumerate(texts)]
    config = MinhashConfig()
    module: dict[str, Any] = minhash.__dict__
    load = module["load_word_tokenizer"]
    if importlib.util.find_spec("spacy") is None:
        module["load_word_tokenizer"] = lambda language: _Words()
    try:
        sign = MinhashDedupSignature(str(folder / "signatures"), config)
    finally:
        module["load_word_tokenizer"] = load
    sign._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())  # its own call needs xxhash below 4
    sign.run(iter(documents), 0, 1)
    for band in range(config.num_buckets):
        MinhashDedupBuckets(str(folder / "signatures"), str(folder / "buckets"), config=config).run(
            None, band, config.num_buckets
        )
    MinhashDedupCluster(str(folder / "buckets"), str(folder / "remove"), config=config).run(None, 0, 1)
    kept = MinhashDedupFilter(str(folder / "remove")).run(iter(documents), 0, 1)
    return {int(document.id) for document in kept}


def ours(texts: list[str], folder: Path, recipe: Recipe) -> set[int]:
    """Numbers of the texts that stay."""
    numbers = {text: i for i, text in enumerate(texts)}
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    run([folder / "in.jsonl"], folder / "out", recipe)
    lines = [line for file in (folder / "out" / "documents").iterdir() for line in file.read_text("utf-8").splitlines()]
    return {numbers[text] for line in lines if (text := json.loads(line)["text"]) in numbers}


def measure(texts: list[str], pairs: list[tuple[int, int]], turns: int) -> list[dict[str, Cell]]:
    """A row for each method: CPU seconds, MB/s, and how many true pairs it found and false ones it removed."""
    true = [(a, b) for a, b in pairs if jaccard(shingles(texts[a]), shingles(texts[b])) > 0.7]
    size_mb = sum(len(text.encode()) for text in texts) / 1e6
    near = Recipe(mend=False, min_tokens=0, exact=False)
    spacy = importlib.util.find_spec("spacy") is not None
    methods: dict[str, Callable[[Path], set[int]]] = {
        "whole recipe": lambda folder: ours(texts, folder, Recipe(mend=True, min_tokens=64)),
        "near copies only": lambda folder: ours(texts, folder, near),
        f"datatrove, {'spaCy' if spacy else 'regular expression'}": lambda folder: theirs(texts, folder),
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    kept: dict[str, set[int]] = {}
    for _ in range(turns):
        for name, method in methods.items():
            with tempfile.TemporaryDirectory() as folder:
                started_s = time.process_time()
                kept[name] = method(Path(folder))
                times[name].append(time.process_time() - started_s)
    rows: list[dict[str, Cell]] = []
    for name in methods:
        took_s = statistics.median(times[name])
        found = sum(a not in kept[name] or b not in kept[name] for a, b in true)
        rows.append(
            {"method": name, "texts": len(texts), "megabytes": round(size_mb, 2), "cpu_s": round(took_s, 2),
             "mb_per_cpu_s": round(size_mb / took_s, 2), "true_pairs": len(true), "pairs_found": found,
             "texts_kept": len(kept[name])}
        )  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    texts, pairs = texts_with_copies(60 if args.tiny else 8000)
    rows = measure(texts, pairs, 1 if args.tiny else 3)
    whole, near, peer = rows
    heads = [
        Headline("Near copies of 12 MB of passages, one core", near["mb_per_cpu_s"], "MB/s", peer["method"],
                 peer["mb_per_cpu_s"]),
        Headline("The whole recipe on them, one core", whole["mb_per_cpu_s"], "MB/s"),
    ]  # fmt: skip
    notes = "CPU seconds, median of turns in one process; the machine was busy"
    return report("corpus_clean_cpu", rows, notes, headlines=heads, folder=folder_of(args.out, toy=args.tiny))


if __name__ == "__main__":
    main()
