"""The verb ``finetune`` for encoders: classes, choices and spans."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from colonnade.cli.common import MODEL_SOURCES, console, is_main_process
from colonnade.config import Device, Plan, TrainConfig, did_you_mean
from colonnade.errors import ConfigError

TRAIN = TrainConfig(lr=2e-5, dropout=0.1, attention_dropout=0.1, weight_decay=0.01)


@dataclass(frozen=True)
class EncoderArgs:
    """The arguments of ``finetune`` for encoders."""

    model: Positional[Annotated[str, arg(metavar="MODEL", help=f"{MODEL_SOURCES}, or minilm.")]]
    data: Path
    """The training data; docs/howto/encoders.md describes the forms."""
    held_out: Path
    """The development set, by which runs are compared."""
    method: str = "classify"
    """classify: texts or pairs of texts (MNLI, QQP). choice: one of several answers (RACE). span: SQuAD 1.1 and 2.0."""
    test: Path | None = None
    """A test set, for the median run and the ensemble."""
    seeds: int = 5
    """Runs with different seeds; the median is reported, and the ensemble of all."""
    epochs: float = 3.0
    """Passes over the training data."""
    lrs: tuple[float, ...] = (2e-5,)
    """Peak learning rates to try, with the first seed."""
    batches: tuple[int, ...] = (32,)
    """Batch sizes to try, with the first seed [samples]."""
    micro_batch: int = 8
    """Samples in one forward pass."""
    sequence: int = 0
    """Longest sequence [tokens]; 0: the encoder's context, at most 512."""
    name: str = ""
    """Folder of the runs within --runs; by default the method."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    device: Device = "auto"
    """auto: CUDA if there is a GPU for each local rank, otherwise the CPU."""
    plan: Plan = Plan()
    """The parallel layout."""
    train: TrainConfig = TRAIN
    """The optimisation; steps, lr, batch, seed and start follow from the flags above."""


def finetune_encoder(args: EncoderArgs) -> None:
    """Run a method of fine-tuning an encoder and print its scores."""
    from colonnade.tune.encoder_runs import EncoderSettings, format_metrics
    from colonnade.tune.encoder_runs import finetune_encoder as run

    settings = EncoderSettings(
        start=args.model, **{name: value for name, value in vars(args).items() if name != "model"}
    )
    result = run(settings, lambda line: console.print(line, soft_wrap=True))
    if is_main_process():
        out = Console(highlight=False, soft_wrap=True)
        out.print(f"median of {len(result.runs)}: {format_metrics(result.median.metrics)} (seed {result.median.seed})")
        out.print(f"ensemble: {format_metrics(result.ensemble)}")
        if result.test is not None and result.test_ensemble is not None:
            out.print(f"test: {format_metrics(result.test)}; ensemble {format_metrics(result.test_ensemble)}")


FINETUNE_METHODS: dict[str, Callable[[EncoderArgs], None]] = dict.fromkeys(
    ("classify", "choice", "span"), finetune_encoder
)
"""Methods of fine-tuning to the functions that run them."""


def finetune(args: Annotated[EncoderArgs, arg(name="")]) -> None:
    """Fine-tune an encoder with several seeds, and report the median; finished runs are not trained again."""
    if args.method not in FINETUNE_METHODS:
        raise ConfigError(f"--method {args.method} is unknown{did_you_mean(args.method, list(FINETUNE_METHODS))}")
    FINETUNE_METHODS[args.method](args)
