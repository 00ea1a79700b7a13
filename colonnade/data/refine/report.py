"""The report of a cleaning run: counts of each step, overlap with test sets; as JSON and as a page with plots."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from colonnade.config import plural
from colonnade.data import html_report
from colonnade.data.refine.storage import merge_lines, write_bytes, write_json

if TYPE_CHECKING:
    from colonnade.data.refine.steps import Job


EXAMPLES, EXAMPLE_CHARACTERS = 3, 160
"""Removed documents of each step on the page, and the length of what it shows of each."""


@dataclass(frozen=True)
class Report:
    """The counts of a cleaning run; the same for any number of workers and any order of files."""

    read: int
    """Documents that had text after repairs."""
    documents: int
    """Kept documents; a document that is cut may become several."""
    size_bytes: int
    """Size of their text in UTF-8."""
    mended: int
    """Documents changed by repairs."""
    removed: dict[str, tuple[int, int]]
    """(documents, bytes of text) that each step removed, in order; decontaminate: documents that it cut or removed."""
    sources: dict[str, int]
    """Documents read of each source."""
    overlap: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(8-grams found in the corpus, all 8-grams) of each test set."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Kept documents with 2^(k-1) to 2^k − 1 characters, by k."""
    similarities: dict[int, int] = field(default_factory=dict)
    """Near duplicates by similarity in hundredths."""
    recipe: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read_json(cls, values: dict[str, Any]) -> "Report":
        """The report of a parsed report.json."""
        pairs: dict[str, Any] = {
            name: {key: tuple(pair) for key, pair in values[name].items()} for name in ("removed", "overlap")
        }
        keyed: dict[str, Any] = {
            name: {int(k): v for k, v in values[name].items()} for name in ("lengths", "similarities")
        }
        return cls(**{**values, **pairs, **keyed})

    @classmethod
    def read_folder(cls, out: Path) -> "Report":
        """The report of a cleaned folder."""
        return cls.read_json(json.loads((out / "report.json").read_text("utf-8")))

    def summary(self) -> str:
        """``"100 documents read; length removed 20, exact 3, near 2"``."""
        parts = [f"{step} removed {number:,}" for step, (number, _) in self.removed.items() if number]
        pieces = f"; {plural(self.pieces, 'piece')} of cut documents are kept" if self.pieces else ""
        return f"{plural(self.read, 'document')} read; {', '.join(parts) or 'nothing was removed'}{pieces}"

    @property
    def pieces(self) -> int:
        """Documents that are pieces of those that decontaminate cut."""
        return self.documents + sum(number for number, _ in self.removed.values()) - self.read


def finish(job: "Job", out: Path) -> None:
    """Merge and move the results of the stages to ``out``; may run again after it was killed."""
    from colonnade.data.refine.steps import STEPS

    for step in STEPS:
        files = sorted(job.work.glob(f"*/*.{step}.removed"))
        if files:
            merge_lines(files, out / "removed" / f"{step}.jsonl")
    report = _collect(job)
    if (job.work / "documents").is_dir():
        shutil.rmtree(out / "documents", ignore_errors=True)
        (job.work / "documents").rename(out / "documents")
    write_bytes(out / "report.html", html(report, out / "removed").encode())
    write_json(out / "report.json", vars(report))


