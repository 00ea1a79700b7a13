"""Expert specialization: which experts take which kinds of tokens (ST-MoE, arXiv 2202.08906, section 7).

    lift(kind, e) = (share of the kind's choices that went to e) / (share of all choices that did)      1: no preference

The table of a layer counts its choices by kind and expert. The mutual information of kind and expert over the entropy
of the kinds says how much they depend on each other: 0 if experts ignore the kind, 1 if the expert determines it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from colonnade.model.moe.layer import MixtureOfExperts


class Specialization(NamedTuple):
    """How one layer's experts divide the kinds of tokens."""

    kinds: list[str]
    """The most frequent first."""
    counts: list[list[int]]
    """Choices by kind, then expert."""
    lifts: list[list[float]]
    """By kind, then expert; 0 for an expert without choices."""
    mutual_information: float
    """Of expert and kind, over the entropy of the kinds: 0 to 1."""

    def preferred_experts(self, kind: str, count: int = 3) -> list[tuple[int, float]]:
        """(expert, lift) of the experts with the highest lift above 1 for ``kind``."""
        lifts = self.lifts[self.kinds.index(kind)]
        best = sorted(range(len(lifts)), key=lambda e: -lifts[e])[:count]
        return [(e, lifts[e]) for e in best if lifts[e] > 1]


def specializations(ids: Mapping[int, Tensor], kinds: Sequence[str], experts: int) -> dict[int, Specialization]:
    """By layer, from its choices ids_TA (E and above are empty) of tokens of these ``kinds``."""
    return {layer: _specialization(ids_TA.cpu(), kinds, experts) for layer, ids_TA in ids.items()}


def _specialization(ids_TA: Tensor, kinds: Sequence[str], experts: int) -> Specialization:
    names = sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind))
    row_T = torch.tensor([names.index(kind) for kind in kinds], dtype=torch.int64)
    row_TA = row_T[:, None].expand_as(ids_TA)
    valid_TA = ids_TA < experts
    cell_R = row_TA[valid_TA] * experts + ids_TA[valid_TA]
    counts = torch.bincount(cell_R, minlength=len(names) * experts).view(len(names), experts)
    share = counts.double() / counts.sum().clamp(min=1)
    kind, expert = share.sum(1, keepdim=True), share.sum(0, keepdim=True)
    independent = kind * expert
    lifts = torch.where(independent > 0, share / independent.clamp(min=torch.finfo(torch.float64).tiny), 0)
    # x·log x of an empty cell is 0.
    information = (torch.xlogy(share, lifts)).sum()
    entropy = -torch.xlogy(kind, kind).sum()
    ratio = (information / entropy).item() if entropy > 0 else 0.0
    return Specialization(names, counts.tolist(), lifts.tolist(), ratio)


def top_tokens(ids_TA: Tensor, pieces: Sequence[str], experts: int, count: int = 8) -> list[list[str]]:
    """By expert, the text of the tokens with the most choices beyond its share, as in ST-MoE's tables."""
    texts = sorted({piece.strip() for piece in pieces} - {""})
    found = _specialization(ids_TA.cpu(), [piece.strip() for piece in pieces], experts)
    row = {text: i for i, text in enumerate(found.kinds)}

    def excess(text: str, e: int) -> float:
        """Choices beyond those of an expert without preference."""
        lift = found.lifts[row[text]][e]
        return found.counts[row[text]][e] * (1 - 1 / lift) if lift > 1 else 0.0

    best = [sorted(texts, key=lambda text, e=e: -excess(text, e))[:count] for e in range(experts)]
    return [[text for text in ranked if excess(text, e) > 0] for e, ranked in enumerate(best)]


@contextmanager
def record_choices(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Record the choices ids_TA of this rank's tokens in the forward passes within, concatenated, by block number."""
    passes: dict[int, list[Tensor]] = {}
    choices: dict[int, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            layer = int(name.split(".")[-2])

            def record(router: nn.Module, inputs: object, out: tuple, layer: int = layer) -> None:  # noqa: ARG001
                passes.setdefault(layer, []).append(out[0].ids_TA.detach())
                choices[layer] = torch.cat(passes[layer])

            hooks.append(module.router.register_forward_hook(record))
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()
