"""Fine-tuning an encoder to classify texts (Devlin 2019, section 4.1).

    model = classifier(encoder, classes=2, seed=0)
    fit(model, examples, TrainConfig(steps=60, batch=16, lr=1e-4, min_lr=0, schedule="linear"), ground)
    accuracy(model, held_out)

Examples of any lengths are laid end to end, never padded. The order in which they are seen is a seeded permutation an
epoch (:mod:`colonnade.data.cursor`), and a step's loss the mean over its examples: a step does not depend on the ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.config import TrainConfig
from colonnade.data import Cursor
from colonnade.errors import DataError, PlanError
from colonnade.model import Classes, Packed, Stream, Transformer
from colonnade.model.retop import retop
from colonnade.parallel.axis import SOLO, world_axis
from colonnade.parallel.fsdp import masters
from colonnade.parallel.mesh import Ground
from colonnade.train.move import Move
from colonnade.train.optimizer import AdamW
from colonnade.train.scaler import LossScaler


class Example(NamedTuple):
    """A text and its class."""

    tokens: list[int]
    """With the tokenizer's control tokens, [CLS] first."""
    label: int
    """0 .. classes − 1."""


def classifier(encoder: Transformer, classes: int, seed: int) -> Transformer:
    """``encoder`` with a new classifier on its pooler; what is new in it is drawn from ``seed``."""
    return retop(encoder, "classes", classes=classes, seed=seed).requires_grad_(True)


def fit(model: Transformer, examples: Sequence[Example], train: TrainConfig, ground: Ground) -> list[float]:
    """Train ``model`` for ``train.steps`` steps of ``train.batch`` examples; the loss of each step.

    ``train.seed`` orders the examples. Every rank of ``ground`` calls this with all the examples. Raises
    :class:`DataError` for no examples, one longer than the context, or a label that is no class, and
    :class:`PlanError` for a pipeline or a context axis.
    """
    check(model, examples)
    if ground.plan.pp * ground.plan.cp > 1:
        raise PlanError(f"fine-tuning lays a model over tensor and data ranks only, not over {ground.plan}")
    train = train.resolved(ground.device.type)
    compute: torch.dtype = getattr(torch, train.dtype)  # torch's own names
    held = masters(model, ground, compute)
    scaler = LossScaler(train, ground.device) if train.dtype == "float16" else None
    move = Move(model, held, AdamW(held.local, train), train, world_axis() if ground.world > 1 else SOLO, scaler)
    count = torch.tensor(train.batch, device=ground.device)
    cursor, dp = Cursor(len(examples), train.seed), model.axes.dp
    losses: list[Tensor] = []
    for number in range(train.steps):
        start, stop = dp.part(train.batch)
        mine = [examples[i] for i in cursor.indices(number, train.batch)[start:stop].tolist()]
        parts = [mine[i : i + train.micro_batch] for i in range(0, max(len(mine), 1), train.micro_batch)]
        divisor = count if scaler is None else scaler.up(count)
        total = torch.zeros((), dtype=torch.promote_types(compute, torch.float32), device=ground.device)
        for i, part in enumerate(parts):
            held.accumulate(last=i == len(parts) - 1)
            found_RC = logits(model, part).to(total.dtype)
            loss_sum = F.cross_entropy(found_RC, labels(part, ground.device), reduction="sum")
            (loss_sum / divisor).backward()
            total += loss_sum.detach()
        move(number, total)
        losses.append(dp.sum_(total) / train.batch)
    return torch.stack(losses).tolist()


@torch.no_grad()
def accuracy(model: Transformer, examples: Sequence[Example], at_once: int = 32) -> float:
    """The share of ``examples`` whose likeliest class is theirs; raises :class:`DataError` as :func:`fit` does."""
    check(model, examples)
    right = 0
    for i in range(0, len(examples), at_once):
        part = examples[i : i + at_once]
        found_R = logits(model, part).argmax(1)
        right += int((found_R == labels(part, found_R.device)).sum())
    return right / len(examples)


def logits(model: Transformer, examples: Sequence[Example]) -> Tensor:
    """logits_RC of some examples."""
    device, lengths = next(model.parameters()).device, [len(example.tokens) for example in examples]
    stream = Stream(
        torch.tensor([token for example in examples for token in example.tokens], device=device),
        torch.cat([torch.arange(n) for n in lengths]).to(device),
    )
    attend = Packed.of(lengths, device, causal=False)
    return model(stream, attend, Classes(attend.cu_seqlens[:-1].long()))


def labels(examples: Sequence[Example], device: torch.device) -> Tensor:
    """Their classes."""
    return torch.tensor([example.label for example in examples], device=device)


def check(model: Transformer, examples: Sequence[Example]) -> None:
    """Raise :class:`DataError` for what this model cannot be given."""
    config = model.config
    if not examples:
        raise DataError("there are no examples; give at least one")
    for number, (tokens, label) in enumerate(examples):
        if not 0 < len(tokens) <= config.context:
            raise DataError(f"example {number} has {len(tokens)} tokens; give 1 to {config.context}, cut where need be")
        if not 0 <= label < config.classes:
            raise DataError(f"example {number} has the label {label}, and there are {config.classes} classes from 0 on")
