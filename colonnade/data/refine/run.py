"""Runs the stages of cleaning with datatrove's executors, and publishes the result.

    out/documents/*.jsonl    the kept documents, in the order of their ids: id, text, and the task if any
    out/removed/STEP.jsonl   what each step removed: id, reason, source, text
    out/report.json          numbers of each step, overlap with evaluation texts
    out/report.html          the same with plots
    out/logs/                datatrove's logs and its record of finished tasks

A run that was killed continues when it is called again with the same sources, recipe and folder.
"""

import importlib.util
import json
import logging
import os
import shutil
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.stats import PipelineStats
from loguru import logger

from colonnade.config import plural
from colonnade.config.recipe import RECIPES, Recipe
from colonnade.data.readers import ReadOptions, Source
from colonnade.data.refine.inputs import identity_of, make_job, on_disk, source_files
from colonnade.data.refine.mend import MinTokens
from colonnade.data.refine.parts import (
    BucketComponents,
    CountGrams,
    ExactDuplicates,
    MatchingBuckets,
    NearDuplicates,
    SelectRareGrams,
    WritePart,
)
from colonnade.data.refine.report import Report, finish
from colonnade.data.refine.steps import Documents, Job, Stage, read_pipeline
from colonnade.data.refine.storage import write_json
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError

MEGATRON = RECIPES["megatron"]


@dataclass(frozen=True)
class Executor:
    """Where the stages run; datatrove's local, Slurm and Ray executors."""

    kind: Literal["local", "slurm", "ray"] = "local"
    workers: int = 1
    """Tasks that run at the same time."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of datatrove's executor, such as partition and time of Slurm."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 1 << 16:
            raise ConfigError(f"--workers {self.workers} is not from 1 to 65,536; use the number of cores")


class Local(LocalPipelineExecutor):
    """datatrove's local executor, with its logs in files only, and with our pool of processes.

    datatrove starts a new pool for each stage, and hangs if one of its processes is killed.
    """

    def __init__(self, pool: ProcessPoolExecutor | None, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._pool = pool

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        logger.enable("datatrove")
        try:
            with redirect_stderr(StringIO()):
                return super()._run_for_rank(rank, local_rank, node_rank)
        finally:
            logger.disable("datatrove")

    def run(self) -> Any:
        """Run the tasks that are not finished."""
        logger.disable("datatrove")
        try:
            ranks = self.get_incomplete_ranks(range(self.tasks))
            self.save_executor_as_json()
            if self._pool is not None:
                deque(self._pool.map(self._run_for_rank, ranks), 0)
                return
            for rank in ranks:
                deepcopy(self)._run_for_rank(rank)
        except BrokenProcessPool:
            raise DataError(
                "a cleaning process was killed, perhaps because memory ran out; rerun the same command, which "
                "resumes, with fewer --workers"
            ) from None
        finally:
            logger.enable("datatrove")


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of processes for all stages, if there are several ``workers``.

    Its processes do not import the main module, which they do not need: where that import fails (a notebook, a script
    on standard input, a script without ``if __name__ == "__main__"``), they would not start.
    """
    if workers == 1:
        yield None
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["colonnade.data.refine.parts"])
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    pool = ProcessPoolExecutor(workers, context, _end_with_parent)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        sys.modules["__main__"] = main


def _end_with_parent() -> None:
    """End this process when its parent is killed: otherwise it would wait for tasks forever."""
    if (parent := parent_process()) is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


class Finish(Stage):
    """Merges the removed records, writes the report, and moves the results to their places."""

    name = "finish"

    def __init__(self, job: Job, out: Path):
        super().__init__(job)
        self.out = out

    def _task(self, data: Documents, rank: int) -> None:
        """Finish; a separate task, because on Slurm no process waits for the others."""
        finish(self.job, self.out)


