"""Verbs that train, ``demo`` and ``train``, and ``presets``: what can be trained."""

import os
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from colonnade.cli.common import console, speaks, start_alone
from colonnade.config import ModelConfig, RunConfig, nearest, size
from colonnade.config.derive import derive, followed, replaced
from colonnade.config.presets import PRESETS, preset
from colonnade.config.toml import dumps, settings
from colonnade.config.toml import read as read_toml
from colonnade.errors import CheckpointError, ConfigError


def demo(folder: Path = Path("runs/demo"), port: int = 0) -> None:
    """Train a small model on real speeches in two processes, reload it in one, serve it, and talk to it (3 minutes).

    Args:
        folder: Where the demo keeps its corpus and its run; made anew.
        port: TCP port of the server; 0 takes a free one.
    """
    start_alone("demo")
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} is not from 0 to 65535; 0 takes a free one")
    from colonnade.demo import demo as run

    run(folder, port)


def presets(match: str = "") -> None:
    """List the models that --preset knows, with their sizes.

    Args:
        match: List only names and families that contain this.
    """
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), caption="total and active: parameters, all and a token's"
    )
    for column in ("name", "family", "total", "active", "layers", "width", "context"):
        table.add_column(column, justify="left" if column in ("name", "family") else "right", no_wrap=True)
    models = {name: preset(name) for name in PRESETS}
    found = {name: model for name, model in models.items() if match in name or match in model.family}
    if not found:
        raise ConfigError(f"no preset or family has '{match}' in its name{nearest(match, list(models))}")
    for name, model in found.items():
        numbers = model.layers, model.width, model.context
        sizes = _size(model.parameters), _size(model.active_parameters)
        table.add_row(name, model.family, *sizes, *(f"{number:,}" for number in numbers))
    Console(highlight=False).print(table)


def _size(parameters: int) -> str:
    """Three figures: ``135 M``, ``8.03 B``."""
    unit, word = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    shown = parameters / unit
    return f"{shown:.{2 if shown < 10 else 1 if shown < 100 else 0}f} {word}"


@dataclass(frozen=True)
class TrainArgs:
    """What ``train`` takes."""

    run: Annotated[RunConfig, arg(name="")]
    config: Path | None = None
    """A TOML file of settings, in the tables [model] [plan] [data] [train]."""
    preset: Annotated[
        str,
        arg(
            help="A model by name (colonnade presets lists their sizes); its vocabulary is the corpus's. One of "
            f"{', '.join(PRESETS)}."
        ),
    ] = "tour"
    dry_run: bool = False
    """Print the resolved settings and the plan, and train nothing."""


def train(args: Annotated[TrainArgs, arg(name="")]) -> None:
    """Train a transformer on a corpus; the same command again resumes it.

    Settings come from the command line, else from --config, else from --preset, else from the defaults shown here.
    A size that no flag gives follows from those that are given. A model without experts gets some by
    --model.moe.experts, with which --help lists all that can be said about them.
    """
    _train(args)


def _train(args: TrainArgs, follows: Callable[[RunConfig], str] = lambda _: "") -> None:
    run = args.run
    from colonnade.train.loop import Trainer, check_data, check_settings

    if args.dry_run:
        check_settings(run)
        made = (run.data.path / "manifest.json").is_file()
        if made:
            check_data(run)
        if speaks():
            if not made:
                console.print(f"{run.data.path} is no corpus yet: the vocabulary is the model's own", soft_wrap=True)
            _show(run, follows(run))
            if made or not run.train.start:  # else the model is not known yet
                console.print(_decided(run), soft_wrap=True)
            print(dumps(run), end="")
        return
    if run.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS picks its algorithms freely
    trainer = Trainer(run)
    if speaks():
        _show(run, follows(run))
    summary = trainer.fit()
    if summary.stopped:
        if speaks():
            how = f"stopped by {summary.stopped}; the same command goes on from {summary.checkpoint}"
            console.print(how, soft_wrap=True)
        sys.exit(128 + signal.Signals[summary.stopped])


