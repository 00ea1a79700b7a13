"""Validates what callers pass to an engine: prompts, lists of prompts, conversations and sampling parameters.

A prompt is text or a list of token ids. In Python a string is also a sequence of one-character strings, and a list of
ids resembles a list of prompts: anything ambiguous is refused with the correct form.
"""

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from colonnade.config import EncoderConfig, short_repr
from colonnade.errors import RequestError
from colonnade.serve.page_pool import PagePool, fewer_tokens
from colonnade.serve.sampling_params import SamplingParams

if TYPE_CHECKING:  # its package imports torch, which the HTTP process does without
    from colonnade.data.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""


def token_ids(tokens: object, vocab_size: int, what: str, allowed: str = "token ids") -> tuple[int, ...]:
    """The ids in a list or 1-D tensor; errors call it ``what`` and say that it may be ``allowed``.

    Raises :class:`RequestError` for anything else, for an empty list, and for ids outside the vocabulary.
    """
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # type: ignore[union-attr]
    try:
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise TypeError
        ids = tuple(map(operator.index, values))
    except TypeError:
        raise RequestError(f"{what} is {short_repr(tokens)}; pass {allowed}", param="prompt") from None
    if not ids:
        raise RequestError(f"{what} is empty; pass at least one token", param="prompt")
    check_vocabulary(ids, vocab_size, "prompt")
    return ids


def encode_text(text: str, tokenizer: "Tokenizer", encoder: EncoderConfig | None, *, special: bool = True) -> list[int]:
    """The ids of a prompt; ``special`` adds the tokenizer's begin and end tokens.

    A model with languages gets those from :func:`encoder_input`, since its tokenizer would add its own language.
    """
    return tokenizer.encode(text, special and not (encoder is not None and encoder.languages))


