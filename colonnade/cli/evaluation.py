"""The verbs ``eval``, for a model, and ``verify``, for parallel layouts."""

import difflib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from colonnade.cli.common import (
    EvaluationPlacementArgs,
    Model,
    console,
    is_main_process,
    progress_status,
    refuse_torchrun,
)
from colonnade.config import ModelConfig, Plan, ServeConfig, plural
from colonnade.config.presets import PRESETS, preset
from colonnade.errors import CheckpointError, ConfigError, DataError, PlanError

if TYPE_CHECKING:
    from colonnade.model_spec import ModelSpec


MAX_WORLD = 64
"""Limit for --world; listing the plans of more processes takes long."""


def evaluate(
    model: Positional[Model],
    text: str = "sotu",
    context: int | None = None,
    stride: int | None = None,
    routing: bool = False,
    tasks: tuple[str, ...] = (),
    limit: int | None = None,
    shots: int | None = None,
    data: tuple[Path, ...] = (),
    chat: bool = False,
    out: Path = Path("runs/eval"),
    placement: Annotated[EvaluationPlacementArgs, arg(name="")] = EvaluationPlacementArgs(),
) -> None:
    """Print a model's perplexity on a text, or its scores on tasks.

    Args:
        model: The model to evaluate.
        text: A UTF-8 text file, or sotu for the latest speech of the sample package.
        context: Tokens in one window; by default the model's context.
        stride: Tokens between the starts of two windows; by default the window, which is fastest. Each token is
            counted once.
        routing: Print the kinds of tokens that each expert processes, for each layer (a mixture of experts, one
            process).
        tasks: Tasks of lm-eval by name, YAML files of tasks, wikitext103, lambada, or built-in ones, which need no
            network: sotu_cloze, sotu_next, sotu_century, sotu_text, sotu_repeat.
        limit: Examples of each task; by default all.
        shots: Solved examples before each question; by default as defined by the task.
        data: Files of tasks that need one: wiki.test.tokens for wikitext103, lambada_test.jsonl for lambada.
        chat: Put questions into the model's chat template.
        out: Folder for the results and the report page of the tasks.
        placement: Where the model runs.
    """
    if tasks:
        if routing or context is not None or stride is not None:
            raise ConfigError("--routing, --context and --stride apply to --text, not to --tasks; remove them")
        _evaluate_tasks(placement.spec(model, ServeConfig()), out, tasks, limit, shots, data, chat)
        return
    if limit is not None or shots is not None or data or chat:
        raise ConfigError("--limit, --shots, --data and --chat apply to tasks; add --tasks, for example sotu_cloze")
    if placement.plan.dp > 1:
        raise PlanError(
            f"--plan.dp {placement.plan.dp} applies to --tasks, whose requests are shared by replicas; remove it"
        )
    from colonnade.data.readers import sotu_documents
    from colonnade.parallel.launch import launch

    name, content = sotu_documents()[-1] if text == "sotu" else (text, _read(Path(text)))
    spec = placement.spec(model, ServeConfig())
    spec.open()  # errors come before any process starts
    if routing:
        result = _routing(spec, content, context, stride)
    else:
        result = launch(_score, (spec, content, context, stride), spec.plan)
    if is_main_process():
        print(
            f"perplexity {result.perplexity:.3f} on {name} "
            f"({result.tokens:,} tokens, {result.nll / result.tokens:.4f} nats per token)"
        )


def _evaluate_tasks(spec: "ModelSpec", out: Path, *options: Any) -> None:
    if not console.is_terminal:
        os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's bars
    try:
        from colonnade.evaluate.report import rows
        from colonnade.evaluate.run import TaskOptions, check_tasks, evaluate_tasks
    except ImportError as error:
        raise ConfigError(f"--tasks needs the extra eval ({error}); run: pip install 'colonnade[eval]'") from None

    chosen = TaskOptions(*options)
    check_tasks(chosen)
    replica = replace(spec, plan=spec.plan.replace(dp=1, replicate=1))
    opened = replica.open()  # errors come before any process starts
    if opened.config.moe is not None and spec.plan.data_ranks > 1:
        raise PlanError(
            f"the experts of a mixture are distributed over all ranks, and {spec.plan} has replicas; use tp instead"
        )
    with progress_status("evaluating"):
        results = evaluate_tasks(spec, chosen, out)
    if is_main_process():
        table = Table("task", "examples", "metric", "value", "±", box=None, pad_edge=False)
        for task, examples, metric, value, error in rows(results):
            table.add_row(str(task), f"{examples:,}", str(metric), f"{value:,.4f}", f"{error:.4f}" if error else "")
        Console(highlight=False).print(table)
        console.print(f"{out / 'report.html'}", soft_wrap=True)


def _score(spec: "ModelSpec", text: str, context: int | None, stride: int | None) -> Any:
    with spec.load() as loaded:
        if loaded.context.rank:
            return loaded.score(text, context=context, stride=stride)
        with progress_status("scoring") as update:

            def progress(done: int, total: int) -> None:
                update(f"scoring: {done} of {plural(total, 'window')}")

            return loaded.score(text, context=context, stride=stride, progress=progress)


