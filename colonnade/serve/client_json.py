"""Checks of client JSON, in a body or as text in one of its fields, before it is used.

json.loads accepts more than valid JSON: lone surrogates, NaN, and nesting so deep that later recursion fails.
"""

import json
import re
from typing import Any, NoReturn

from colonnade.errors import RequestError

MAX_NESTING = 100
"""Maximum nesting of lists and objects. llguidance reads 128 levels, Python's own functions a few hundred."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_json(text: str, values: object) -> None:
    """Raise :class:`RequestError` if ``values``, read from ``text``, nest too deep or have a lone surrogate."""
    if text.count("[") + text.count("{") > MAX_NESTING:
        _check_nesting(values)
    if _ESCAPED_SURROGATE.search(text):
        check_unicode(values)


def parse_text(text: str, param: str, where: str) -> Any:
    """The values of a ``text`` that is JSON; raises :class:`RequestError`, which calls the text ``where``."""
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
        check_json(text, values)
    except RequestError as error:
        raise RequestError(f"{where}: {error.message}", param=param, code=error.code) from None
    except RecursionError:
        raise RequestError(f"{where} nests lists or objects too deeply", param=param, code="invalid_json") from None
    except ValueError as error:
        what = str(error).partition(";")[0]
        raise RequestError(f"{where} cannot be read as JSON: {what}", param=param, code="invalid_json") from None
    return values


def to_json_text(values: object, param: str, where: str) -> str:
    """``values`` as JSON; raises :class:`RequestError` where they cannot be written, or are not finite."""
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        what = str(error).partition(":")[0].lower()
        raise RequestError(f"{where} cannot be written as JSON: {what}", param=param) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_nesting(values: object) -> None:
    level: list[Any] = [values]
    for _ in range(MAX_NESTING):
        children = (each for value in level for each in (value.values() if isinstance(value, dict) else value))
        level = [each for each in children if isinstance(each, list | dict)]
        if not level:
            return
    raise RequestError(
        f"lists and objects are nested more than {MAX_NESTING} levels deep; no request needs more than a few",
        code="invalid_json",
    )


def check_unicode(values: object) -> None:
    """Raise :class:`RequestError` if a string or a field's name anywhere in ``values`` has a lone surrogate."""
    stack: list[tuple[tuple[str, ...], object]] = [((), values)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            _check_text(value, ".".join(path) or "the body", path)
        elif isinstance(value, list):
            stack += [((*path, str(i)), each) for i, each in enumerate(value) if isinstance(each, str | list | dict)]
        elif isinstance(value, dict):
            for name, each in value.items():
                _check_text(name, f"the name of a field in {'.'.join(path) or 'the body'}", path)
                stack.append(((*path, name), each))


def _check_text(text: str, where: str, path: tuple[str, ...]) -> None:
    if not text.isascii() and (found := _SURROGATE.search(text)):
        raise RequestError(
            f"{where[:80]} has the lone surrogate U+{ord(found.group()):04X} at character {found.start()}, which is "
            "not a character; send both halves of the pair, or the character itself in UTF-8",
            param=path[0][:80] if path else None,
            code="invalid_unicode",
        )
