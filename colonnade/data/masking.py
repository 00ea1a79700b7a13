"""Masks over whole words and runs of them, as a pure function of a key.

Words are chosen in a drawn order, each with the length of its run, n words with probability ∝ 1/n for n up to
``longest``, until ``share`` of the tokens are chosen; a run that would exceed the budget is shortened, and no run
crosses a control token. All tokens of a run get the same fate: [MASK] with 0.8, other tokens with 0.1, their own with
0.1.
(Whole words and n-grams: Joshi 2020, arXiv 1907.10529, section 3.1, and Lan 2020, arXiv 1909.11942, section 4.1;
80/10/10: Devlin 2019, section 3.1. Joshi decides by the span, and so do we: a piece that is left standing would give
away the rest of its word.)

Every number that is drawn is a hash of (key, place), never a generator's next: the masks of a sample do not depend on
the rank, the batch or the run that asks for them.
"""

import numpy as np

from colonnade.data.cursor import GOLDEN, MASK, mix, mix_one
from colonnade.data.wordpiece import Pieces

MASKED, RANDOM = 0.8, 0.1


def key_of(seed: int, *numbers: int) -> int:
    """One well-mixed key from a seed and numbers; other numbers, or their order, give another."""
    key = mix_one(seed & MASK)
    for number in numbers:
        key = mix_one(key ^ (number & MASK))
    return key


def uniforms(key: int, count: int) -> np.ndarray:
    """``count`` numbers in [0, 1), float64, a function of ``key`` alone; fewer are the beginning of more."""
    places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key)
    return (mix(places) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def budget(tokens: int, share: float) -> int:
    """How many of so many maskable tokens are chosen, at most; at least one of any."""
    return min(tokens, max(1, round(tokens * share)))


def words(tokens_T: np.ndarray, pieces: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, end, run) of each word: its tokens, and a number that control tokens between two words make differ."""
    special_T = pieces.special_V[tokens_T]
    after_special_T = np.concatenate([[True], special_T[:-1]])
    first_T = ~special_T & (~pieces.continues_V[tokens_T] | after_special_T)
    starts = np.flatnonzero(first_T)
    stops = np.append(starts[1:], len(tokens_T))
    # A word before a control token ends there.
    bounds = np.flatnonzero(special_T)
    next_bound = np.append(bounds, len(tokens_T))[np.searchsorted(bounds, starts)]
    return starts, np.minimum(stops, next_bound), np.searchsorted(bounds, starts)


def mask(
    tokens_T: np.ndarray, pieces: Pieces, key: int, *, share: float = 0.15, longest: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """(the tokens with masks, the sorted places that were chosen) of one sequence with its control tokens."""
    starts, stops, run = words(tokens_T, pieces)
    count = len(starts)
    left = budget(int((~pieces.special_V[tokens_T]).sum()), share)
    order = np.argsort(uniforms(key_of(key, 0), count), kind="stable")
    lengths = np.searchsorted(_run_lengths(longest), uniforms(key_of(key, 1), count), side="right") + 1
    fates, others = uniforms(key_of(key, 2), count), uniforms(key_of(key, 3), len(tokens_T))

    masked_T, chosen_T, taken = tokens_T.copy(), np.zeros(len(tokens_T), bool), np.zeros(count, bool)
    for word in order.tolist():
        if not left:
            break
        for n in range(int(lengths[word]), 0, -1):
            last = word + n - 1
            if last >= count or run[last] != run[word] or taken[word : last + 1].any():
                continue
            here = slice(starts[word], stops[last])
            size = int(here.stop - here.start)
            if size > left:
                continue
            taken[word : last + 1], chosen_T[here], left = True, True, left - size
            if fates[word] < MASKED:
                masked_T[here] = pieces.mask
            elif fates[word] < MASKED + RANDOM:
                masked_T[here] = pieces.ordinary[(others[here] * len(pieces.ordinary)).astype(np.int64)]
            break
    return masked_T, np.flatnonzero(chosen_T)


def _run_lengths(longest: int) -> np.ndarray:
    """Cumulative probabilities of 1 .. longest - 1 words."""
    weights = 1 / np.arange(1, longest + 1)
    return np.cumsum(weights)[:-1] / weights.sum()
