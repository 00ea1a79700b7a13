"""Draws decoding into the roofline of a machine: operations per second over operations per byte."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from colonnade.bench.ceilings import Ceilings
from colonnade.bench.roofline import DecodeSpeed

COLORS = {"float32": "#0072b2", "bfloat16": "#d55e00", "int8": "#009e73", "int4": "#cc79a7"}


def draw_roofline(path: Path, title: str, ceilings: Ceilings, speeds: Sequence[DecodeSpeed]) -> None:
    """Write the plot to ``path``; its suffix determines the format."""
    figure = Figure(figsize=(7, 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    bandwidth, peak = ceilings.read_bytes_per_s, max(ceilings.flops.values())
    least, most = 0.25, max(16.0, 4 * peak / bandwidth)
    for name, flops in ceilings.flops.items():
        ridge = flops / bandwidth
        axes.plot([least, ridge, most], [least * bandwidth, flops, flops], color=COLORS[name], linewidth=1, alpha=0.7)
        axes.text(most, flops, f"{name} products ", color=COLORS[name], ha="right", va="bottom", fontsize=8)
    axes.text(least, 1.15 * least * bandwidth, f" memory, {bandwidth / 1e9:.3g} GB/s", rotation=30, fontsize=8)
    for speed in speeds:
        axes.plot(
            speed.intensity, speed.flops_per_token * speed.tokens_per_s, marker="o", linestyle="", markersize=8,
            color=COLORS[speed.weights],
            label=f"{speed.weights}: {speed.tokens_per_s:.3g} tokens/s, {speed.share:.0%} of the bound",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", title=title, xlabel="FLOP per byte read", ylabel="FLOP/s")
    axes.grid(alpha=0.3, which="major")
    if speeds:
        axes.legend(loc="lower right", fontsize=8, title="decoding, one request")
    figure.savefig(path)
