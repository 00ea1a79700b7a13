"""Where sentences begin in a run of WordPiece tokens.

A sentence begins at the first word after a full stop, an exclamation or a question mark, and after the closing quotes
and brackets that follow it. A full stop within a number (3.5) or after an initial or a title (U. S., Mr.) ends none.
"""

import numpy as np

from colonnade.data.wordpiece import Pieces


def sentence_starts(tokens_T: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Sorted indices (1 .. T-1) of the tokens that begin a sentence; the first token's context is unknown."""
    T = len(tokens_T)
    if T < 2:
        return np.empty(0, np.int64)
    ends_T, closes_T = pieces.ends_V[tokens_T], pieces.closes_V[tokens_T]
    at_T = np.arange(T)
    # The last token before each one that is no closing quote or bracket: the mark that may end a sentence.
    mark_T = np.maximum.accumulate(np.where(closes_T, 0, at_T))
    before_T = np.maximum(mark_T - 1, 0)
    after_T = np.minimum(mark_T + 1, T - 1)
    within_number = pieces.digits_V[tokens_T[before_T]] & pieces.digits_V[tokens_T[after_T]]
    # A letter or a title is a word of its own: "b" of "club" is a continuation.
    abbreviated = pieces.abbreviates_V[tokens_T[before_T]]
    ended_T = ends_T[mark_T] & ~(pieces.stops_V[tokens_T[mark_T]] & (within_number | abbreviated))
    begins_T = ~(ends_T | closes_T | pieces.continues_V[tokens_T])
    return 1 + np.flatnonzero(ended_T[:-1] & begins_T[1:])
