"""Tables of the experts that receive each kind of token of a text (ST-MoE, arXiv 2202.08906, section 7).

A layer's table has a row for each expert: its share of the choices, the kinds of tokens that it takes more often than
its share would suggest (and how many times more often), and its most over-represented tokens.

The kinds of tokens:

    punctuation    number    name    function word    verb    word    part of a word    white space

come from simple rules and word lists for English, not from a tagger: a name is a capitalised word within a sentence; a
verb is a common verb or has a verb's ending. This suffices to see whether an expert processes commas, but not to parse.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import RequestError
from colonnade.model.moe.expert_specialization import Specialization, record_choices, specializations, top_tokens
from colonnade.model.score import Score, score
from colonnade.model.transformer import Transformer

PREFERENCE = 1.2
"""A kind is listed if an expert takes it this many times more often than its share of all tokens."""


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
        raise RequestError("this model has no experts; --routing applies to a mixture of experts")
    if model.axes.experts.tokens.size > 1:
        raise RequestError("--routing needs the whole model in one process; remove --plan")
    with record_choices(model) as ids:
        scored = score(model, list(tokens), context=context)
    pieces = [tokenizer.decode([token]) for token in tokens[:-1]]  # the last token is only a target
    layers = specializations(ids, classify_tokens(pieces), moe.experts)
    return RoutedText(scored, layers, {layer: top_tokens(ids_TA, pieces, moe.experts) for layer, ids_TA in ids.items()})


def routing_tables(routed: RoutedText) -> list[Table]:
    """One table per layer."""
    return [_table(layer, it, routed.texts[layer]) for layer, it in routed.layers.items()]


def _table(layer: int, expert_kinds: Specialization, texts: list[list[str]]) -> Table:
    title = f"layer {layer}: the expert explains {expert_kinds.mutual_information:.1%} of a token's kind"
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


TOKEN_CLASSES = ("punctuation", "number", "name", "function word", "verb", "word", "part of a word", "white space")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FUNCTION = _words(
    """
    a an the this that these those and or but nor so yet if because although though while than as of in on at by for
    with from to into onto upon about over under between among through during before after above below against
    without within i you he she it we they me him her us them my your his its our their who whom whose which what
    not no
    """
)
_VERBS = _words(
    """
    am is are was were be been being have has had having do does did done doing will would shall should can could
    may might must go goes went gone come came take took taken give gave given get got make made know knew known
    think thought see saw seen say said says tell told find found keep kept let put run ran become became leave left
    feel felt bring brought begin began hold held write wrote stand stood hear heard meet met pay paid sit sat speak
    spoke lead led grow grew lose lost fall fell send sent build built understand understood draw drew break broke
    spend spent cut rise rose look want use work call try ask need seem help show play move live believe
    """
)
_ENDS = ("ing", "ed", "ize", "ise", "ify")
_SENTENCE_ENDS = frozenset(".!?:\n")


def classify_tokens(pieces: Sequence[str]) -> list[str]:
    """The class of each token of a text, from :data:`TOKEN_CLASSES`; ``pieces`` are the tokens as text, with spaces."""
    "spaces."
    classes: list[str] = []
    after_letter, starts_sentence = False, True
    for piece in pieces:
        bare = piece.strip()
        classes.append(_classify(bare, joined=after_letter and piece[:1].isalpha(), starts_sentence=starts_sentence))
        if bare and any(c.isalnum() for c in bare):
            starts_sentence = False
        if set(piece) & _SENTENCE_ENDS:
            starts_sentence = True
        if piece:
            after_letter = piece[-1].isalpha()
    return classes


def _classify(bare: str, *, joined: bool, starts_sentence: bool) -> str:
    if not bare:
        return "white space"
    if not any(c.isalnum() for c in bare):
        return "punctuation"
    if any(c.isdigit() for c in bare):
        return "number"
    if joined:
        return "part of a word"
    lower = bare.lower().strip("'’.,;:!?\"()")
    if lower in _FUNCTION:
        return "function word"
    if bare[0].isupper() and not starts_sentence:
        return "name"
    return "verb" if lower in _VERBS or (len(lower) > 4 and lower.endswith(_ENDS)) else "word"
