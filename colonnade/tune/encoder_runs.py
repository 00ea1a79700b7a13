"""Fine-tunes an encoder with several seeds and reports the median, as the Megatron-LM paper does (section 5.3).

A grid over learning rates and batch sizes is searched with the first seed; the other seeds use the best pair. The
median run on the development set gives the test score. The ensemble averages the runs' probabilities.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.checkpoint import native
from colonnade.checkpoint.hf.pooling import read_pooling
from colonnade.checkpoint.load_model import load_model, open_for_plan, open_model
from colonnade.checkpoint.native import read_class_names
from colonnade.config import AS_TRAINED, DataConfig, Device, EncoderTuning, Plan, RunConfig, differences
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError
from colonnade.model import Transformer
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.train.distill import check_classifier
from colonnade.tune.classify import fit
from colonnade.tune.encoder_data import label_names, read_choices, read_spans, read_texts
from colonnade.tune.encoder_tasks import ChoiceTask, ClassifyTask, EncoderTask, Pair
from colonnade.tune.spans import SpanTask

READERS: dict[str, Callable[[Path], list[Any]]] = {"classify": read_texts, "choice": read_choices, "span": read_spans}
"""The reader of each method's data."""


class SeedRun(NamedTuple):
    """One run on the development set."""

    seed: int
    lr: float
    batch: int
    folder: Path
    metrics: dict[str, float]

    @property
    def value(self) -> float:
        """The metric by which runs are selected."""
        return next(iter(self.metrics.values()))


@dataclass(frozen=True)
class EncoderResult:
    """The scores of all runs."""

    grid: list[SeedRun]
    runs: list[SeedRun]
    median: SeedRun
    ensemble: dict[str, float]
    test: dict[str, float] | None
    test_ensemble: dict[str, float] | None


def finetune_encoder(settings: EncoderTuning, report: Callable[[str], None] = lambda line: None) -> EncoderResult:
    """Train and score all runs; writes ``results.json`` to their folder. Finished runs are not trained again.

    Raises :class:`DataError` for data in an unknown format, :class:`ConfigError` for settings out of range or different
    from those of the runs in the folder.
    """
    _check(settings)
    read = READERS[settings.method]
    rows, held_out = read(settings.data), read(settings.held_out)
    test = None if settings.test is None else read(settings.test)
    opened = open_model(settings.model)
    if opened.config.causal:
        raise ConfigError(f"{settings.model} is a decoder; --method {settings.method} is for encoders such as BERT")
    if (tokenizer := Tokenizer.from_model(opened.tokenizer_source)) is None:
        raise DataError(f"{settings.model} has no tokenizer; put its tokenizer.json into the folder of the weights")
    longest = settings.sequence or min(512, opened.config.context)
    if longest > opened.config.context:
        raise ConfigError(f"--sequence {longest} is more than the encoder's context of {opened.config.context}")
    task = make_task(settings.method, Pair(tokenizer, longest), rows, held_out, test)
    class_names = task.labels if isinstance(task, ClassifyTask) else ()
    if settings.distill.teacher and class_names:
        check_teacher_labels(settings.distill.teacher, class_names)
        teacher = predict_with(settings.distill.teacher, task, held_out, settings.device)
        report(f"teacher {settings.distill.teacher}: {format_metrics(task.score(teacher, held_out))}")
    examples = task.examples(rows)
    predictions: dict[Path, Any] = {}

    def run(seed: int, lr: float, batch: int) -> SeedRun:
        config = _run_config(
            settings, task.config(opened.config), len(examples) // task.choices, longest, seed, lr, batch
        )
        check_same_run(config)
        fit(config, examples, choices=task.choices, class_names=class_names)
        predictions[config.folder] = predict_with(config.folder, task, held_out, settings.device)
        done = SeedRun(seed, lr, batch, config.folder, task.score(predictions[config.folder], held_out))
        report(f"lr {lr:g} batch {batch} seed {seed}: {format_metrics(done.metrics)}")
        return done

    grid = [run(1, lr, batch) for lr in settings.lrs for batch in settings.batches]
    best = max(grid, key=lambda each: each.value)
    runs = [best, *(run(seed, best.lr, best.batch) for seed in range(2, settings.seeds + 1))]
    median = median_run(runs)
    result = EncoderResult(
        grid, runs, median, task.score(task.average([predictions[each.folder] for each in runs]), held_out), None, None
    )
    if test is not None:
        tested = {each.folder: predict_with(each.folder, task, test, settings.device) for each in runs}
        result = EncoderResult(
            grid, runs, median, result.ensemble, task.score(tested[median.folder], test, median.metrics),
            task.score(task.average(list(tested.values())), test, result.ensemble),
        )  # fmt: skip
    _write(settings, result)
    return result


