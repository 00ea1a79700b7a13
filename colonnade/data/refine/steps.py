"""Reading, repairing and filtering as datatrove pipeline steps, and the job shared by all stages.

Each task reads and writes its own files. The stages:

    read      a unit of input: repair, filter    -> sorted records, removed records
    exact     a part of the ids: exact copies  -> records, shingles, bands of signatures
    buckets   a band                           -> documents with equal signatures in it
    group     one task                         -> connected components, a share for each part
    near      a share of the components        -> removed documents and their twins
    count     a part                           -> how often grams of evaluation texts occur
    rare      one task                         -> the grams to cut out
    write     a part                           -> documents, removed records, overlap

``read`` is here, the others are in :mod:`~colonnade.data.refine.parts`. No task reads the whole output of another stage
about documents, so the time grows linearly with the corpus.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter

from colonnade.config.recipe import Recipe
from colonnade.data.readers import ReadOptions, read_documents
from colonnade.data.refine.mend import MinTokens, mend, named_filter
from colonnade.data.refine.storage import (
    Record,
    document_id,
    json_line,
    text_key,
    write_json,
    write_lines,
    write_unit,
)
from colonnade.errors import DataError

MAX_CHARACTERS = 1 << 25
"""Maximum length of a document; a text file without a separator is one document."""
CHUNK_BYTES = 32 << 20
"""Approximate amount of text that a task of the first stage keeps in memory."""
STEPS = ("titles", "language", "length", "filters", "exact", "near", "decontaminate")
"""The steps that remove documents, in order."""


Documents = Iterable[Document]


class File(NamedTuple):
    """A source file."""

    path: Path
    name: str
    owner: str
    """The name of the source that the file is or belongs to."""
    rank: int
    """Of two duplicates, the one of lower rank is kept."""
    task: str | None = None


class Unit(NamedTuple):
    """The input of one task: some files, or a share of the documents of one file."""

    files: tuple[File, ...]
    part: int
    parts: int


class Job(NamedTuple):
    """The job, known to all stages."""

    work: Path
    recipe: Recipe
    parts: int
    units: int
    """Tasks of the first stage. What each reads is in the folder ``units``: a job is sent to every task."""
    options: ReadOptions
    tests: tuple[str, ...] = ()
    """Names of the evaluation sets, whose grams are in the folder ``tests``."""

    @property
    def finds_near(self) -> bool:
        """Whether near duplicates are removed."""
        return self.recipe.similarity < 1

    def removed(self, stage: str, task: int, step: str) -> Path:
        """The file of records that ``step`` removed in a task of ``stage``."""
        return self.work / stage / f"{task:06d}.{step}.removed"

    def stats(self, stage: str, task: int) -> Path:
        """The statistics file of a task."""
        return self.work / "stats" / f"{stage}-{task:06d}.json"


def save_unit(work: Path, rank: int, unit: Unit) -> None:
    """Write what task ``rank`` of the first stage reads."""
    files = [[str(file.path), *file[1:]] for file in unit.files]
    write_json(work / "units" / f"{rank:06d}.json", {"files": files, "stripe": [unit.part, unit.parts]})


def load_unit(work: Path, rank: int) -> Unit:
    """Read what :func:`save_unit` wrote."""
    stored = json.loads((work / "units" / f"{rank:06d}.json").read_text("utf-8"))
    return Unit(tuple(File(Path(path), *rest) for path, *rest in stored["files"]), *stored["stripe"])


class Stage(PipelineStep):
    """A step that does not receive documents from another one."""

    type = "colonnade"

    def __init__(self, job: Job):
        super().__init__()
        self.job = job

    def run(self, data: Documents | None = None, rank: int = 0, world_size: int = 1) -> Any:
        """Run task ``rank``."""
        return self._task(data or (), rank)

    def _task(self, data: Documents, rank: int) -> Any:
        raise NotImplementedError


class Removed:
    """Writes the documents that filters remove, with their reasons; the exclusion writer of datatrove's filters."""

    def __init__(self, job: Job, step: str):
        self.job, self.step, self.owners = job, step, Counter[str]()
        self.count = self.size_bytes = 0
        self._lines, self._held_bytes, self._files = list[bytes](), 0, 0

    def __enter__(self) -> "Removed":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, document: Document, rank: int = 0, **kwargs: Any) -> None:
        """Record a removed ``document`` with its reason."""
        reason = str(document.metadata.get("filter_reason", self.step))
        self._lines.append(json_line(removed_record(document.text, reason, document.metadata["source"])))
        self._held_bytes += len(self._lines[-1])
        self.owners[document.metadata["owner"]] += 1
        self.count += 1
        self.size_bytes += len(document.text.encode())
        if self._held_bytes >= CHUNK_BYTES:
            self.flush(rank)

    def flush(self, rank: int) -> None:
        """Write the buffered records, sorted, to a new file."""
        write_lines(self.job.removed("read", rank, f"{self._files:04d}.{self.step}"), sorted(self._lines))
        self._lines, self._held_bytes, self._files = [], 0, self._files + 1


def removed_record(text: str, reason: str, source: str, document: str | None = None) -> Record:
    """A line of ``removed/STEP.jsonl``."""
    return {"id": document or document_id(text), "reason": reason, "source": source, "text": text}


