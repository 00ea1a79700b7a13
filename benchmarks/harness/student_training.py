"""The teacher and the students of ``student_ladder.py``: an encoder, fine-tuned, and a ninth of it, distilled."""

import json
import multiprocessing
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import colonnade
from colonnade.checkpoint.load_model import open_model
from colonnade.config import DataConfig, DistillConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.model import Transformer
from colonnade.tune import Example, accuracy, classifier, fit
from harness.report import command, commit, machine
from harness.speech_periods import PERIODS, examples, passages

SEQUENCE = 224
LABELS = "cross-entropy"
Accuracies = dict[str, float]
"""By part: development and test."""


class Kind(NamedTuple):
    """A kind of student."""

    loss: str
    mix: float = 1.0
    """Share of the labels' cross-entropy."""

    def __str__(self) -> str:
        return self.loss if self.loss == LABELS else f"{self.loss}, mix {self.mix:g}"


class Hyperparameters(NamedTuple):
    """What the first seed's development accuracy decides for each kind."""

    lr: float
    temperature: float = 1.0


@dataclass(frozen=True)
class Settings:
    """What is trained; the command line."""

    keep: Path
    device: str
    seeds: int = 5
    labelled: int = 1600
    passages: int = 0
    """Those that KL and DIST see, from the same speeches; 0: the labelled ones."""
    held_out: int = 1200
    """Test passages; half as many for development."""
    epochs: float = 3.0
    """Epochs of the teacher."""
    steps: int = 300
    batch: int = 64
    jobs: int = 1
    """Students that are trained at the same time."""
    words: int = 96
    teacher: str = "minilm"
    """The encoder that is fine-tuned."""
    rates: tuple[float, ...] = (1e-3,)
    mixes: tuple[float, ...] = (0.5, 0.0)
    temperatures: tuple[float, ...] = (2.0,)

    def parts(self) -> dict[str, list[tuple[str, int]]]:
        """The passages of the task."""
        sizes = {"labelled": self.labelled, "transfer": self.passages, "development": self.held_out // 2,
                 "test": self.held_out}  # fmt: skip
        return passages(sizes, self.words)

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of students that are trained."""
        return [Kind(LABELS), *(Kind(loss, mix) for mix in self.mixes for loss in ("kl", "dist"))]

    def choices(self, kind: Kind) -> list[Hyperparameters]:
        """The learning rates and temperatures tried with the first seed."""
        temperatures = (1.0,) if kind.loss == LABELS else self.temperatures
        return [Hyperparameters(*each) for each in product(self.rates, temperatures)]


class StudentJob(NamedTuple):
    """One student to train and measure."""

    kind: Kind
    seed: int
    choice: Hyperparameters

    @property
    def name(self) -> str:
        """The name of its run."""
        (loss, mix), (lr, temperature) = self.kind, self.choice
        how = "" if loss == LABELS else f"-mix{mix:g}-t{temperature:g}"
        return f"{loss}-lr{lr:g}{how}-seed{self.seed}"


def student_config(teacher: ModelConfig) -> ModelConfig:
    """One layer of six with half of the hidden units: a ninth of the weights in blocks."""
    return teacher.replace(layers=teacher.layers // 6, ffn_width=teacher.ffn_width // 2)


@torch.no_grad()
def write_start(folder: Path, teacher: colonnade.Model) -> None:
    """The weights that all students start from: the teacher's, without the hidden units of the smallest weights."""
    old = teacher.transformer
    new = Transformer(student_config(old.config), dtype=torch.float32)
    given = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        layer = re.match(r"blocks\.\d+\.ffn\.", name)
        if layer is None:
            parameter.copy_(given[name])
            continue
        up, down = given[f"{layer[0]}up.weight"], given[f"{layer[0]}down.weight"]
        units = (up.norm(dim=1) * down.norm(dim=0)).topk(new.config.ffn_width).indices.sort().values
        value = given[name]
        parameter.copy_(value[:, units] if name.endswith("down.weight") else value[units] if "up" in name else value)
    colonnade.save(colonnade.Model(new, teacher.tokenizer, teacher.context, "start"), folder)


def train_run(name: str, model: ModelConfig, settings: Settings, rows: list[Example], **given: Any) -> Path:
    """Train a run, unless it is there, and return its folder."""
    distill = given.pop("distill", DistillConfig())
    train = TrainConfig(
        batch=settings.batch, micro_batch=settings.batch, min_lr=0, schedule="linear", weight_decay=0.01,
        dtype="bfloat16" if settings.device == "cuda" else "float32", eval_every=0, log_every=10_000,
        compile=False, check_memory=False, **given,
    )  # fmt: skip
    run = RunConfig(
        name=name, runs=settings.keep, device=settings.device, model=model, train=train, distill=distill,
        data=DataConfig(sequence=SEQUENCE, seed=train.seed),
    )  # fmt: skip
    fit(run, rows)
    return run.folder


