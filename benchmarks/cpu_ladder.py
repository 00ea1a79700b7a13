"""Serving on a CPU, step by step: default threads, aligned threads, pinned workers, lighter weights; requests/s.

    python benchmarks/cpu_ladder.py                          # all services, on the cores that this process may use
    python benchmarks/cpu_ladder.py --services image --workers 4 --clients 4 --rounds 5
    python benchmarks/cpu_ladder.py --rate 5                 # an open loop: 5 requests/s arrive, whatever the answers
    python benchmarks/cpu_ladder.py --random TOKENIZERS      # random weights of the same shapes, which are as fast
    python benchmarks/cpu_ladder.py --steps default pinned   # some steps only
    python benchmarks/cpu_ladder.py --redraw                 # only draw the records again
    python benchmarks/cpu_ladder.py --join ONE OTHER         # one record of those in two folders, for services that
                                                             # were measured at the same time on cores of their own;
                                                             # --services chooses some of them
    python benchmarks/cpu_ladder.py --tiny                   # a smoke test: a small image service, no record

Services: ``image``, ResNet-50 on JPEG images at 384 x 384, in plain torch, about the size of the image scoring model in
"ML Model Server Resource Saving" (NAVER and Intel, PyTorch's blog), whose figures are shown beside ours;
``text``, the class of a passage, by a classifier of MiniLM's shape (random weights); ``chat``, 16 tokens by
SmolLM2-135M. Steps, each with as many workers:

    default     each worker has a thread for each core, which wait as OpenMP's do by default
    aligned     cores / workers threads each
    pinned      and cores, affinity and waiting of colonnade.cores: ``--serve.replicas`` for text and chat
    int8, int4  and quantised weights; images and text: bfloat16 weights
    student     a model in the place of a distilled one, with random weights: ResNet-18 at 224 x 224; half of the
                classifier's layers in bfloat16; a third of SmolLM2's layers in int4 (student_ladder.py has a
                classifier that was distilled, with its accuracy)

Clients are closed loops, bound to the workers in turn (pinned engines: to their router), and use the same cores. One
service runs at a time; steps alternate over the rounds, each with servers of its own, after a warm-up. A round ends
``--patience`` seconds after its last request: default threads may need minutes for what they have accepted, and are
bounded like all others. Requests that are unanswered then are counted, and percentiles take their age as latency.
Latencies are of all rounds together, rates are medians. On several NUMA nodes ``colonnade serve`` binds a default
engine to a node too.

Stages: ``image`` pinned, with decoding, resizing and JSON beside the network of another request, or in turn with it;
or beside it on any core of the service, so that it does not hold up the network's threads;
``text`` pinned, with texts (tokenised beside the forward pass) or token ids. Waiting: ``pinned`` threads spin briefly,
or sleep at once, as they do where cores are shared.
"""

import argparse
import io
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from colonnade.api import Model, load_tokenizer, save
from colonnade.config.presets import preset
from colonnade.cores import OPENMP_VARIABLES, child_placement, idle_warning, place_replicas, read_machine
from colonnade.data.readers import sotu_documents
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from harness.http_load import LoadResult, closed_loop, open_loop
from harness.paired_timing import OtherProcesses, run_interleaved
from harness.report import RESULTS, ROOT, Cell, Headline, report
from harness.rows import format_row, round_significant
from harness.served import running_server

PUBLISHED = {"default": 2.1, "aligned": 6.3, "pinned": 7.9, "student": 61.9}
"""Requests/s of the article's image scoring model: 4 workers under a quota of 8 cores of 2 x 12."""
TEXT_LAYERS, CHAT_LAYERS = 3, 10
"""Layers of the students."""
CLASSES = 4
LADDER = ("default", "aligned", "pinned", "bfloat16", "int8", "int4", "student")
"""Order of the plot."""
DECODED_ANYWHERE = "pinned, decoding on any core"
STAGES = ("pinned, stages in turn", DECODED_ANYWHERE, "pinned, token ids")
"""Steps that compare stages; not drawn."""
PINNED_ASLEEP = "pinned, threads asleep"
"""A step whose threads sleep as soon as they wait; not drawn."""
PICTURE = ROOT / "docs" / "assets" / "cpu_ladder.png"
RECORD = "cpu_ladder"
WARM_UP_S = 2.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *OPENMP_VARIABLES)


