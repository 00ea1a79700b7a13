"""The program: finds the verb, parses its words, and turns what the user did wrong into one line."""

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

from colonnade.cli.common import console
from colonnade.cli.data import convert, corpus
from colonnade.cli.evaluation import evaluate, verify
from colonnade.cli.serving import chat, generate, serve
from colonnade.cli.training import demo, presets, train, train_with_defaults
from colonnade.config import nearest
from colonnade.config.plugins import load_plugin
from colonnade.errors import ColonnadeError, ConfigError, Interrupted

ABOUT = """Trains and serves large transformers with one model definition, from a laptop to a cluster.

colonnade help VERB, or colonnade VERB --help, lists a verb's flags. A mistake is one line on stderr and exit code 1;
with --debug, before or after the verb, it is a traceback.
--import MODULE, likewise, imports a module of your own first, which may register routers; repeat it for several.
--version prints the version."""

VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "corpus": corpus,
    "train": train,
    "presets": presets,
    "eval": evaluate,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "convert": convert,
    "verify": verify,
}


SECTIONS = {
    "ServeConfig": "serve", "TrainConfig": "train", "DataConfig": "data", "Plan": "plan", "ModelConfig": "model",
    "MoeConfig": "model.moe", "LatentConfig": "model.latent", "ExpertsConfig": "experts",
}  # fmt: skip
"""The flags by which each configuration is set."""


def parse(argv: list[str]) -> Callable[[], None]:
    """The call that ``argv`` asks for, not made yet; raises SystemExit for words that no verb takes."""
    name, words = (argv or ["--help"])[0], argv[1:]
    if name == "help":
        return parse([*words[:1], "--help"])
    # A choice between "none" and a table of settings (rope_scaling) is made in the TOML file.
    options = {"use_underscores": True, "config": (tyro.conf.AvoidSubcommands,)}
    if name in VERBS:
        verb = train_with_defaults(words) if name == "train" else VERBS[name]
        return tyro.cli(_deferred(verb), prog=f"colonnade {name}", args=words, **options)
    if not name.startswith("-"):
        console.print(
            f"colonnade has no verb '{name}'{nearest(name, [*VERBS, 'help'])} (see colonnade help)", soft_wrap=True
        )
        sys.exit(2)
    verbs = {each: _deferred(verb) for each, verb in VERBS.items()}
    return tyro.extras.subcommand_cli_from_dict(
        verbs, prog="colonnade", description=ABOUT, args=[name], sort_subcommands=False, **options
    )


def _deferred(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """``verb`` for tyro, which calls what it parsed: gives back the call instead."""

    @functools.wraps(verb)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return functools.partial(verb, *args, **kwargs)

    return bound


def _pop_imports(argv: list[str]) -> list[str]:
    """Take each ``--import MODULE`` out of ``argv``; the modules."""
    found: list[str] = []
    while at := next((i for i, word in enumerate(argv, 1) if word.partition("=")[0] == "--import"), 0):
        _, equals, name = argv[at - 1].partition("=")
        name = name if equals else "".join(argv[at : at + 1])
        if not name or name.startswith("-"):
            raise ConfigError("--import needs the name of a module, as in: --import my_routers")
        found.append(name)
        del argv[at - 1 : at if equals else at + 1]
    return found


def _with_flag_names(message: str, argv: list[str]) -> str:
    """``message`` with fields by the flags that set them: ``--train.steps is 0`` in the place of ``TrainConfig.steps``.

    What no flag set came from a file, and is left as the file has it.
    """
    flags = {word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}

    def named(field: re.Match[str]) -> str:
        flag = f"--{SECTIONS[field[1]]}.{field[2]}"
        return flag if flag.replace("-", "_") in flags else field[0]

    return re.sub(rf"\b({'|'.join(SECTIONS)})\.(\w+)(?= is )", named, message)


def main(argv: list[str] | None = None) -> None:
    """The program; returns normally or raises SystemExit with the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if debug := "--debug" in argv:
        argv.remove("--debug")
    if argv[:1] == ["--version"]:
        print(f"colonnade {version('colonnade')}")
        return
    try:
        for plugin in _pop_imports(argv):
            load_plugin(plugin)
        parse(argv)()
    except ColonnadeError as error:
        if debug:
            raise
        kind, said = f"{type(error).__name__}: ", _with_flag_names(str(error), argv)
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # what torchrun ends its own account with
            Path(report).write_text(json.dumps({"message": f"{kind}{said}", "timestamp": time.time()}))
        console.print(Text.assemble((kind, "bold red"), said), soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Interrupted as stop:
        sys.exit(128 + stop.signal)
    except BrokenPipeError:
        # The reader of our output has gone (``colonnade generate … | head``): nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