def _decided(run: RunConfig) -> str:
    """What ``run`` leaves to its device, and the memory that it would take; no GPU is needed to ask."""
    from colonnade.parallel.distributed_context import choose_device
    from colonnade.train.memory_estimate import estimate
    from colonnade.train.run_log import precision_summary

    device = "cuda" if run.train.cuda_graph else run.device
    device = choose_device(run.plan, device) if device == "auto" else device
    most = max(sum(estimate(run, device, rank).device.values()) for rank in range(run.plan.pp))
    return f"on {device}: {precision_summary(run.resolved(device).train)}; memory estimate: {size(most)} a rank"


def train_with_defaults(argv: list[str]) -> Callable[..., None]:
    """:func:`train` for tyro, with the defaults that :func:`train_defaults` finds; it prints what was derived."""
    defaults, follows = train_defaults(argv)

    def bound(args: Annotated[TrainArgs, arg(name="")] = defaults) -> None:
        _train(args, follows)

    bound.__doc__ = train.__doc__
    return bound


def train_defaults(argv: list[str]) -> tuple[TrainArgs, Callable[[RunConfig], str]]:
    """Defaults of every flag, and a function that names the fields of the final run that were derived from others.

    They come from --preset and --config, the corpus's vocabulary, and what follows from the flags. They are not
    validated: a flag may still set what they lack.
    """
    chosen, file, start = (_value(argv, flag) for flag in ("--preset", "--config", "--train.start"))
    model = (None if chosen or not start else _started(start)) or preset(chosen or "tour")
    base = RunConfig(model=model)
    run = read_toml(RunConfig, Path(file), base=base) if file else base
    folder = Path(_value(argv, "--data.path") or run.data.path)
    same = run.model.vocab_size == base.model.vocab_size and not start
    if same and (folder / "manifest.json").is_file():
        from colonnade.data import Corpus

        run = replaced(run, {"model.vocab_size": Corpus(folder).manifest.vocab_size})
    flags = _settings(argv)
    _check_sections(run.model, flags)
    begun = any(name.startswith("model.moe.") for name in flags) and run.model.moe is None
    defaults = replaced(run, derive(run, flags) | ({"model.moe.experts": 0} if begun else {}))
    by_file = followed(base, run, settings(Path(file))) if file else []

    def follows(final: RunConfig) -> str:
        found = by_file + followed(run, final, flags)
        if final.model.vocab_size != base.model.vocab_size and same and "model.vocab_size" not in flags:
            found.append(f"model.vocab_size {final.model.vocab_size} (the corpus's)")
        return ", ".join({one.split()[0]: one for one in found}.values())

    return TrainArgs(defaults, Path(file) if file else None, chosen or "tour"), follows


def _settings(argv: list[str]) -> dict[str, object]:
    """What the flags set, by dotted names; numbers as numbers, anything else for the parser to judge."""
    words = [word for word in argv if word.startswith("--")]
    names = [word[2:].partition("=")[0].replace("-", "_") for word in words]
    return {name: _number(_value(argv, word.partition("=")[0])) for name, word in zip(names, words, strict=True)}


def _number(text: str | None) -> object:
    try:
        return int(text or "")
    except ValueError:
        return text


def _check_sections(model: ModelConfig, flags: Collection[str]) -> None:
    """Raise :class:`ConfigError` for flags about a section that ``model`` lacks and that they do not make whole."""
    absent = [name for name in ModelConfig.model_fields if getattr(model, name) is None]
    about = {name: flag for name in absent for flag in flags if flag.startswith(f"model.{name}.")}
    if (flag := about.pop("moe", None)) and "model.moe.experts" not in flags:
        raise ConfigError(
            f"--{flag} is about experts, and this model has none; say how many with --model.moe.experts, or begin with "
            "a preset that has some (--preset tour-moe)"
        )
    for name, other in about.items():
        raise ConfigError(
            f"--{other} is about a part that this model has not; begin with a preset that has it, or write the whole "
            f"table [model.{name}] into a file for --config"
        )


def _started(start: str) -> ModelConfig | None:
    """The model that a run begins with; one that is not there is for the trainer to complain of."""
    from colonnade.checkpoint.open_model import open_model

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


def _show(run: RunConfig, derived: str) -> None:
    if derived:
        console.print(f"derived: {derived}", soft_wrap=True)
    table = Table("axis", "ranks", "each rank holds", title=f"{run.folder}: {run.model.parameters:,} parameters")
    for row in run.plan.table(run.model):
        table.add_row(*row)
    console.print(table)
