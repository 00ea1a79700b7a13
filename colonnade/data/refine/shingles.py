r"""Words, their hashes, and hashes of n-grams of words.

    w_i = xxh64(word i)        g_i = mix(Σ_{j<n} w_{i+j} · B^{n−1−j} mod 2^64)

A word is ``\w+`` in lower case. The n-grams of a text of W words are computed by n multiply-adds of arrays, not by
joining words. ``mix`` is the finaliser of splitmix64: a rolling sum alone has structure in its low bits. Python's own
``hash`` differs in each process and is not used.
"""

import re

import numpy as np
import xxhash

SHINGLE_WORDS = 5
"""Words of a shingle, for near duplicates."""
_WORD = re.compile(r"\w+")
_BASE = np.uint64(0x9E3779B97F4A7C15)


class _Hashes(dict[str, int]):
    """Hashes of words, computed when they are first looked up."""

    def __missing__(self, word: str) -> int:
        self[word] = value = xxhash.xxh64_intdigest(word.lower().encode())
        return value


_KNOWN = _Hashes()
_KNOWN_WORDS = 1 << 19


def word_hashes(text: str) -> np.ndarray:
    """The 64-bit hash of each word of ``text``, in order."""
    words = _WORD.findall(text)
    if len(_KNOWN) > _KNOWN_WORDS:
        _KNOWN.clear()
    return np.fromiter(map(_KNOWN.__getitem__, words), np.uint64, len(words))


def word_spans(text: str) -> np.ndarray:
    """Start and end of each word of :func:`word_hashes` in ``text``, (W, 2)."""
    spans = [match.span() for match in _WORD.finditer(text)]
    return np.array(spans, np.int64).reshape(-1, 2)


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """The hashes of the W − n + 1 n-grams of ``words`` in order; none for a shorter text."""
    count = len(words) - n + 1
    if count < 1:
        return np.empty(0, np.uint64)
    sums = words[:count].copy()
    for j in range(1, n):
        sums *= _BASE
        sums += words[j : j + count]
    return _mix(sums + np.uint64(n))  # n-grams of different lengths differ


def shingles(text: str) -> np.ndarray:
    """The sorted set of 5-grams of ``text``; a shorter text is one gram; empty without words."""
    words = word_hashes(text)
    return np.unique(ngram_hashes(words, min(SHINGLE_WORDS, len(words)))) if len(words) else words


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|A ∩ B| / |A ∪ B| of two sorted sets; 0 where both are empty."""
    smaller, larger = (a, b) if len(a) <= len(b) else (b, a)
    if not len(smaller):
        return 0.0
    at = np.searchsorted(larger, smaller)
    at[at == len(larger)] = 0
    common = int((larger[at] == smaller).sum())
    return common / (len(a) + len(b) - common)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
