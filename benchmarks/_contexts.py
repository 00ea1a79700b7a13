"""The article's first plot, for benchmarks/decode_model.py: tokens a second over the length of the context."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Who by who, with the bound of reading weights and cache; rows that failed have no speed, and no place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    there = [row for row in rows if "tokens_per_s" in row]
    bound = [(row["context"], row["bound_tokens_per_s"]) for row in there if "bound_tokens_per_s" in row]
    axes.plot(*zip(*bound, strict=True), "--", color="#9aa5b1", label="reading weights and cache once")
    for who in dict.fromkeys(row["who"] for row in there):
        at = [(row["context"], row["tokens_per_s"]) for row in there if row["who"] == who]
        wide = who.startswith("colonnade")
        axes.plot(*zip(*at, strict=True), marker="o", markersize=3, linewidth=2.4 if wide else 1.1, label=who)
    first = there[0]
    axes.set_title(f"{first['model']}, {first['plan']}, batch {first['batch']}, weights {first['weights']}", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("tokens/s")
    axes.grid(color="#e4e7eb", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