def accuracies(folder: Path, data: dict[str, list[Example]], device: str) -> Accuracies:
    """Accuracy on the development and the test passages, in float32."""
    with colonnade.load(folder, device=device, dtype="float32") as model:
        return {part: accuracy(model.transformer, data[part], at_once=128) for part in ("development", "test")}


def train_teacher(settings: Settings, data: dict[str, list[Example]]) -> Accuracies:
    """Fine-tune the encoder."""
    steps = max(1, round(settings.epochs * len(data["labelled"]) / settings.batch))
    folder = train_run(
        "teacher", classifier(settings.teacher, len(PERIODS)), settings, data["labelled"], lr=2e-4, steps=steps,
        warmup=steps // 10, pretrained_checkpoint=settings.teacher, save_every=steps, seed=0, dropout=0.1,
    )  # fmt: skip
    return accuracies(folder, data, settings.device)


def train_student(job: StudentJob, settings: Settings, data: dict[str, list[Example]]) -> Accuracies:
    """Accuracies of a student, and the seconds it took."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.jobs))
    began, (loss, mix), (lr, temperature) = time.perf_counter(), job.kind, job.choice
    distill, rows = DistillConfig(), data["labelled"]
    if loss != LABELS:
        distill = DistillConfig(
            teacher=str(settings.keep / "teacher"), loss=loss, mix=mix, temperature=temperature,  # type: ignore[arg-type]
            cache="" if settings.device == "cuda" else str(settings.keep / "answers"),
        )  # fmt: skip
        rows = data["transfer"] or rows
    start = settings.keep / "start"
    folder = train_run(
        job.name, open_model(start).config, settings, rows, distill=distill, seed=job.seed, lr=lr,
        steps=settings.steps, warmup=settings.steps // 10, save_every=settings.steps,
        pretrained_checkpoint=str(start), freeze=("embed",),
    )  # fmt: skip
    return {**accuracies(folder, data, settings.device), "seconds": time.perf_counter() - began}


def prepare_worker(device: str) -> None:
    """In a worker: import what jobs need, and open the device."""
    torch.zeros(1, device=device)


def train_all(settings: Settings) -> dict[str, Any]:
    """Accuracies of the teacher, and of each student by its run's name; kept in ``accuracies.json``."""
    path = settings.keep / "accuracies.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def keep(name: str, found: Any) -> None:
        known[name] = found
        path.write_text(json.dumps(known, indent=1))
        print(name, found, flush=True)

    with ProcessPoolExecutor(settings.jobs, multiprocessing.get_context("spawn")) as pool:
        for _ in range(settings.jobs):  # they start while the teacher trains
            pool.submit(prepare_worker, settings.device)
        tokenizer = colonnade.load_tokenizer(settings.teacher)
        data = {part: examples(tokenizer, rows, SEQUENCE) for part, rows in settings.parts().items()}
        keep("sizes", {part: len(rows) for part, rows in data.items()})
        here = machine()
        keep("where", f"{here['gpu'] or here['cpu']} (commit {commit()}, {command()})")
        if "teacher" not in known:
            keep("teacher", train_teacher(settings, data))
        if not (settings.keep / "start").exists():
            with colonnade.load(settings.keep / "teacher", device="cpu", dtype="float32") as model:
                write_start(settings.keep / "start", model)

        def run(jobs: Sequence[StudentJob]) -> None:
            new = [job for job in jobs if job.name not in known]
            futures = [(job, pool.submit(train_student, job, settings, data)) for job in new]
            for job, future in futures:
                keep(job.name, future.result())

        kinds = settings.kinds
        run([StudentJob(kind, 0, choice) for kind in kinds for choice in settings.choices(kind)])
        seeds = range(1, settings.seeds)
        run([StudentJob(kind, seed, best_hyperparameters(kind, settings, known)) for seed in seeds for kind in kinds])
    return known


def best_hyperparameters(kind: Kind, settings: Settings, known: dict[str, Any]) -> Hyperparameters:
    """The choice with the best development accuracy of the first seed."""
    return max(settings.choices(kind), key=lambda choice: known[StudentJob(kind, 0, choice).name]["development"])
