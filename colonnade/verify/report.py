"""Reports of the results: a line per plan, a table, and JSON."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from colonnade.config import ModelConfig
from colonnade.verify.run import CHECKS, TOLERANCE, Result


def format_result(result: Result) -> str:
    """Format one plan's result, with the tensor of each miss."""
    words = []
    for check in (check for check in CHECKS if check in result.errors):
        words.append(f"{check} {_format_error(check, result.errors[check])}")
        if _missed(result, check) and result.where[check]:
            words[-1] += f" in {result.where[check]}"
    return f"{'ok  ' if result.ok else 'MISS'} {result.plan!s:48} {'  '.join(words)}"


def _format_error(check: str, error: float) -> str:
    return f"{error:.0f}" if check == "tokens" or error == 0 else f"{error:.0e}"


def _missed(result: Result, check: str) -> bool:
    return not result.errors[check] <= TOLERANCE


def print_result(result: Result) -> None:
    """Print :func:`format_result`; flushes, because it runs in a worker."""
    print(format_result(result), flush=True)


def table(results: Sequence[Result]) -> Table:
    """Tabulate the worst error by plan and check."""
    grid = Table("plan", *CHECKS, title=f"worst error against one process; a miss is above {TOLERANCE:.0e}")
    for result in results:
        cells = []
        for check in CHECKS:
            text = _format_error(check, result.errors[check]) if check in result.errors else "-"
            cells.append(f"[bold red]{text}[/]" if check in result.errors and _missed(result, check) else text)
        grid.add_row(str(result.plan), *cells)
    return grid


def write(results: Sequence[Result], model: ModelConfig, file: Path, device: str = "cpu") -> None:
    """Write ``results`` to ``file`` as JSON; an infinite error is null."""
    report = {
        "tolerance": TOLERANCE,
        "checks": CHECKS,
        "torch": torch.__version__,
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "model": model.model_dump(mode="json"),
        "plans": [
            {
                "plan": result.plan.model_dump(mode="json"),
                "name": str(result.plan),
                "ok": result.ok,
                "errors": {check: e if math.isfinite(e) else None for check, e in result.errors.items()},
                "where": result.where,
            }
            for result in results
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
