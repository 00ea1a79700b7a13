"""Routing statistics of the MoE layers in a step, over all ranks and micro-batches, and the balancing-bias update.

The balancing bias changes once per step, by the load of all tokens of the step (DeepSeek-V3, arXiv 2412.19437, section
2.1.2), whatever ranks and micro-batches they were in.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.config import ModelConfig
from colonnade.model import Transformer
from colonnade.model.moe import DispatchOptions, LayerReport
from colonnade.model.moe.routing_context import ModelBalance, find_nonfinite_scores
from colonnade.parallel.axis import Axis


class MoeStats(NamedTuple):
    """Statistics of this pipeline rank's MoE layers, in order; on the device, not synchronised."""

    layers: list[int]
    """Block numbers; those of an encoder follow the decoder's."""
    load_LE: Tensor
    """int64: choices of all ranks' tokens by expert."""
    dropped_L: Tensor
    """int64: choices dropped over capacity."""
    balance_L: Tensor
    """The balance loss, a mean over the step's tokens."""
    z_L: Tensor
    """The router z-loss, in the same form."""
    sent_bytes_L: Tensor
    """int64: bytes that ranks exchanged in the forward passes."""
    finite_L: Tensor
    """bool: whether all router scores of this rank's own tokens were finite."""
    spread_L: list[DispatchOptions]
    """The expert parallelism of each layer."""


def collect_moe_stats(
    model: Transformer,
    reports: Sequence[Mapping[int, LayerReport]],
    tokens: Sequence[int],
    spread: Sequence[DispatchOptions] = (DispatchOptions(),),
    source_tokens: Sequence[int] = (),
) -> MoeStats | None:
    """Sum the ``reports`` of a step's micro-batches of ``tokens`` tokens; None without experts.

    ``spread`` is the expert parallelism: one for all layers, or one for each block; ``source_tokens`` are those of an
    encoder's blocks.
    """
    layers = sorted({layer for report in reports for layer in report})
    if not layers:
        return None
    by_layer = [[report[layer] for report in reports] for layer in layers]
    counts_LC = model.axes.experts.tokens.sum_(torch.stack([_counts(row) for row in by_layer]))
    share_LM = [
        _token_shares(by_layer[0][0].balance, tokens if layer < model.config.layers else source_tokens)
        for layer in layers
    ]
    return MoeStats(
        layers,
        counts_LC[:, :-2],
        counts_LC[:, -2],
        torch.stack([torch.stack([r.balance for r in row]) @ share_LM[i] for i, row in enumerate(by_layer)]),
        torch.stack([torch.stack([r.z for r in row]) @ share_LM[i] for i, row in enumerate(by_layer)]),
        counts_LC[:, -1],
        torch.stack([torch.stack([r.finite for r in row]).all() for row in by_layer]),
        [spread[layer if len(spread) > 1 else 0] for layer in layers],
    )


def pooled_balance_loss(pooled: Sequence[ModelBalance], tokens: Sequence[int]) -> Tensor | None:
    """The balance loss over all layers together, a mean over micro-batches of ``tokens`` tokens.

    None on ranks without the last pipeline stage, and where each layer has its own loss.
    """
    losses = [each.balance for each in pooled if each.balance is not None]
    return torch.stack(losses) @ _token_shares(losses[0], tokens) if losses else None


def _token_shares(like: Tensor, tokens: Sequence[int]) -> Tensor:
    """share_M: each micro-batch's share of the step's tokens; filled on the device, as a copy would synchronise."""
    total = max(1, sum(tokens))
    return torch.stack([like.new_full((), n / total) for n in tokens])


def _counts(reports: Sequence[LayerReport]) -> Tensor:
    """int64 (E + 2,): load, dropped choices and sent bytes, summed over micro-batches."""
    return torch.stack([torch.cat((r.load_E, torch.stack((r.dropped, r.sent_bytes)))) for r in reports]).sum(0)