def _routing(spec: "ModelSpec", text: str, context: int | None, stride: int | None) -> Any:
    from colonnade import look

    if stride not in (None, context):
        raise ConfigError("--routing follows each token once; remove --stride")
    if spec.plan.world > 1:
        raise ConfigError("--routing runs in one process; remove --plan")
    with spec.load() as loaded:
        with progress_status("following the tokens"):
            traced = look.record_routing(loaded.transformer, loaded.tokenizer, loaded.tokenizer.encode(text), context)
        for table in look.routing_tables(traced):
            Console(highlight=False).print(table)  # on the standard output, like the perplexity
        return traced.score


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; use a text file, or sotu") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def verify(
    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tour",
    world: int = 4,
    all: bool = False,  # noqa: A002 - the flag's name
    device: Literal["cpu", "cuda"] = "cpu",
    out: Path = Path("runs/verify.json"),
) -> None:
    """Check that every parallel layout computes the same as one process, on this machine's CPUs or GPUs.

    Each plan trains two steps, saves a checkpoint, loads that of another plan, and generates some tokens; everything is
    compared with one process in float64. The exit code is 1 if anything differs. For a speech recogniser, losses,
    gradients and transcripts with its own weights are compared over dp and tp, on CPUs.

    Args:
        model: A preset, or any model that eval accepts (only its config is read), reduced in width and depth. Or a
            recogniser from speech train, at full size.
        world: Number of processes.
        all: Run every plan instead of a set that covers each pair of choices.
        device: cpu, or cuda with one GPU per process, still in float64.
        out: JSON file for the results.
    """
    refuse_torchrun("verify")
    from colonnade.checkpoint.load_model import recogniser_at
    from colonnade.parallel.pipeline import schedule_supported
    from colonnade.verify import all_plans, covering, shrink
    from colonnade.verify import verify as run
    from colonnade.verify.run import print_result, result_table, write_results

    if out.suffix not in ("", ".json"):
        raise ConfigError(
            f"--out {out} is a {out.suffix} file, and the results are JSON; use a name that ends in .json"
        )
    if not 1 <= world <= MAX_WORLD:
        raise ConfigError(f"--world {world} is not from 1 to {MAX_WORLD}; 2, 4 and 8 are usual")
    if (recogniser := recogniser_at(model)) is not None:
        _verify_recogniser(recogniser, world, device, out)
        return
    full = _config_of(model)
    plans = all_plans(world, shrink(full, 2 * world))
    config = shrink(full, 1 + max(plan.total_stages for plan in plans))
    plans = plans if all else covering(plans)
    sizes = f"{config.layers} layers, {config.heads} heads of {config.head_width}, vocabulary {config.vocab_size}"
    runs = f"{plural(len(plans), 'plan')} of {plural(world, 'process')}"
    console.print(f"{model} in small ({sizes}) under {runs}", soft_wrap=True)
    if world > 1 and not schedule_supported(Plan(pp=world, schedule="zero_bubble")):
        console.print("without zero_bubble, whose gradients need torch 2.13", soft_wrap=True)
    results = run(config, plans, print_result, device)
    write_results(results, config, out, device)
    console.print(result_table(results))
    failed = [result for result in results if not result.ok]
    equal = f"{len(results) - len(failed)} of {plural(len(results), 'plan')}"
    console.print(f"{equal} equal one process; {out}", soft_wrap=True)
    if failed:
        sys.exit(1)


def _verify_recogniser(recogniser: Path, world: int, device: str, out: Path) -> None:
    from colonnade.speech.model import SpeechModel
    from colonnade.speech.verify import plans_of, write_outcomes
    from colonnade.speech.verify import verify as run

    if device != "cpu":
        raise ConfigError(f"--device {device}: recognisers are verified on CPUs; remove it")
    plans = plans_of(SpeechModel.load(recogniser), world)
    console.print(f"{recogniser} under {plural(len(plans), 'plan')} of {plural(world, 'process')}", soft_wrap=True)
    outcomes = run(recogniser, plans, print_line)
    write_outcomes(outcomes, recogniser, out)
    failed = [each for each in outcomes if not each.ok]
    equal = f"{len(outcomes) - len(failed)} of {plural(len(outcomes), 'plan')}"
    console.print(f"{equal} equal one process; {out}", soft_wrap=True)
    if failed:
        sys.exit(1)


def print_line(each: object) -> None:
    """Print an outcome; flushes, because it runs in a worker."""
    print(each, flush=True)


def _config_of(model: str) -> ModelConfig:
    if model in PRESETS:
        return preset(model)
    from colonnade.checkpoint.load_model import open_for_plan

    try:
        return open_for_plan(model, Plan()).config
    except CheckpointError as error:
        if near := difflib.get_close_matches(model, PRESETS):
            raise CheckpointError(f"{error}; similar presets: {', '.join(near)}") from None
        raise
