"""How many blocks must be computed again so that the rest fits into a given number of bytes.

    L blocks of a bytes each; attention again: b < a; all again: c < b

    all kept                     if L a fits
    attention again in few       the fewest blocks that make L a − n (a − b) fit: no product of weights is repeated
    all again in few             else the fewest that make L b − n (b − c) fit, and attention again in the others

What a block keeps is measured, not modelled: models of one and of two blocks run forward on a real micro-batch, and
every storage that autograd packs away is counted once; the difference is one block and its input. So it is right for
any attention kernel, any precision and a compiled block, which keeps what its compiler thinks best. Ranks decide
alike, by the largest of their counts, because a block that is computed again repeats its collectives.

The first blocks are those computed again: when their turn comes in the backward pass, the others' activations are
gone, and there is room for a whole block's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from colonnade.config import ModelConfig, TrainConfig, size
from colonnade.data import Batch
from colonnade.errors import CapacityError
from colonnade.model import Transformer
from colonnade.model.activation_checkpointing import RECOMPUTE_KINDS, RecomputeKind, set_recompute
from colonnade.parallel.axis import Axis
from colonnade.train.train_step import forward


@dataclass(frozen=True)
class Choice:
    """What each block of this rank computes again, and why."""

    kinds: list[RecomputeKind]
    block_bytes: dict[RecomputeKind, int]
    """What one block keeps for one micro-batch, by kind."""
    allowed_bytes: int

    @property
    def kept_bytes(self) -> int:
        """What all blocks of this rank keep for one micro-batch."""
        return sum(self.block_bytes[kind] for kind in self.kinds)

    def __str__(self) -> str:
        """A line for the beginning of a run."""
        L, each = len(self.kinds), self.block_bytes
        counts = ", ".join(f"{self.kinds.count(kind)} {kind}" for kind in RECOMPUTE_KINDS if kind in self.kinds)
        return (
            f"recompute in {L} blocks: {counts}; they keep {size(self.kept_bytes)} of the {size(self.allowed_bytes)} "
            f"allowed for a micro-batch ({size(L * each['none'])} if nothing were computed again, "
            f"{size(L * each['full'])} if everything)"
        )


def choose_kinds(block_bytes: dict[RecomputeKind, int], blocks: int, allowed_bytes: int) -> list[RecomputeKind]:
    """The kind of each of ``blocks`` blocks; raises :class:`CapacityError` when nothing fits."""
    none, attention, full = (block_bytes[kind] for kind in RECOMPUTE_KINDS)
    over = blocks * none - allowed_bytes
    if over <= 0:
        return _first("none", blocks, "none", blocks)
    if over <= blocks * (none - attention):
        few = -(-over // (none - attention))
        return _first("attention", few, "none", blocks)
    # Where attention keeps little of its own (or costs more to enter than it frees), it is no step on the way.
    middle, middle_bytes = ("attention", attention) if attention < none else ("none", none)
    over = blocks * middle_bytes - allowed_bytes
    if over > blocks * (middle_bytes - full):
        raise CapacityError(
            f"{blocks} blocks keep {size(blocks * full)} for a micro-batch even when all is computed again, and "
            f"train.activation_bytes allows {size(allowed_bytes)}; set it to at least {blocks * full}, or lower "
            "train.micro_batch"
        )
    few = -(-over // (middle_bytes - full))
    return _first("full", few, middle, blocks)


def _first(kind: RecomputeKind, few: int, rest: RecomputeKind, blocks: int) -> list[RecomputeKind]:
    return [kind if i < few else rest for i in range(blocks)]


def arrange(
    model: Transformer,
    train: TrainConfig,
    sample: Callable[[], Batch],
    make: Callable[[ModelConfig], Transformer],
    world: Axis,
) -> str | None:
    """Tell ``model``'s blocks what to compute again; says what was chosen where there was a choice.

    ``sample`` reads one of the run's micro-batches, where one must be measured; the rest is as for :func:`weigh`, and
    raises as :func:`choose_kinds`.
    """
    blocks, allowed_bytes = len(model.blocks), train.activation_bytes
    if train.recompute != "budget":
        set_recompute(model.blocks, [train.recompute for _ in model.blocks])
        return None
    batch = sample()
    block_bytes = weigh(make, model.config, lambda it: forward(it, batch), world)
    choice = Choice(choose_kinds(block_bytes, blocks, allowed_bytes), block_bytes, allowed_bytes)
    set_recompute(model.blocks, choice.kinds)
    return str(choice)


def weigh(
    make: Callable[[ModelConfig], Transformer],
    config: ModelConfig,
    run: Callable[[Transformer], Tensor],
    world: Axis,
) -> dict[RecomputeKind, int]:
    """What one block keeps for one micro-batch, by kind [bytes], the largest over ``world``; all ranks call it.

    ``make`` builds a model like the one to be trained, in its compute type; ``run`` takes it forward.
    """
    found: list[int] = []
    for kind in RECOMPUTE_KINDS:
        one, two = (_kept(make(config.but(layers=layers)), kind, run) for layers in (1, 2))
        found.append(two - one)
    largest = world.max_(torch.tensor(found)).tolist()
    return dict(zip(RECOMPUTE_KINDS, largest, strict=True))


def _kept(model: Transformer, kind: RecomputeKind, run: Callable[[Transformer], Tensor]) -> int:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_recompute(model.blocks, [kind for _ in model.blocks])
    run(model)  # compiles, where there is something to compile
    return kept_bytes(model, lambda: run(model))


def kept_bytes(model: torch.nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes that ``run()`` leaves for its backward pass, ``model``'s parameters not counted, no storage twice."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # holding them, so that no address is used a second time

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(storage.nbytes() for storage in kept.values())
