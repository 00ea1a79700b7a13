"""What the backward pass computes again instead of having it kept (Chen 2016, arXiv 1604.06174).

    full        a block keeps its input alone and runs once more, collectives included: a third more arithmetic
    attention   a block keeps all but what lies between the query/key/value projection and the output projection:
                rotated and normalised heads, scores, softmax (selective recomputation, Korthikanti 2022, arXiv
                2205.05198, section 5). No projection is repeated, and no collective of tensor parallelism.

Every random number of a model is a function of its place (no generator is asked), so nothing of the random state is
kept or restored. Collectives are functional, so running them twice is safe (docs/ideas/conjugate-collectives.md). The
parts are handed over as methods with arguments: a closure over a loop's variable would run the last block again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

RecomputeKind = Literal["none", "attention", "full"]
RECOMPUTE_KINDS: tuple[RecomputeKind, ...] = ("none", "attention", "full")


def checkpointed(run: Callable[..., Any], *arguments: Any, random: bool = False) -> Any:
    """``run(*arguments)``, of which only the arguments are kept, and which runs again in the backward pass.

    ``random``: it may ask torch's generators, whose state is then kept, as our own models never do.
    """
    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=random)


def set_recompute(blocks: Sequence[nn.Module] | nn.ModuleList, kinds: Sequence[RecomputeKind]) -> None:
    """From now on each of ``blocks`` keeps what its kind says."""
    for block, kind in zip(blocks, kinds, strict=True):
        block.recompute = kind == "full"  # type: ignore[assignment]
        block.get_submodule("attention").recompute = kind == "attention"  # type: ignore[assignment]
