"""The results of an evaluation as JSON and as a page with plots."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.data import html_report
from colonnade.errors import DataError

if TYPE_CHECKING:
    from colonnade.evaluate.run import TaskResult


def write_report(
    out: Path, model: str, results: Sequence["TaskResult"], options: Mapping[str, Any], took_s: float
) -> None:
    """Write ``results.json`` and ``report.html`` to the folder ``out``."""
    values = {
        "model": model, "options": {k: v for k, v in options.items() if v}, "took_s": round(took_s, 1),
        "tasks": [vars(result) for result in results],
    }  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=1, ensure_ascii=False, default=str)
        (out / "results.json").write_text(text + "\n", "utf-8")
        (out / "report.html").write_text(html(model, results), "utf-8")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}; choose another folder with --out") from None


def html(model: str, results: Sequence["TaskResult"]) -> str:
    """The page."""
    parts = [html_report.table(("task", "examples", "metric", "value", "standard error"), rows(results))]
    shares = {
        f"{result.task}: {metric}": (value, result.stderr.get(metric, 0.0))
        for result in results
        for metric, value in result.metrics.items()
        if metric.startswith(("acc", "exact_match", "f1")) and 0 <= value <= 1
    }
    others = {
        f"{result.task}: {metric}": value
        for result in results
        for metric, value in result.metrics.items()
        if "perplexity" in metric
    }
    if shares:
        parts.append(html_report.plot("Accuracy, with one standard error", lambda axes: _shares(axes, shares)))
    if others:
        parts.append(html_report.plot("Perplexity (lower is better)", lambda axes: _perplexities(axes, others)))
    for result in results:
        if result.samples:
            parts.append(html_report.heading(f"{result.task}: the first examples"))
            parts += [_example(sample) for sample in result.samples]
    return html_report.page(f"Evaluation of {model}", parts)


def rows(results: Sequence["TaskResult"]) -> list[tuple[str, int, str, float, float | str]]:
    """(task, examples, metric, value, standard error) of each metric."""
    return [
        (result.task, result.examples, metric, round(value, 6), round(result.stderr.get(metric, 0.0), 6) or "")
        for result in results
        for metric, value in result.metrics.items()
    ]


def _example(sample: Mapping[str, Any]) -> str:
    shown = [f"… {sample['arguments'][0][-300:]}" if sample["arguments"] else "", sample["target"], sample["answers"]]
    return html_report.table(("question", "target", "answers"), [shown])


def _shares(axes: Any, values: Mapping[str, tuple[float, float]]) -> None:
    axes.barh(list(values), [v for v, _ in values.values()], xerr=[e for _, e in values.values()], color="#4477aa")
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _perplexities(axes: Any, values: Mapping[str, float]) -> None:
    axes.barh(list(values), list(values.values()), color="#cc6677")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