def make_task(method: str, pair: Pair, rows: Sequence[Any], *others: Sequence[Any] | None) -> EncoderTask:
    """The task of a method for these data."""
    if method == "classify":
        labels = label_names(rows)
        for other in others:
            if other is not None:
                label_names(other, labels)
        return ClassifyTask(pair, tuple(labels))
    if method == "choice":
        return ChoiceTask(pair, len(rows[0].options))
    return SpanTask(pair, impossible=any(not row.answers for part in (rows, *others) for row in part or ()))


def check_teacher_labels(teacher: str, labels: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if ``teacher`` does not classify, or has classes other than ``labels``."""
    opened = open_model(teacher)
    check_classifier(teacher, opened.config)
    folder = opened.path
    names = read_class_names(folder) or read_pooling(folder, kind=False).labels
    unnamed = tuple(f"LABEL_{i}" for i in range(len(names)))
    if names not in ((), unnamed) and names != tuple(labels):
        raise ConfigError(
            f"distill.teacher {teacher} has the classes {', '.join(names)} and the data {', '.join(labels)}; use a "
            "teacher with the same labels in the same order"
        )


def check_same_run(run: RunConfig) -> None:
    """Raise :class:`ConfigError` if the run's folder has one with another start, length or teacher.

    A run's name has its learning rate, batch and seed only; the other run would be continued, or reported as this one.
    """
    newest = native.newest(run.folder)
    there = None if newest is None else native.read_meta(newest).run
    if there is None:
        return
    was, now = ((each.train.pretrained_checkpoint, each.train.steps) for each in (there, run))
    names = ("MODEL", "steps")
    changes = [f"{name}: {a} -> {b}" for name, a, b in zip(names, was, now, strict=True) if a != b]
    changes += differences(there.distill, run.distill, ignore=("cache",), prefix="distill.")
    if changes:
        raise ConfigError(
            f"{run.folder} has a run with other settings ({', '.join(changes)}); use another --name, or its flags"
        )


def median_run(runs: Sequence[SeedRun]) -> SeedRun:
    """The run with the median score; the lower of the middle two if the number of runs is even."""
    middle = statistics.median_low(run.value for run in runs)
    return next(run for run in runs if run.value == middle)


def predict_with(source: str | Path, task: EncoderTask, rows: Sequence[Any], device: Device) -> Any:
    """The predictions of a trained model, in this process."""
    context = DistributedContext.solo(choose_device(Plan(), device))
    opened = open_for_plan(str(source), Plan())
    model: Transformer = load_model(opened, context, "float32", str(source), AS_TRAINED.layers_on_device, "stored", 64)
    return task.predict(model, rows)


def format_metrics(metrics: dict[str, float]) -> str:
    """``"accuracy 0.8123"``."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _check(settings: EncoderTuning) -> None:
    if settings.method not in READERS:
        raise ConfigError(f"--method {settings.method} is not one of {', '.join(READERS)}")
    if not 1 <= settings.seeds <= 100:
        raise ConfigError(f"--seeds {settings.seeds} is not from 1 to 100; BERT's paper uses 5")
    if not 0 < settings.epochs <= 1000:
        raise ConfigError(f"--epochs {settings.epochs} is not from 0 to 1,000")
    if settings.distill.init == "layers":
        raise ConfigError(
            "--distill.init layers starts the student from the teacher's layers, and here MODEL is its start; remove "
            "the flag, or use colonnade.tune.fit in Python"
        )
    if not settings.lrs or not settings.batches or min(settings.batches) < 1:
        raise ConfigError("the grid needs at least one learning rate and one batch size of 1 or more")


def _run_config(
    settings: EncoderTuning, model: Any, samples: int, longest: int, seed: int, lr: float, batch: int
) -> RunConfig:
    steps = max(1, math.ceil(samples * settings.epochs / batch))
    name = settings.name or settings.method
    train = settings.train.replace(
        pretrained_checkpoint=settings.model, steps=steps, lr=lr, min_lr=0.0, batch=batch,
        micro_batch=min(settings.micro_batch, batch), warmup=steps // 10, schedule="linear", seed=seed, eval_every=0,
        save_every=steps,
    )  # fmt: skip
    return RunConfig(
        name=f"lr{lr:g}-batch{batch}-seed{seed}", runs=settings.runs / name, device=settings.device, model=model,
        data=DataConfig(sequence=longest, seed=seed), plan=settings.plan, train=train,
        distill=settings.distill,
    )  # fmt: skip


def _write(settings: EncoderTuning, result: EncoderResult) -> None:
    def plain(run: SeedRun) -> dict[str, Any]:
        return {"seed": run.seed, "lr": run.lr, "batch": run.batch, "folder": str(run.folder), **run.metrics}

    values = {
        "model": settings.model, "method": settings.method, "grid": list(map(plain, result.grid)),
        "runs": list(map(plain, result.runs)), "median": plain(result.median), "ensemble": result.ensemble,
        "test": result.test, "test_ensemble": result.test_ensemble,
    }  # fmt: skip
    folder = settings.runs / (settings.name or settings.method)
    (folder / "results.json").write_text(json.dumps(values, indent=1) + "\n", "utf-8")
