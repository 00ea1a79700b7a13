"""Activation checkpointing: the backward pass recomputes what was not saved (Chen 2016, arXiv 1604.06174).

    full        a block saves its input only and runs again, collectives included: a third more arithmetic
    attention   a block saves everything but the tensors between the query/key/value projection and the output
                projection: rotated and normalised heads, scores, softmax (selective recomputation, Korthikanti 2022,
                arXiv 2205.05198, section 5). No projection is repeated, and no collective of tensor parallelism.

Random numbers are hashes and use no generator, so no random state is saved or restored. Collectives are functional, so
they can run twice (docs/ideas/conjugate-collectives.md). Functions are methods with arguments: a closure over a loop
variable would run the last block again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

RecomputeKind = Literal["none", "attention", "full"]
RECOMPUTE_KINDS: tuple[RecomputeKind, ...] = ("none", "attention", "full")


def checkpointed(run: Callable[..., Any], *arguments: Any, random: bool = False) -> Any:
    """``run(*arguments)``, which saves its arguments only and runs again in the backward pass.

    ``random``: save and restore torch's random state, for functions that use it; our own models do not.
    """
    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=random)


def set_recompute(blocks: Sequence[nn.Module] | nn.ModuleList, kinds: Sequence[RecomputeKind]) -> None:
    """Set what each of ``blocks`` recomputes."""
    for block, kind in zip(blocks, kinds, strict=True):
        block.recompute = kind == "full"  # type: ignore[assignment]
        block.get_submodule("attention").recompute = kind == "attention"  # type: ignore[assignment]
