"""What comes out of an engine: a piece a step while a request runs, or the whole at the end.

What an engine counts; the HTTP layer shows it as metrics.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from colonnade.errors import RequestError

FinishReason = Literal["stop", "length", "error"]
"""stop: an end token or a stop string. length: max_tokens or the context. error: the logits were not finite."""


def not_finite() -> RequestError:
    """What the reason "error" means to those who asked."""
    return RequestError(
        "the model's logits were not finite (overflow in its dtype, or damaged weights); try --dtype float32",
        status=500,
        code="not_finite",
    )


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
        """The pieces of one request, up to the last one; :class:`RequestError` when that is an error."""
        pieces = list(pieces)
        reason = pieces[-1].finish_reason
        assert reason is not None, "more pieces follow"
        if reason == "error":
            raise not_finite()
        tokens = tuple(piece.token for piece in pieces)
        return Completion("".join(piece.text for piece in pieces), tokens, reason, pieces[-1].prompt_tokens)


@dataclass
class Stats:
    """Totals since the start, and the state after the last step."""

    running: int = 0
    """Requests that hold pages."""
    waiting: int = 0
    """Requests in the queue."""
    pages_used: int = 0
    pages: int = 0
    """Pages in the pool."""
    steps: int = 0
    """Forward passes."""
    preemptions: int = 0
    """Times that a request gave its pages back and was recomputed."""
    prefix_queries: int = 0
    """Tokens of requests when they were admitted, which the cache was searched for."""
    prefix_hits: int = 0
    """Of these, tokens that were there already and not computed again."""
    shared_keys: int = 0
    """Keys of a layer that decode steps read once for several requests, summed over the steps."""
    spared_keys: int = 0
    """Readings of a key that this saved: each, times the requests that shared it but one."""
    prompt_tokens: int = 0
    """Tokens of the prompts that were run, each prompt counted once."""
    generation_tokens: int = 0
    """Tokens sampled."""
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""

    @property
    def cache_usage(self) -> float:
        """Share of the pages in use, 0 to 1."""
        return self.pages_used / self.pages if self.pages else 0.0
