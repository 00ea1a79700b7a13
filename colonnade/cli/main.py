"""The program: parses the verb and its flags, runs it, and prints a user error as one line."""

import functools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro
from rich.text import Text

from colonnade.cli.bench import bench
from colonnade.cli.common import console
from colonnade.cli.compress import compress
from colonnade.cli.data import convert, corpus
from colonnade.cli.evaluation import evaluate, verify
from colonnade.cli.export import export
from colonnade.cli.finetune import finetune, finetune_with_defaults
from colonnade.cli.look import look
from colonnade.cli.serving import chat, generate, serve
from colonnade.cli.shadow import shadow
from colonnade.cli.speech import SPEECH, speech
from colonnade.cli.training import demo, distill, presets, train, train_with_defaults
from colonnade.config import did_you_mean
from colonnade.config.plugins import load_plugin
from colonnade.cores import set_openmp_unpinned
from colonnade.errors import ColonnadeError, ConfigError, Interrupted

ABOUT = """Trains and serves large transformers with one model definition, from a laptop to a cluster.

colonnade help VERB, or colonnade VERB --help, lists a verb's flags. An error is one line on stderr and exit code 1;
--debug, before or after the verb, shows its traceback.
--import MODULE, before or after the verb, first imports your module, for example one that registers routers;
repeat it for several.
--version prints the version."""

VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "corpus": corpus,
    "train": train,
    "finetune": finetune,
    "distill": distill,
    "presets": presets,
    "eval": evaluate,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "shadow": shadow,
    "convert": convert,
    "look": look,
    "compress": compress,
    "export": export,
    "verify": verify,
    "bench": bench,
    "speech": speech,
}

SUBCOMMANDS: dict[str, dict[str, Callable[..., None]]] = {"speech": SPEECH}
"""The subcommands of verbs that have them."""

WITH_DEFAULTS: dict[str, Callable[[list[str]], Callable[..., None]]] = {
    "train": train_with_defaults,
    "distill": functools.partial(train_with_defaults, verb=distill),
    "finetune": finetune_with_defaults,
}
"""Verbs whose defaults depend on the given flags."""

SECTIONS = {
    "ServeConfig": "serve", "TrainConfig": "train", "DataConfig": "data", "Plan": "plan", "ModelConfig": "model",
    "MoeConfig": "model.moe", "LatentConfig": "model.latent", "ExpertsConfig": "experts", "DistillConfig": "distill",
    "LoraConfig": "lora", "TuneConfig": "tune", "FinetuneTrain": "train",
    "EncoderConfig": "model.encoder", "RelativePositions": "model.relative_positions",
}  # fmt: skip
"""The prefix of the flags that set each configuration."""


def parse(argv: list[str]) -> Callable[[], None]:
    """Parse ``argv`` into a call, without making it; raises SystemExit for invalid arguments."""
    name, words = (argv or ["--help"])[0], argv[1:]
    if name == "help":
        return parse([*words[:1], "--help"])
    # Optional tables of settings (rope_scaling) are set in the TOML file, not by subcommands.
    options = {"use_underscores": True, "config": (tyro.conf.AvoidSubcommands,)}
    if name in SUBCOMMANDS:
        verbs = {each: _deferred(verb) for each, verb in SUBCOMMANDS[name].items()}
        about = VERBS[name].__doc__
        return tyro.extras.subcommand_cli_from_dict(
            verbs, prog=f"colonnade {name}", description=about, args=words or ["--help"], sort_subcommands=False,
            **options,
        )  # fmt: skip
    if name in VERBS:
        verb = WITH_DEFAULTS[name](words) if name in WITH_DEFAULTS else VERBS[name]
        return tyro.cli(_deferred(verb), prog=f"colonnade {name}", args=words, **options)
    if not name.startswith("-"):
        console.print(
            f"colonnade has no verb '{name}'{did_you_mean(name, [*VERBS, 'help'])} (see colonnade help)",
            soft_wrap=True,
        )
        sys.exit(2)
    verbs = {each: _deferred(verb) for each, verb in VERBS.items()}
    return tyro.extras.subcommand_cli_from_dict(
        verbs, prog="colonnade", description=ABOUT, args=[name], sort_subcommands=False, **options
    )


def _deferred(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """Wraps ``verb`` for tyro, which would call it: returns the call instead of making it."""

    @functools.wraps(verb)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return functools.partial(verb, *args, **kwargs)

    return bound


def _pop_imports(argv: list[str]) -> list[str]:
    """Remove each ``--import MODULE`` from ``argv`` and return the modules."""
    modules: list[str] = []
    while at := next((i for i, word in enumerate(argv, 1) if word.partition("=")[0] == "--import"), 0):
        _, equals, name = argv[at - 1].partition("=")
        name = name if equals else "".join(argv[at : at + 1])
        if not name or name.startswith("-"):
            raise ConfigError("--import needs the name of a module, as in: --import my_routers")
        modules.append(name)
        del argv[at - 1 : at if equals else at + 1]
    return modules


def _with_flag_names(message: str, argv: list[str]) -> str:
    """``message`` with the flags for the fields that they set: ``--train.steps is 0`` for ``TrainConfig.steps is 0``.

    A field that no flag set comes from a file and keeps its name.
    """
    flags = {word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}

    def replacement(field: re.Match[str]) -> str:
        flag = f"--{SECTIONS[field[1]]}.{field[2]}"
        return flag if flag.replace("-", "_") in flags else field[0]

    return re.sub(rf"\b({'|'.join(SECTIONS)})\.(\w+)(?= is )", replacement, message)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; returns normally or raises SystemExit with the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if debug := "--debug" in argv:
        argv.remove("--debug")
    if argv[:1] == ["--version"]:
        print(f"colonnade {version('colonnade')}")
        return
    try:
        set_openmp_unpinned(os.environ)  # before anything imports torch
        for plugin in _pop_imports(argv):
            load_plugin(plugin)
        parse(argv)()
    except ColonnadeError as error:
        if debug:
            raise
        kind, message = f"{type(error).__name__}: ", _with_flag_names(str(error), argv)
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints it at the end
            Path(report).write_text(json.dumps({"message": f"{kind}{message}", "timestamp": time.time()}))
        console.print(Text.assemble((kind, "bold red"), message), soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Interrupted as stop:
        sys.exit(128 + stop.signal)
    except BrokenPipeError:
        # The reader of the output has closed the pipe (``colonnade generate … | head``).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
