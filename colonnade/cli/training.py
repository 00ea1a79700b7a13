"""The verbs ``demo``, ``train`` and ``presets``."""

import os
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from colonnade.cli.common import console, is_main_process, refuse_torchrun
from colonnade.config import ModelConfig, RunConfig, did_you_mean, format_bytes
from colonnade.config.derive import derive, describe_derived, replace_paths
from colonnade.config.presets import PRESETS, preset
from colonnade.config.toml import dumps, read_settings
from colonnade.config.toml import read as read_toml
from colonnade.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from colonnade.train.run_log import Summary


def demo(folder: Path = Path("runs/demo"), port: int = 0) -> None:
    """Train a small model on real speeches in two processes, load it in one, serve it and query it (3 minutes).

    Args:
        folder: Folder for the corpus and the run; an existing one is replaced.
        port: TCP port of the server; 0 picks a free one.
    """
    refuse_torchrun("demo")
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} is not from 0 to 65535; 0 picks a free one")
    from colonnade.demo import demo as run

    run(folder, port)


def presets(match: str = "") -> None:
    """List the presets for --preset, with their sizes.

    Args:
        match: List only names and families that contain this text.
    """
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        caption="total, active: all parameters, and those used per token",
    )
    for column in ("name", "family", "total", "active", "layers", "width", "context"):
        table.add_column(column, justify="left" if column in ("name", "family") else "right", no_wrap=True)
    models = {name: preset(name) for name in PRESETS}
    matching = {name: model for name, model in models.items() if match in name or match in model.family}
    if not matching:
        raise ConfigError(f"no preset or family has '{match}' in its name{did_you_mean(match, list(models))}")
    for name, model in matching.items():
        sizes = _size(model.parameters), _size(model.active_parameters)
        table.add_row(name, model.family, *sizes, f"{model.layers:,}", f"{model.width:,}", f"{model.context:,}")
    Console(highlight=False).print(table)


def _size(parameters: int) -> str:
    """Formatted with three digits: ``135 M``, ``8.03 B``."""
    unit, word = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    value = parameters / unit
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {word}"


@dataclass(frozen=True)
class TrainArgs:
    """The arguments of ``train``."""

    run: Annotated[RunConfig, arg(name="")]
    config: Path | None = None
    """A TOML file with the tables [model] [plan] [data] [train]."""
    preset: Annotated[
        str,
        arg(
            help="A model by name (colonnade presets lists their sizes), with the vocabulary of the corpus. One of "
            f"{', '.join(PRESETS)}."
        ),
    ] = "tour"
    dry_run: bool = False
    """Print the resolved settings and the plan without training."""


def train(args: Annotated[TrainArgs, arg(name="")]) -> None:
    """Train a transformer on a corpus; repeating the command resumes it.

    Settings come from the command line, otherwise from --config, otherwise from --preset, otherwise from the defaults
    shown here. Sizes that are not set are derived from those that are. --model.moe.experts adds experts to a dense
    model; with it, --help lists all their settings.
    """
    _train(args)


def _train(args: TrainArgs, follows: Callable[[RunConfig], str] = lambda _: "") -> None:
    run = args.run
    from colonnade.train.data_feed import CorpusFeed
    from colonnade.train.loop import Trainer, check_data, check_settings

    feed = CorpusFeed
    if run.distill.on_policy:
        from colonnade.tune.on_policy import OnPolicyFeed

        feed = OnPolicyFeed
    if args.dry_run:
        check_settings(run)
        has_corpus = (run.data.path / "manifest.json").is_file()
        if has_corpus:
            check_data(run, feed)
        if is_main_process():
            if not has_corpus:
                console.print(f"{run.data.path} is not built yet: using the model's vocabulary", soft_wrap=True)
            show_run(run, follows(run))
            if has_corpus or not run.train.pretrained_checkpoint:  # otherwise the model is not known yet
                console.print(_resolved_summary(run), soft_wrap=True)
            print(dumps(run), end="")
        return
    if run.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic cuBLAS algorithms
    trainer = Trainer(run, feed=feed)
    if is_main_process():
        show_run(run, follows(run))
    exit_if_stopped(trainer.fit())


def exit_if_stopped(summary: "Summary") -> None:
    """Exit with the signal's code if one ended the run."""
    if summary.stopped:
        if is_main_process():
            message = f"stopped by {summary.stopped}; the same command resumes from {summary.checkpoint}"
            console.print(message, soft_wrap=True)
        sys.exit(128 + signal.Signals[summary.stopped])


def _resolved_summary(run: RunConfig) -> str:
    """The settings that depend on the device, and the memory estimate; needs no GPU."""
    from colonnade.parallel.distributed_context import choose_device
    from colonnade.train.memory_estimate import estimate
    from colonnade.train.run_log import precision_summary

    device = "cuda" if run.train.cuda_graph else run.device
    device = choose_device(run.plan, device) if device == "auto" else device
    most = max(sum(estimate(run, device, rank).device.values()) for rank in range(run.plan.pp))
    return f"on {device}: {precision_summary(run.resolved(device).train)}; memory: about {format_bytes(most)} per rank"


