"""Fine-tuning of SmolLM2-135M by each method on the small data sets of examples/, with curves.

    python benchmarks/finetune_curves.py            # about 20 minutes on two quiet cores

One run a method, all with adapters of rank 8: conversations and preferences about capitals ("Paris (France)" rather
than a sentence), rewards for short right answers, and embeddings of questions near their sentences. The picture has
each run's curve; ``cpu_s`` is the CPU time of the whole run, with reading the model and, for rewards, the processes
that score.
"""

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from colonnade.config import LoraConfig, TrainConfig, TuneConfig
from colonnade.train.trackers import read_rows
from colonnade.tune.tuner import Tuner, tuned_run
from harness.report import RESULTS, ROOT, Cell, Headline, report
from harness.rows import format_row

EXAMPLES = ROOT / "examples"
PICTURE = ROOT / "docs" / "assets" / "finetune_curves.png"
METHODS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "sft": ("capitals.jsonl", "loss", {"steps": 20, "batch": 8, "micro_batch": 8, "lr": 2e-4}, {}),
    "dpo": ("capital_preferences.jsonl", "loss", {"steps": 15, "batch": 8, "micro_batch": 8, "lr": 2e-4}, {}),
    "embed": (
        "capital_pairs.jsonl", "loss", {"steps": 20, "batch": 40, "micro_batch": 10, "lr": 2e-3}, {"pooling": "mean"},
    ),
    "grpo": (
        "capital_prompts.jsonl", "reward", {"steps": 12, "batch": 32, "micro_batch": 8, "lr": 5e-4},
        {"group": 8, "max_tokens": 24, "reward": f"{EXAMPLES / 'short.py'}:reward"},
    ),
}  # fmt: skip
"""Data, what the curve shows, and settings of the steps and of the method."""


def run(method: str, folder: Path, model: str, steps: int | None) -> list[dict[str, Cell]]:
    """The curve of one method."""
    data, metric, train, tune = METHODS[method]
    train = TrainConfig(**(train | ({"steps": steps} if steps else {})), save_every=0, log_every=1)
    began = os.times()
    run = tuned_run(model, name=method, runs=folder, device="cpu", sequence=96, train=train, lora=LoraConfig(rank=8))
    Tuner(run, EXAMPLES / data, method, TuneConfig(**tune)).fit()
    cpu_s = sum(b - a for a, b in zip(began[:4], os.times()[:4], strict=True))
    return [
        {"method": method, "step": row["step"], "metric": metric, "value": round(row[metric], 4), "cpu_s": round(cpu_s)}
        for row in read_rows(run.folder) if metric in row
    ]  # fmt: skip


def draw(rows: list[dict[str, Cell]], path: Path) -> None:
    """A panel a method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    figure = Figure(figsize=(3 * len(methods), 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"sft": "conversations", "dpo": "preferences", "embed": "embeddings", "grpo": "rewards"}
    for at, method in enumerate(methods, 1):
        mine = [row for row in rows if row["method"] == method]
        axes = figure.add_subplot(1, len(methods), at)
        axes.plot([row["step"] for row in mine], [row["value"] for row in mine], marker=".")  # type: ignore[misc]
        axes.set(title=titles[method], xlabel="step", ylabel="mean reward" if method == "grpo" else "loss")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--steps", type=int, help="of each method, for a quick look")
    parser.add_argument("--out", type=Path, help="folder of the JSON file and the picture")
    args = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    heads: list[Headline] = []
    with TemporaryDirectory() as name:
        for method in args.methods:
            mine = run(method, Path(name), args.model, args.steps)
            rows += mine
            print(format_row(mine[-1]), flush=True)
            heads.append(
                Headline(f"SmolLM2-135M by {method}, {len(mine)} steps", float(mine[0]["cpu_s"] or 0), "CPU s")
            )
            report("finetune_curves_cpu", rows, notes=__doc__ or "", headlines=heads, folder=args.out or RESULTS)
            draw(rows, args.out / PICTURE.name if args.out else PICTURE)


if __name__ == "__main__":
    main()
