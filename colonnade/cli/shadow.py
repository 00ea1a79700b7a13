"""The verb ``shadow``: summarises comparisons with a shadow server."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from colonnade.errors import ConfigError

FIELDS = {"route", "status", "shadow_status", "latency_s", "shadow_latency_s"}
COLUMNS = ("route", "requests", "differ", "unanswered", "common prefix", "least cosine", "latency", "shadow's")


def shadow(
    file: Annotated[Positional[Path], arg(metavar="FILE")], max_differ: float = 0.0, min_cosine: float = 0.999
) -> None:
    """Summarise the comparisons that a server with --serve.shadow has logged; exits 1 if too many responses differ.

    Args:
        file: The log (--serve.shadow_log).
        max_differ: Share of the responses that may differ in status, text or class, or be missing.
        min_cosine: Embeddings with a smaller cosine count as different.
    """
    from colonnade.serve.shadow_comparison import summarise

    if not 0 <= max_differ <= 1:
        raise ConfigError(f"--max_differ is {max_differ:g}; it must be a share from 0 to 1")
    try:
        with file.open(encoding="utf-8") as lines:
            summaries = summarise(_comparisons(file, lines), min_cosine)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; use the file written by --serve.shadow_log") from None
    if not summaries:
        raise ConfigError(
            f"{file} has no comparisons; use the file written by --serve.shadow_log, or wait for requests"
        )
    table = Table(*COLUMNS, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for route in sorted(summaries):
        table.add_row(route, *summaries[route].row())
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    requests, differ = (sum(getattr(each, name) for each in summaries.values()) for name in ("requests", "differ"))
    if differ > max_differ * requests:
        raise ConfigError(
            f"{differ:,} of {requests:,} responses differ ({differ / requests:.1%}), more than --max_differ "
            f"{max_differ:g} allows; compare both servers' models, dtypes and settings"
        )


def _comparisons(file: Path, lines: Iterator[str]) -> Iterator[dict]:
    for number, line in enumerate(lines, 1):
        try:
            it = json.loads(line)
        except (ValueError, RecursionError):
            it = None
        if not isinstance(it, dict) or not it.keys() >= FIELDS:
            raise ConfigError(f"{file}, line {number} is not a comparison; use the file written by --serve.shadow_log")
        yield it
