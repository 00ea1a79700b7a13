"""What a client may ask of one generation: a frozen, checked record.

A bad value raises :class:`colonnade.errors.RequestError` whose ``param`` is the field's name, so that the HTTP layer
can pass it on in the shape of OpenAI's errors.
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
"""Stop strings, and stop tokens, in one request."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the likeliest token (greedy)."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least p (Holtzman 2019)."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the likeliest one (Nguyen 2024)."""
    seed: int | None = None
    """Same seed, same text, whatever else is in the batch; None draws a fresh one."""
    stop: Sequence[str] | str = ()
    """Strings that end the text; they may span tokens and are never part of it."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text, besides the tokenizer's own end tokens."""
    max_tokens: int | None = None
    """Tokens to generate at most; None goes on to the end of the context."""
    ignore_eos: bool = False
    """Go on past the tokenizer's end tokens (for benchmarks)."""

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p"):
            _check(name, getattr(self, name), _is_a(Real, getattr(self, name)), "a number")
        for name in ("top_k", "seed", "max_tokens"):
            value = getattr(self, name)
            _check(name, value, _is_a(Integral, value) or (value is None and name != "top_k"), "a whole number")
        _check("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else _each("stop", self.stop, "a string, or a list of some")
        tokens = _each("stop_token_ids", self.stop_token_ids, "a list of token ids")
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
        _check("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "1 or more")

    @classmethod
    def named(cls, given: Mapping[str, Any]) -> Self:
        """Those of ``given``, by their names; a name that there is not is refused with the nearest that there is."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise RequestError(f"unknown parameter '{name}'{did_you_mean(name, known)}", param=name)
        return cls(**given)

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0


class Draw(NamedTuple):
    """All that the choice of one token depends on, beside the logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    index: int
    """Tokens generated before it."""

    @staticmethod
    def of(params: SamplingParams, seed: int, index: int) -> "Draw":
        """Token ``index`` of a request."""
        return Draw(params.temperature, params.top_k, params.top_p, params.min_p, seed, index)

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """True when tokens must be ranked before one is chosen."""
        return self.top_k > 0 or self.top_p < 1

    def pack(self) -> tuple[int, ...]:
        """As int64 numbers, the fractions by their bits."""
        return (*struct.unpack("<3q", struct.pack("<3d", self.temperature, self.top_p, self.min_p)), *self[4:], self[1])

    @staticmethod
    def unpack(numbers: Sequence[int]) -> "Draw":
        """The inverse of :meth:`pack`."""
        temperature, top_p, min_p = struct.unpack("<3d", struct.pack("<3q", *numbers[:3]))
        seed, index, top_k = numbers[3:]
        return Draw(temperature, top_k, top_p, min_p, seed, index)


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number that no float can be
        return False


def _each(param: str, values: object, allowed: str) -> tuple:
    _check(param, values, isinstance(values, Iterable) and not isinstance(values, str | bytes), allowed)
    return tuple(values)  # type: ignore[arg-type]


def _check(param: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        said = repr(value) if isinstance(value, str) else str(value)
        raise RequestError(f"{param} is {said[:80]}; it must be {allowed}", param=param)