@dataclass(frozen=True)
class Step:
    """How the workers of one measurement run."""

    name: str
    threads: int
    """Threads of each worker, if it is not pinned."""
    pinned: bool = False
    flags: tuple[str, ...] = ()
    """Of the worker, or of ``colonnade serve``."""
    weights: str = "float32"
    ids: bool = False
    """Text is sent as token ids."""
    asleep: bool = False
    """A pinned worker's threads sleep as soon as they wait."""
    model: str = "model"
    """The model's folder: ``model`` or ``student``."""


@dataclass(frozen=True)
class Settings:
    """The command line."""

    workers: int
    cores: int
    clients: int
    seconds: float
    rate: float | None
    patience_s: float = 40.0
    size: int = 384
    models: Path = Path()
    """Folder of the text models, by service."""
    steps: tuple[str, ...] = ()
    """Names of the steps to measure; none: all."""
    tokenizers: Path | None = None
    """Folder of the tokenizers ``minilm`` and ``smollm2``; None: those of the packages, and SmolLM2's weights."""


def steps_of(service: str, settings: Settings) -> list[Step]:
    """The steps of a service to measure."""
    return [step for step in all_steps(service, settings) if not settings.steps or step.name in settings.steps]


def all_steps(service: str, settings: Settings) -> list[Step]:
    """The steps of a service, and its comparison of stages."""
    default, aligned = Step("default", settings.cores), Step("aligned", max(1, settings.cores // settings.workers))
    pinned = replace(aligned, name="pinned", pinned=True)
    if service == "image":
        image = ("--size", str(settings.size))
        default, aligned, pinned = (replace(step, flags=(*image, "--overlap")) for step in (default, aligned, pinned))
        return [
            default, aligned, pinned,
            replace(pinned, name="bfloat16", flags=(*pinned.flags, "--dtype", "bfloat16"), weights="bfloat16"),
            replace(pinned, name="student", flags=("--overlap", "--model", "resnet18", "--size", "224")),
            replace(pinned, name="pinned, stages in turn", flags=image),
            replace(pinned, name=DECODED_ANYWHERE, flags=(*pinned.flags, "--decode_cpus", *usable_cpus())),
            replace(pinned, name=PINNED_ASLEEP, asleep=True),
        ]  # fmt: skip

    def quantised(kind: str) -> Step:
        return replace(pinned, name=kind, flags=("--serve.weights", kind), weights=kind)

    if service == "text":
        halved = replace(pinned, name="bfloat16", flags=("--dtype", "bfloat16"), weights="bfloat16")
        student = replace(halved, name="student", model="student")
        ids = replace(pinned, name="pinned, token ids", ids=True)
        return [default, aligned, pinned, halved, student, ids, replace(pinned, name=PINNED_ASLEEP, asleep=True)]
    student = replace(quantised("int4"), name="student", model="student")
    return [default, aligned, pinned, quantised("int8"), quantised("int4"), student]


def usable_cpus() -> list[str]:
    """The logical CPUs of the service."""
    return [str(cpu.number) for cpu in read_machine().cpus]


# -- models ------------------------------------------------------------------------------------------------------------


def make_models(service: str, settings: Settings) -> None:
    """Write the text models of ``service`` with random weights, but for SmolLM2's own where its package is used."""
    folder, given = settings.models / service, settings.tokenizers
    if service == "image":
        return
    if service == "text":
        full = preset("minilm-l6").replace(task_head="classes", classes=CLASSES, tied=True)
        configs = {"model": full, "student": full.replace(layers=TEXT_LAYERS)}
    else:
        configs = {"model": preset("smollm2-135m")} if given else {}
        configs["student"] = preset("smollm2-135m").replace(layers=CHAT_LAYERS)
    name = "minilm" if service == "text" else "smollm2"
    tokenizer = load_tokenizer(given / name if given else name)
    for kind, config in configs.items():
        model = initialise(Transformer(config), seed=0).requires_grad_(False)
        save(Model(model, tokenizer, DistributedContext.solo(), kind), folder / kind, format="hf")


def model_path(service: str, step: Step, settings: Settings) -> str | Path:
    """What ``colonnade serve`` gets."""
    own = settings.models / service / step.model
    return own if own.exists() else "smollm2"


# -- workers -----------------------------------------------------------------------------------------------------------


def environment(step: Step) -> dict[str, str]:
    """What unpinned workers get: a number of threads, and libgomp's default waiting, which the product would change."""
    if step.asleep:
        return {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    return {} if step.pinned else {"OMP_NUM_THREADS": str(step.threads), "GOMP_SPINCOUNT": "300000"}


@contextmanager
def without_thread_settings() -> Iterator[None]:
    """In the block this process's own thread settings are not inherited."""
    given = {name: os.environ.pop(name) for name in THREAD_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(given)


@contextmanager
def image_workers(step: Step, workers: int) -> Iterator[list[str]]:
    """The URLs of the workers, which start at the same time."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "harness.image_worker", *step.flags]
    places = place_replicas(read_machine(), workers)
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for number in range(workers):
            with child_placement(places[number], os.environ) if step.pinned else nullcontext():
                process = subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": path, **environment(step)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            stack.enter_context(process)
            stack.callback(process.send_signal, signal.SIGTERM)
            processes.append(process)
        urls: list[str] = []
        for process in processes:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if not words:
                raise RuntimeError(f"the worker did not start: {' '.join(command)}")
            urls.append(words[1])
        yield urls
        for process in processes:
            process.send_signal(signal.SIGTERM)


@contextmanager
def running_services(service: str, step: Step, settings: Settings) -> Iterator[list[str]]:
    """The URLs to which the clients of ``step`` send their requests; all servers start, and stop, at the same time."""
    with without_thread_settings(), ExitStack() as stack:
        if service == "image":
            yield stack.enter_context(image_workers(step, settings.workers))
            return
        model, path = model_path(service, step, settings), "/classify" if service == "text" else "/v1/completions"
        flags = ("--serve.log", "off", *step.flags)
        flags += ("--serve.replicas", str(settings.workers)) if step.pinned else ()
        servers = [
            running_server(model, *flags, **environment(step)) for _ in range(1 if step.pinned else settings.workers)
        ]
        with ThreadPoolExecutor(len(servers)) as pool:
            running = list(pool.map(stack.enter_context, servers))
        yield [url + path for url, _ in running]
        for _, process in running:
            os.kill(process, signal.SIGTERM)


# -- requests ----------------------------------------------------------------------------------------------------------


def request_of(service: str, step: Step, settings: Settings) -> dict[str, Any]:
    """The arguments of ``httpx``'s ``post``."""
    if service == "image":
        return {"content": photo()}
    words = sotu_documents()[-1][1].split()
    if service == "chat":
        body = {"prompt": " ".join(words[:24]), "max_tokens": 16, "ignore_eos": True, "temperature": 0}
        return {"json": body}
    text = " ".join(words[:100])
    tokenizer = load_tokenizer(settings.models / service / step.model)
    return {"json": {"input": [tokenizer.encode(text) if step.ids else text]}}


def photo(height: int = 768, width: int = 1024) -> bytes:
    """A JPEG image with smooth areas and noise, as large as a phone's preview."""
    draw = np.random.default_rng(0)
    y_HW, x_HW = np.mgrid[0:height, 0:width]
    waves = [np.sin(x_HW / (40 + 30 * i)) * np.cos(y_HW / (60 - 10 * i)) for i in range(3)]
    pixels = 128 + 100 * np.stack(waves, -1) + draw.normal(0, 8, (height, width, 3))
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


# -- measuring ---------------------------------------------------------------------------------------------------------


def run_step(service: str, step: Step, settings: Settings, number: int) -> LoadResult:
    """One round of one step: start the workers, warm up, measure, and stop."""
    request = request_of(service, step, settings)
    with running_services(service, step, settings) as urls:
        # One client a worker: an image worker also computes what is cancelled, and the measured requests would wait.
        closed_loop(urls, request, settings.workers, min(WARM_UP_S, settings.seconds), settings.patience_s)
        if settings.rate is None:
            result = closed_loop(urls, request, settings.clients, settings.seconds, settings.patience_s)
        else:
            result = open_loop(urls, request, settings.rate, settings.seconds, seed=number)
    print(f"{service}, {step.name}: {result.requests_per_s:.2f} requests/s", flush=True)
    return result


def measure(service: str, settings: Settings, rounds: int) -> list[dict[str, Cell]]:
    """A row for each step of ``service``."""
    make_models(service, settings)
    steps = steps_of(service, settings)
    runs: dict[str, Callable[[int], LoadResult]] = {
        step.name: partial(run_step, service, step, settings) for step in steps
    }
    results = run_interleaved(runs, rounds, warm_up=0)
    rates = {name: statistics.median(each.requests_per_s for each in results[name]) for name in runs}
    threads = {step.name: place_replicas(read_machine(), settings.workers)[0].threads if step.pinned else step.threads
               for step in steps}  # fmt: skip
    rows: list[dict[str, Cell]] = []
    for step in steps:
        each = results[step.name]
        everything = LoadResult(
            1, [s for one in each for s in one.latencies_s], unanswered_s=[s for one in each for s in one.unanswered_s]
        )
        rows.append(
            {
                "service": service,
                "step": step.name,
                "requests_per_s": round_significant(rates[step.name]),
                "over_default": round_significant(rates[step.name] / rates["default"], 3)
                if rates.get("default")
                else None,
                **{
                    f"p{percent}_ms": None
                    if math.isnan(ms := everything.percentile_ms(percent))
                    else round_significant(ms)
                    for percent in (50, 95, 99)
                },
                "slowest_round_requests_per_s": round_significant(min(one.requests_per_s for one in each)),
                "failures": sum(one.failures for one in each),
                "unanswered": len(everything.unanswered_s),
                "workers": settings.workers,
                "threads_each": threads[step.name],
                "weights": step.weights,
                "clients": settings.clients,
                "rate": settings.rate,
                "published_requests_per_s": PUBLISHED.get(step.name) if service == "image" else None,
            }
        )
        print(format_row(rows[-1]), flush=True)
    return rows


def headlines(rows: Sequence[dict[str, Cell]]) -> list[Headline]:
    """Pinned workers beside default threads, for each service."""
    speed = {(row["service"], row["step"]): float(row["requests_per_s"] or 0) for row in rows}
    names = {"image": "ResNet-50 at 384 x 384", "text": "MiniLM classifier", "chat": "SmolLM2-135M, 16 tokens"}
    return [
        Headline(f"{what} on a CPU, pinned workers", speed[service, "pinned"], "requests/s",
                 "default threads", speed[service, "default"])
        for service, what in names.items() if speed.get((service, "default")) and (service, "pinned") in speed
    ]  # fmt: skip


def draw(rows: Sequence[dict[str, Cell]], path: Path) -> None:
    """Requests/s relative to default threads, beside the published figures."""
    from matplotlib.figure import Figure

    measured = {str(row["step"]) for row in rows}
    steps = [step for step in LADDER if step in measured or step in PUBLISHED]
    ladders = {"published, 8 cores": {step: rate / PUBLISHED["default"] for step, rate in PUBLISHED.items()}}
    for row in rows:
        if row["over_default"] is not None:
            ladders.setdefault(str(row["service"]), {})[str(row["step"])] = float(row["over_default"])
    figure = Figure(figsize=(8, 4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    width = 0.8 / len(ladders)
    for i, (name, ladder) in enumerate(ladders.items()):
        at = [j + (i - (len(ladders) - 1) / 2) * width for j, step in enumerate(steps) if step in ladder]
        bars = axes.bar(at, [ladder[step] for step in steps if step in ladder], width, label=name,
                        color="#999999" if i == 0 else None)  # fmt: skip
        axes.bar_label(bars, fmt="%.3g", fontsize=7, rotation=90, padding=2)
    axes.set(yscale="log", ylabel="requests/s over default threads", xticks=range(len(steps)), xticklabels=steps)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.margins(y=0.12)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def join(folders: Sequence[Path], services: Sequence[str], name: str, out: Path) -> None:
    """Write the record ``name`` with the rows of ``services`` that are in ``folders``.

    One version of the code must have measured them on one machine. The conditions of each are kept; what this file says
    of the benchmark stands there once.
    """
    records = [json.loads((folder / f"{RECORD}.json").read_text()) for folder in folders]
    for key in ("machine", "versions", "commit"):
        if len({json.dumps(record[key]) for record in records}) > 1:
            raise ValueError(f"the records differ in {key}")
    rows, notes = list[dict[str, Cell]](), [str(__doc__)]
    for record in records:
        rows += (chosen := [row for row in record["rows"] if row["service"] in services])
        notes += conditions(record["notes"], list(dict.fromkeys(str(row["service"]) for row in chosen)))
    commands = " & ".join(record["command"] for record in records)
    joined = {**records[0], "name": name, "command": commands, "notes": "\n".join(notes), "rows": rows}
    joined["headlines"] = [asdict(head) for head in headlines(rows)]
    (out / f"{name}.json").write_text(json.dumps(joined, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def conditions(notes: str, services: Sequence[str]) -> list[str]:
    """Lines that say how ``services`` were measured: what follows the last empty line of a record's notes."""
    lines = notes.rpartition("\n\n")[2].splitlines()
    joined = [line for line in lines if line.partition(": ")[0] in services]
    return joined or [f"{', '.join(services)}: {'; '.join(lines)}"]


def rows_by_cores(folder: Path) -> list[dict[str, Cell]]:
    """The rows of all records of the ladder in ``folder``, with the number of cores in the service's name."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{RECORD}*.json"))]
    return [
        {**row, "service": f"{row['service']}, {record['machine']['cores']} cores"}
        for record in records
        for row in record["rows"]
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", nargs="+", choices=["image", "text", "chat"], default=["image", "text", "chat"])
    parser.add_argument("--workers", type=int, help="default: 4 as in the article, 1 a core on fewer cores")
    parser.add_argument("--clients", type=int, help="default: 4 a worker")
    parser.add_argument("--seconds", type=float, default=15, help="for each step and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", nargs="+", default=[], choices=[*LADDER, *STAGES, PINNED_ASLEEP], help="default: all"
    )
    parser.add_argument("--patience", type=float, default=40, help="seconds until unanswered requests are cancelled")
    parser.add_argument("--rate", type=float, help="requests/s that arrive, in place of clients that wait for answers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file of the plot")
    parser.add_argument("--random", type=Path, help="folder of the tokenizers minilm and smollm2")
    parser.add_argument("--redraw", action="store_true", help="draw all records in --out, and measure nothing")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FOLDER", help="join the records in these folders")
    parser.add_argument("--record", default=RECORD, help="name of the record")
    parser.add_argument("--no-picture", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small images, short rounds; writes no record")
    args = parser.parse_args(argv)
    if args.join:
        join(args.join, args.services, args.record, args.out)
    if args.redraw or args.join:
        draw(rows_by_cores(args.out), args.picture)
        return
    machine, neighbours = read_machine(), OtherProcesses()
    workers = args.workers or min(4, machine.usable)
    place_replicas(machine, workers)  # refuses more workers than cores
    if warning := idle_warning(machine, workers):
        print(warning, flush=True)
    settings = Settings(
        workers,
        machine.usable,
        args.clients or 4 * workers,
        args.seconds,
        args.rate,
        args.patience,
        steps=tuple(args.steps),
    )
    if args.tiny:
        measure("image", replace(settings, seconds=0.5, size=64), 1)
        return
    rows = list[dict[str, Cell]]()
    with tempfile.TemporaryDirectory() as models:
        settings = replace(settings, models=Path(models), tokenizers=args.random)
        for service in args.services:
            rows += measure(service, settings, args.rounds)
            load = f"load average {os.getloadavg()[1]:.1f} over 5 minutes"
            notes = f"{__doc__}\n{machine.usable} usable cores; {neighbours}, servers and clients included; {load}"
            notes += "; random weights" if args.random else ""
            report(args.record, rows, notes, headlines=headlines(rows), folder=args.out)  # kept if it is stopped
    if not args.no_picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
