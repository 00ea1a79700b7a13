"""Examples from the sample speeches: the latest twenty, which a corpus built from the others does not contain.

lm-eval calls these functions, which are named in the YAML files of this folder. A function takes the metadata of its
task and returns the examples of each split.
"""

import random
import re
from typing import Any

from colonnade.data.readers import sotu_documents

HELD_OUT = 20
"""Number of latest speeches for examples; an evaluated model must not be trained on them."""


class Examples(list[dict[str, Any]]):
    """The examples of a split, with the interface of ``datasets.Dataset`` that lm-eval uses."""

    @property
    def features(self) -> dict[str, type]:
        """The columns."""
        return {name: type(value) for name, value in self[0].items()}


_SENTENCE = re.compile(r"[A-Z][^.!?\n]{30,250}[.!?]")
_CENTURIES = ("eighteenth", "nineteenth", "twentieth", "twenty-first")


def _speeches(every: bool = False) -> list[tuple[str, str]]:
    return sotu_documents() if every else sotu_documents()[-HELD_OUT:]


def _paragraphs(text: str) -> list[list[str]]:
    """Runs of at least six sentences that follow one another."""
    found: list[list[str]] = []
    for paragraph in re.split(r"\n\s*\n", text):
        sentences = _SENTENCE.findall(" ".join(paragraph.split()))
        if len(sentences) >= 6:
            found.append(sentences)
    return found or [_SENTENCE.findall(" ".join(text.split()))]


def _passages(name: str, text: str, length: int, count: int) -> list[list[str]]:
    """``count`` runs of ``length`` sentences of a speech, the same ones every time."""
    sentences = [each for paragraph in _paragraphs(text) for each in paragraph]
    starts = range(0, len(sentences) - length, length)
    chosen = random.Random(name).sample(starts, min(count, len(starts)))
    return [sentences[start : start + length] for start in sorted(chosen)]


def cloze(**_: Any) -> dict[str, Examples]:
    """The last word of a passage, which occurs earlier in the passage (as in LAMBADA)."""
    examples: list[dict[str, str]] = []
    for name, text in _speeches():
        sentences = [each for paragraph in _paragraphs(text) for each in paragraph]
        own: list[dict[str, str]] = []
        for start in range(len(sentences) - 5):
            words = " ".join(sentences[start : start + 5]).split()
            last = words[-1].rstrip(".!?")
            before = {word.strip(",.;:!?") for word in words[:-1]}
            if len(last) > 3 and last in before:
                own.append({"context": " ".join(words[:-1]), "word": last})
        examples += random.Random(name).sample(own, min(10, len(own)))
    return {"test": Examples(examples)}


def following(**_: Any) -> dict[str, Examples]:
    """The sentence that follows four others, among three from elsewhere in the same speech."""
    examples: list[dict[str, Any]] = []
    for name, text in _speeches():
        passages = _passages(name, text, 5, 14)
        for number, passage in enumerate(passages[:10]):
            choose = random.Random(f"{name}-{number}")
            others = [other[choose.randrange(5)] for i, other in enumerate(passages) if i != number]
            if len(others) >= 3:
                choices = [passage[4], *choose.sample(others, 3)]
                order = choose.sample(range(4), 4)
                examples.append(
                    {"context": " ".join(passage[:4]), "choices": [choices[i] for i in order], "label": order.index(0)}
                )
    return {"test": Examples(examples)}


def century(**_: Any) -> dict[str, Examples]:
    """In which century a passage was spoken; of all speeches, the same number from each century."""
    passages: dict[str, list[str]] = {name: [] for name in _CENTURIES}
    for name, text in _speeches(every=True):
        year = int(name[:4])
        passages[_CENTURIES[(year - 1) // 100 - 17]] += [" ".join(each) for each in _passages(name, text, 4, 10)]
    count = min(60, *(len(each) for each in passages.values()))
    examples = [
        {"passage": passage, "choices": list(_CENTURIES), "label": _CENTURIES.index(name)}
        for name, own in passages.items()
        for passage in random.Random(name).sample(own, count)
    ]
    random.Random(1).shuffle(examples)
    return {"test": Examples(examples)}


def whole(**_: Any) -> dict[str, Examples]:
    """The speeches themselves."""
    return {"test": Examples({"text": text} for _, text in _speeches())}


def repeat(**_: Any) -> dict[str, Examples]:
    """Sentences to be repeated word for word, after two examples."""
    examples: list[dict[str, str]] = []
    for name, text in _speeches():
        sentences = [each for passage in _passages(name, text, 3, 5) for each in passage]
        examples += [
            {"first": sentences[i], "second": sentences[i + 1], "third": sentences[i + 2]}
            for i in range(0, len(sentences) - 2, 3)
        ]
    return {"test": Examples(examples)}
