"""One optimizer step, read from top to bottom.

    loss = Σ token losses / Σ valid tokens          both over data ranks, context ranks and micro-batches
           + Σ order losses / Σ pairs               for BERT, likewise
           + Σ router losses / Σ tokens             for a mixture of experts, likewise
    a step whose loss or norm is not finite moves nothing: weights, moments and Adam's count stay as they were

The count of valid tokens is summed over all of them *before* the first backward pass, so that each micro-batch's
backward already carries the right weight and gradients are plain sums (a mean of means over ranks or micro-batches of
unequal counts is another loss, and differs from layout to layout).
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colonnade.config import MoeConfig, TrainConfig
from colonnade.data import Batch
from colonnade.model import IGNORE, Transformer
from colonnade.model.moe import Spread
from colonnade.parallel.axis import Axis
from colonnade.parallel.fsdp import Masters
from colonnade.train.cuda_graph import Graphed, Passes
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.model_inputs import VALIDATION, Terms, model_inputs, noise_of
from colonnade.train.moe_stats import Routed, pooled_balance, rebalance, routed
from colonnade.train.optimizer import AdamW
from colonnade.train.optimizer_step import OptimizerStep
from colonnade.train.pipeline_step import PipelineStep


@dataclass(frozen=True)
class Outcome:
    """What a step leaves to be looked at later; all on the device, nobody has waited for it."""

    loss_sum: Tensor
    """Of this rank's tokens."""
    count: Tensor
    """Valid tokens of all data ranks."""
    norm: Tensor
    """Global gradient norm before the clip."""
    lr: float | Tensor
    """Learning rate that the step used; on the device where steps may be skipped."""
    loss_scale: Tensor | None = None
    """In float16: the scale that the step used."""
    skipped: Tensor | None = None
    """In float16: steps of the run that overflowed and moved nothing, this one included; its norm is not finite."""
    routed: Routed | None = None
    """What the layers of experts of this pipeline rank did, over all ranks."""
    balance: Tensor | None = None
    """The balance loss over all layers together, on the ranks of the last pipeline stage."""
    data_s: float = 0.0
    """What this rank's samples took to read."""
    memory_bytes: int = 0
    """The most that this rank had in use: in the step on a GPU, since it began on a CPU."""


