"""The verb ``finetune`` for encoders: classes, choices and spans."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from colonnade.cli.common import MODEL_SOURCES, console, is_main_process
from colonnade.config import EncoderTuning, did_you_mean
from colonnade.errors import ConfigError


@dataclass(frozen=True)
class EncoderArgs(EncoderTuning):
    """The arguments of ``finetune`` for encoders."""

    model: Positional[Annotated[str, arg(metavar="MODEL", help=f"{MODEL_SOURCES}, or minilm.")]]


def finetune_encoder(args: EncoderArgs) -> None:
    """Run a method of fine-tuning an encoder and print its scores."""
    from colonnade.tune.encoder_runs import finetune_encoder as run
    from colonnade.tune.encoder_runs import format_metrics

    result = run(args, lambda line: console.print(line, soft_wrap=True))
    if is_main_process():
        out = Console(highlight=False, soft_wrap=True)
        out.print(f"median of {len(result.runs)}: {format_metrics(result.median.metrics)} (seed {result.median.seed})")
        out.print(f"ensemble: {format_metrics(result.ensemble)}")
        if result.test is not None and result.test_ensemble is not None:
            out.print(f"test: {format_metrics(result.test)}; ensemble {format_metrics(result.test_ensemble)}")


FINETUNE_METHODS: dict[str, Callable[[EncoderArgs], None]] = dict.fromkeys(
    ("classify", "choice", "span"), finetune_encoder
)
"""The function of each method."""


def finetune(args: Annotated[EncoderArgs, arg(name="")]) -> None:
    """Fine-tune an encoder with several seeds, and report the median; finished runs are not trained again."""
    if args.method not in FINETUNE_METHODS:
        raise ConfigError(f"--method {args.method} is unknown{did_you_mean(args.method, list(FINETUNE_METHODS))}")
    FINETUNE_METHODS[args.method](args)
