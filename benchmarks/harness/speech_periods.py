"""A classification task: in which of four periods (1790 to today) a passage of a State of the Union speech was given.

Whole speeches are held out, a fifth of each period; all periods have equally many passages, so chance is 25%.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from colonnade.data.readers import sotu_documents
from colonnade.data.tokenizer import Tokenizer
from colonnade.tune import Example

PERIODS = (1790, 1861, 1913, 1965)
"""First year of each period."""
QUOTED = 16
"""Consecutive words that make a passage a quotation."""
TRAINING = ("labelled", "transfer")
"""The parts that are drawn from the training speeches."""

Part = list[tuple[str, int]]
"""(text, period) of each passage."""


def passages(sizes: Mapping[str, int], length: int) -> dict[str, Part]:
    """As many passages of ``length`` words for "labelled", "transfer", "development" and "test" as ``sizes`` says.

    Speeches quote earlier ones: a held-out passage shares no 16 consecutive words with a training speech.
    """
    draw = random.Random(0)
    groups = list[dict[str, list[list[str]]]]()
    for start, end in zip(PERIODS, [*PERIODS[1:], 10_000], strict=True):
        speeches = [text.split() for name, text in sotu_documents() if start <= int(name[:4]) < end]
        draw.shuffle(speeches)
        fifth, tenth = max(2, len(speeches) // 5), max(2, len(speeches) // 10)
        train, development, test = speeches[fifth + tenth :], speeches[fifth : fifth + tenth], speeches[:fifth]
        groups.append({**dict.fromkeys(TRAINING, train), "development": development, "test": test})
    seen = {hash(run) for group in groups for words in group[TRAINING[0]] for run in runs_of(words)}
    parts: dict[str, Part] = {name: [] for name in sizes}
    for period, group in enumerate(groups):
        for name, rows in parts.items():
            at = list[tuple[list[str], int]]()
            for words in group[name]:
                quoted = [0, *accumulate(hash(run) in seen for run in runs_of(words))]
                for i in range(0, len(words) - max(length, QUOTED) + 1, 8):
                    if name in TRAINING or quoted[i] == quoted[max(i, i + length - QUOTED + 1)]:
                        at.append((words, i))
            for words, i in draw.sample(at, min(len(at), sizes[name] // len(PERIODS))):
                rows.append((" ".join(words[i : i + length]), period))
    for rows in parts.values():
        draw.shuffle(rows)
    return parts


def runs_of(words: list[str]) -> Iterator[tuple[str, ...]]:
    """All runs of :data:`QUOTED` consecutive words."""
    return zip(*(words[i:] for i in range(QUOTED)), strict=False)


def examples(tokenizer: Tokenizer, rows: Sequence[tuple[str, int]], longest: int) -> list[Example]:
    """The passages as examples of at most ``longest`` tokens."""
    ids = tokenizer.encode_batch([text for text, _ in rows])
    return [Example(each[: longest - 1] + each[-1:], label) for each, (_, label) in zip(ids, rows, strict=True)]
