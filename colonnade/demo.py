"""The whole pipeline on real text in three minutes, with the same steps as on a cluster.

speeches -> corpus -> train on two processes -> checkpoint -> load in one -> serve over HTTP -> query
"""

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule

from colonnade import api
from colonnade.config import DataConfig, Plan, RunConfig, TrainConfig
from colonnade.config.presets import preset
from colonnade.data import Corpus, build
from colonnade.data.corpus_builder import progress_bar
from colonnade.data.readers import sotu_documents
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.parallel.launch import launch
from colonnade.train.loop import Trainer
from colonnade.train.metrics import Throughput
from colonnade.train.trackers import ROUTING, read_rows

PROMPTS = ("The state of our union is", "My fellow citizens, the year that has passed", "I ask the Congress to")
BARS = "▁▂▃▄▅▆▇█"
START_S = 900
"""Time limit for the server to start [s]; a busy machine takes minutes."""

console = Console(highlight=False)


def demo(folder: Path, port: int) -> None:
    """Run the demo in ``folder``, which is replaced; the server listens on ``port`` (0: any free one)."""
    start_s = time.monotonic()
    try:
        import openai
    except ImportError:
        raise ConfigError("the demo queries its server with OpenAI's client; run: pip install openai") from None
    shutil.rmtree(folder, ignore_errors=True)

    _title(1, "A corpus of real speeches, and a tokenizer trained on them")
    corpus = folder / "corpus"
    with progress_bar(console) as progress:
        manifest = build(sotu_documents(), corpus, vocab_size=4096, progress=progress)
    console.print(f"{manifest.train.documents} speeches, {manifest.train.tokens:,} tokens in {corpus}")

    _title(2, "Training a mixture of experts on two processes (tp=2, ep=2)")
    run = settings(folder, corpus)
    for axis, ranks, share in run.plan.table(run.model):
        console.print(f"[bold]{axis:>6}[/bold] {ranks}  {share}")
    summary = Trainer(run).fit()
    if summary.stopped:
        raise KeyboardInterrupt
    _print_loss_curve(run.folder / "metrics.jsonl")
    _print_expert_loads(run.folder)
    console.print(f"loss curve: {summary.picture}    checkpoint: {summary.checkpoint}")

    _title(3, "One checkpoint, any layout: saved by two processes, loaded by one")
    tokens = Corpus(corpus).split("validation").read(0, run.data.sequence).tolist()
    console.print("computing the same logits on two processes and on one")
    of_two = launch(_logits, (summary.checkpoint, run.plan, tokens), run.plan)
    model = api.load(summary.checkpoint, dtype="float32", device="cpu")
    difference = np.abs(model.logits(tokens).numpy() - of_two).max()
    console.print(f"largest difference of {of_two.size:,} logits: [bold]{difference:.2e}[/bold]")

    _title(4, "Serving it, and querying it with OpenAI's client")
    console.print("starting the server")
    with _server(summary.checkpoint, port) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        name = client.models.list().data[0].id
        console.print(f"model '{name}' at {url}/v1")
        for seed, prompt in enumerate(PROMPTS):
            console.print(f"[bold]{prompt}[/bold]", end="")
            for piece in client.completions.create(
                model=name, prompt=prompt, max_tokens=48, temperature=0.6, seed=seed, stream=True
            ):
                console.print(piece.choices[0].text, end="", markup=False, soft_wrap=True)
            console.print("\n")

    text = f"[bold]{time.monotonic() - start_s:.0f} s[/bold] from text to server. Next:\n\n"
    console.print(Panel(text + suggestions(run, summary.speed), title="done", expand=False))


