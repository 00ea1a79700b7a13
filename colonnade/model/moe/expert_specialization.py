"""Which experts take which kinds of tokens (ST-MoE, arXiv 2202.08906, section 7).

    lift(kind, e) = (share of the kind's choices that went to e) / (share of all choices that did)      1: no preference

The table of a layer counts its choices by kind and expert. How much the two have to do with each other is their mutual
information over the kinds' entropy: 0 where experts do not care, 1 where the expert tells the kind.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from colonnade.model.moe.layer import MixtureOfExperts


class Specialization(NamedTuple):
    """What one layer's experts make of some kinds of tokens."""

    kinds: list[str]
    """Those that there are, the commonest first."""
    counts: list[list[int]]
    """By kind, then expert: choices."""
    lifts: list[list[float]]
    """By kind, then expert; 0 for an expert that nobody chose."""
    told: float
    """Mutual information of expert and kind over the kinds' entropy, 0 to 1."""

    def preferred_experts(self, kind: str, count: int = 3) -> list[tuple[int, float]]:
        """(expert, lift) of the experts that most prefer ``kind``."""
        lifts = self.lifts[self.kinds.index(kind)]
        best = sorted(range(len(lifts)), key=lambda e: -lifts[e])[:count]
        return [(e, lifts[e]) for e in best if lifts[e] > 1]


def specializations(ids: Mapping[int, Tensor], kinds: Sequence[str], experts: int) -> dict[int, Specialization]:
    """By layer, from each one's choices ids_TA (E and more are none) of the tokens whose ``kinds`` are given."""
    return {layer: _of_one(ids_TA.cpu(), kinds, experts) for layer, ids_TA in ids.items()}


def _of_one(ids_TA: Tensor, kinds: Sequence[str], experts: int) -> Specialization:
    names = sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind))
    row_T = torch.tensor([names.index(kind) for kind in kinds], dtype=torch.int64)
    row_TA = row_T[:, None].expand_as(ids_TA)
    taken = ids_TA < experts
    cell_R = row_TA[taken] * experts + ids_TA[taken]
    counts = torch.bincount(cell_R, minlength=len(names) * experts).view(len(names), experts)
    share = counts.double() / counts.sum().clamp(min=1)
    kind, expert = share.sum(1, keepdim=True), share.sum(0, keepdim=True)
    even = kind * expert
    lifts = torch.where(even > 0, share / even.clamp(min=torch.finfo(torch.float64).tiny), 0)
    # x·log x of an empty cell is 0.
    shared = (torch.xlogy(share, lifts)).sum()
    entropy = -torch.xlogy(kind, kind).sum()
    told = (shared / entropy).item() if entropy > 0 else 0.0
    return Specialization(names, counts.tolist(), lifts.tolist(), told)


def top_tokens(ids_TA: Tensor, pieces: Sequence[str], experts: int, count: int = 8) -> list[list[str]]:
    """By expert, the tokens' texts that it takes most beyond its share, as the tables of ST-MoE show them."""
    texts = sorted({piece.strip() for piece in pieces} - {""})
    found = _of_one(ids_TA.cpu(), [piece.strip() for piece in pieces], experts)
    row = {text: i for i, text in enumerate(found.kinds)}

    def beyond(text: str, e: int) -> float:
        """Choices beyond those of an expert without preference."""
        lift = found.lifts[row[text]][e]
        return found.counts[row[text]][e] * (1 - 1 / lift) if lift > 1 else 0.0

    best = [sorted(texts, key=lambda text, e=e: -beyond(text, e))[:count] for e in range(experts)]
    return [[text for text in row_ if beyond(text, e) > 0] for e, row_ in enumerate(best)]


@contextmanager
def record_choices(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """The choices ids_TA of the forward passes within, by block number, this rank's tokens' one pass after another."""
    found: dict[int, list[Tensor]] = {}
    whole: dict[int, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            layer = int(name.split(".")[-2])

            def keep(router: nn.Module, inputs: object, out: tuple, layer: int = layer) -> None:  # noqa: ARG001
                found.setdefault(layer, []).append(out[0].ids_TA.detach())
                whole[layer] = torch.cat(found[layer])

            hooks.append(module.router.register_forward_hook(keep))
    try:
        yield whole
    finally:
        for hook in hooks:
            hook.remove()
