"""The matrix of plans and checks, for people and for programs."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from colonnade.config import ModelConfig
from colonnade.verify.run import CHECKS, TOLERANCE, Result


def line(result: Result) -> str:
    """One plan's result as it comes."""
    errors = "  ".join(f"{check} {error:.0e}" for check, error in result.errors.items())
    return f"{'ok  ' if result.ok else 'MISS'} {result.plan!s:48} {errors}"


def show(result: Result) -> None:
    """Print :func:`line`, at once: it comes from a worker."""
    print(line(result), flush=True)


def table(results: Sequence[Result]) -> Table:
    """Plan × check: the worst error, and in which tensor a miss is."""
    made = Table("plan", *CHECKS, title=f"worst error against one process; a miss is above {TOLERANCE:.0e}")
    for result in results:
        cells = []
        for check in CHECKS:
            if (error := result.errors.get(check)) is None:
                cells.append("-")
                continue
            missed = not error <= TOLERANCE
            cells.append(f"[bold red]{error:.0e} {result.where.get(check, '')}[/]" if missed else f"{error:.0e}")
        made.add_row(str(result.plan), *cells)
    return made


def write(results: Sequence[Result], model: ModelConfig, file: Path) -> None:
    """All of it as JSON."""
    found = {
        "tolerance": TOLERANCE,
        "checks": CHECKS,
        "torch": torch.__version__,
        "model": model.model_dump(mode="json"),
        "plans": [
            {
                "plan": result.plan.model_dump(mode="json"),
                "name": str(result.plan),
                "ok": result.ok,
                "errors": result.errors,
                "where": result.where,
            }
            for result in results
        ],
    }
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
