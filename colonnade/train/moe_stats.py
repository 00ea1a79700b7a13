"""What the layers of experts did in a step, over all ranks and micro-batches, and what follows from it.

The balancing bias moves once a step, against the load of all tokens of the step (DeepSeek-V3, arXiv 2412.19437, section
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
from colonnade.model.moe import MixtureOfExperts, Report, Spread
from colonnade.model.moe.routing_context import Pooled, blame
from colonnade.parallel.axis import Axis


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
    sent_bytes_L: Tensor
    """int64: what the ranks handed to one another in the forward passes."""
    finite_L: Tensor
    """bool: whether all scores of this rank's own tokens were finite."""
    spread_L: list[Spread]
    """How each spread its work."""


def routed(
    model: Transformer,
    reports: Sequence[Mapping[int, Report]],
    tokens: Sequence[int],
    spread: Sequence[Spread] = (Spread(),),
) -> Routed | None:
    """What the ``reports`` of a step's micro-batches of so many ``tokens`` say together, which were told to ``spread``
    their work so (one for all layers, or one each by block number); None without experts.
    """
    layers = sorted({layer for report in reports for layer in report})
    if not layers:
        return None
    by_layer = [[report[layer] for report in reports] for layer in layers]
    counts_LC = model.axes.experts.tokens.sum_(torch.stack([_counts(row) for row in by_layer]))
    share_M = _shares(by_layer[0][0].balance, tokens)
    return Routed(
        layers,
        counts_LC[:, :-2],
        counts_LC[:, -2],
        torch.stack([torch.stack([r.balance for r in row]) @ share_M for row in by_layer]),
        torch.stack([torch.stack([r.z for r in row]) @ share_M for row in by_layer]),
        counts_LC[:, -1],
        torch.stack([torch.stack([r.finite for r in row]).all() for row in by_layer]),
        [spread[layer if len(spread) > 1 else 0] for layer in layers],
    )


def pooled_balance(pooled: Sequence[Pooled], tokens: Sequence[int]) -> Tensor | None:
    """The balance loss over all layers together, a mean over a step's micro-batches of so many ``tokens``; None on
    ranks without the last pipeline stage, and where each layer has a loss of its own.
    """
    losses = [each.balance for each in pooled if each.balance is not None]
    return torch.stack(losses) @ _shares(losses[0], tokens) if losses else None


def _shares(like: Tensor, tokens: Sequence[int]) -> Tensor:
    """share_M: each micro-batch's part of the step's tokens, filled on the device, where a copy would wait."""
    whole = max(1, sum(tokens))
    return torch.stack([like.new_full((), n / whole) for n in tokens])


def _counts(reports: Sequence[Report]) -> Tensor:
    """int64 (E + 2,): load, dropped choices and bytes of some micro-batches."""
    return torch.stack([torch.cat((r.load_E, torch.stack((r.dropped, r.sent_bytes)))) for r in reports]).sum(0)


def blamed(found: Routed | None, layers: int, world: Axis, device: torch.device) -> str:
    """What is to be said of the routers in a bad step: whose scores were the first to break, or nothing. Every rank
    must ask.
    """
    broken = torch.zeros(world.size, layers, device=device)
    if found is not None:
        broken[world.rank, found.layers] = (~found.finite_L).to(broken.dtype)
    whom = blame((world.sum_(broken) == 0).tolist())
    return f"; {whom}" if whom else ""


Table = dict[int, dict[str, Any]]
"""By layer, for people and files: its load by expert and the rest, as plain numbers."""


def tabled(
    found: Routed | None, model: ModelConfig, pp: Axis, device: torch.device, balance: Tensor | None = None
) -> Table:
    """What the layers of all pipeline ranks did, with the same ``balance`` loss for each where it is one of all layers
    together (of the last stage's ranks); waits for the device, and every rank must ask.
    """
    if model.moe is None:
        return {}
    E, layers = model.moe.experts, [i for i in range(model.layers) if model.experts_of(i)]
    all_LC = torch.zeros(len(layers), E + 6, dtype=torch.float64, device=device)
    if found is not None:
        rows = torch.tensor([layers.index(layer) for layer in found.layers], device=device)
        how_L2 = torch.tensor([(it.degree, it.overlap) for it in found.spread_L], device=device)
        columns = (found.dropped_L, found.balance_L, found.z_L, found.sent_bytes_L, *how_L2.unbind(1))
        all_LC[rows] = torch.cat((found.load_LE, *(column[:, None] for column in columns)), 1).double()
    if balance is not None:
        all_LC[:, E + 1] = balance
    return {
        layer: {
            "load": [int(n) for n in row[:E]],
            "dropped": int(row[E]),
            "balance": row[E + 1],
            "z": row[E + 2],
            "sent_bytes": int(row[E + 3]),
            "degree": int(row[E + 4]),
            "overlap": int(row[E + 5]),
        }
        for layer, row in zip(layers, pp.sum_(all_LC).tolist(), strict=True)
    }


OVERALL: dict[str, Callable[[Iterable[float]], float]] = {
    "balance": statistics.fmean,
    "z": statistics.fmean,
    "dropped": max,
    "busiest": max,
    "idle": sum,
    "entropy": min,
    "sent_bytes": sum,
}
"""What a tracker gets of each layer, and how the layers are one number."""


def row_of(found: Table) -> dict[str, float]:
    """A step's numbers for a tracker, ``moe/dropped`` over all layers and ``moe/3/dropped`` of layer 3."""
    row: dict[str, float] = {}
    for layer, it in found.items():
        choices = max(1, sum(it["load"]))
        shares = [n / choices for n in it["load"]]
        even = math.log(len(shares)) or 1.0
        row |= {
            f"moe/{layer}/balance": it["balance"],
            f"moe/{layer}/z": it["z"],
            f"moe/{layer}/dropped": it["dropped"] / choices,
            f"moe/{layer}/busiest": max(shares) * len(shares),
            f"moe/{layer}/idle": float(it["load"].count(0)),
            f"moe/{layer}/entropy": -sum(p * math.log(p) for p in shares if p) / even,
            f"moe/{layer}/sent_bytes": float(it["sent_bytes"]),
            f"moe/{layer}/degree": float(it["degree"]),
            f"moe/{layer}/overlap": float(it["overlap"]),
        }
    return {f"moe/{key}": float(of([row[f"moe/{i}/{key}"] for i in found])) for key, of in OVERALL.items()} | row


def rebalance(model: Transformer, found: Routed, skip: Tensor) -> None:
    """Move the balancing biases of this rank's layers, unless ``skip`` (0 or 1) says that the step moves nothing."""
    for layer, load_E in zip(found.layers, found.load_LE, strict=True):
        ffn = model.blocks.get_submodule(str(layer)).get_submodule("ffn")
        assert isinstance(ffn, MixtureOfExperts)
        ffn.router.rebalance(load_E, skip)