def run(
    sources: Sequence[Source],
    out: str | Path,
    recipe: Recipe = MEGATRON,
    executor: Executor | None = None,
    *,
    field: str = "text",
    separator: str | None = None,
    tasks: str | None = None,
    tokenizer: Tokenizer | None = None,
    decontaminate: Sequence[Source] = (),
    progress: Callable[[str], object] = lambda _stage: None,
) -> Report | None:
    """Clean ``sources`` into the folder ``out``; None if the stages were only submitted (Slurm).

    ``sources``, ``field``, ``separator`` and ``tasks`` are those of :func:`colonnade.data.build`, and ``sotu`` is the
    sample of speeches. ``tokenizer`` counts the tokens of short documents. ``decontaminate``: files of evaluation
    texts, each a test set. A finished folder is not built again. Raises :class:`DataError` for files that cannot be
    read, and if no document is kept.
    """
    out, executor = Path(out), executor or Executor()
    files = source_files(sources, recipe, tasks)
    identity = identity_of(files, recipe, decontaminate, [field, separator, tasks, tokenizer and tokenizer.fingerprint])
    work = out / "work"
    if out.exists() and _stored_identity(out) != identity:
        if any(out.iterdir()) and not (out / "identity.json").is_file():
            raise DataError(f"{out} exists and is not a cleaned corpus; choose another folder")
        shutil.rmtree(out)
    if (out / "report.json").is_file():
        return _checked_report(out)
    work.mkdir(parents=True, exist_ok=True)
    write_json(out / "identity.json", {"sha256": identity})
    files = [on_disk(file, work, number, field) for number, file in enumerate(files)]
    options = ReadOptions(
        field,
        separator,
        task_field=tasks.partition(":")[2] if tasks and tasks != "source" else None,
        tasks={},  # datatrove copies its pipelines, and a mapping proxy cannot be copied
        title_field=recipe.title_field,
    )
    job = make_job(work, recipe, [file for file in files if file is not None], options, decontaminate)
    stages = _stages(job, out, tokenizer)
    if executor.kind == "local":
        with _pool(executor.workers) as pool:
            for number, (name, pipeline, count) in enumerate(stages):
                progress(f"stage {number + 1} of {len(stages)}, {name.partition('-')[2]}")
                Local(pool, pipeline, tasks=count, logging_dir=str(out / "logs" / name)).run()
    elif _run_remote(stages, executor, out):
        return None
    return _checked_report(out)


def _checked_report(out: Path) -> Report:
    """The report of a finished folder; raises :class:`DataError` if no document is kept."""
    shutil.rmtree(out / "work", ignore_errors=True)
    report = Report.read_folder(out)
    if not report.documents:
        raise DataError(f"no document is kept: {report.summary()}; change the recipe")
    return report


def _run_remote(stages: list[tuple[str, list[PipelineStep], int]], executor: Executor, out: Path) -> bool:
    """Run on Ray, or submit to Slurm; True if the stages were only submitted."""
    if executor.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("the executor ray needs the package ray; run: pip install ray")
        from datatrove.executor import RayPipelineExecutor

        make: Any = RayPipelineExecutor
    else:
        if shutil.which("sbatch") is None:
            raise ConfigError("the executor slurm needs the program sbatch, which is not on the PATH of this machine")
        if missing := [name for name in ("partition", "time") if name not in executor.options]:
            raise ConfigError(f"the executor slurm needs {' and '.join(missing)}; pass --slurm.{missing[0]}")
        from datatrove.executor import SlurmPipelineExecutor

        make = SlurmPipelineExecutor
    last: Any = None
    for name, pipeline, count in stages:
        options: dict[str, Any] = {**executor.options}
        if executor.kind == "slurm":
            options |= {"job_name": f"corpus-{name}", "slurm_logs_folder": str(out / "logs" / name / "slurm")}
        last = make(
            pipeline, tasks=count, workers=min(executor.workers, count), depends=last,  # pyrefly: ignore[bad-argument-type]
            logging_dir=str((out / "logs" / name).absolute()), **options,
        )  # fmt: skip
        last.run()
        if executor.kind == "ray" and (failed := last.get_incomplete_ranks()):
            raise DataError(
                f"{plural(len(failed), 'task')} of the stage {name} failed; see {out / 'logs' / name}, and rerun the "
                "same command to resume"
            )
    return executor.kind == "slurm"


def _stages(job: Job, out: Path, tokenizer: Tokenizer | None) -> list[tuple[str, list[PipelineStep], int]]:
    """(name, steps, number of tasks) of each stage."""
    recipe, counter = job.recipe, None
    if recipe.min_tokens:
        path = None
        if tokenizer is not None:
            path = job.work / "tokenizer"
            tokenizer.save(path)
        counter = MinTokens(recipe.min_tokens, path)
    titles = _titles(recipe)
    stages: list[tuple[str, list[PipelineStep], int]] = [
        ("1-read", read_pipeline(job, titles, counter), job.units),
        ("2-exact", [ExactDuplicates(job)], job.parts),
    ]
    if job.finds_near:
        stages += [
            ("3-buckets", [MatchingBuckets(job)], recipe.bands),
            ("4-group", [BucketComponents(job)], 1),
            ("5-near", [NearDuplicates(job)], job.parts),
        ]
    if job.tests:
        stages += [("6-count", [CountGrams(job)], job.parts), ("7-rare", [SelectRareGrams(job)], 1)]
    return [*stages, ("8-write", [WritePart(job)], job.parts), ("9-finish", [Finish(job, out)], 1)]


def _titles(recipe: Recipe) -> tuple[str, ...]:
    if not recipe.drop_titles:
        return ()
    try:
        lines = Path(recipe.drop_titles).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the titles in {recipe.drop_titles}: {error}; use a file with one title per line"
        ) from None
    return tuple(stripped for each in lines if (stripped := each.strip()))


def _stored_identity(out: Path) -> str | None:
    try:
        return json.loads((out / "identity.json").read_text())["sha256"]
    except (OSError, ValueError, KeyError):
        return None


logging.getLogger("fsspec").setLevel(logging.WARNING)
