"""Loss curves of one model in bfloat16, float16 and float8, from the same weights and on the same samples.

    python benchmarks/precision_curves.py                                  GPT-2 355M on one GPU, 300 steps of each
    python benchmarks/precision_curves.py --keep /tmp/runs                 resumes an interrupted benchmark
    python benchmarks/precision_curves.py --keep /tmp/runs --only float16  one run alone, to use several GPUs
    python benchmarks/precision_curves.py --toy --out /tmp/curves          a minute on a CPU, without float8

Each is a complete run of ``Trainer`` on the State of the Union addresses (package ``sotu``, its own tokenizer): float32
masters, AdamW, warm-up and cosine decay, blocks compiled on a GPU. The difference of each curve from bfloat16's is
averaged over a step and its 10 neighbours on either side; the script fails if it exceeds 0.02 nats, or 0.04 for
tensorwise float8, whose gradients have two bits of mantissa. A last run starts in float16 with a loss scale of 2^40, at
which everything overflows: each overflow halves the scale and skips the step, until a step does not overflow.
"""

import argparse
import shutil
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from colonnade.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.config.presets import preset
from colonnade.config.toml import dumps
from colonnade.data import build
from colonnade.data.readers import sotu_documents
from colonnade.train import Trainer
from colonnade.train.trackers import moving_average, read_rows
from harness.report import Cell, Headline, folder_of, report

LIMIT = 0.02
LIMITS = {"float8 tensorwise": 0.04}
"""Exceptions to :data:`LIMIT`."""
WINDOW_STEPS = 10
TOO_HIGH = 2.0**40
RECOVERY = "recovery"
COLOURS = {"bfloat16": "#1f2933", "float16": "#2f6fb3", "float8 tensorwise": "#d98e04", "float8 rowwise": "#d1495b"}
PRECISIONS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "float8 tensorwise": {"dtype": "bfloat16", "float8": "tensorwise"},
    "float8 rowwise": {"dtype": "bfloat16", "float8": "rowwise"},
    RECOVERY: {"dtype": "float16", "loss_scale": TOO_HIGH},
}

Curve = list[dict[str, float]]


def trained(run: RunConfig) -> Curve:
    """The metrics of a run, which is skipped if it has already ended; its checkpoints are deleted."""
    ended, settings = run.folder / "ended.toml", dumps(run)
    if not ended.exists() or ended.read_text(encoding="utf-8") != settings:
        shutil.rmtree(run.folder, ignore_errors=True)
        Trainer(run).fit()
        for step in run.folder.glob("step-*"):
            shutil.rmtree(step)
        ended.write_text(settings, encoding="utf-8")
    return [row for row in read_rows(run.folder) if "lr" in row]


def difference(curve: Curve, reference: Curve) -> list[float]:
    """The smoothed difference of two loss curves by step."""
    gaps = [mine["loss"] - theirs["loss"] for mine, theirs in zip(curve, reference, strict=True)]
    return moving_average(gaps, WINDOW_STEPS)


