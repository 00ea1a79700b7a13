"""The verb ``finetune``: a table of methods, and those of :mod:`colonnade.tune.tuner`."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field
from tyro.conf import Positional, Suppress, arg

from colonnade.cli import finetune_encoder
from colonnade.cli.common import MODEL_SOURCES, is_main_process, progress_status
from colonnade.cli.finetune_encoder import FINETUNE_METHODS as ENCODER_METHODS
from colonnade.cli.training import exit_if_stopped, flag_settings, show_run
from colonnade.config import Device, LoraConfig, Plan, TrainConfig, TuneConfig, did_you_mean
from colonnade.config.tune import check_method_settings
from colonnade.errors import ConfigError

FULL_LR, LORA_LR = 2e-5, 2e-4
"""Default peak learning rates, without and with adapters."""


class FinetuneTrain(TrainConfig):
    """The flags of :class:`TrainConfig`, without the one that MODEL sets."""

    lr: float = Field(default=FULL_LR, gt=0)
    """Peak learning rate; unless it is set, 2e-5, or 2e-4 with adapters (any --lora flag)."""
    pretrained_checkpoint: Suppress[str] = ""


_LORA, _TUNE, _TRAIN = LoraConfig(), TuneConfig(), FinetuneTrain()


@dataclass(frozen=True)
class FinetuneArgs:
    """The arguments of ``finetune``."""

    model: Positional[
        Annotated[str, arg(metavar="MODEL", help=f"{MODEL_SOURCES}, smollm2, or (--method embed) minilm.")]
    ]
    data: Path
    """A JSON Lines file; docs/howto/finetune.md describes its rows."""
    method: str = "sft"
    """sft: train on the assistant's messages in conversations. dpo: prefer the chosen of two completions. grpo: sample
    completions and reinforce those with a high reward. embed: train similar embeddings for texts that belong together.
    classify, choice and span are for encoders; colonnade finetune --method span --help lists their flags."""
    held_out: Path | None = None
    """A file in the same format for validation."""
    name: str = ""
    """Name of the run's folder within runs; by default the method."""
    runs: Path = Path("runs")
    """Folder of all runs; checkpoints are written to runs/NAME/step-N."""
    device: Device = "auto"
    """auto: CUDA if there is a GPU for each local rank, otherwise the CPU."""
    sequence: int = 0
    """Maximum length of a conversation [tokens]; 0: 1024, or the model's context if it is shorter."""
    lora: LoraConfig = _LORA
    """Low-rank adapters: if any of these flags is given, only adapters are trained."""
    tune: TuneConfig = _TUNE
    """Settings of the method."""
    plan: Plan = Plan()
    """The parallel layout."""
    train: FinetuneTrain = _TRAIN
    """Optimisation; unless they are set, steps is derived from tune.epochs, and log_every from steps: 1 in short runs
    and with grpo, otherwise up to 10."""


def _tune(args: FinetuneArgs, flags: Collection[str]) -> None:
    """Methods whose rows are conversations or preferences."""
    check_method_settings(args.method, [name.removeprefix("tune.") for name in flags if name.startswith("tune.")])
    if {"tune.epochs", "train.steps"} <= set(flags):
        raise ConfigError("--tune.epochs and --train.steps both set the length of the run; remove one of them")
    derived = [name for name in ("steps", "log_every") if f"train.{name}" not in flags]
    with progress_status(f"reading {args.data}") as report:
        from colonnade.tune.tuner import Tuner, tuned_run  # imports torch, which takes seconds

        lora = args.lora if any(name.startswith("lora.") for name in flags) else None
        run = tuned_run(
            args.model, lora=lora, sequence=args.sequence, name=args.name or args.method, runs=args.runs,
            device=args.device, plan=args.plan, train=TrainConfig(**dict(args.train)),
        )  # fmt: skip
        tuner = Tuner(
            run, args.data, args.method, args.tune, held_out=args.held_out, set_steps="steps" in derived,
            set_log_every="log_every" in derived, report=report,
        )  # fmt: skip
    if is_main_process():
        show_run(tuner.run, ", ".join(f"train.{name} {getattr(tuner.run.train, name)}" for name in derived))
    exit_if_stopped(tuner.fit())


METHODS: dict[str, Callable[[FinetuneArgs, Collection[str]], None]] = dict.fromkeys(
    ("sft", "dpo", "grpo", "embed"), _tune
)
"""Methods to the functions that run them: (arguments, names of the flags that were given)."""


def finetune(args: Annotated[FinetuneArgs, arg(name="")]) -> None:
    """Fine-tune a model on conversations, preferences, rewards or pairs of texts; repeating the command resumes it.

    MODEL and --data are required, as in: colonnade finetune smollm2 --data rows.jsonl. With --lora.rank N, or another
    --lora flag, only adapters are trained and the model is frozen.
    """
    _finetune(args, ())


def _finetune(args: FinetuneArgs, flags: Collection[str]) -> None:
    if args.method not in METHODS:
        methods = [*METHODS, *ENCODER_METHODS]
        raise ConfigError(f"--method {args.method} is unknown{did_you_mean(args.method, methods)}")
    METHODS[args.method](args, flags)


def finetune_with_defaults(argv: list[str]) -> Callable[..., None]:
    """``finetune`` for tyro, with defaults that depend on the flags in ``argv``; methods of encoders have others."""
    if _method(argv) in ENCODER_METHODS:
        return finetune_encoder.finetune
    flags = flag_settings(argv)
    adapters = any(name.startswith("lora.") for name in flags)
    train = FinetuneTrain(lr=LORA_LR if adapters else FULL_LR, batch=16, micro_batch=4, weight_decay=0.0, beta2=0.999)
    defaults = FinetuneArgs(tyro.MISSING, tyro.MISSING, train=train)

    def bound(args: Annotated[FinetuneArgs, arg(name="")] = defaults) -> None:
        _finetune(args, flags)

    bound.__doc__ = finetune.__doc__
    return bound


def _method(argv: list[str]) -> str | None:
    """The value of --method."""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--method":
            return following
        if word.startswith("--method="):
            return word.partition("=")[2]
    return None
