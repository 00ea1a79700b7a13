"""Expert specialization: which experts take which kinds of tokens, as tables (ST-MoE, arXiv 2202.08906, section 7).

    lift(kind, e) = (share of the kind's choices that went to e) / (share of all choices that did)      1: no preference

The counts of a layer are its choices by kind and expert. The mutual information of kind and expert over the entropy of
the kinds says how much they depend on each other: 0 if experts ignore the kind, 1 if the expert determines it. A
layer's table has a row for each expert: its share of the choices, the kinds of tokens that it takes more often than its
share would suggest (and how many times more often), and its most over-represented tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from colonnade.data.token_classes import classify_tokens
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import RequestError
from colonnade.model.moe.layer import MixtureOfExperts
from colonnade.model.score import Score, score
from colonnade.model.transformer import Transformer

PREFERENCE = 1.2
"""A kind is listed where an expert takes it so many times more often than its share of all tokens."""


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
    """By layer, from its choices ids_TA (E and more are none) of tokens of these ``kinds``."""
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
    """By expert, the texts of the tokens with the most choices beyond its share, as in ST-MoE's tables."""
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


class RoutedText(NamedTuple):
    """A text's score, and its routing through the experts of each layer."""

    score: Score
    layers: dict[int, Specialization]
    """By block number."""
    texts: dict[int, list[list[str]]]
    """By block number and expert: the most over-represented tokens."""


def record_routing(
    model: Transformer, tokenizer: Tokenizer, tokens: Sequence[int], context: int | None = None
) -> RoutedText:
    """Score ``tokens`` in windows of ``context`` and record the routing.

    Raises :class:`RequestError` for a model without experts, and for one sharded over several processes.
    """
    moe = model.config.moe
    if moe is None:
        raise RequestError("this model has no experts; --routing is for a mixture of experts")
    if model.axes.experts.tokens.size > 1:
        raise RequestError("--routing needs the whole model in one process; leave --plan out")
    with record_choices(model) as ids:
        scored = score(model, list(tokens), context=context)
    pieces = [tokenizer.decode([token]) for token in tokens[:-1]]  # the last one is only predicted
    layers = specializations(ids, classify_tokens(pieces), moe.experts)
    return RoutedText(scored, layers, {layer: top_tokens(ids_TA, pieces, moe.experts) for layer, ids_TA in ids.items()})


def routing_tables(routed: RoutedText) -> list[Table]:
    """One table per layer."""
    return [_table(layer, it, routed.texts[layer]) for layer, it in routed.layers.items()]


def _table(layer: int, expert_kinds: Specialization, texts: list[list[str]]) -> Table:
    title = f"layer {layer}: the expert tells {expert_kinds.mutual_information:.1%} of what kind a token is"
    table = Table("expert", "share", "takes more than its share of", "such as", title=title)
    by_expert = list(zip(*expert_kinds.counts, strict=True))
    total = max(1, sum(map(sum, by_expert)))
    for e, counts in enumerate(by_expert):
        lifts = sorted(
            ((row[e], kind) for kind, row in zip(expert_kinds.kinds, expert_kinds.lifts, strict=True)), reverse=True
        )
        preferred = ", ".join(f"{kind} x{lift:.1f}" for lift, kind in lifts[:3] if lift >= PREFERENCE)
        examples_text = " ".join(repr(text)[1:-1] for text in texts[e])
        table.add_row(str(e), f"{sum(counts) / total:.1%}", preferred or "-", examples_text or "-")
    return table
