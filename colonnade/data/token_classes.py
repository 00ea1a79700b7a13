"""Classifies tokens by their text, to see what experts specialise in (ST-MoE, arXiv 2202.08906, section 7).

    punctuation    number    name    function word    verb    word    part of a word    white space

Simple rules and word lists for English, not a tagger: a name is a capitalised word within a sentence; a verb is a
common verb or has a verb's ending. Enough to see whether an expert processes commas, not enough to parse.
"""

from collections.abc import Sequence

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