def _collect(job: "Job") -> Report:
    from colonnade.data.refine.steps import STEPS

    removed = {step: [0, 0] for step in STEPS}
    numbers: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    similarities: Counter[int] = Counter()
    for file in sorted((job.work / "stats").glob("*.json")):
        stats = json.loads(file.read_text("utf-8"))
        for step, totals in removed.items():
            for i, value in enumerate(stats.get(step, ())):
                totals[i] += value
        sources.update(stats.get("sources", {}))
        numbers["mended"] += stats.get("mended", 0)
        lengths.update({int(k): v for k, v in stats.get("lengths", {}).items()})
        similarities.update({int(k): v for k, v in stats.get("similarities", {}).items()})
        if file.name.startswith("write-"):
            numbers["documents"] += stats["kept"][0]
            numbers["size_bytes"] += stats["kept"][1]
    overlap: dict[str, tuple[int, int]] = {}
    for number, name in enumerate(job.tests):
        total = (job.work / "tests" / f"{number}.grams").stat().st_size // 8
        found = np.zeros((total + 7) // 8, np.uint8)
        for file in sorted((job.work / "overlap").glob(f"{number}-*.found")):
            found |= np.fromfile(file, np.uint8)
        overlap[name] = (int(np.unpackbits(found).sum()), total)
    return Report(
        read=sum(sources.values()), documents=numbers["documents"], size_bytes=numbers["size_bytes"],
        mended=numbers["mended"], removed={step: (pair[0], pair[1]) for step, pair in removed.items()},
        sources=dict(sorted(sources.items())), overlap=overlap, lengths=dict(sorted(lengths.items())),
        similarities=dict(sorted(similarities.items())), recipe=job.recipe.model_dump(mode="json"),
    )  # fmt: skip


def html(report: Report, removed: Path) -> str:
    """The report as a page, with examples from the folder of removed documents."""
    steps = {step: pair for step, pair in report.removed.items() if pair[0]}
    rows = [
        ("read", report.read, ""),
        *((step, *pair) for step, pair in steps.items()),
        *([("pieces of cut documents", report.pieces, "")] if report.pieces else []),
        ("stay", report.documents, report.size_bytes),
    ]
    parts = [
        html_report.paragraph(f"{report.summary()}. {plural(report.mended, 'document')} mended."),
        html_report.table(("step", "documents", "bytes of text"), rows),
    ]
    if steps:
        parts.append(
            html_report.plot(
                "Documents removed by each step", lambda axes: _bars(axes, {k: v[0] for k, v in steps.items()})
            )
        )
        columns = ("step", "reason", "source", "text")
        parts += [html_report.heading("Removed, for example"), html_report.table(columns, _examples(removed))]
    if report.lengths:
        names = {f"{1 << k >> 1:,}": v for k, v in report.lengths.items()}
        parts.append(
            html_report.plot(
                "Documents that are kept, by characters (from this many, to twice as many)",
                lambda axes: _bars(axes, names, upright=True),
            )
        )
    if report.similarities:
        numbers = {k / 100: v for k, v in report.similarities.items()}
        parts.append(
            html_report.plot(
                "Near copies, by Jaccard similarity to the document that is kept",
                lambda axes: _histogram(axes, numbers),
            )
        )
    if report.overlap:
        shares = {name: 100 * found / max(total, 1) for name, (found, total) in report.overlap.items()}
        rows = [(name, found, total, f"{shares[name]:.2f}%") for name, (found, total) in report.overlap.items()]
        parts += [
            html_report.heading("Test sets in the corpus"),
            html_report.paragraph(
                "The share of a test set's distinct 8-grams that occur in the documents that are kept. "
                f"Decontamination cuts longer matches that occur fewer than {report.recipe['common']:,} times; common "
                "phrases are kept."
            ),
            html_report.table(("test set", "found", "8-grams", "share"), rows),
            html_report.plot("8-grams of test sets found in the corpus [%]", lambda axes: _bars(axes, shares)),
        ]
    parts += [html_report.heading("Sources"), html_report.table(("source", "documents read"), _most(report.sources))]
    parts += [
        html_report.heading("Recipe"),
        html_report.table(("key", "value"), [(k, str(v)) for k, v in report.recipe.items()]),
    ]
    return html_report.page("Cleaned corpus", parts)


def _examples(removed: Path) -> list[tuple[str, str, str, str]]:
    """(step, reason, source, start of the text) of the first documents that each step removed."""
    rows = []
    for file in sorted(removed.glob("*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            for record in map(json.loads, islice(lines, EXAMPLES)):
                text = record["text"][:EXAMPLE_CHARACTERS]
                rows.append((file.stem, record["reason"], record["source"], text))
    return rows


def _most(sources: dict[str, int], count: int = 50) -> list[tuple[str, int]]:
    """The sources with most documents; the others together."""
    ordered = sorted(sources.items(), key=lambda pair: (-pair[1], pair[0]))
    rest = ordered[count:]
    return [*ordered[:count], *([(f"{len(rest):,} others", sum(n for _, n in rest))] if rest else [])]


def _bars(axes: Any, values: Mapping[str, float], upright: bool = False) -> None:
    names, numbers = list(values), list(values.values())
    if upright:
        axes.bar(names, numbers, color="#4477aa")
        axes.tick_params(axis="x", rotation=45)
    else:
        axes.barh(names, numbers, color="#4477aa")
        axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _histogram(axes: Any, values: dict[float, int]) -> None:
    axes.bar(list(values), list(values.values()), width=0.009, align="edge", color="#4477aa")
    axes.set_xlabel("similarity")
    axes.set_ylabel("documents")
    axes.spines[["top", "right"]].set_visible(False)
