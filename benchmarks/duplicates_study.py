"""The effect of near duplicates: the same model trained on a corpus with planted copies, and on that corpus cleaned.

    python benchmarks/duplicates_study.py [--device cuda] [--steps 500]

Passages of speeches, of which some are repeated with a few edited words until they make 80% of the text. Both runs take
the same number of steps from the same weights. Reported: the held-out loss, and the loss on the repeated passages,
which the first run memorises. Writes a plot next to the record.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import colonnade
from colonnade import Trainer
from colonnade.config import DataConfig, Device, Recipe, RunConfig, TrainConfig
from colonnade.config.presets import preset
from colonnade.data import Corpus, build
from colonnade.data.readers import sotu_documents
from colonnade.data.refine.run import run
from harness.report import Cell, Headline, folder_of, report

WORDS = 200


def texts_with_copies(passages: int, repeated: int, share: float) -> tuple[list[str], list[str]]:
    """(texts with edited copies that make ``share`` of them, the passages that are repeated)."""
    texts: list[str] = []
    for _, speech in sotu_documents()[:-20]:
        parts = speech.split(" ")
        texts += [" ".join(parts[i : i + WORDS]) for i in range(0, len(parts) - WORDS, WORDS)]
    choose = random.Random(0)
    choose.shuffle(texts)
    texts = texts[:passages]
    sources, copies = texts[:repeated], list[str]()
    for _ in range(round(share / (1 - share) * len(texts))):
        parts = sources[len(copies) % repeated].split(" ")
        for at in choose.sample(range(WORDS), 3):
            parts[at] = choose.choice(parts)
        copies.append(" ".join(parts))
    return [*texts, *copies], sources


def train(name: str, corpus: Path, folder: Path, steps: int, device: Device) -> tuple[Any, float | None]:
    """(the trained model, its last training loss)."""
    model = preset("tour").replace(vocab_size=Corpus(corpus).manifest.vocab_size)
    settings = RunConfig(
        name=name, runs=folder, device=device, model=model, data=DataConfig(path=corpus, sequence=128),
        train=TrainConfig(steps=steps, batch=8, micro_batch=8, lr=2e-3, min_lr=1e-4, warmup=max(1, steps // 20),
                          eval_every=0, save_every=steps, log_every=max(1, steps // 10), compile=False),
    )  # fmt: skip
    summary = Trainer(settings).fit()
    return colonnade.load(settings.folder, device=device, dtype="float32"), summary.loss


def nats(model: Any, texts: list[str]) -> float:
    """Mean loss per token [nats]."""
    scores = [model.score(text, context=128) for text in texts]
    return sum(score.nll for score in scores) / sum(score.tokens for score in scores)


def main(argv: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    passages, repeated, steps = (30, 3, 3) if args.tiny else (1000, 20, args.steps)
    texts, sources = texts_with_copies(passages, repeated, 0.8)
    held_out = [text[:20_000] for _, text in sotu_documents()[-20:]][: 1 if args.tiny else 20]
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "planted").mkdir()
        (folder / "planted" / "texts.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8"
        )
        cleaned = run([folder / "planted"], folder / "clean", Recipe(min_tokens=20))
        tokenizer = None
        for kind, source in (("cleaned", folder / "clean" / "documents"), ("planted", folder / "planted")):
            corpus = folder / f"corpus-{kind}"
            more = {"vocab_size": 300 if args.tiny else 4096} if tokenizer is None else {"tokenizer": tokenizer}
            build([source], corpus, validation_share=0, **more)
            tokenizer = corpus / "tokenizer"
            model, loss = train(kind, corpus, folder / "runs", steps, args.device)
            rows.append(
                {"corpus": kind, "documents": len(texts) if kind == "planted" else cleaned.documents, "steps": steps,
                 "training_loss_nats": None if loss is None else round(loss, 3),
                 "held_out_nats": round(nats(model, held_out), 3),
                 "repeated_passages_nats": round(nats(model, sources), 3)}
            )  # fmt: skip
    clean, dirty = rows
    heads = [
        Headline("Held-out loss after cleaning, 80% near copies planted (lower is better)", clean["held_out_nats"],
                 "nats", "not cleaned", dirty["held_out_nats"]),
    ]  # fmt: skip
    out = folder_of(args.out, toy=args.tiny)
    path = report("duplicates_study", rows, "same steps, weights and vocabulary", headlines=heads, folder=out)
    _plot(rows, path.with_suffix(".svg"))
    return path


def _plot(rows: list[dict[str, Cell]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    names = ("held_out_nats", "repeated_passages_nats")
    for i, row in enumerate(rows):
        axes.bar([j + 0.4 * i for j in range(2)], [row[name] for name in names], width=0.38, label=str(row["corpus"]))
    axes.set_xticks([0.2, 1.2], ["held-out speeches", "repeated passages"])
    axes.set_ylabel("loss [nats a token]")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
