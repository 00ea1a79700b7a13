"""Activation recomputation within a memory budget: chooses which blocks to recompute in the backward pass.

    L blocks of a bytes each; with attention recomputed b < a; with the whole block recomputed c < b

    no recomputation                 if L a fits
    attention of some blocks         the fewest n that make L a − n (a − b) fit: no GEMM is repeated
    some whole blocks                else the fewest n that make L b − n (b − c) fit, and attention in all others

What a block saves is measured, not modelled: models of one and of two blocks run forward on a real micro-batch, and
every storage that autograd saves is counted once; the difference is one block and its input. So the count is right for
any attention kernel, any precision and a compiled block. All ranks make the same decision, from the largest of their
counts, because a recomputed block repeats its collectives.

The first blocks are the recomputed ones: when the backward pass reaches them, the activations of the later blocks are
already freed, which leaves memory for a whole block's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from colonnade.config import ModelConfig, TrainConfig, format_bytes
from colonnade.data import Batch
from colonnade.errors import CapacityError, ConfigError
from colonnade.model import Transformer
from colonnade.model.activation_checkpointing import RECOMPUTE_KINDS, RecomputeKind, set_recompute
from colonnade.parallel.axis import Axis
from colonnade.train.train_step import forward


@dataclass(frozen=True)
class RecomputeChoice:
    """The recomputation of each block of this rank, and the measurements behind it."""

    kinds: list[RecomputeKind]
    block_bytes: dict[RecomputeKind, int]
    """Saved by one block for one micro-batch, by kind."""
    allowed_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Saved by all blocks of this rank for one micro-batch."""
        return sum(self.block_bytes[kind] for kind in self.kinds)

    def __str__(self) -> str:
        """A line for the header of a run."""
        L, each = len(self.kinds), self.block_bytes
        counts = ", ".join(f"{self.kinds.count(kind)} {kind}" for kind in RECOMPUTE_KINDS if kind in self.kinds)
        return (
            f"recompute in {L} blocks: {counts}; they save {format_bytes(self.saved_bytes)} of the "
            f"{format_bytes(self.allowed_bytes)} allowed for a micro-batch ({format_bytes(L * each['none'])} without "
            f"recomputation, {format_bytes(L * each['full'])} with full)"
        )


def choose_kinds(block_bytes: dict[RecomputeKind, int], blocks: int, allowed_bytes: int) -> list[RecomputeKind]:
    """The kind of each of ``blocks`` blocks; raises :class:`CapacityError` when nothing fits."""
    none, attention, full = (block_bytes[kind] for kind in RECOMPUTE_KINDS)
    over = blocks * none - allowed_bytes
    if over <= 0:
        return _kinds("none", blocks, "none", blocks)
    if over <= blocks * (none - attention):
        return _kinds("attention", -(-over // (none - attention)), "none", blocks)
    # Where recomputing attention saves nothing, it is skipped.
    middle, middle_bytes = ("attention", attention) if attention < none else ("none", none)
    over = blocks * middle_bytes - allowed_bytes
    if over > blocks * (middle_bytes - full):
        raise CapacityError(
            f"{blocks} blocks save {format_bytes(blocks * full)} for a micro-batch even with full recomputation, "
            f"and train.activation_bytes allows {format_bytes(allowed_bytes)}; set it to at least {blocks * full}, or "
            "lower train.micro_batch"
        )
    return _kinds("full", -(-over // (middle_bytes - full)), middle, blocks)


def _kinds(kind: RecomputeKind, count: int, rest: RecomputeKind, blocks: int) -> list[RecomputeKind]:
    """``kind`` for the first ``count`` blocks, ``rest`` for the others."""
    return [kind if i < count else rest for i in range(blocks)]


def configure_recompute(
    model: Transformer,
    train: TrainConfig,
    sample: Callable[[], Batch],
    make: Callable[[ModelConfig], Transformer],
    world: Axis,
) -> str | None:
    """Set the recomputation of ``model``'s blocks; a description of it for train.recompute budget.

    ``sample`` reads one of the run's micro-batches, if one must be measured. The rest is as for
    :func:`measure_block_bytes`, and raises as :func:`choose_kinds`.
    """
    if train.recompute != "budget":
        stacks = [*model.blocks, *model.encoder_blocks]
        set_recompute(stacks, [train.recompute for _ in stacks])
        return None
    if model.config.encoder is not None:
        raise ConfigError(
            "train.recompute budget supports one stack of blocks, but this model also has an encoder; set "
            "train.recompute to attention or full"
        )
    batch = sample()
    block_bytes = measure_block_bytes(make, model.config, lambda probe: forward(probe, batch), world)
    kinds = choose_kinds(block_bytes, len(model.blocks), train.activation_bytes)
    choice = RecomputeChoice(kinds, block_bytes, train.activation_bytes)
    set_recompute(model.blocks, choice.kinds)
    return str(choice)


def measure_block_bytes(
    make: Callable[[ModelConfig], Transformer],
    config: ModelConfig,
    run: Callable[[Transformer], Tensor],
    world: Axis,
) -> dict[RecomputeKind, int]:
    """Bytes saved by one block for one micro-batch, by kind; the maximum over ``world``, whose ranks all call it.

    ``make`` builds a model like the one to be trained, in its compute type; ``run`` is its forward pass.
    """
    saved: list[int] = []
    for kind in RECOMPUTE_KINDS:
        one, two = (_model_bytes(make(config.replace(layers=layers)), kind, run) for layers in (1, 2))
        saved.append(two - one)
    largest = world.max_(torch.tensor(saved)).tolist()
    return dict(zip(RECOMPUTE_KINDS, largest, strict=True))


def _model_bytes(model: Transformer, kind: RecomputeKind, run: Callable[[Transformer], Tensor]) -> int:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_recompute(model.blocks, [kind for _ in model.blocks])
    run(model)  # compiles where train.compile is set
    return saved_for_backward_bytes(model, lambda: run(model))


def saved_for_backward_bytes(model: torch.nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes that ``run()`` saves for its backward pass, without ``model``'s parameters, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is reused

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(storage.nbytes() for storage in saved.values())