class Step:
    """``step(number, micro_batches)``: forward, backward, and the
    :class:`~colonnade.train.optimizer_step.OptimizerStep`.
    """

    def __init__(
        self,
        model: Transformer,
        masters: Masters,
        optimizer: AdamW,
        train: TrainConfig,
        world: Axis,
        piped: PipelineStep | None = None,
        scaler: LossScaler | None = None,
        spread: Sequence[Spread] = (Spread(),),
        graphed: bool = False,
    ):
        """``piped`` when ``model`` is one rank's part of a pipeline, ``scaler`` for float16; ``spread`` says how layers
        of experts spread their work, and may be set anew between two steps. ``graphed`` replays the passes of a step's
        one micro-batch as a CUDA graph.
        """
        self.spread = spread
        self.piped, self.scaler = piped, scaler
        self.model, self.masters, self.train, self.axes = model, masters, train, model.axes
        self.move = OptimizerStep(model, masters, optimizer, train, world, scaler)
        self.passes: Passes = functools.partial(passes, model)
        if graphed:
            graded = (*model.parameters(), *masters.local.values())
            self.passes = Graphed(self.passes, graded, next(model.parameters()).device)

    def __call__(self, number: int, micro_batches: Sequence[Batch]) -> Outcome:
        """Train on this data rank's ``micro_batches`` as step ``number`` (from 0)."""
        count = valid_tokens(micro_batches, self.axes.dp)
        divisor = count if self.scaler is None else self.scaler.up(count)
        terms = Terms(
            self.train.label_smoothing,
            pair_weight(micro_batches, count, self.axes.dp),
            noise_of(self.train, number, self.model.config, count.device),
        )
        sizes = [len(batch.tokens_T) for batch in micro_batches]
        if self.model.config.moe is not None:
            here = torch.full((), sum(sizes), device=count.device)  # no copy from the host, which would wait
            tokens = self.axes.dp.sum_(here).clamp(min=1)
            # In float64, because torch divides integers in float32.
            terms = replace(terms, router_weight=count.double() / (tokens * divisor), steps=self.spread)
        if self.piped is None:
            loss_sum = self._accumulate(micro_batches, divisor, terms)
        else:
            loss_sum = self.piped.step(micro_batches, divisor, terms)
        gradient_norm, lr, skip = self.move(number, loss_sum)
        found = routed(self.model, terms.reports, sizes, self.spread)
        if found is not None:
            rebalance(self.model, found, skip)
        outcome = Outcome(loss_sum, count, gradient_norm, lr, routed=found, balance=pooled_balance(terms.pooled, sizes))
        if self.scaler is None:
            return outcome
        return replace(outcome, loss_scale=self.scaler.used, skipped=self.scaler.skipped)

    @property
    def recorded_bytes(self) -> int:
        """The most memory in use when the passes were recorded, which the allocator does not see in a replay."""
        return self.passes.peak_bytes if isinstance(self.passes, Graphed) else 0

    def _accumulate(self, micro_batches: Sequence[Batch], divisor: Tensor, terms: Terms) -> Tensor:
        """Forward and backward of one micro-batch after another; the summed loss."""
        loss_sum = 0
        for i, batch in enumerate(micro_batches):
            self.masters.begin_micro_batch(last=i == len(micro_batches) - 1)
            loss_sum += self.passes(batch, divisor, terms)
        assert isinstance(loss_sum, Tensor), "a step needs at least one micro-batch"
        return loss_sum


def passes(model: Transformer, batch: Batch, divisor: Tensor, terms: Terms) -> Tensor:
    """Forward and backward of a micro-batch whose loss counts for 1 / ``divisor``; its undivided sum."""
    batch_sum = forward(model, batch, terms)
    (batch_sum / divisor).backward()
    return batch_sum.detach()


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Iterable[Batch], piped: PipelineStep | None = None, moe: MoeConfig | None = None
) -> Tensor:
    """The mean loss over this data rank's ``batches`` and everybody else's, without label smoothing; experts are chosen
    by ``moe``, where that is not the model's own.
    """
    batches = list(batches)
    count = valid_tokens(batches, model.axes.dp)
    terms = Terms(order_weight=pair_weight(batches, count, model.axes.dp), moe=moe)
    if piped is None:
        mine = torch.stack([forward(model, batch, terms).double() for batch in batches]).sum()
    else:
        mine = piped.evaluate(batches, terms)
    return model.axes.global_sum(mine) / count


def forward(model: Transformer, batch: Batch, terms: Terms = VALIDATION) -> Tensor:
    """The summed loss of a micro-batch, or of this context rank's tokens of it."""
    stream, attend, head = model_inputs(batch, model, terms)
    loss_sum, _ = model(stream, attend, head)
    return loss_sum


def valid_tokens(batches: Iterable[Batch], dp: Axis) -> Tensor:
    """How many targets count in this step, over all data ranks; at least 1, so that an empty step is a step of 0."""
    return dp.sum_(torch.stack([(batch.targets_T != IGNORE).sum() for batch in batches]).sum()).clamp(min=1)


def pair_weight(batches: Sequence[Batch], count: Tensor, dp: Axis) -> Tensor | float:
    """What a pair's order counts beside a token (float64), so that the sum over ``count`` tokens ends as a mean over
    each.
    """
    pairs = [(batch.orders_R != IGNORE).sum() for batch in batches if batch.orders_R is not None]
    return count.double() / dp.sum_(torch.stack(pairs).sum()).clamp(min=1) if pairs else 1.0
