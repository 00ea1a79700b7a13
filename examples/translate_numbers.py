"""Trains a small T5 to translate numbers from English words to German ones, and scores it on numbers it has not seen.

    python examples/translate_numbers.py

English: four thousand three hundred twenty-one. German: viertausenddreihunderteinundzwanzig: units come before tens,
and words are joined. 300 steps, about a minute of one core, translate half of the held-out numbers rightly; the default
is 1,200. The last lines printed are the shares of held-out numbers whose translation is exactly right, greedy and with
four beams.
"""

import argparse
import random
import tempfile
from pathlib import Path

import colonnade
from colonnade import DataConfig, EncoderConfig, ModelConfig, RelativePositions, RunConfig, TrainConfig, Trainer
from colonnade.data import Corpus, build

ENGLISH = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
ENGLISH_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
GERMAN = [
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
]  # fmt: skip
GERMAN_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def english(n: int) -> str:
    """The words for 0 to 9,999."""
    if n < 20:
        return ENGLISH[n]
    if n < 100:
        return ENGLISH_TENS[n // 10 - 2] + (f"-{ENGLISH[n % 10]}" if n % 10 else "")
    size, name = (100, "hundred") if n < 1000 else (1000, "thousand")
    return f"{english(n // size)} {name}" + (f" {english(n % size)}" if n % size else "")


def german(n: int) -> str:
    """The word for 0 to 9,999."""
    if n < 20:
        return GERMAN[n]
    if n < 100:
        return (f"{_joined(n % 10)}und" if n % 10 else "") + GERMAN_TENS[n // 10 - 2]
    size, name = (100, "hundert") if n < 1000 else (1000, "tausend")
    return f"{_joined(n // size)}{name}" + (german(n % size) if n % size else "")


def _joined(n: int) -> str:
    return "ein" if n == 1 else GERMAN[n]


def main(arguments: list[str] | None = None) -> float:
    """Prints the accuracy, and returns that of the beam search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--held-out", type=int, default=200, help="numbers held out from training")
    parser.add_argument("--runs", type=Path, help="folder to keep the run in; by default it is deleted")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return train_and_score(args, args.runs or Path(folder))


def train_and_score(args: argparse.Namespace, folder: Path) -> float:
    """The share of held-out numbers that beams translate rightly."""
    numbers = random.Random(0).sample(range(10_000), 10_000)
    test, train = numbers[: args.held_out], numbers[args.held_out :]
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{english(n)}\t{german(n)}\n" for n in train), encoding="utf-8")
    build([pairs], folder / "corpus", objective="pairs", vocab_size=400, overwrite=True)
    model = ModelConfig(
        family="t5", vocab_size=Corpus(folder / "corpus").manifest.vocab_size, layers=2, width=128, heads=4,
        ffn_width=256, context=64, positions="none", relative_positions=RelativePositions(buckets=16, distance=32),
        score_scale=1.0, activation="gelu_tanh", init_std=0.05, encoder=EncoderConfig(layers=2, context=64),
    )  # fmt: skip
    run = RunConfig(
        name="numbers", runs=folder, device="cpu", model=model,
        data=DataConfig(path=folder / "corpus", sequence=48),
        train=TrainConfig(
            steps=args.steps, batch=64, lr=3e-3, warmup=min(50, args.steps), dtype="float32", eval_every=0,
            log_every=100,
        ),
    )  # fmt: skip
    Trainer(run).fit()
    translator = colonnade.load(run.folder, device="cpu")
    share = 0.0
    for beams in (1, 4):
        texts = translator.generate([english(n) for n in test], temperature=0, max_tokens=40, beams=beams)
        share = sum(text == german(n) for text, n in zip(texts, test, strict=True)) / len(test)
        print(f"{english(test[0])} -> {texts[0]}")
        print(f"exactly right with {beams} beam{'s' if beams > 1 else ''}: {share:.1%} of {len(test)}")
    return share


if __name__ == "__main__":
    main()
