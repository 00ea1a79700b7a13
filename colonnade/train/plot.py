"""The loss curve as a picture, drawn from the run's own ``metrics.jsonl`` at its end."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from colonnade.train.trackers import read_rows

PICTURE = "loss.png"
INK, QUIET, TRAIN, VALIDATION = "#1f2933", "#8a94a0", "#2f6fb3", "#d1495b"


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and up to ``reach`` neighbours on either side (a trailing mean would lag behind)."""
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in ends]


def draw(folder: Path, title: str) -> Path | None:
    """Write ``folder/loss.png`` and return it; None when nothing was tracked yet."""
    rows = read_rows(folder)
    gap = float("nan")  # of a step that float16 skipped
    train = [(row["step"], row["loss"], row["lr"], row.get("grad_norm", gap)) for row in rows if "loss" in row]
    held_out = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if not train:
        return None
    # Imported here because it is slow; a figure of its own (no pyplot) leaves the caller's figures alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses, rates, norms = (list(column) for column in zip(*train, strict=True))
    figure = Figure(figsize=(8, 5.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "loss"], ["norm", "lr"]], height_ratios=[3, 1])
    top, left, right = panels["loss"], panels["norm"], panels["lr"]
    reach = len(losses) // 100
    if reach:
        top.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=0.8)
    top.plot(steps, smoothed(losses, reach), color=TRAIN, linewidth=1.8, label=f"training, now {losses[-1]:.3f}")
    if held_out:
        label = f"validation, now {held_out[-1][1]:.3f}"
        top.plot(*zip(*held_out, strict=True), color=VALIDATION, marker="o", markersize=4, linewidth=1.4, label=label)
    top.set_ylabel("loss (nats per token)", color=INK)
    top.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    top.legend(frameon=False, labelcolor=INK)
    left.plot(steps, norms, color=QUIET, linewidth=0.9)
    left.set_ylabel("gradient norm", color=INK, fontsize=8)
    left.set_ylim(bottom=0)
    right.plot(steps, rates, color=QUIET, linewidth=1.2)
    right.set_ylabel("learning rate", color=INK, fontsize=8)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    for axes in (top, left, right):
        axes.set_xlim(0, max(steps) * 1.01)  # room for the last marker
        axes.grid(color="#e4e7eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=QUIET, labelcolor=INK, labelsize=8 if axes is not top else 9)
    for axes in (left, right):
        axes.set_xlabel("step", color=INK, fontsize=8)
    path = folder / PICTURE
    fresh = path.with_suffix(".partial.png")
    figure.savefig(fresh, dpi=150)
    fresh.replace(path)
    return path