def suggestions(run: RunConfig, speed: Throughput | None) -> str:
    """Commands to try after ``run``, with the duration of the long one at this machine's ``speed``."""
    larger = RunConfig(model=preset("smollm2-135m").replace(vocab_size=run.model.vocab_size))
    duration = "hours or days"
    if speed is not None:
        t, sequence = larger.train, larger.data.sequence
        flops = t.steps * t.batch * sequence * larger.model.flops_per_token(sequence, causal=False)
        duration = _duration(flops / (1e12 * speed.tflops * run.plan.world))
    rows = {
        "chat smollm2": "a pretrained model, 135 million parameters",
        f"serve {run.folder}": "this model, until Ctrl-C",
        f"convert {run.folder} hf-model": "for transformers, vLLM and others",
        f"train --preset smollm2-135m --data.path {run.data.path}": (
            f"a larger model: about {duration} at the speed of this demo, minutes on a GPU; Ctrl-C saves and stops"
        ),
    }
    return "\n".join(f"  [bold]colonnade {command}[/bold]\n      {what}" for command, what in rows.items())


def _duration(seconds: float) -> str:
    for unit, length_s in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(1, seconds / 60):.0f} minutes"


def settings(folder: Path, corpus: Path) -> RunConfig:
    """The run: 10 million parameters, 4 million active per token; a minute of training on two cores."""
    return RunConfig(
        name="tour",
        runs=folder,
        model=preset("tour-moe").replace(vocab_size=Corpus(corpus).manifest.vocab_size),
        plan=Plan(tp=2, ep=2),
        data=DataConfig(path=corpus, sequence=256),
        train=TrainConfig(
            steps=500,
            batch=2,
            micro_batch=2,
            lr=3e-3,
            min_lr=1e-4,
            warmup=30,
            log_every=20,
            eval_every=250,
            eval_samples=16,
            save_every=250,
        ),
    )


def _title(number: int, text: str) -> None:
    console.print()
    console.print(Rule(f"[bold]{number}. {text}[/bold]", align="left"))


def _print_loss_curve(metrics: Path) -> None:
    """Print the training loss as a line of bars."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row["loss"] for row in rows if "loss" in row]
    width = min(60, len(steps))
    cuts = [round(i * len(steps) / width) for i in range(width + 1)]
    losses = [statistics.fmean(steps[a:b]) for a, b in itertools.pairwise(cuts)]
    low, high = min(losses), max(losses)
    bars = "".join(BARS[round((loss - low) / (high - low or 1) * (len(BARS) - 1))] for loss in losses)
    console.print(f"loss {losses[0]:.2f} {bars} {losses[-1]:.2f}")


def _print_expert_loads(folder: Path) -> None:
    """Print each expert's share of the tokens in the last logged step."""
    last = read_rows(folder, ROUTING)[-1]
    for layer, routing in ((layer, routing) for layer, routing in last.items() if layer != "step"):
        shares = "  ".join(f"{n / sum(routing['load']):4.0%}" for n in routing["load"])
        console.print(f"layer {layer}: its experts' shares of the tokens  {shares}")


def _logits(checkpoint: Path, plan: Plan, tokens: list[int]) -> np.ndarray:
    """The logits that the processes of ``plan`` compute together."""
    with api.load(checkpoint, plan=plan, dtype="float32", device="cpu") as model:
        return model.logits(tokens).numpy()


@contextmanager
def _server(checkpoint: Path, port: int) -> Iterator[str]:
    """Run ``colonnade serve`` in another process; yields its address once it listens."""
    command = [sys.executable, "-m", "colonnade", "serve", str(checkpoint), "--serve.port", str(port)]
    command += ["--serve.model_name", "tour"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    timer = threading.Timer(START_S, server.kill)  # a server that never starts must not block the demo
    started_s = time.monotonic()
    timer.start()
    try:
        assert server.stderr is not None
        for line in server.stderr:
            lines.append(line)
            if "http://" in line:
                break
        else:
            if time.monotonic() - started_s >= START_S:
                raise ColonnadeError(
                    f"the server did not start within {START_S} s; when the machine is less busy, run: "
                    f"colonnade serve {checkpoint}"
                )
            raise ColonnadeError(f"the server did not start: {''.join(lines).strip()}")
        timer.cancel()
        yield line[line.index("http://") :].split()[0].rstrip("/")
    finally:
        timer.cancel()
        server.terminate()
        server.wait()
        if server.stderr:
            server.stderr.close()