def nonfinite_router(stats: MoeStats | None, layers: int, world: Axis, device: torch.device) -> str:
    """Name the first router with non-finite scores in a bad step, or ``""``; every rank must call it."""
    broken = torch.zeros(world.size, layers, device=device)
    if stats is not None:
        broken[world.rank, stats.layers] = (~stats.finite_L).to(broken.dtype)
    culprit = find_nonfinite_scores((world.sum_(broken) == 0).tolist())
    return f"; {culprit}" if culprit else ""


RoutingTable = dict[int, dict[str, Any]]
"""By layer: its load by expert and other statistics, as plain numbers."""


def gather_routing_table(
    stats: MoeStats | None, model: ModelConfig, pp: Axis, device: torch.device, balance: Tensor | None = None
) -> RoutingTable:
    """The statistics of all pipeline ranks' layers; synchronises with the device, and every rank must call it.

    ``balance``, from the last stage's ranks, is a loss over all layers together and replaces that of each layer.
    """
    if model.moe is None:
        return {}
    E, layers = model.moe.experts, [i for i in range(model.total_layers) if model.experts_of(i)]
    all_LC = torch.zeros(len(layers), E + 6, dtype=torch.float64, device=device)
    if stats is not None:
        rows = torch.tensor([layers.index(layer) for layer in stats.layers], device=device)
        spread_L2 = torch.tensor([(spread.adaptive_r, spread.overlap) for spread in stats.spread_L], device=device)
        columns = (stats.dropped_L, stats.balance_L, stats.z_L, stats.sent_bytes_L, *spread_L2.unbind(1))
        all_LC[rows] = torch.cat((stats.load_LE, *(column[:, None] for column in columns)), 1).double()
    if balance is not None:
        all_LC[:, E + 1] = balance
    return {
        layer: {
            "load": [int(n) for n in row[:E]],
            "dropped": int(row[E]),
            "balance": row[E + 1],
            "z": row[E + 2],
            "sent_bytes": int(row[E + 3]),
            "adaptive_r": int(row[E + 4]),
            "overlap": int(row[E + 5]),
        }
        for layer, row in zip(layers, pp.sum_(all_LC).tolist(), strict=True)
    }


LAYER_REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {
    "balance": statistics.fmean,
    "z": statistics.fmean,
    "dropped": max,
    "busiest": max,
    "idle": sum,
    "entropy": min,
    "sent_bytes": sum,
}
"""How each tracked statistic is reduced over layers."""


def tracker_row(table: RoutingTable) -> dict[str, float]:
    """A step's statistics for trackers: ``moe/dropped`` over all layers, ``moe/3/dropped`` of layer 3."""
    row: dict[str, float] = {}
    for layer, stats in table.items():
        choices = max(1, sum(stats["load"]))
        shares = [n / choices for n in stats["load"]]
        uniform_entropy = math.log(len(shares)) or 1.0
        row |= {
            f"moe/{layer}/balance": stats["balance"],
            f"moe/{layer}/z": stats["z"],
            f"moe/{layer}/dropped": stats["dropped"] / choices,
            f"moe/{layer}/busiest": max(shares) * len(shares),
            f"moe/{layer}/idle": float(stats["load"].count(0)),
            f"moe/{layer}/entropy": -sum(p * math.log(p) for p in shares if p) / uniform_entropy,
            f"moe/{layer}/sent_bytes": float(stats["sent_bytes"]),
            f"moe/{layer}/adaptive_r": float(stats["adaptive_r"]),
            f"moe/{layer}/overlap": float(stats["overlap"]),
        }
    totals = {
        f"moe/{key}": float(reduce(row[f"moe/{layer}/{key}"] for layer in table))
        for key, reduce in LAYER_REDUCTIONS.items()
    }
    return totals | row


def update_router_biases(model: Transformer, stats: MoeStats, skip: Tensor) -> None:
    """Update the balancing biases of this rank's layers; ``skip`` (0 or 1) leaves them unchanged."""
    for layer, load_E in zip(stats.layers, stats.load_LE, strict=True):
        model.expert_layer(layer).router.rebalance(load_E, skip)
