"""The verb ``bench``."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from colonnade.cli.common import GenerativeModel, console, refuse_torchrun
from colonnade.config import Device, Plan
from colonnade.cores import MAX_IDLE_LOAD, read_machine
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.bench.ceilings import Ceilings
    from colonnade.bench.roofline import DecodeSpeed

Weights = Literal["float32", "bfloat16", "int8", "int4"]
PLOT_SUFFIXES = (".svg", ".png", ".pdf")
CEILINGS_SHARE = 0.3
"""Share of the time for measuring bandwidth and products."""


def bench(
    model: Positional[GenerativeModel] = "smollm2",
    weights: tuple[Weights, ...] = get_args(Weights),
    seconds: float = 30.0,
    device: Device = "auto",
    plot: Path | None = None,
    as_json: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Measure this machine, and the share of its memory bandwidth that decoding reaches.

    Prints the read bandwidth and the rates of matrix products by number of threads, and for each weight format the
    bytes read per token, the maximum tokens/s that this bandwidth allows, those of the engine, and their ratio. Ctrl-C
    prints what has been measured.

    Args:
        model: The model that decodes.
        weights: Weight formats to measure.
        seconds: Time for measuring; loading the model for each format takes additional time.
        device: auto: a GPU if there is one.
        plot: File for the roofline plot: .svg, .png or .pdf.
        as_json: Print JSON instead of tables.
    """
    refuse_torchrun("bench")
    if not 0 < seconds <= 86_400:
        raise ConfigError(f"--seconds {seconds:g} is not over 0 and at most 86400")
    if not weights:
        raise ConfigError(f"--weights is empty; list some of {', '.join(get_args(Weights))}")
    if plot and plot.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {plot} has no supported image format; end it in {', '.join(PLOT_SUFFIXES)}")
    if plot and not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}; create it first")
    from colonnade.bench.ceilings import machine_name, measure_ceilings, thread_counts
    from colonnade.bench.roofline import check_model, measure_decoding
    from colonnade.parallel.distributed_context import choose_device

    check_model(model)
    on: Literal["cpu", "cuda"] = "cuda" if choose_device(Plan(), device) == "cuda" else "cpu"
    name, ceilings, speeds = machine_name(on), list["Ceilings"](), list["DecodeSpeed"]()
    try:
        if on == "cpu" and (load := read_machine().load) > MAX_IDLE_LOAD:
            console.print(
                f"other processes keep {min(1, load):.0%} of the CPUs busy: this machine can do more", soft_wrap=True
            )
        console.print("measuring read bandwidth and matrix products")
        import torch

        ceilings.extend(measure_ceilings(on, thread_counts(torch.get_num_threads()), CEILINGS_SHARE * seconds))
        bandwidth = max(each.read_bytes_per_s for each in ceilings)
        console.print(f"measuring {model} with weights in {', '.join(weights)}")
        speeds.extend(measure_decoding(model, weights, on, bandwidth, (1 - CEILINGS_SHARE) * seconds))
    finally:  # also after Ctrl-C
        _print(as_json, name, model, ceilings, speeds)
    if plot:
        from colonnade.bench.roofline_plot import draw_roofline

        draw_roofline(plot, f"{model} on {name}", max(ceilings, key=lambda each: each.threads), speeds)
        console.print(f"wrote {plot}")


def _print(as_json: bool, name: str, model: str, ceilings: "list[Ceilings]", speeds: "list[DecodeSpeed]") -> None:
    if as_json:
        decoding = [asdict(each) | {"share_of_bound": each.share} for each in speeds]
        record = {"machine": name, "ceilings": [each._asdict() for each in ceilings], "model": model}
        json.dump(record | {"decoding": decoding}, sys.stdout, indent=2)
        print()
        return
    out = Console(highlight=False)
    formats = list(ceilings[0].flops) if ceilings else []
    table = _table(name, "threads", "read GB/s", *(f"{each} GFLOP/s" for each in formats))
    for each in ceilings:
        rates = (f"{each.flops[kind] / 1e9:,.0f}" for kind in formats)
        table.add_row(str(each.threads), f"{each.read_bytes_per_s / 1e9:.1f}", *rates)
    out.print(table)
    table = _table(f"{model}, one request", "weights", "MB/token", "bound tokens/s", "tokens/s", "reached")
    for each in speeds:
        table.add_row(
            each.weights, f"{each.bytes_per_token / 1e6:,.0f}", f"{each.bound_tokens_per_s:,.1f}",
            f"{each.tokens_per_s:,.1f}", f"{each.share:.0%}",
        )  # fmt: skip
    out.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
