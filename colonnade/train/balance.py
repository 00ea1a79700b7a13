"""What the layers of experts did in a step, over all ranks and micro-batches, and what follows from it.

The balancing bias moves once a step, against the load of all tokens of the step (DeepSeek-V3, arXiv 2412.19437, section
2.1.2), whatever ranks and micro-batches they were in.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.model import Transformer
from colonnade.model.moe import MixtureOfExperts, Report


class Routed(NamedTuple):
    """The layers with experts of this pipeline rank, in their order; on the device, nobody has waited for it."""

    layers: list[int]
    """Their numbers."""
    load_LE: Tensor
    """int64: choices of all ranks' tokens by expert."""
    dropped_L: Tensor
    """int64: choices that got no place."""
    balance_L: Tensor
    """The balance loss, a mean over the step's tokens."""
    z_L: Tensor
    """The router z-loss, likewise."""


def routed(model: Transformer, reports: Sequence[Mapping[int, Report]], tokens: Sequence[int]) -> Routed | None:
    """What the ``reports`` of a step's micro-batches of so many ``tokens`` say together; None without experts."""
    layers = sorted({layer for report in reports for layer in report})
    if not layers:
        return None
    by_layer = [[report[layer] for report in reports] for layer in layers]
    counts_LE1 = torch.stack(
        [torch.cat((sum_of(r.load_E for r in row), sum_of(r.dropped for r in row)[None])) for row in by_layer]
    )
    counts_LE1 = model.axes.grid.tokens.sum_(counts_LE1)
    share_M = torch.tensor(tokens, dtype=by_layer[0][0].balance.dtype, device=counts_LE1.device) / max(1, sum(tokens))
    return Routed(
        layers,
        counts_LE1[:, :-1],
        counts_LE1[:, -1],
        torch.stack([torch.stack([r.balance for r in row]) @ share_M for row in by_layer]),
        torch.stack([torch.stack([r.z for r in row]) @ share_M for row in by_layer]),
    )


def sum_of(parts) -> Tensor:
    """The sum of some tensors of one shape."""
    return torch.stack(list(parts)).sum(0)


def rebalance(model: Transformer, found: Routed) -> None:
    """Move the balancing biases of this rank's layers."""
    for layer, load_E in zip(found.layers, found.load_LE, strict=True):
        ffn = model.blocks.get_submodule(str(layer)).get_submodule("ffn")
        assert isinstance(ffn, MixtureOfExperts)
        ffn.router.rebalance(load_E)
