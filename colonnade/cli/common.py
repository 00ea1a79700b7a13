"""Common parts of the verbs: flags for the model and its placement, the console, checks for torchrun."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from colonnade.config import AS_TRAINED, Device, ExpertsConfig, Plan, ServeConfig
from colonnade.config.model import divisors
from colonnade.errors import PlanError
from colonnade.model_spec import ModelSpec

MODEL_SOURCES = "A Colonnade checkpoint or run, a Hugging Face folder, a GGUF file, a hub id"
Model = Annotated[str, arg(metavar="MODEL", help=f"{MODEL_SOURCES}, smollm2, or minilm.")]
Models = Annotated[
    Positional[tuple[str, ...]],
    arg(metavar="MODEL [MODEL ...]", help=f"{MODEL_SOURCES}, smollm2, or minilm; with --serve.upstreams only a name."),
]
GenerativeModel = Annotated[str, arg(metavar="MODEL", help=f"{MODEL_SOURCES}, or smollm2.")]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
console = Console(stderr=True, highlight=False)
PROGRESS_INTERVAL_S = 10.0
"""Minimum time between two lines of progress if the output is not a terminal [s]."""


@contextmanager
def progress_status(text: str) -> Iterator[Callable[[str], object]]:
    """Show what runs: a spinner on a terminal, otherwise a line at the start and then at intervals.

    Yields a function that replaces the text.
    """
    if not is_main_process():
        yield lambda _text: None
        return
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
        return
    console.print(text, soft_wrap=True)
    printed_s = time.monotonic()

    def update(text: str) -> None:
        nonlocal printed_s
        if (now_s := time.monotonic()) - printed_s >= PROGRESS_INTERVAL_S:
            console.print(text, soft_wrap=True)
            printed_s = now_s

    yield update


class LogConsole(Console):
    """A console that survives a closed pipe: a server must not exit because its log is no longer read."""

    def on_broken_pipe(self) -> None:
        """Silence the output instead of exiting as rich does; redirect the file, whose last flush would fail at
        exit.
        """
        self.quiet = True
        with Path(os.devnull).open("w") as devnull:
            os.dup2(devnull.fileno(), self.file.fileno())


@dataclass(frozen=True)
class RankArgs:
    """The parallel layout for inference."""

    tp: int = 1
    """Tensor parallel: ranks that share each layer's heads, hidden width and vocabulary (Megatron-LM)."""


@dataclass(frozen=True)
class EvaluationRankArgs(RankArgs):
    """The parallel layout for evaluation."""

    dp: int = 1
    """Data parallel: replicas that share the requests of --tasks."""


@dataclass(frozen=True)
class ServingRankArgs(RankArgs):
    """The parallel layout for text generation."""

    cp: int = 1
    """Context parallel: ranks that share the key/value cache, each with a part of every context."""
    ep: int = 1
    """Expert parallel: ranks, of the tp · cp above, among which a layer's experts are distributed."""
    etp: int = 1
    """Ranks that share each expert's hidden width."""

    def __post_init__(self) -> None:
        ranks, experts = self.tp * self.cp, self.ep * self.etp
        if min(ranks, experts) > 0 and ranks % experts:
            raise PlanError(
                f"ep={self.ep} times etp={self.etp} distributes experts over the ranks of tp and cp, and does "
                f"not divide "
                f"their number {ranks}; set --plan.tp or --plan.cp to {experts}, or ep and etp so that their "
                f"product is "
                f"one of {divisors(ranks)}"
            )


@dataclass(frozen=True)
class PlacementArgs:
    """Where the model runs."""

    plan: RankArgs = RankArgs()
    device: Device = "auto"
    """auto: one GPU per rank if there are enough, otherwise the CPU."""
    dtype: DType = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    experts: ExpertsConfig = AS_TRAINED
    """For a mixture of experts: settings that differ from training."""

    def spec(self, model: str, serve: ServeConfig) -> "ModelSpec":
        """The :class:`~colonnade.model_spec.ModelSpec` of these arguments."""
        return ModelSpec(model, Plan(**vars(self.plan)), serve, self.device, self.dtype, self.experts)


@dataclass(frozen=True)
class EvaluationPlacementArgs(PlacementArgs):
    """Where the evaluated model runs."""

    plan: EvaluationRankArgs = EvaluationRankArgs()


@dataclass(frozen=True)
class ServingPlacementArgs(PlacementArgs):
    """Where the text-generating model runs."""

    plan: ServingRankArgs = ServingRankArgs()


def refuse_torchrun(verb: str) -> None:
    """Raise :class:`~colonnade.errors.PlanError` under torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PlanError(f"{verb} starts the processes of its plan itself; run it without torchrun")


def is_main_process() -> bool:
    """Whether this process may print: under torchrun only the first one does."""
    return os.environ.get("RANK", "0") == "0"
