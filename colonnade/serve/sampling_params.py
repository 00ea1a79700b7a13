"""Sampling parameters of a request: a frozen, validated record, and what sampling one token needs of it.

A bad value raises :class:`colonnade.errors.RequestError` whose ``param`` is the field's name, so that the HTTP layer
can report it as OpenAI does.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

from colonnade.config import did_you_mean
from colonnade.errors import RequestError

MAX_STOPS = 64
"""Limit for the stop strings, and for the stop tokens, of one request."""

MAX_LOGPROBS = 20
"""Limit for the alternatives returned with a token's log-probability."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the most probable token (greedy)."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probabilities sum to at least p (Holtzman 2019)."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the most probable one (Nguyen 2024)."""
    seed: int | None = None
    """The same seed gives the same text, whatever else is in the batch; None takes a random one."""
    stop: Sequence[str] | str = ()
    """Strings that end the text; they may span tokens and are not part of the text."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text, in addition to the tokenizer's end tokens."""
    max_tokens: int | None = None
    """Tokens to generate at most; None generates up to the end of the context."""
    ignore_eos: bool = False
    """Continue past the tokenizer's end tokens (for benchmarks)."""
    logprobs: int | None = None
    """Return the log-probability of each generated token and of this many most probable ones, at most 20.

    They are those of the raw logits, before temperature and filters; None returns none.
    """
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. Such a prompt is not read from the prefix cache."""
    echo: bool = False
    """Begin the text with the prompt's."""

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p"):
            _check(name, getattr(self, name), _is_a(Real, getattr(self, name)), "a number")
        for name in ("top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(name, value, _is_a(Integral, value) or (value is None and name != "top_k"), "a whole number")
        for name in ("ignore_eos", "echo"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        stop = (
            (self.stop,)
            if isinstance(self.stop, str)
            else _to_tuple("stop", self.stop, "a string or a list of strings")
        )
        tokens = _to_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tokens)
        _check("temperature", self.temperature, self.temperature >= 0 and _finite(self.temperature), "0 or more")
        _check("top_k", self.top_k, 0 <= self.top_k < 2**63, "0 (all) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        _check("seed", self.seed, self.seed is None or -(2**63) <= self.seed < 2**63, "a signed 64-bit integer")
        _check("stop", list(stop), len(stop) <= MAX_STOPS, f"at most {MAX_STOPS} strings")
        _check("stop", list(stop), all(isinstance(text, str) and text for text in stop), "strings that are not empty")
        _check("stop_token_ids", list(tokens), all(_is_a(Integral, token) for token in tokens), "a list of token ids")
        _check("stop_token_ids", None, len(tokens) <= MAX_STOPS, f"at most {MAX_STOPS} tokens")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(name, count, count is None or 0 <= count <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")
        only_prompt = self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)
        allowed = "1 or more (0 only with echo or prompt_logprobs)"
        _check("max_tokens", self.max_tokens, only_prompt or self.max_tokens is None or self.max_tokens >= 1, allowed)

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> Self:
        """Build from keyword arguments; an unknown name is refused with the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise RequestError(f"unknown parameter '{name}'{did_you_mean(name, known)}", param=name)
        return cls(**kwargs)

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature == 0


class SampleArgs(NamedTuple):
    """Everything that the sampling of one token depends on, except the logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    index: int
    """Number of tokens generated before it."""
    logprobs: int = -1
    """How many alternatives to return with the token's log-probability; negative for no log-probability."""

    @staticmethod
    def of(params: SamplingParams, seed: int, index: int) -> "SampleArgs":
        """Arguments for token ``index`` of a request."""
        logprobs = -1 if params.logprobs is None else params.logprobs
        return SampleArgs(params.temperature, params.top_k, params.top_p, params.min_p, seed, index, logprobs)

    @property
    def greedy(self) -> bool:
        """True if the most probable token is taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """True if tokens must be sorted (top-k or top-p)."""
        return self.top_k > 0 or self.top_p < 1

    def pack(self) -> tuple[int, ...]:
        """Encode as int64 values, the floats by their bits."""
        floats = struct.unpack("<3q", struct.pack("<3d", self.temperature, self.top_p, self.min_p))
        return (*floats, self.seed, self.index, self.top_k, self.logprobs)

    @staticmethod
    def unpack(values: Sequence[int]) -> "SampleArgs":
        """The inverse of :meth:`pack`."""
        temperature, top_p, min_p = struct.unpack("<3d", struct.pack("<3q", *values[:3]))
        seed, index, top_k, logprobs = values[3:]
        return SampleArgs(temperature, top_k, top_p, min_p, seed, index, logprobs)


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer too large for a float
        return False


def _to_tuple(param: str, values: object, allowed: str) -> tuple:
    _check(param, values, isinstance(values, Iterable) and not isinstance(values, str | bytes), allowed)
    return tuple(values)  # type: ignore[arg-type]


def _check(param: str, value: object, valid: bool, allowed: str) -> None:
    if not valid:
        shown = repr(value) if isinstance(value, str) else str(value)
        raise RequestError(f"{param} is {shown[:80]}; it must be {allowed}", param=param)
