"""The inputs of a cleaning run: source files, the identity of the result, and the division into tasks."""

import hashlib
import importlib.util
import json
import math
from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any

from colonnade.config.recipe import Recipe
from colonnade.data.readers import ReadOptions, Source, find_files, read_documents, sotu_documents
from colonnade.data.refine.mend import named_filter
from colonnade.data.refine.overlap import evaluation_grams, overlap_grams
from colonnade.data.refine.parts import save_grams
from colonnade.data.refine.steps import File, Job, Unit, save_unit
from colonnade.data.refine.storage import json_line, write_lines
from colonnade.errors import ConfigError, DataError

UNIT_BYTES = 8 << 20
"""Approximate amount of text per task of the first stage."""
MAX_STRIPES = 16
"""Tasks that share a file: each reads all of it and takes every sixteenth document."""
PART_BYTES = 32 << 20
"""Approximate amount of text per part."""
MIN_PARTS = 4


def source_files(sources: Sequence[Source], recipe: Recipe, tasks: str | None) -> list[tuple[Source, File]]:
    """The source files with their properties, without those of dropped sources, ordered by name and size."""
    if not sources:
        raise DataError("no source; pass files or folders")
    if tasks not in (None, "source") and not tasks.startswith("field:"):
        raise ConfigError(f"--tasks {tasks} is neither source nor field:NAME; use one of them, or remove it")
    found: list[tuple[Source, File]] = []
    for source in sources:
        inside = sotu_documents() if source == "sotu" else find_files([source])
        owner = source[0] if isinstance(source, tuple) else Path(source).name or str(source)
        for each in inside:
            name = each[0] if isinstance(each, tuple) else Path(each).name
            if any(fnmatch(one, pattern) for one in (owner, name) for pattern in recipe.drop_sources):
                continue
            path = Path() if isinstance(each, tuple) else Path(each)
            rank = source_rank(recipe, owner, name)
            found.append((each, File(path, name, owner, rank, owner if tasks == "source" else None)))
    if not found:
        raise DataError("all sources are excluded by the recipe's drop_sources; use others")
    for name in recipe.filters:
        check_filter(name)
    if recipe.language and importlib.util.find_spec("py3langid") is None:
        raise ConfigError("Recipe.language needs the package py3langid; run: pip install 'colonnade[corpus]'")
    return sorted(found, key=lambda pair: (pair[1].name, str(pair[1].path)))


def check_filter(name: str) -> None:
    """Raise :class:`ConfigError` if a package of the filter is missing: it is imported at the first document."""
    from datatrove.data import Document

    try:
        named_filter(name, None).filter(
            Document("".join(f"The sentence number {i} is like that of others.\n" for i in range(60)), "")
        )
    except ImportError as error:
        raise ConfigError(f"filter '{name}' of datatrove needs more packages: {error}") from None


FORMAT = 2
"""Version of the intermediate files: increase it when they, or the division into tasks, change."""


def identity_of(files: list[tuple[Source, File]], recipe: Recipe, tests: Sequence[Source], rest: list[Any]) -> str:
    """A hash of everything that the result depends on; for a file its path, size and modification time."""
    parts: list[Any] = [FORMAT, recipe.model_dump_json(), rest]
    for source, file in [*files, *((test, None) for test in (find_files(tests) if tests else ()))]:
        if isinstance(source, tuple):
            parts.append([source, file and list(file[1:])])
        else:
            stat = Path(source).stat()
            parts.append([str(Path(source).absolute()), stat.st_size, stat.st_mtime_ns, file and list(file[1:])])
    return hashlib.sha256(json.dumps(parts, default=str).encode(errors="surrogatepass")).hexdigest()


def on_disk(pair: tuple[Source, File], work: Path, number: int, field: str) -> File | None:
    """The file of a source; a source in memory is written to a file for other processes. None for a source without
    text.
    """
    source, file = pair
    if not isinstance(source, tuple):
        return file._replace(path=file.path.absolute())
    for _ in read_documents([source], ReadOptions()):  # refuses invalid characters
        path = work / "input" / f"{number:06d}.jsonl"
        write_lines(path, [json_line({field: source[1]})])
        return file._replace(path=path.absolute())
    return None


def make_job(work: Path, recipe: Recipe, files: list[File], options: ReadOptions, tests: Sequence[Source]) -> Job:
    """The job of cleaning ``files``; writes its units and the grams of the evaluation sets ``tests``."""
    sizes = [_text_bytes(file.path) for file in files]
    units, group, group_bytes = list[Unit](), list[File](), 0
    for file, size in zip(files, sizes, strict=True):
        if size > UNIT_BYTES:
            parts = min(MAX_STRIPES, math.ceil(size / UNIT_BYTES))
            units += [Unit((file,), part, parts) for part in range(parts)]
            continue
        if group and group_bytes + size > UNIT_BYTES // 2:
            units.append(Unit(tuple(group), 0, 1))
            group, group_bytes = [], 0
        group.append(file)
        group_bytes += size
    if group:
        units.append(Unit(tuple(group), 0, 1))
    parts = max(MIN_PARTS, math.ceil(sum(sizes) / PART_BYTES))
    names = [each[0] if isinstance(each, tuple) else Path(each).name for each in find_files(tests)] if tests else []
    for rank, unit in enumerate(units):
        save_unit(work, rank, unit)
    job = Job(work.absolute(), recipe, parts, len(units), options, tuple(names))
    if tests:
        sets = [_texts(each, options) for each in find_files(tests)]
        for number, texts in enumerate(sets):
            save_grams(job, str(number), overlap_grams(texts))
        save_grams(job, "cut", evaluation_grams([text for texts in sets for text in texts], recipe.ngram))
    return job


def _text_bytes(path: Path) -> int:
    """Approximate size of a file's text, uncompressed."""
    if path.suffix == ".gz":
        return 4 * path.stat().st_size
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            metadata = pyarrow.parquet.read_metadata(path)
            return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        except pyarrow.ArrowException:
            pass  # the reading stage reports the error
    return path.stat().st_size


def _texts(source: Source, options: ReadOptions) -> list[str]:
    """The texts of an evaluation set; each line of a text file is one."""
    plain = not isinstance(source, tuple) and Path(source).suffix.lower() in (".txt", ".text", ".md")
    chunks = read_documents([source], options._replace(task_field=None, separator="\n" if plain else options.separator))
    texts, parts = list[str](), list[str]()
    for chunk in chunks:
        parts.append(chunk.text)
        if chunk.last:
            texts.append("".join(parts))
            parts = []
    if not texts:
        raise DataError(f"{source[0] if isinstance(source, tuple) else source} has no evaluation text; remove it")
    return texts


def source_rank(recipe: Recipe, *names: str) -> int:
    """The position of the first of ``recipe.prefer`` that matches one of ``names``."""
    matching = (i for i, pattern in enumerate(recipe.prefer) if any(fnmatch(name, pattern) for name in names))
    return next(chain(matching, [len(recipe.prefer)]))