class ReadDocuments(Stage):
    """Yields the documents of a unit."""

    name = "read"

    def _task(self, data: Documents, rank: int) -> Iterator[Document]:
        unit = load_unit(self.job.work, rank)
        options = self.job.options._replace(stripe=(unit.part, unit.parts))
        for file in unit.files:
            yield from self._documents(file, options)

    def _documents(self, file: File, options: ReadOptions) -> Iterator[Document]:
        texts: list[str] = []
        characters = 0
        for chunk in read_documents([file.path], options):
            texts.append(chunk.text)
            if (characters := characters + len(chunk.text)) > MAX_CHARACTERS:
                raise DataError(
                    f"{file.path} has a document of more than {MAX_CHARACTERS:,} characters; divide it with --separator"
                )
            if chunk.last:
                meta = {
                    "source": file.name, "owner": file.owner, "rank": file.rank, "task": file.task or chunk.task,
                    "title": chunk.title,
                }  # fmt: skip
                yield Document("".join(texts), file.name, metadata={k: v for k, v in meta.items() if v is not None})
                texts, characters = [], 0


class Mend(Stage):
    """Repairs characters and lines."""

    name = "mend"

    def _task(self, data: Documents, rank: int) -> Iterator[Document]:
        for document in data:
            self.stat_update("total")
            mended = mend(document.text)
            document.metadata["mended"] = mended != document.text
            document.text = mended
            if mended.strip():
                yield document


class DropTitles(BaseFilter):
    """Removes the documents with a listed title."""

    name = "titles"

    def __init__(self, titles: Iterable[str], removed: Removed):
        super().__init__(cast(Any, removed))
        self.titles = frozenset(titles)

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Whether ``doc`` stays, or why not."""
        title = str(doc.metadata.get("title", "")).strip()
        return title not in self.titles or (False, f"title '{title}' is listed")


class Language(BaseFilter):
    """Keeps the documents in one language, judged by their first 2,000 characters."""

    name = "language"

    def __init__(self, language: str, removed: Removed):
        super().__init__(cast(Any, removed))
        self.language = language

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Whether ``doc`` stays, or why not."""
        import py3langid

        language = py3langid.classify(doc.text[:2000])[0]
        return language == self.language or (False, f"language {language}, not {self.language}")


class Length(BaseFilter):
    """Removes short documents."""

    name = "length"

    def __init__(self, tokens: MinTokens, removed: Removed):
        super().__init__(cast(Any, removed))
        self.tokens = tokens

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Whether ``doc`` stays, or why not."""
        count = self.tokens.count_if_fewer(doc.text)
        return count is None or (False, f"{count} tokens are fewer than {self.tokens.least}")


class WriteUnit(Stage):
    """Writes the remaining and the filtered documents of a unit, in chunks of bounded size."""

    name = "write unit"

    def __init__(self, job: Job, removed: tuple[Removed, ...]):
        super().__init__(job)
        self.removed = removed

    def _task(self, data: Documents, rank: int) -> None:
        records, owners, mended, kept, kept_bytes = list[Record](), Counter[str](), 0, 0, 0
        chunk = chunk_bytes = 0

        def write() -> None:
            nonlocal records, chunk, chunk_bytes
            write_unit(self.job.work / "read" / f"{rank:06d}-{chunk:04d}", records, self.job.parts)
            records, chunk, chunk_bytes = [], chunk + 1, 0

        for document in data:
            meta, size = document.metadata, len(document.text.encode())
            mended += bool(meta.get("mended"))
            kept, kept_bytes, chunk_bytes = kept + 1, kept_bytes + size, chunk_bytes + size
            owners[meta["owner"]] += 1
            more = {"task": meta["task"]} if "task" in meta else {}
            records.append(
                {"id": document_id(document.text), "rank": meta["rank"], "key": text_key(document.text),
                 "source": meta["source"], "text": document.text, **more}
            )  # fmt: skip
            if chunk_bytes >= CHUNK_BYTES:
                write()
        write()
        stats: dict[str, Any] = {"kept": [kept, kept_bytes], "mended": mended}
        for removed in self.removed:
            removed.flush(rank)
            owners.update(removed.owners)
            stats[removed.step] = [removed.count, removed.size_bytes]
        write_json(self.job.stats("read", rank), {**stats, "sources": owners})


def read_pipeline(job: Job, titles: Iterable[str], tokens: MinTokens | None) -> list[PipelineStep]:
    """The steps of the first stage."""
    recipe, steps, removed = job.recipe, list[PipelineStep](), list[Removed]()

    def sink(step: str) -> Removed:
        if not (removed and removed[-1].step == step):
            removed.append(Removed(job, step))
        return removed[-1]

    steps.append(ReadDocuments(job))
    if recipe.mend:
        steps.append(Mend(job))
    if titles:
        steps.append(DropTitles(titles, sink("titles")))
    if recipe.language:
        steps.append(Language(recipe.language, sink("language")))
    if tokens is not None:
        steps.append(Length(tokens, sink("length")))
    steps += [named_filter(name, sink("filters")) for name in recipe.filters]
    return [*steps, WriteUnit(job, tuple(removed))]
