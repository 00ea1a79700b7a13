"""Verbs that train: ``demo`` and ``train``."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table
from tyro.conf import arg

from colonnade.cli.shared import console, speaks, start_alone
from colonnade.config import DataConfig, ModelConfig, MoeConfig, RunConfig, size
from colonnade.config.presets import PRESETS, preset
from colonnade.config.presets_common import WITH_EXPERTS
from colonnade.config.toml import dumps
from colonnade.config.toml import read as read_toml
from colonnade.errors import CheckpointError, ConfigError


def demo(folder: Path = Path("runs/demo"), port: int = 0) -> None:
    """Train a small model on real speeches in two processes, reload it in one, serve it, and talk to it (3 minutes).

    Args:
        folder: Where the demo keeps its corpus and its run; made anew.
        port: TCP port of the server; 0 takes a free one.
    """
    start_alone("demo")
    from colonnade.demo import demo as run

    run(folder, port)


@dataclass(frozen=True)
class TrainArgs:
    """What ``train`` takes."""

    run: Annotated[RunConfig, arg(name="")]
    config: Path | None = None
    """A TOML file of settings, in the tables [model] [plan] [data] [train]."""
    preset: Annotated[
        str, arg(help=f"A model by name; its vocabulary is the corpus's. One of {', '.join(PRESETS)}.")
    ] = "tour"
    dry_run: bool = False
    """Print the resolved settings and the plan, and train nothing."""


def train(args: Annotated[TrainArgs, arg(name="")]) -> None:
    """Train a transformer on a corpus; the same command again resumes it.

    Settings come from the command line, else from --config, else from --preset, else from the defaults shown here.
    A model without experts gets some by --model.moe.experts, with which --help lists all that can be said about them.
    """
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
            console.print(_plan_table(run))
            if made or not run.train.start:  # else the model is not known yet
                console.print(_decided(run), soft_wrap=True)
            print(dumps(run), end="")
        return
    if run.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS picks its algorithms freely
    trainer = Trainer(run)
    if speaks():
        console.print(_plan_table(run))
    summary = trainer.fit()
    if summary.stopped:
        if speaks():
            how = f"stopped by {summary.stopped}; the same command goes on from {summary.checkpoint}"
            console.print(how, soft_wrap=True)
        sys.exit(128 + signal.Signals[summary.stopped])


def _decided(run: RunConfig) -> str:
    """What ``run`` leaves to its device, and the memory that it would take; no GPU is needed to ask."""
    from colonnade.parallel.mesh import choose_device
    from colonnade.train.log import computing
    from colonnade.train.memory_estimate import estimate

    device = "cuda" if run.train.cuda_graph else run.device
    device = choose_device(run.plan, device) if device == "auto" else device
    most = max(sum(estimate(run, device, rank).device.values()) for rank in range(run.plan.pp))
    return f"on {device}: {computing(run.resolved(device).train)}; memory estimate: {size(most)} a rank"


def with_defaults(verb: Callable[..., None], defaults: TrainArgs) -> Callable[..., None]:
    """``verb`` for tyro, with ``defaults`` for all that no flag says."""

    def train(args: Annotated[TrainArgs, arg(name="")] = defaults) -> None:
        verb(args)

    train.__doc__ = verb.__doc__
    return train


def train_defaults(argv: list[str]) -> TrainArgs:
    """What --preset and --config say, and the corpus's vocabulary, as the defaults of every other flag."""
    chosen, file, start = (_value(argv, flag) for flag in ("--preset", "--config", "--train.start"))
    model = (None if chosen or not start else _started(start)) or preset(chosen or "tour")
    base = RunConfig(model=model, data=DataConfig(sequence=min(DataConfig().sequence, model.context)))
    run = read_toml(RunConfig, Path(file), base=base) if file else base
    folder = Path(_value(argv, "--data.path") or run.data.path)
    model = run.model
    same = model.vocab_size == base.model.vocab_size and not start
    if same and (folder / "manifest.json").is_file():
        from colonnade.data import Corpus

        model = model.but(vocab_size=Corpus(folder).manifest.vocab_size)
    # Not validated again, and with the sizes that follow from others left open: a flag may change what they follow.
    open_model = ModelConfig.model_construct(None, **(dict(model) | model.derived() | _sections(model, argv)))
    open_run = RunConfig.model_construct(None, **(dict(run) | {"model": open_model}))
    return TrainArgs(open_run, Path(file) if file else None, chosen or "tour")


def _sections(model: ModelConfig, argv: list[str]) -> dict[str, object]:
    """Sections of ``model`` that it has not and that flags are about: experts, to be laid over the defaults.

    Raises :class:`ConfigError` for flags that do not say enough to make one.
    """
    words = ["--" + word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    absent = [name for name in ModelConfig.model_fields if getattr(model, name) is None]
    about = {name: word for name in absent for word in words if word.startswith(f"--model.{name}.")}
    if (flag := about.pop("moe", None)) and "--model.moe.experts" not in words:
        raise ConfigError(
            f"{flag} is about experts, and this model has none; say how many with --model.moe.experts, or begin with a "
            "preset that has some (--preset tour-moe)"
        )
    for name, other in about.items():
        raise ConfigError(
            f"{other} is about a part that this model has not; begin with a preset that has it, or write the whole "
            f"table [model.{name}] into a file for --config"
        )
    if not flag:
        return {}
    width = _value(argv, "--model.ffn_width") or ""
    width = int(width) if width.isdecimal() else model.ffn_width  # what is no number is the parser's to refuse
    moe = MoeConfig.model_construct(None, experts=0, ffn_width=width)
    return {"family": WITH_EXPERTS.get(model.family, model.family), "moe": moe}


def _started(start: str) -> ModelConfig | None:
    """The model that a run begins with; one that is not there is for the trainer to complain of."""
    from colonnade.checkpoint.found import opened

    try:
        return opened(start).config
    except CheckpointError:
        return None


def _value(argv: list[str], flag: str) -> str | None:
    for i, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
    return None


def _plan_table(run: RunConfig) -> Table:
    table = Table("axis", "ranks", "each rank holds", title=f"{run.folder}: {run.model.parameters:,} parameters")
    for row in run.plan.table(run.model):
        table.add_row(*row)
    return table
