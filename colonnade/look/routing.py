"""Tables of which experts take which tokens of a text (ST-MoE, arXiv 2202.08906, section 7).

A layer's table has a row for each expert: its share of the choices, the kinds of tokens that it takes more often than
its share would suggest (and how many times more often), and its most over-represented tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from colonnade.data.token_classes import classify_tokens
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import RequestError
from colonnade.model.moe.expert_specialization import Specialization, record_choices, specializations, top_tokens
from colonnade.model.score import Score, score
from colonnade.model.transformer import Transformer

PREFERENCE = 1.2
"""A kind is listed where an expert takes it so many times more often than its share of all tokens."""


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
