"""Plot of tokens/s by context length, as in the Flash-Decoding article, for benchmarks/decode_model.py."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = "#1f5fa8", "#d1495b", "#2a9d8f", "#8e5ea2", "#e08e1b", "#3a3a3a", "#7a4b2a", "#a3b18a"
GREY = "#9aa5b1"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the rows: a panel for the model with most rows and one for all others. Dashed lines are the bounds of
    reading weights and cache. Failed rows are skipped.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    valid = [row for row in rows if "tokens_per_s" in row]
    models = [row["model"] for row in valid]
    most = max(models, key=models.count)
    panels = [[row for row in valid if (row["model"] == most) == first] for first in (True, False)]
    panels = [panel for panel in panels if panel]
    figure = Figure(figsize=(5.2 * len(panels), 5.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown = sorted({row["model"] for row in panel})
        lines = dict[str, list[Mapping[str, Any]]]()
        for row in sorted(panel, key=lambda row: -row["tokens_per_s"]):
            lines.setdefault(_name(row, alone=len(shown) == 1), []).append(row)
        for (name, line), colour in zip(lines.items(), itertools.cycle(COLOURS), strict=False):
            line.sort(key=lambda row: row["context"])
            at = [row["context"] for row in line]
            axes.plot(at, [row["tokens_per_s"] for row in line], "o-", color=colour, markersize=4, label=name)
            if "bound_tokens_per_s" in line[0]:
                axes.plot(at, [row["bound_tokens_per_s"] for row in line], "--", color=colour, linewidth=1)
        axes.plot([], [], "--", color=GREY, linewidth=1, label="reading weights and cache once")
        axes.set_title(f"{', '.join(shown)}; batch {panel[0]['batch']}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        contexts = [row["context"] for row in panel]
        speeds = [row[key] for row in panel for key in ("tokens_per_s", "bound_tokens_per_s") if key in row]
        for axis, values in ((axes.yaxis, speeds), (axes.xaxis, contexts)):
            ticks = [2**n for n in range(math.floor(math.log2(min(values))), math.floor(math.log2(max(values))) + 1)]
            axis.set_ticks(ticks := ticks[:: 1 + len(ticks) // 8], [f"{tick:,}" for tick in ticks])
        axes.set_ylim(min(speeds) / 1.3, max(speeds) * 1.2)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("tokens/s")
        axes.grid(color="#e4e7eb", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _name(row: Mapping[str, Any], *, alone: bool) -> str:
    """The legend of a row; includes the model's name unless it is ``alone`` in the panel."""
    parts = [] if alone else [row["model"]]
    if not row["who"].startswith("colonnade"):
        return ", ".join([row["who"], *parts])
    parts += ["bfloat16" if row["weights"] == "stored" else row["weights"]]
    parts += ["batch-invariant"] if row["batch_invariant"] else []
    parts += [f"{row['plan']}, {row['ranks']} GPUs"] if row["ranks"] > 1 else []
    return ", ".join(parts)
