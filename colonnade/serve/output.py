"""What comes out of an engine: a piece a step while a request runs, or the whole at the end."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "error"]
"""stop: an end token or a stop string. length: max_tokens or the context. error: the logits were not finite."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a finished request's time went [s]."""

    queue_s: float
    """From arrival to the first step that ran any of its tokens."""
    prefill_s: float
    """From there to its first token."""
    decode_s: float
    """From the first token to the last."""


@dataclass(frozen=True, slots=True)
class Output:
    """One new token of one request, and the text that became certain with it."""

    id: str
    text: str
    """New text; may be empty while a character or a possible stop string is incomplete."""
    token: int
    finish_reason: FinishReason | None
    """None while more follows."""
    prompt_tokens: int
    generated_tokens: int
    """Tokens so far, an end token included."""
    timing: Timing | None = None
    """With the last piece."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    """All generated tokens, also those of a stop string or the end token, which the text leaves out."""
    finish_reason: FinishReason
    prompt_tokens: int

    @staticmethod
    def of(pieces: Iterable[Output]) -> "Completion":
        """The pieces of one request, the last of which has a finish reason."""
        pieces = list(pieces)
        reason = pieces[-1].finish_reason
        assert reason is not None, "more pieces follow"
        tokens = tuple(piece.token for piece in pieces)
        return Completion("".join(piece.text for piece in pieces), tokens, reason, pieces[-1].prompt_tokens)
