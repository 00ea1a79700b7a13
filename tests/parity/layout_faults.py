"""Faults that other frameworks had in their layouts, injected to check that ``colonnade verify`` finds them.

Each breaks one thing and leaves a single process unchanged, so that a fault shows only under a plan that triggers it.
They are applied inside the workers: a patch in the parent does not reach a spawned process.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from colonnade.checkpoint import native
from colonnade.config import ModelConfig, Plan
from colonnade.data import Batch
from colonnade.kernels.attention import chunk
from colonnade.kernels.registry import choose
from colonnade.model import IGNORE, Dropout, context_parallel, loss
from colonnade.parallel.axis import Axis
from colonnade.train import optimizer_step, train_step
from colonnade.verify import run as verifying

Patch = pytest.MonkeyPatch


def partial_gradients_not_summed(patch: Patch) -> None:
    """Norms under sequence parallelism keep the gradient of this rank's tokens only."""
    patch.setattr(optimizer_step, "sum_partial_grads", lambda *_: None)


def replicated_counted_by_all(patch: Patch) -> None:
    """The norm counts a parameter replicated over tp once per rank."""
    right = optimizer_step.gradient_norm
    patch.setattr(
        optimizer_step, "gradient_norm", lambda weights, layout, *rest: right(weights, dict.fromkeys(layout, 0), *rest)
    )


def tied_gradients_not_summed(patch: Patch) -> None:
    """Each end of a pipeline keeps its own gradient of the tied weight."""
    patch.setattr(optimizer_step, "sum_tied_grads", lambda *_: None)


def copies_counted(patch: Patch) -> None:
    """The norm counts the tied weight on both ends of a pipeline."""
    right = optimizer_step.gradient_norm
    patch.setattr(
        optimizer_step,
        "gradient_norm",
        lambda weights, layout, axes, world, copies, loss_sum: right(weights, layout, axes, world, (), loss_sum),
    )


def ring_backward_by_chunks(patch: Patch) -> None:
    """Each chunk of the ring is differentiated with its own output and log-sum-exp instead of the final ones."""

    def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, queries: Any, keys: Any, **see):
        own = chunk.forward(q, k, v, queries, keys, **see)
        return chunk.backward(do, q, k, v, own.o, own.lse, queries, keys, **see)

    def chosen(operation: str, *rest: Any) -> Callable[..., Any]:
        return backward if operation == "chunk_backward" else choose(operation, *rest)

    patch.setattr(context_parallel, "choose", chosen)


def tokens_counted_by_data_rank(patch: Patch) -> None:
    """The loss is divided by the token count of this data rank: a mean of means."""
    right = train_step.count_targets
    patch.setattr(train_step, "count_targets", lambda batches, dp: right(batches, Axis("mine")) * dp.size)


def tokens_counted_by_context_rank(patch: Patch) -> None:
    """The loss is the mean over context ranks of the means over their own tokens."""

    def forward(model: Any, batch: Batch, terms: Any) -> Tensor:
        stream, attend, head = train_step.model_inputs(batch, model, terms)
        loss_sum, own = model(stream, attend, head)
        return loss_sum * (batch.targets_T != IGNORE).sum() / (own * model.axes.cp.size).clamp(min=1)

    patch.setattr(train_step, "forward", forward)


def fsdp_takes_the_mean(patch: Patch) -> None:
    """FSDP keeps its default: gradients are averaged over its ranks."""
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)


def dropout_by_local_row(patch: Patch) -> None:
    """A dropout mask is indexed by a token's row on its rank instead of its index in the global batch."""

    def rows(self: Dropout, part: slice | Tensor) -> Dropout:
        count = len(self.index_T[part])
        return self.for_tokens(self.index_T[:count])

    patch.setattr(Dropout, "rows", rows)


def smoothing_over_own_vocabulary(patch: Patch) -> None:
    """Label smoothing is spread over this rank's rows of the vocabulary only."""
    right = loss._gradient
    patch.setattr(loss, "_gradient", lambda z_cv, *rest: right(z_cv, *rest[:-1], z_cv.shape[1]))


def logits_joined_in_another_order(patch: Patch) -> None:
    """The vocabulary shards are concatenated from the last rank to the first."""
    right = Axis.join

    def join(self: Axis, x: Tensor, dim: int, n: int) -> Tensor:
        return right(self, x, dim, n).flip(dim) if self.size > 1 else right(self, x, dim, n)

    patch.setattr(Axis, "join", join)


def second_moment_not_loaded(patch: Patch) -> None:
    """Loading a checkpoint under a plan leaves one moment of one weight unchanged."""
    right = native.load

    def load(folder: Path, model: Any, context: Any, **parts: Any) -> native.Meta:
        unloaded = parts["optimizer"].state["exp_avg_sq/embed.tokens.weight"]
        previous = unloaded.clone()
        meta = right(folder, model, context, **parts)
        if context.world > 1:
            unloaded.copy_(previous)
        return meta

    patch.setattr(native, "load", load)


def a_gradient_missing(patch: Patch) -> None:
    """One parameter gets no gradient on ranks of a group larger than one."""
    right = optimizer_step.sum_partial_grads

    def lose(weights: dict[str, Tensor], layout: Any, tp: Axis) -> None:
        right(weights, layout, tp)
        if tp.size > 1:
            weights["blocks.0.norm1.weight"].grad = None

    patch.setattr(optimizer_step, "sum_partial_grads", lose)


def not_a_number(patch: Patch) -> None:
    """The loss of the last data rank is NaN, and so is everything after it."""
    right = train_step.forward

    def forward(model: Any, batch: Batch, terms: Any) -> Tensor:
        dp = model.axes.dp
        return right(model, batch, terms) * (torch.nan if dp.size > 1 and dp.rank == dp.size - 1 else 1)

    patch.setattr(train_step, "forward", forward)


def work(
    fault: Callable[[Patch], None], model: ModelConfig, plans: Sequence[Plan], folder: Path, *rest: Any
) -> list[verifying.Result]:
    """The work of each ``colonnade verify`` worker, with a fault injected."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return _right_work(model, plans, folder, *rest)


_right_work = verifying._work
