"""Which experts take which tokens of a text, as tables for people (ST-MoE, arXiv 2202.08906, section 7).

A layer's table has a row for each expert: its share of the choices, the kinds of tokens that it takes more often than
an expert without preference would (with how many times more often), and the tokens that it takes most beyond its share.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from colonnade.data.token_classes import kinds_of
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import RequestError
from colonnade.model.moe.expert_specialization import Specialization, examples, recorded, specializations
from colonnade.model.score import Score, score
from colonnade.model.transformer import Transformer

PREFERS = 1.2
"""A kind is named where an expert takes it so many times more often than its share of all tokens."""


class RoutedText(NamedTuple):
    """How one text went through the experts of a model."""

    score: Score
    layers: dict[int, Specialization]
    """By block number."""
    texts: dict[int, list[list[str]]]
    """By block number and expert: the tokens that it takes most beyond its share."""


def record_routing(
    model: Transformer, tokenizer: Tokenizer, tokens: Sequence[int], context: int | None = None
) -> RoutedText:
    """Score ``tokens`` in windows of ``context`` and note which expert took which of them.

    Raises :class:`RequestError` for a model without experts, and for one of which this process has a share only.
    """
    moe = model.config.moe
    if moe is None:
        raise RequestError("this model has no experts; --routing is for a mixture of experts")
    if model.axes.experts.tokens.size > 1:
        raise RequestError("who takes which token is told by one process; leave --plan out with --routing")
    with recorded(model) as ids:
        found = score(model, list(tokens), context=context)
    pieces = [tokenizer.decode([token]) for token in tokens[:-1]]  # the last one is predicted and not read
    layers = specializations(ids, kinds_of(pieces), moe.experts)
    return RoutedText(found, layers, {layer: examples(ids_TA, pieces, moe.experts) for layer, ids_TA in ids.items()})


def routing_tables(routed: RoutedText) -> list[Table]:
    """One a layer."""
    return [_table(layer, it, routed.texts[layer]) for layer, it in routed.layers.items()]


def _table(layer: int, it: Specialization, texts: list[list[str]]) -> Table:
    told = f"layer {layer}: the expert tells {it.told:.1%} of what kind a token is"
    made = Table("expert", "share", "takes more than its share of", "such as", title=told)
    by_expert = list(zip(*it.counts, strict=True))
    whole = max(1, sum(map(sum, by_expert)))
    for e, counts in enumerate(by_expert):
        lifts = sorted(((row[e], kind) for kind, row in zip(it.kinds, it.lifts, strict=True)), reverse=True)
        likes = ", ".join(f"{kind} x{lift:.1f}" for lift, kind in lifts[:3] if lift >= PREFERS)
        such = " ".join(repr(text)[1:-1] for text in texts[e])
        made.add_row(str(e), f"{sum(counts) / whole:.1%}", likes or "-", such or "-")
    return made
