"""Fine-tunes the MiniLM encoder to classify passages of State of the Union speeches by century.

    python examples/classify_speeches.py

Passages of 64 words come from the speeches of the package ``sotu``. Whole speeches are held out, so that no passage of
a test speech is trained on, and all centuries have equally many (chance is 1 in 3). Five seeds choose the
classifier's initial weights and the order of the examples; the last line printed is the median accuracy, as in
Megatron-LM (arXiv 1909.08053, section 5.3).
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

import colonnade
from colonnade.config import DataConfig, RunConfig, TrainConfig
from colonnade.data.readers import sotu_documents
from colonnade.tune import Example, accuracy, classifier, fit

CENTURIES = (19, 20, 21)
WORDS = 64


def passages(per_class: int, held_out_per_class: int, seed: int = 0) -> tuple[list[tuple[str, int]], ...]:
    """(train, test) passages with their class; a fifth of each century's speeches is held out."""
    draw = random.Random(seed)
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, century in enumerate(CENTURIES):
        speeches = [text.split() for name, text in sotu_documents() if (int(name[:4]) - 1) // 100 + 1 == century]
        draw.shuffle(speeches)
        test_count = max(1, len(speeches) // 5)
        for part, count, into in (
            (speeches[test_count:], per_class, train),
            (speeches[:test_count], held_out_per_class, test),
        ):
            starts = [(words, at) for words in part for at in range(0, len(words) - WORDS, WORDS)]
            into += [(" ".join(words[at : at + WORDS]), label) for words, at in draw.sample(starts, count)]
    return train, test


def main(arguments: list[str] | None = None) -> float:
    """Prints each seed's accuracy and the median; returns the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="an encoder, as accepted by colonnade.load")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--per-class", type=int, default=80, help="training passages of each century")
    parser.add_argument("--held-out", type=int, default=50, help="test passages of each century")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in; by default they are deleted")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return tune(args, args.runs or Path(folder))


def tune(args: argparse.Namespace, runs: Path) -> float:
    """Train one run in ``runs`` per seed; returns the median accuracy."""
    tokenizer = colonnade.load(args.model).tokenizer
    encode = lambda rows: [Example(tokenizer.encode(text), label) for text, label in rows]  # noqa: E731
    train, test = (encode(part) for part in passages(args.per_class, args.held_out))
    steps = max(1, args.epochs * len(train) // 16)
    accuracies: list[float] = []
    for seed in range(args.seeds):
        settings = TrainConfig(
            steps=steps, batch=16, micro_batch=16, lr=args.lr, min_lr=0, warmup=steps // 10, schedule="linear",
            weight_decay=0.01, beta2=0.999, pretrained_checkpoint=args.model, seed=seed, save_every=0,
        )  # fmt: skip
        model = classifier(args.model, classes=len(CENTURIES))
        run = RunConfig(name=f"seed-{seed}", runs=runs, model=model, train=settings, data=DataConfig(seed=seed))
        fit(run, train)
        accuracies.append(accuracy(colonnade.load(run.folder, dtype="float32").transformer, test))
        print(f"seed {seed}: accuracy {accuracies[-1]:.1%}", flush=True)
    median = statistics.median(accuracies)
    print(f"median of {len(accuracies)} seeds: {median:.1%} of {len(test)} passages (chance {1 / len(CENTURIES):.0%})")
    return median


if __name__ == "__main__":
    print(f"{Path(sys.argv[0]).name}: {WORDS}-word passages")
    main()