def encoder_input(
    ids: tuple[int, ...], params: SamplingParams, encoder: EncoderConfig, tokenizer: "Tokenizer"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(source, first tokens of the target) of an encoder–decoder for a prompt ``ids``.

    The source gets its end token and, in a model with languages, begins with that of its language. A language that
    ``ids`` begin with, or end with after an end token (older tokenizers of NLLB), counts if ``source_lang`` is omitted.
    Raises :class:`RequestError` for a source that is empty or over the encoder's context, for a language that is
    missing or unknown, and for parameters about the tokens of a prompt, which is not part of the output here.
    """
    first, ends = (encoder.start_token,), tokenizer.eos_ids
    language: tuple[int, ...] = ()
    if encoder.languages:
        languages = language_tokens(tokenizer)
        first = (encoder.start_token, _language(languages, params.target_lang, "target_lang"))
        known = languages.values()
        if ids[0] in known:
            language, ids = ids[:1], ids[1:]
        elif len(ids) > 1 and ids[-1] in known and ids[-2] in ends:
            language, ids = ids[-1:], ids[:-1]
        if params.source_lang is not None or not language:
            language = (_language(languages, params.source_lang, "source_lang"),)
    else:
        check_no_languages(params)
    if not ids or (len(ids) == 1 and ids[0] in ends):
        raise RequestError("the source is empty; pass the text for the encoder", param="prompt")
    if ends and ids[-1] not in ends:
        ids = (*ids, ends[0])
    ids = (*language, *ids)
    if len(ids) > encoder.context:
        raise RequestError(
            f"the source has {len(ids):,} tokens with its end, but this model's encoder accepts {encoder.context:,}; "
            "shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    for name, given in (("echo", params.echo), ("prompt_logprobs", params.prompt_logprobs is not None)):
        if given:
            raise RequestError(
                f"{name} is for models that continue the prompt, but this one reads it with an encoder; remove it",
                param=name,
            )
    return ids, first


LANGUAGE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}|__[a-z]{2,3}__")
"""A language token: eng_Latn (NLLB), __en__ (M2M-100)."""


def language_tokens(tokenizer: "Tokenizer") -> dict[str, int]:
    """The languages among a tokenizer's special tokens, with their ids."""
    named = ((tokenizer.token(i), i) for i in sorted(tokenizer.special_ids))
    return {name: i for name, i in named if name is not None and LANGUAGE.fullmatch(name)}


def _language(languages: Mapping[str, int], name: str | None, param: str) -> int:
    """The token of a language; raises :class:`RequestError` for one that is missing or unknown."""
    examples = ", ".join(list(languages)[:3]) + (", …" if len(languages) > 3 else "")
    if name is None:
        raise RequestError(f"{param} is missing: this model translates between {examples}; name one", param=param)
    if name not in languages:
        near = difflib.get_close_matches(name, languages, n=1, cutoff=0.5)
        raise RequestError(
            f"{param} '{name[:80]}' is not one of this model's {len(languages)} languages ({examples}); "
            + (f"did you mean '{near[0]}'?" if near else "name one of them"),
            param=param,
        )
    return languages[name]


def check_no_beams(params: SamplingParams) -> None:
    """Raise :class:`RequestError` for a beam search with a model that has no encoder."""
    if params.beams > 1:
        raise RequestError("beams need a model with an encoder; remove it", param="beams")


def check_no_languages(params: SamplingParams) -> None:
    """Raise :class:`RequestError` for languages in a request to a model that has none."""
    for name in ("source_lang", "target_lang"):
        if getattr(params, name) is not None:
            raise RequestError(f"{name} is for models that translate between named languages; remove it", param=name)


def check_vocabulary(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise :class:`RequestError` for ids outside the vocabulary."""
    unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
    if unknown is not None:
        where = "" if param == "prompt" else f" of {param}"
        raise RequestError(
            f"token {unknown}{where} is not in the vocabulary of {vocab_size}; use ids from 0 to {vocab_size - 1}",
            param=param,
        )


def check_prompts(prompts: object) -> list[Prompt]:
    """``prompts`` as a list; raises :class:`RequestError` for a single prompt, which would be split up."""
    if isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes) and not hasattr(prompts, "tolist"):
        items = list(prompts)
        if not any(isinstance(item, Integral) for item in items):
            return items
    raise RequestError(
        f"prompts is {short_repr(prompts)}; pass a list of prompts, each a string or a list of token ids: "
        "generate([…])",
        param="prompt",
    )


def is_list_of_prompts(prompt: object) -> bool:
    """Whether ``prompt`` is a list of texts or of lists of ids, not one list of ids."""
    return _is_list_of(prompt, lambda item: isinstance(item, str | Sequence) or getattr(item, "ndim", 0) == 1)


def is_conversation(prompt: object) -> bool:
    """Whether ``prompt`` is a list of messages."""
    return _is_list_of(prompt, lambda item: isinstance(item, Mapping))


def _is_list_of(value: object, matches: Callable[[object], bool]) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(matches, value))


def check_params(params: object) -> SamplingParams:
    """``params``, or the default for None; raises :class:`RequestError` for any other type."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        expected = "SamplingParams(**params)" if isinstance(params, dict) else "SamplingParams(…)"
        raise RequestError(f"params is {short_repr(params)}; pass {expected}", param="params")
    return params


def check_params_list(params: object, count: int) -> list[SamplingParams]:
    """Sampling parameters for each of ``count`` prompts, from a list of as many or from one for all."""
    items = (
        [check_params(one) for one in params] if isinstance(params, list | tuple) else [check_params(params)] * count
    )
    if len(items) != count:
        raise RequestError(f"{count} prompts but {len(items)} sampling params; pass one per prompt, or one for all")
    return items


def context_error(length: int, max_tokens: int | None, context: int, limit: int | None = None) -> RequestError:
    """The error for a prompt of ``length`` tokens that, with ``max_tokens``, exceeds the context.

    ``limit`` is the number of tokens that the cache holds for a request, if that is less. Clients recognise the error
    by its first words, which are OpenAI's.
    """
    total = f", and max_tokens {max_tokens:,} make them {length + max_tokens:,}" if max_tokens else ""
    accepted = context + (max_tokens == 0)
    remedy = fewer_tokens(length, accepted if limit is None else min(accepted, limit))
    return RequestError(
        f"this model's maximum context length is {context:,} tokens; the prompt has {length:,}{total}: {remedy}",
        param="prompt",
        code="context_length_exceeded",
    )


def limit_tokens(ids: Sequence[int], params: SamplingParams, *, context: int, vocab_size: int, pool: PagePool) -> int:
    """How many tokens a request may generate; :class:`RequestError` if prompt and max_tokens exceed the context.

    Without ``max_tokens`` it is what the context and the cache allow, at least 1. Where the cache holds less than the
    context, :meth:`PagePool.check_fits` refuses both, with the largest number that is accepted.
    """
    check_vocabulary(params.stop_token_ids, vocab_size, "stop_token_ids")
    check_vocabulary(params.logit_bias, vocab_size, "logit_bias")
    left, wanted = context - len(ids), params.max_tokens
    if context <= pool.max_request_tokens and left < (1 if wanted is None else wanted):
        raise context_error(len(ids), wanted, context)
    if wanted is not None:
        return max(1, wanted)  # without a token to generate, the step that scores the prompt's end samples one
    return max(1, min(left, pool.max_request_tokens - len(ids)))
