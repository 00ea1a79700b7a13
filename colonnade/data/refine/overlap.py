"""Finds evaluation texts in a corpus: n-grams to cut out, and the shares of test sets that a corpus contains.

- Decontamination (Brown 2020, appendix C; Megatron-LM's ``tools/openwebtext``): 13-grams of evaluation texts, and whole
  texts of 8 to 12 words, are cut out of a document together with 200 characters on each side, extended to the end of a
  sentence.
- Overlap (Radford 2019, section 4): the share of a test set's 8-grams that occur in the corpus. The test set's grams
  are held in memory and the corpus is streamed, so the share is exact, without a Bloom filter.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from colonnade.data.refine.shingles import ngram_hashes, word_hashes, word_spans

OVERLAP_WORDS = 8
"""Length of the grams whose share is reported, and of the shortest text that is cut out [words]."""
_SENTENCE_END = re.compile(r"[.!?][\"')\]’”]*(?=\s|$)|\n\s*\n")


class Grams(NamedTuple):
    """Hashes of n-grams, sorted, and the lengths n that occur among them."""

    hashes: np.ndarray
    lengths: tuple[int, ...]

    def find(self, words: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(place in the text, place in ``hashes``) of each n-gram of the text ``words`` that is one of these."""
        grams = ngram_hashes(words, n)
        if not (len(grams) and len(self.hashes)):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        at = np.searchsorted(self.hashes, grams)
        at[at == len(self.hashes)] = 0
        (places,) = np.nonzero(self.hashes[at] == grams)
        return places, at[places]


def evaluation_grams(texts: Iterable[str], ngram: int) -> Grams:
    """The n-grams of ``texts``; a text of 8 to n − 1 words is one gram, a shorter one has none."""
    found: list[np.ndarray] = []
    lengths: set[int] = set()
    for text in texts:
        words = word_hashes(text)
        n = min(ngram, len(words))
        if n >= OVERLAP_WORDS:
            lengths.add(n)
            found.append(ngram_hashes(words, n))
    hashes = np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)
    return Grams(hashes, tuple(sorted(lengths)))


def overlap_grams(texts: Iterable[str]) -> Grams:
    """The distinct 8-grams of ``texts``."""
    found = [ngram_hashes(word_hashes(text), OVERLAP_WORDS) for text in texts]
    return Grams(np.unique(np.concatenate([*found, np.empty(0, np.uint64)])), (OVERLAP_WORDS,))


def count_grams(grams: Grams, texts: Iterable[str]) -> np.ndarray:
    """How often each of ``grams`` occurs in ``texts``."""
    counts = np.zeros(len(grams.hashes), np.int64)
    for text in texts:
        words = word_hashes(text)
        for n in grams.lengths:
            np.add.at(counts, grams.find(words, n)[1], 1)
    return counts


def cut(text: str, grams: Grams, margin: int) -> list[str] | None:
    """The remaining pieces of ``text``, including those under ``margin`` characters; None if nothing is cut."""
    words = word_hashes(text)
    found = [(n, int(at)) for n in grams.lengths for at in grams.find(words, n)[0]]
    if not found:
        return None
    places = word_spans(text)
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    spans: list[tuple[int, int]] = []
    for n, at in found:
        start, stop = int(places[at, 0]) - margin, int(places[at + n - 1, 1]) + margin
        left = ends[max(0, bisect_right(ends, start) - 1)]
        right = ends[min(len(ends) - 1, bisect_left(ends, stop))]
        spans.append((left, right))
    pieces: list[str] = []
    end = 0
    for start, stop in _merge(spans):
        pieces.append(text[end:start])
        end = stop
    return [*pieces, text[end:]]


def _merge(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
