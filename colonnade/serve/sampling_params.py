"""Sampling parameters of a request: a frozen, validated record.

A bad value raises :class:`colonnade.errors.RequestError` with the field's name as ``param``, so that the HTTP layer
can report it as OpenAI does.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Self

from colonnade.config import did_you_mean
from colonnade.errors import RequestError
from colonnade.serve.structured_outputs import StructuredOutputs

MAX_STOPS = 64
"""Limit for the stop strings, and for the stop tokens, of one request."""

MAX_LOGPROBS = 20
"""Limit for the alternatives returned with a token's log-probability."""

MAX_LOGIT_BIASES = 1024
"""Limit for the tokens of one request's ``logit_bias``."""

MAX_BAD_WORDS = 64
"""Limit for the bad words of one request."""

MAX_BEAMS = 64
"""Limit for the beams of one request."""

MAX_BAD_WORD_CHARACTERS = 512
"""Length limit of a bad word."""


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
    """The same seed gives the same text, independently of the rest of the batch; None selects a random seed."""
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
    tempered_logprobs: bool = False
    """Divide the logits by the temperature before ``logprobs``; only without filters."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt except the first. Such a prompt is not read from the prefix cache."""
    echo: bool = False
    """Begin the text with the prompt's."""
    return_prompt_ids: bool = False
    """Return the prompt's token ids, in the first output."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the output (Keskar 2019)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output, -2 to 2."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, -2 to 2."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens, -100 to 100; at most 1,024 tokens."""
    beams: int = 1
    """Beams of a beam search, which finds a probable text instead of sampling one; 1: none. For encoder–decoders."""
    length_penalty: float = 1.0
    """A text's log-probability is divided by its number of tokens to this power before beams are compared, 0 to 10."""
    source_lang: str | None = None
    """The language of the source, for a model that translates between languages, as its tokenizer spells it."""
    target_lang: str | None = None
    """The language to translate into."""
    min_tokens: int = 0
    """Tokens to generate before an end token or a stop string may end the text."""
    bad_words: Sequence[str] = ()
    """Words that are not generated, alone or after a space; at most 64."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputs | None = None
    """A JSON schema, a regular expression, a grammar or a list of choices that the text must match."""

    def __post_init__(self):
        penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        for name in ("temperature", "top_p", "min_p", "length_penalty", *penalties):
            _check(name, getattr(self, name), _is_a(Real, getattr(self, name)), "a number")
        for name in ("top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs", "min_tokens", "beams"):
            value = getattr(self, name)
            optional = name not in ("top_k", "min_tokens", "beams")
            _check(name, value, _is_a(Integral, value) or (value is None and optional), "a whole number")
        for name in ("ignore_eos", "tempered_logprobs", "echo", "return_prompt_ids", "skip_special_tokens"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        for name in ("source_lang", "target_lang"):
            value = getattr(self, name)
            _check(name, value, value is None or isinstance(value, str), "a language, as a string")
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
        _check("stop", list(stop), all(isinstance(text, str) and text for text in stop), "non-empty strings")
        _check("stop_token_ids", list(tokens), all(_is_a(Integral, token) for token in tokens), "a list of token ids")
        _check("stop_token_ids", None, len(tokens) <= MAX_STOPS, f"at most {MAX_STOPS} tokens")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(name, count, count is None or 0 <= count <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")
        for name in ("frequency_penalty", "presence_penalty"):
            _check(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "from -2 to 2")
        allowed = "from 0.001 to 1000"
        _check("repetition_penalty", self.repetition_penalty, 0.001 <= self.repetition_penalty <= 1000, allowed)
        self._check_banned_and_biased()
        self._check_beams()
        only_prompt = self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)
        allowed = "1 or more (0 only with echo or prompt_logprobs)"
        _check("max_tokens", self.max_tokens, only_prompt or self.max_tokens is None or self.max_tokens >= 1, allowed)
        most = math.inf if self.max_tokens is None else self.max_tokens
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= most, "from 0 to max_tokens")

    def _check_beams(self) -> None:
        _check("beams", self.beams, 1 <= self.beams <= MAX_BEAMS, f"from 1 to {MAX_BEAMS}")
        _check("length_penalty", self.length_penalty, 0 <= self.length_penalty <= 10, "from 0 to 10")
        if self.beams == 1:
            return
        neutral: dict[str, tuple[Any, ...]] = {
            "tempered_logprobs": (False,), "top_k": (0,), "top_p": (1,), "min_p": (0,), "stop": ((),),
            "logprobs": (None,), "prompt_logprobs": (None,), "repetition_penalty": (1,), "frequency_penalty": (0,),
            "min_tokens": (0,), "presence_penalty": (0,), "logit_bias": ({},), "bad_words": ((),),
            "structured_outputs": (None,),
        }  # fmt: skip
        if self.temperature not in (0, 1):
            raise RequestError("beam search is deterministic; set temperature to 0", param="temperature")
        for name, values in neutral.items():
            if getattr(self, name) not in values:
                raise RequestError(f"{name} and beams are mutually exclusive; remove one of them", param=name)

    def _check_banned_and_biased(self) -> None:
        bias, pairs = self.logit_bias, "a map from token ids to numbers from -100 to 100"
        _check("logit_bias", bias, isinstance(bias, Mapping), pairs)
        _check("logit_bias", None, len(bias) <= MAX_LOGIT_BIASES, f"at most {MAX_LOGIT_BIASES:,} tokens")
        for token, value in bias.items():
            valid = _is_a(Integral, token) and _is_a(Real, value) and -100 <= value <= 100
            _check("logit_bias", {token: value}, valid, pairs)
        words = _to_tuple("bad_words", self.bad_words, "a list of strings")
        object.__setattr__(self, "bad_words", words)
        _check("bad_words", None, len(words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} strings")
        for word in words:
            valid = isinstance(word, str) and 0 < len(word) <= MAX_BAD_WORD_CHARACTERS
            _check("bad_words", word, valid, f"strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters")

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> Self:
        """Build from keyword arguments; an unknown name is refused with the closest known one."""
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise RequestError(f"unknown parameter '{name}'{did_you_mean(name, known)}", param=name)
        return cls(**kwargs)

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature == 0


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice ``choice`` of a request with several: the first choice has the request's own."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<qq", seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
