"""A distilled classifier: accuracy of a ninth of a fine-tuned encoder, five seeds, and requests/s of both on a CPU.

    python benchmarks/student_ladder.py                     # on two quiet cores an hour
    python benchmarks/student_ladder.py --keep FOLDER       # keep models; a second call measures what is missing
    python benchmarks/student_ladder.py --only train --device cuda --keep FOLDER    # on a GPU, then
    python benchmarks/student_ladder.py --only serve --keep FOLDER                  # on a CPU, with these models
    python benchmarks/student_ladder.py --tiny              # a smoke test: a few steps, no record

The task (``harness/speech_periods.py``): in which of four periods a passage of a State of the Union speech was given.

    teacher            MiniLM (6 layers of 384), fine-tuned on --labelled passages
    students           the teacher's embedding, which stays as it is, and its first layer with half of the hidden units:
                       a ninth of its weights in blocks
      cross-entropy    trained on the same labelled passages
      KL, DIST         trained on the teacher's answers for --passages passages of the same speeches (default: the
                       labelled ones); with a mix above 0 that share of the loss is the cross-entropy of their labels

Every student takes as many steps. Of several --rates or --temperatures those count with which the first seed has the
best accuracy on development speeches. The teacher's accuracy is that of one run.

Serving is measured as in ``cpu_ladder.py``: as many workers, closed loops of HTTP requests with one passage each, on
the same cores. Servers of all rungs run, and are asked in turn; the median of the rounds counts (default: one round).

    default     the teacher; each worker has a thread for each core
    pinned      the teacher; each worker has cores of its own (``--serve.replicas``)
    student     the student that DIST trained with the first mix and seed, in the same way; also in bfloat16
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import colonnade
import cpu_ladder
from colonnade.cores import place_replicas, read_machine
from harness.http_load import LoadResult, closed_loop
from harness.paired_timing import OtherProcesses
from harness.report import RESULTS, ROOT, Cell, Headline, folder_of, report
from harness.rows import format_row, round_significant
from harness.student_training import Hyperparameters, Kind, Settings, StudentJob, best_hyperparameters, train_all

PUBLISHED = {"images": (2.1, 7.9, 61.9), "food": (2.5, 17.5, 84.5), "receipts": (20.0, None, 111.8)}
"""Requests/s in "ML Model Server Resource Saving": default, threads and cores set, student."""
PICTURE = ROOT / "docs" / "assets" / "student_ladder.png"


# -- serving -----------------------------------------------------------------------------------------------------------


def text_folders(settings: Settings, known: dict[str, Any]) -> Path:
    """A folder for ``cpu_ladder``: the teacher as ``text/model``, the student as ``text/student``."""
    kind = Kind("dist", settings.mixes[0])
    student = settings.keep / StudentJob(kind, 0, best_hyperparameters(kind, settings, known)).name
    for name, run in {"model": settings.keep / "teacher", "student": student}.items():
        folder = settings.keep / "served" / "text" / name
        if not folder.exists():
            with colonnade.load(run, device="cpu", dtype="float32") as model:
                colonnade.save(model, folder, format="hf")
    return settings.keep / "served"


def serve_all(settings: Settings, known: dict[str, Any], args: argparse.Namespace) -> dict[str, list[LoadResult]]:
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
    text = settings.parts()["test"][0][0]
    rounds: dict[str, list[LoadResult]] = {step.name: [] for step in steps}
    with ExitStack() as stack:
        urls = {step.name: stack.enter_context(cpu_ladder.running_services("text", step, ladder)) for step in steps}
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


def make_rows(settings: Settings, known: dict[str, Any], rounds: dict[str, list[LoadResult]]) -> list[dict[str, Cell]]:
    """A row for the teacher, for each kind of student, and for each rung of the ladder."""
    teacher = known["teacher"]["test"]
    rows: list[dict[str, Cell]] = [
        {"who": "teacher", "accuracy": round_significant(teacher, 4), "deviation": None, "of_teacher": 1.0, "seeds": 1}
    ]
    for kind in settings.kinds:
        best = best_hyperparameters(kind, settings, known)
        found = [known[StudentJob(kind, seed, best).name]["test"] for seed in range(settings.seeds)]
        mean = statistics.mean(found)
        rows.append(
            {
                "who": f"student, {kind}",
                "accuracy": round_significant(mean, 4),
                "deviation": round_significant(statistics.stdev(found), 2) if len(found) > 1 else None,
                "of_teacher": round_significant(mean / teacher, 4),
                "seeds": len(found),
                **choice_cells(kind, best),
            }
        )
    for kind in settings.kinds:
        for choice in settings.choices(kind) if len(settings.choices(kind)) > 1 else ():
            first = known[StudentJob(kind, 0, choice).name]
            cells: dict[str, Cell] = {"development": round_significant(first["development"], 4)}
            rows.append({"who": f"first seed, {kind}", **cells, **choice_cells(kind, choice)})
    rates = {name: statistics.median(each.requests_per_s for each in results) for name, results in rounds.items()}
    for name, results in rounds.items():
        every = LoadResult(1, [s for each in results for s in each.latencies_s])
        rows.append(
            {
                "who": f"served, {name}",
                "requests_per_s": round_significant(rates[name]),
                "over_pinned": round_significant(rates[name] / rates["pinned"], 3),
                "p50_ms": None if math.isnan(ms := every.percentile_ms(50)) else round_significant(ms),
                "slowest_round_requests_per_s": round_significant(min(each.requests_per_s for each in results)),
                "failures": sum(each.failures for each in results),
            }
        )
    for row in rows:
        print(format_row(row), flush=True)
    return rows


def choice_cells(kind: Kind, choice: Hyperparameters) -> dict[str, Cell]:
    """A choice in a row."""
    return {"lr": choice.lr, "temperature": None if kind.mix == 1 else choice.temperature}


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
    names = [str(row["who"]).removeprefix("student, ").replace(", ", "\n") for row in students]
    means = [100 * float(row["accuracy"] or 0) for row in students]
    errors = [100 * float(row["deviation"] or 0) for row in students]
    right.bar(names, means, yerr=errors, capsize=4, color=["0.6", *["C0"] * (len(names) - 1)])
    teacher = 100 * float(rows[0]["accuracy"] or 0)
    right.axhline(teacher, color="black", linewidth=0.8)
    right.annotate("teacher", (0, teacher), textcoords="offset points", xytext=(-20, 3), fontsize=8)
    for x, mean in enumerate(means):
        right.annotate(f"{mean:.1f}", (x, mean / 2), ha="center", fontsize=8)
    right.tick_params(axis="x", labelsize=7)
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
    parser.add_argument("--passages", type=int, default=0, help="for KL and DIST; default: the labelled ones")
    parser.add_argument("--held-out", type=int, default=1200)
    parser.add_argument("--words", type=int, default=96)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3], help="learning rates to try")
    parser.add_argument(
        "--mixes", nargs="+", type=float, default=[0.5, 0.0], help="shares of the labels in KL's and DIST's loss"
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[2.0], help="temperatures to try")
    parser.add_argument("--encoder", default="minilm", help="what the teacher is fine-tuned from")
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
            mixes=tuple(args.mixes), temperatures=tuple(args.temperatures),
        )  # fmt: skip
        settings.keep.mkdir(parents=True, exist_ok=True)
        measure(settings, args)


def measure(settings: Settings, args: argparse.Namespace) -> None:
    """Train, serve, and write the record."""
    path, neighbours = settings.keep / "accuracies.json", OtherProcesses()
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
    threads = place_replicas(machine, args.workers or min(4, machine.usable))[0].threads
    notes = (
        f"{__doc__}\n{known['sizes']}, {settings.words} words each; teacher {settings.epochs:g} epochs, students "
        f"{settings.steps} steps of {settings.batch}; trained on {known['where']}; served on {machine.usable} usable "
        f"cores, {threads} threads per worker; {neighbours}, servers and clients included"
    )
    folder = folder_of(args.out, toy=args.tiny)
    report("student_ladder_cpu", rows, notes, headlines=heads, folder=folder)
    if not args.no_picture:
        draw(rows, folder / "student_ladder.png" if args.tiny or args.out else PICTURE)


if __name__ == "__main__":
    main()