def draw(curves: dict[str, Curve], recovery: Curve, title: str, path: Path) -> None:
    """Plot losses, their differences, and the recovery from overflows into ``path``."""
    figure = Figure(figsize=(8, 8), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    losses, gaps, falls = figure.subplots(3, 1, height_ratios=[3, 2, 2])
    for name, curve in curves.items():
        steps = [row["step"] for row in curve]
        losses.plot(
            steps, moving_average([row["loss"] for row in curve], WINDOW_STEPS), color=COLOURS[name], label=name
        )
        if name != "bfloat16":
            gaps.plot(steps, difference(curve, curves["bfloat16"]), color=COLOURS[name], label=name)
    for limit in (-LIMIT, LIMIT):
        gaps.axhline(limit, color="#8a94a0", linewidth=0.8, linestyle="--")
    falls.semilogy([row["step"] for row in recovery], [row["loss_scale"] for row in recovery], color="#2f6fb3", base=2)
    beside = falls.twinx()
    fine = [row for row in recovery if "loss" in row]
    beside.plot([row["step"] for row in fine], [row["loss"] for row in fine], color="#1f2933", linewidth=0.9)
    losses.set_title(title, loc="left", fontsize=11, fontweight="bold")
    losses.set_ylabel("loss (nats per token)")
    gaps.set_ylabel("loss above bfloat16's")
    falls.set_ylabel("loss scale (blue)")
    beside.set_ylabel("loss (black)")
    falls.set_xlabel("step")
    losses.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step")
    parser.add_argument("--micro_batch", type=int, default=16, help="sequences per forward pass")
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate")
    every = list(PRECISIONS)
    parser.add_argument(
        "--only", nargs="+", choices=every, default=every, help="with fewer than all no result is written"
    )
    parser.add_argument("--keep", type=Path, help="folder of the runs; completed ones are not repeated")
    parser.add_argument("--toy", action="store_true", help="a tiny model on a CPU, in bfloat16 and float16")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the JSON file and the picture; benchmarks/results, with --toy a temporary one",
    )
    args = parser.parse_args()
    device, vocab_size, sequence, log_every = ("cpu", 512, 64, 1) if args.toy else ("cuda", 16384, 1024, 10)
    model = preset("gpt2-medium").replace(vocab_size=vocab_size)
    if args.toy:
        model = model.replace(layers=2, width=64, heads=4, ffn_width=128, context=64)
    possible = [name for name in every if not (args.toy and "float8" in name)]
    names = [name for name in possible if name in args.only]
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        if not corpus.exists():
            documents = sotu_documents()
            build(documents[-20:] if args.toy else documents, corpus, vocab_size=vocab_size)
        t = TrainConfig(
            steps=args.steps, batch=args.batch, micro_batch=args.micro_batch, lr=args.lr, min_lr=args.lr / 10,
            warmup=args.steps // 10, weight_decay=0.1, compile=not args.toy, eval_every=0, save_every=0,
            log_every=log_every,
        )  # fmt: skip
        data = DataConfig(path=corpus, sequence=sequence, separate_documents=False)
        run = RunConfig(name="bfloat16", runs=Path(folder), device=device, model=model, data=data, train=t)
        curves = {
            name: trained(run.replace(name=name.replace(" ", "-"), train=t.replace(**PRECISIONS[name])))
            for name in names
        }
    if names != possible:
        return 0
    recovery = curves.pop(RECOVERY)
    return judge(model, run, curves, recovery, folder_of(args.out, toy=args.toy), "toy" if args.toy else "355m_h200")


def judge(model: ModelConfig, run: RunConfig, curves: dict[str, Curve], recovery: Curve, out: Path, name: str) -> int:
    """Write the record and the plot; 1 if a curve exceeded its limit or the run did not recover, else 0."""
    reference, rows, heads, within = curves["bfloat16"], [], [], True
    tokens = run.train.batch * run.data.sequence
    title = f"{model.parameters / 1e6:.0f} M parameters, {run.train.steps} steps of {tokens:,} tokens"
    for precision, curve in curves.items():
        largest = max(abs(gap) for gap in difference(curve, reference))
        within &= largest < LIMITS.get(precision, LIMIT)
        if precision != "bfloat16":
            what = f"largest smoothed loss difference from bfloat16, {precision}, {title}"
            heads.append(Headline(what, round(largest, 4), "nats"))
        rows.append(summary(precision, curve) | {"largest_smoothed_difference": round(largest, 5)})
    skipped = int(recovery[-1]["skipped"])
    recovered = 0 < skipped < len(recovery) // 2 and recovery[-1]["loss"] < recovery[0].get("loss", 1e9)
    rows.append(summary(f"float16 from 2^40: {skipped} steps skipped", recovery))
    out.mkdir(parents=True, exist_ok=True)
    draw(curves, recovery, title, out / f"precision_curves_{name}.png")
    report(f"precision_curves_{name}", rows, f"{title}.\n\n{__doc__}", headlines=heads, folder=out)
    print(f"{[(h.what, h.value) for h in heads]}, recovered {recovered} after {skipped} skipped steps")
    return 0 if within and recovered else 1


def summary(name: str, curve: Curve) -> dict[str, Cell]:
    """A row of the table: smoothed losses at a few steps; the plot has the complete curves."""
    losses = moving_average([row["loss"] for row in curve if "loss" in row], WINDOW_STEPS)
    rates = [row["tokens_per_s"] for row in curve if "tokens_per_s" in row]
    quarters = {
        f"loss_at_{share}_percent": round(losses[(len(losses) - 1) * share // 100], 4) for share in (25, 50, 75)
    }
    return {
        "precision": name,
        "first_loss": round(losses[0], 4),
        **quarters,
        "last_loss": round(losses[-1], 4),
        "tokens_per_s": round(max(rates, default=0.0)),
        "last_loss_scale": curve[-1].get("loss_scale"),
    }


if __name__ == "__main__":
    sys.exit(main())
