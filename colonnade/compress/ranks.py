"""Compression on several ranks: texts are divided over dp and each layer's experts over ep, with identical results.

Sums of floating-point numbers depend on their order. The texts are therefore divided into :data:`SLOTS` parts, whose
sums are added as the leaves of one binary tree:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

A rank has a subtree; the ranks' sums are gathered and added in the same order by every rank. Each text is computed
separately, and while a block is calibrated every rank has all of its experts. So any number of ranks gives the same
bits as one process.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from colonnade.errors import PlanError
from colonnade.kernels.linear.quantise import Quantised
from colonnade.model import Transformer
from colonnade.model.moe.experts import Experts
from colonnade.model.tensor_parallel_linear import QuantisableMatrix
from colonnade.model.transformer import Block
from colonnade.model.weight_only_quant import assign_quantised
from colonnade.parallel.axis import SOLO_AXES, Axis

SLOTS = 8
"""Leaves of the tree, and the largest number of ranks."""
T = TypeVar("T")


def check_ranks(model: Transformer) -> None:
    """Raise :class:`PlanError` unless the ranks of ``model`` can compress it together."""
    axes = model.axes
    cut = {"tp": axes.tp.size, "cp": axes.cp.size, "pp": axes.pp.size, "etp": axes.experts.etp.size}
    if any(size > 1 for size in cut.values()):
        plan = ", ".join(f"{name}={size}" for name, size in cut.items() if size > 1)
        raise PlanError(f"compression shards text over dp and experts over ep only, and the plan has {plan}")
    check_count(axes.dp.size)


def check_count(dp: int) -> None:
    """Raise :class:`PlanError` unless this number of ranks can share the texts."""
    if SLOTS % dp:
        raise PlanError(f"compression runs on 1, 2, 4 or {SLOTS} dp ranks, not on {dp}; set --plan.dp to one of these")


def slots(texts: Sequence[T], dp: Axis) -> list[Sequence[T]]:
    """This rank's parts of the texts."""
    count, own = len(texts), SLOTS // dp.size
    return [
        texts[slot * count // SLOTS : (slot + 1) * count // SLOTS] for slot in range(dp.rank * own, (dp.rank + 1) * own)
    ]


def tree_sum(leaves: Iterable[T], add: Callable[[T, T], T]) -> T:
    """The sum of a power of two of ``leaves``, as a balanced tree; few of them exist at a time."""
    waiting: list[tuple[int, T]] = []
    for total in leaves:
        level = 0
        while waiting and waiting[-1][0] == level:
            total, level = add(waiting.pop()[1], total), level + 1  # noqa: PLW2901 - the sum so far
        waiting.append((level, total))
    ((_, total),) = waiting
    return total


def sum_over(dp: Axis, own: Tensor) -> Tensor:
    """The sum of the ranks' tensors in the order of the tree, the same on all of them."""
    return own if dp.size == 1 else tree_sum(dp.all_gather_(own).unbind(), torch.add)


class WholeBlock:
    """Block ``layer`` of ``model`` with all of its experts, replacing this rank's share."""

    def __init__(self, model: Transformer, layer: int):
        self.model, self.name = model, str(layer)
        own = model.blocks.get_submodule(self.name)
        assert isinstance(own, Block)
        self.own = self.block = own
        self.ep = model.axes.experts.ep
        if model.axes.dp.size == 1 or model.config.experts_of(layer) is None:
            return
        sample = next(own.parameters())
        self.block = Block(
            model.config, SOLO_AXES, model.config.experts_of(layer), device=sample.device, dtype=sample.dtype
        ).requires_grad_(False)
        tensors = dict((*own.named_parameters(), *own.named_buffers()))
        for name, tensor in (*self.block.named_parameters(), *self.block.named_buffers()):
            value = tensors[name].detach()
            tensor.copy_(value if value.shape == tensor.shape else self._gathered(value))
        setattr(model.blocks, self.name, self.block)

    def gather(self, weight: Quantised) -> Quantised:
        """The whole stack of this rank's quantised experts."""
        values, scales = (self._gathered(x.contiguous()) for x in (weight.values.view(torch.uint8), weight.scales))
        return weight._replace(values=values.view(weight.values.dtype), scales=scales)

    def gather_tensor(self, stack: Tensor) -> Tensor:
        """The whole stack; this rank has only its own experts of it."""
        return self._gathered(stack.contiguous())

    def experts(self, count: int) -> range:
        """The experts that this rank quantises."""
        return range(*self.ep.part(count)) if self.block is not self.own else range(count)

    @contextmanager
    def restored(self):
        """Restores this rank's share afterwards, with the values of the whole block."""
        try:
            yield self
        finally:
            if self.block is not self.own:
                setattr(self.model.blocks, self.name, self.own)
        if self.block is self.own:
            return
        for name, module in self.own.named_modules():
            whole = self.block.get_submodule(name)
            for part, parameter in module.named_parameters(recurse=False):
                value = getattr(whole, part, None)
                if isinstance(value, Tensor):
                    first, stop = self.ep.part(len(value)) if value.shape != parameter.shape else (0, len(value))
                    parameter.copy_(value[first:stop])
            if isinstance(module, Experts):
                assert isinstance(whole, Experts)
                first, stop = self.ep.part(whole.count)
                for part, stack in whole.quantised.items():
                    own = stack._replace(values=stack.values[first:stop], scales=stack.scales[first:stop])
                    assign_quantised(module, part, own)
            elif isinstance(whole, QuantisableMatrix) and whole.quantised is not None:
                assert isinstance(module, QuantisableMatrix)
                assign_quantised(module, "weight", whole.quantised)

    def _gathered(self, x: Tensor) -> Tensor:
        return x if self.ep.size == 1 else self.ep.all_gather_(x).flatten(0, 1)
