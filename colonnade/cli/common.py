"""What the verbs have in common: how a model is named and placed, the console, and who may speak."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from tyro.conf import arg

from colonnade.config import AS_TRAINED, Device, ExpertsConfig, Plan, ServeConfig
from colonnade.config.model import divisors
from colonnade.errors import PlanError

if TYPE_CHECKING:
    from colonnade.chat import ModelSpec

MODEL_SOURCES = "A checkpoint or run of ours, a Hugging Face folder, a GGUF file, a hub id"
Model = Annotated[str, arg(metavar="MODEL", help=f"{MODEL_SOURCES}, smollm2, or minilm.")]
GenerativeModel = Annotated[str, arg(metavar="MODEL", help=f"{MODEL_SOURCES}, or smollm2.")]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
console = Console(stderr=True, highlight=False)


class LogConsole(Console):
    """A console whose reader may go: what nobody reads any more is no reason to end."""

    def on_broken_pipe(self) -> None:
        """Fall silent, where rich would exit with code 1; at the end Python would complain of what it still holds."""
        self.quiet = True
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


@dataclass(frozen=True)
class RankArgs:
    """The parallel layout of a model that is not trained."""

    tp: int = 1
    """Tensor parallel: ranks that share each layer's heads, hidden width and vocabulary (Megatron-LM)."""


@dataclass(frozen=True)
class ServingRankArgs(RankArgs):
    """The parallel layout of a model that writes."""

    cp: int = 1
    """Context parallel: ranks that share the cache of keys and values, each with its part of every context."""
    ep: int = 1
    """Expert parallel: ranks, of those above, that share a layer's experts among them."""
    sh: int = 1
    """Ranks that share each expert's hidden units."""

    def __post_init__(self) -> None:
        ranks, experts = self.tp * self.cp, self.ep * self.sh
        if min(ranks, experts) > 0 and ranks % experts:
            raise PlanError(
                f"ep={self.ep} times sh={self.sh} shares experts out over the ranks of tp and cp, and does not divide "
                f"their {ranks}; set --plan.tp or --plan.cp to {experts}, or ep and sh of which the product is one of "
                f"{divisors(ranks)}"
            )


@dataclass(frozen=True)
class PlacementArgs:
    """Where the model runs."""

    plan: RankArgs = RankArgs()
    device: Device = "auto"
    """auto: a GPU for each rank if there are enough, otherwise the CPU."""
    dtype: DType = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    experts: ExpertsConfig = AS_TRAINED
    """Of a mixture of experts: what it does otherwise than in training."""

    def where(self, model: str, serve: ServeConfig) -> "ModelSpec":
        """The same for :mod:`colonnade.chat`."""
        plan = Plan(**vars(self.plan))  # refused before torch is imported
        from colonnade.chat import ModelSpec

        return ModelSpec(model, plan, serve, self.device, self.dtype, self.experts)


@dataclass(frozen=True)
class ServingPlacementArgs(PlacementArgs):
    """Where a model that writes runs."""

    plan: ServingRankArgs = ServingRankArgs()


def refuse_torchrun(verb: str) -> None:
    """Refuse to run under torchrun; raises :class:`~colonnade.errors.PlanError`."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PlanError(f"{verb} starts the processes of its plan itself; run it without torchrun")


def is_main_process() -> bool:
    """Whether this process talks to the user: of those that torchrun started only the first does."""
    return os.environ.get("RANK", "0") == "0"
