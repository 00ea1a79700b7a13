"""Training speed against depth, width, sequence length and ranks, as a table and a plot.

    python benchmarks/cost_growth.py             needs 4 GPUs; --worlds 1 2 with two
    python benchmarks/cost_growth.py --tiny      toy sizes on a CPU

Starting from a GPT-2 shape of 24 x 1024 (heads of 64, sequence 1024, 16,384 tokens per step and rank, bfloat16 compute,
float32 masters, blocks compiled), one size is changed at a time. ``foretold_tokens_per_s`` is predicted from the first
row by counting operations:

    tokens/s = tokens/s of the base · FLOPs per token of the base / FLOPs per token      (ModelConfig.flops_per_token)
    tokens/s = tokens/s of one rank · ranks                                              (FSDP, equal work per rank)

A row that is faster than predicted uses the GPU better (wider GEMMs), a slower one worse.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from colonnade.config import ModelConfig, Plan
from colonnade.config.presets import preset
from harness.report import ROOT, Headline, report
from harness.training_jobs import FAST, PLAIN, Job, Row, device_and_folder, has_gpus, make_parser, run_jobs

TOKENS = 16384
"""Tokens per rank and step."""
INK, QUIET, MEASURED = "#1f2933", "#8a94a0", "#2f6fb3"
PANELS = {"layers": "blocks", "width": "width", "sequence": "tokens of a sequence", "ranks": "ranks"}


def shape(width: int, layers: int, sequence: int, vocab_size: int) -> ModelConfig:
    """A GPT-2 with heads of 64 (8 in the tiny sizes)."""
    return preset("gpt2").replace(
        layers=layers, width=width, heads=max(4, width // 64), ffn_width=4 * width, context=sequence,
        vocab_size=vocab_size,
    )  # fmt: skip


def jobs(tiny: bool, worlds: Sequence[int]) -> list[Job]:
    """The base, then one job for each changed size, named after it."""
    if tiny:
        base = {"width": 32, "layers": 2, "sequence": 32}
        changes = {"layers": (1, 4), "width": (64,), "sequence": (64,)}
        tokens, vocab_size, train, warm, steps = 128, 211, PLAIN, 1, 2
    else:
        base = {"width": 1024, "layers": 24, "sequence": 1024}
        changes = {"layers": (6, 12, 48), "width": (512, 2048, 3072), "sequence": (2048, 4096, 16384)}
        tokens, vocab_size, train, warm, steps = TOKENS, 51200, FAST, 3, 6
    points = [("base", base)] + [(key, base | {key: value}) for key in changes for value in changes[key]]
    made = [
        Job(f"{key} {at['layers']} x {at['width']}, {at['sequence']}", shape(**at, vocab_size=vocab_size), Plan(),
            at["sequence"], tokens // at["sequence"], train, warm, steps)
        for key, at in points
    ]  # fmt: skip
    config, sequence = shape(**base, vocab_size=vocab_size), base["sequence"]
    return made + [
        Job(f"ranks {n}", config, Plan(dp=n), sequence, tokens // sequence, train, warm, steps) for n in worlds if n > 1
    ]


def with_predictions(made: Sequence[Job], rows: Sequence[Row]) -> list[Row]:
    """The rows with their sizes and the speed predicted from the first one."""

    def cost(job: Job) -> float:
        return job.config.flops_per_token(job.sequence, causal=True)

    base = rows[0]["tokens_per_s"]
    compared = []
    for job, row in zip(made, rows, strict=True):
        predicted = base * job.plan.world * cost(made[0]) / cost(job)
        ratio = row["tokens_per_s"] / predicted
        compared.append(
            {"changed": job.name.split()[0], "layers": job.config.layers, "width": job.config.width,
             "sequence": job.sequence, "ranks": job.plan.world, "tokens_per_s": row["tokens_per_s"],
             "foretold_tokens_per_s": round(predicted), "of_foretold": round(ratio, 3),
             "tflops_per_rank_causal": row["tflops_per_rank_causal"], "peak_gib": row["peak_gib"]}
        )  # fmt: skip
    return compared


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot measured and predicted speed, a panel per size, into ``path``."""
    figure = Figure(figsize=(8, 6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for panel, (key, label) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        points = sorted((row for row in rows if row["changed"] in ("base", key)), key=lambda row: row[key])
        at = [row[key] for row in points]
        predicted = [row["foretold_tokens_per_s"] for row in points]
        measured = [row["tokens_per_s"] for row in points]
        panel.loglog(at, predicted, color=QUIET, linestyle="--", linewidth=1.2, label="predicted by FLOPs")
        panel.loglog(at, measured, color=MEASURED, marker="o", markersize=4, linewidth=1.8, label="measured")
        panel.set_xticks(at, [f"{n:,}" for n in at])
        panel.set_ylim(min(measured + predicted) / 1.5, max(measured + predicted) * 1.5)  # wide enough for two ticks
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.minorticks_off()
        panel.set_xlabel(label, color=INK)
        panel.yaxis.set_major_formatter(lambda rate, _: f"{rate:,.0f}")
        panel.grid(color="#e4e7eb", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors=QUIET, labelcolor=INK, labelsize=8)
    figure.axes[0].legend(frameon=False, labelcolor=INK, fontsize=8)
    figure.supylabel("tokens/s", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    options = make_parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", help="numbers of ranks; 1 2 4, with --tiny 1 2")
    options.add_argument(
        "--picture", type=Path, help="default: docs/assets/cost_growth.png; with --tiny next to the results"
    )
    args = options.parse_args(argv)
    worlds = args.worlds or ([1, 2] if args.tiny else [1, 2, 4])
    if not has_gpus(args, max(worlds)):
        return
    device, folder, name = device_and_folder(args)
    made = jobs(args.tiny, worlds)
    rows = with_predictions(made, run_jobs(made, device, args.keep))
    draw(rows, args.picture or (folder if args.tiny else ROOT / "docs" / "assets") / "cost_growth.png")
    last = rows[-1]
    what = f"GPT-2 {last['layers']} x {last['width']} on {last['ranks']} ranks, FSDP"
    peer = "linear from one rank"
    heads = [Headline(what, last["tokens_per_s"], "tokens/s", peer, last["foretold_tokens_per_s"])]
    report(f"cost_growth_{name}", rows, __doc__ or "", headlines=heads if last["ranks"] > 1 else [], folder=folder)


if __name__ == "__main__":
    main()