def distill(args: Annotated[TrainArgs, arg(name="")]) -> None:
    """Train a model that also learns from a teacher (--distill.teacher); repeating the command resumes it.

    This is colonnade train with a required teacher: the settings under distill define how the two are compared, all
    others are those of train.
    """
    _require_teacher(args)
    _train(args)


def _require_teacher(args: TrainArgs) -> None:
    if not args.run.distill.teacher:
        raise ConfigError("distillation needs a teacher; set --distill.teacher, or use colonnade train")


def train_with_defaults(argv: list[str], verb: Callable[..., None] = train) -> Callable[..., None]:
    """``verb``, train or distill, for tyro, with the defaults that :func:`train_defaults` finds; it prints what was
    derived.
    """
    defaults, follows = train_defaults(argv)

    def bound(args: Annotated[TrainArgs, arg(name="")] = defaults) -> None:
        if verb is distill:
            _require_teacher(args)
        _train(args, follows)

    bound.__doc__ = verb.__doc__
    return bound


def train_defaults(argv: list[str]) -> tuple[TrainArgs, Callable[[RunConfig], str]]:
    """Defaults of every flag, and a function that lists the derived fields of the final run.

    They come from --preset and --config, the corpus's vocabulary, and the values derived from the flags. They are not
    validated, because a flag may still set missing values.
    """
    chosen, file, start = (_value(argv, flag) for flag in ("--preset", "--config", "--train.pretrained_checkpoint"))
    if not start and _value(argv, "--distill.init") == "layers":  # then the model is the teacher's, with fewer layers
        start = _value(argv, "--distill.teacher")
    model = (None if chosen or not start else _starting_model(start)) or preset(chosen or "tour")
    base = RunConfig(model=model)
    run = read_toml(RunConfig, Path(file), base=base) if file else base
    folder = Path(_value(argv, "--data.path") or run.data.path)
    take_vocabulary = run.model.vocab_size == base.model.vocab_size and not start
    if take_vocabulary and (folder / "manifest.json").is_file():
        from colonnade.data import Corpus

        run = replace_paths(run, {"model.vocab_size": Corpus(folder).manifest.vocab_size})
    flags = flag_settings(argv)
    _check_sections(run.model, flags)
    adds_experts = any(name.startswith("model.moe.") for name in flags) and run.model.moe is None
    defaults = replace_paths(run, derive(run, flags) | ({"model.moe.experts": 0} if adds_experts else {}))
    by_file = describe_derived(base, run, read_settings(Path(file))) if file else []

    def follows(final: RunConfig) -> str:
        derived = by_file + describe_derived(run, final, flags)
        if final.model.vocab_size != base.model.vocab_size and take_vocabulary and "model.vocab_size" not in flags:
            derived.append(f"model.vocab_size {final.model.vocab_size} (the corpus's)")
        return ", ".join({one.split()[0]: one for one in derived}.values())

    return TrainArgs(defaults, Path(file) if file else None, chosen or "tour"), follows


def flag_settings(argv: list[str]) -> dict[str, object]:
    """The values of the flags by dotted names; integers as int, everything else as text."""
    words = [word for word in argv if word.startswith("--")]
    names = [word[2:].partition("=")[0].replace("-", "_") for word in words]
    return {name: _number(_value(argv, word.partition("=")[0])) for name, word in zip(names, words, strict=True)}


def _number(text: str | None) -> object:
    try:
        return int(text or "")
    except ValueError:
        return text


def _check_sections(model: ModelConfig, flags: Collection[str]) -> None:
    """Raise :class:`ConfigError` for flags of a section that ``model`` lacks, unless they complete it."""
    absent = [name for name in ModelConfig.model_fields if getattr(model, name) is None]
    incomplete = {name: flag for name in absent for flag in flags if flag.startswith(f"model.{name}.")}
    if (flag := incomplete.pop("moe", None)) and "model.moe.experts" not in flags:
        raise ConfigError(
            f"--{flag} applies to experts, and this model has none; set their number with --model.moe.experts, or use "
            "a preset with experts (--preset tour-moe)"
        )
    for name, other in incomplete.items():
        raise ConfigError(
            f"--{other} belongs to a part that this model does not have; use a preset that has it, or put the "
            f"complete table [model.{name}] in a file for --config"
        )


def _starting_model(start: str) -> ModelConfig | None:
    """The config of the model that a run starts from; None if it is missing, which the trainer reports."""
    from colonnade.checkpoint.load_model import open_model

    try:
        return open_model(start).config
    except CheckpointError:
        return None


def _value(argv: list[str], flag: str) -> str | None:
    for i, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
    return None


def show_run(run: RunConfig, derived: str) -> None:
    """Print the derived settings and the plan."""
    if derived:
        console.print(f"derived: {derived}", soft_wrap=True)
    table = Table("axis", "ranks", "each rank holds", title=f"{run.folder}: {run.model.parameters:,} parameters")
    for row in run.plan.table(run.model):
        table.add_row(*row)
    console.print(table)
