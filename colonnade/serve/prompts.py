"""What may be handed to an engine: a prompt is text, or token ids as they are; several are a list of prompts.

To Python a text is also a list of texts of one character, and a list of ids looks like a list of prompts; whatever can
be told apart is refused here by name, where it would else be answered as something that nobody asked.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from colonnade.config import shown
from colonnade.errors import RequestError
from colonnade.serve.sampling_params import SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids as they are."""
Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""


def token_ids(tokens: object, vocab_size: int, what: str, allowed: str = "token ids") -> tuple[int, ...]:
    """The ids in a list or a 1-D tensor; ``what`` names it, and ``allowed`` says what it may be.

    Raises :class:`RequestError` for anything else, for no ids, and for ids that are not in the vocabulary.
    """
    each = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # type: ignore[union-attr]
    if isinstance(each, str | bytes) or not isinstance(each, Iterable):
        raise RequestError(f"{what} is {shown(tokens)}; give {allowed}", param="prompt")
    each = tuple(each)
    try:
        ids = tuple(map(operator.index, each))
    except TypeError:
        raise RequestError(f"{what} is {shown(tokens)}; give {allowed}", param="prompt") from None
    if not ids:
        raise RequestError(f"{what} is empty; give at least one token", param="prompt")
    check_vocabulary(ids, vocab_size, "prompt")
    return ids


def check_vocabulary(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise :class:`RequestError` for ids that are no tokens of a model's."""
    strange = next((token for token in ids if not 0 <= token < vocab_size), None)
    if strange is not None:
        where = "" if param == "prompt" else f" of {param}"
        raise RequestError(
            f"token {strange}{where} is not in the vocabulary of {vocab_size}; give ids from 0 to {vocab_size - 1}",
            param=param,
        )


def several(prompts: object) -> list[Prompt]:
    """A list of prompts; raises :class:`RequestError` for a single one, which would be taken to pieces."""
    if isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes) and not hasattr(prompts, "tolist"):
        each = list(prompts)
        if not any(isinstance(one, Integral) for one in each):
            return each
    raise RequestError(
        f"prompts is {shown(prompts)}; give a list of prompts, each a text or a list of token ids: generate([…])",
        param="prompt",
    )


def is_list_of_prompts(prompt: object) -> bool:
    """Whether ``prompt`` is a list of texts or of lists of ids, and not one list of ids."""
    return _all(prompt, lambda one: isinstance(one, str | Sequence) or getattr(one, "ndim", 0) == 1)


def is_conversation(prompt: object) -> bool:
    """Whether ``prompt`` is a list of messages."""
    return _all(prompt, lambda one: isinstance(one, Mapping))


def _all(prompt: object, right: Callable[[object], bool]) -> bool:
    """Whether ``prompt`` is a list that is not empty, and all of it ``right``."""
    each: Sequence[object] = prompt if isinstance(prompt, list | tuple) else ()
    return bool(each) and all(right(one) for one in each)


def checked(params: object) -> SamplingParams:
    """``params``, or the default of None; raises :class:`RequestError` for what is none."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        like = "SamplingParams(**params)" if isinstance(params, dict) else "SamplingParams(…)"
        raise RequestError(f"params is {shown(params)}; give {like}", param="params")
    return params


def checked_each(params: object, count: int) -> list[SamplingParams]:
    """One for each of ``count`` prompts: those given, or the one given for all of them."""
    each = [checked(one) for one in params] if isinstance(params, list | tuple) else [checked(params)] * count
    if len(each) != count:
        raise RequestError(f"{count} prompts but {len(each)} sampling params; give one for each, or one")
    return each


def limit_tokens(ids: Sequence[int], params: SamplingParams, *, context: int, vocab_size: int, pool: PagePool) -> int:
    """Tokens that a request with this prompt may generate; :class:`RequestError` when it cannot even start, or could
    never end as it is told to.

    Without ``max_tokens`` that is what the context and the cache hold, and at least 1: whether that fits into the
    cache is checked, with the numbers, where pages are given out.
    """
    check_vocabulary(params.stop_token_ids, vocab_size, "stop_token_ids")
    room, asked = context - len(ids), params.max_tokens
    if room < (asked or 1):
        total = f" and max_tokens {asked} make {len(ids) + asked}" if asked else ""
        remedy = f"ask for at most {room}" if room > 0 else f"shorten the prompt to at most {context - 1}"
        raise RequestError(
            f"the prompt's {len(ids)} tokens{total}: too many for the model's context of {context}; {remedy}",
            param="prompt",
            code="context_length_exceeded",
        )
    return asked or max(1, min(room, pool.tokens + 1 - len(ids)))
