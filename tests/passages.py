"""Passages of real speeches, with planted copies and edits, for the tests of cleaning."""

import functools
import random
import re

from colonnade.data.readers import sotu_documents


@functools.cache
def passages(count: int, words: int = 160) -> tuple[str, ...]:
    """``count`` passages of ``words`` words from different places."""
    found = []
    for _, text in sotu_documents()[::3]:
        parts = text.split(" ")
        found += [" ".join(parts[i : i + words]) for i in range(0, len(parts) - words, 4 * words)]
    return tuple(found[:: len(found) // count][:count])


def edited(text: str, changes: int, seed: int) -> str:
    """``text`` with ``changes`` of its words replaced."""
    parts = re.split(r"(\w+)", text)
    for at in random.Random(seed).sample(range(1, len(parts), 2), changes):
        parts[at] = f"changed{seed}{at}"
    return "".join(parts)


def grams(text: str, n: int = 5) -> set[tuple[str, ...]]:
    """The n-grams of ``text``, without hashes: the definition; of a text of fewer words all its words."""
    words = [word.lower() for word in re.findall(r"\w+", text)]
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)} or ({tuple(words)} if words else set())


def similarity(a: str, b: str) -> float:
    """The Jaccard similarity of two texts."""
    x, y = grams(a), grams(b)
    return len(x & y) / len(x | y)
