"""Conversations as tokens, and which of these tokens count in the loss.

A row of a JSON Lines file has one of these forms:

    {"messages": [{"role": "user", "content": "…"}, …]}             the assistant's messages count
    {"prompt": …, "completion": …}                                  the completion counts
    {"prompt": …, "chosen": …, "rejected": …}                       a preference; without a prompt, two conversations

``prompt``, ``completion``, ``chosen`` and ``rejected`` are strings or lists of messages. A message with ``"train":
false`` does not count. Strings are encoded without a chat template, and the end token that follows a completion counts.

In a conversation the tokens that count are those within ``{% generation %}`` where the template has it. Otherwise they
are the tokens that the prompt of messages 0..i adds to that of messages 0..i − 1 with the generation prompt. If the
shorter prompt is not a prefix of the longer one (templates that change earlier messages), or if no token counts, the
row is refused: training on nothing, or on everything, would go unnoticed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from json import JSONDecodeError
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from colonnade.data import Tokenizer
from colonnade.data.chat_template import Message, Role
from colonnade.errors import DataError, RequestError


class Conversation(NamedTuple):
    """Tokens, and for each whether it counts as a target."""

    tokens: list[int]
    counts: list[bool]


class Preference(NamedTuple):
    """Two continuations of a prompt."""

    chosen: Conversation
    rejected: Conversation


Report = Callable[[str], object]
"""Receives a line about what is being done."""

ROWS_BETWEEN_REPORTS = 100


def read_rows(path: str | Path, report: Report = lambda _line: None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of each line of a JSON Lines file that is not empty; periodically reports the number of lines.

    Raises :class:`DataError` for a file that cannot be read and for a line that is not a JSON object.
    """
    first = True
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if number % ROWS_BETWEEN_REPORTS == 0:
                    report(f"tokenised {number:,} rows of {path}")
                if not line.strip():
                    continue
                if first and line.lstrip().startswith("["):
                    raise DataError(
                        f"{path} is a JSON array; write one object per line, without the brackets and the commas "
                        "between objects"
                    )
                first = False
                try:
                    row = json.loads(line.rstrip("\n"))
                except (ValueError, RecursionError) as why:
                    reason = str(why)
                    if isinstance(why, JSONDecodeError):  # its own text has a line number too, which is always 1
                        reason = f"{why.msg.removesuffix(' at')} at column {why.colno}"
                    raise DataError(
                        f"{path}, line {number} is not JSON: {reason}; fix it: each line must be one object"
                    ) from None
                if not isinstance(row, dict):
                    raise DataError(
                        f"{path}, line {number} is not a JSON object, but {_kind(row)}; write one, such as "
                        '{"messages": […]}'
                    )
                yield f"{path}, line {number}", cast("dict[str, Any]", row)
    except UnicodeDecodeError:
        raise DataError(f"{path}, {_not_utf8(path)}; save the file as UTF-8") from None
    except OSError as why:
        raise DataError(f"cannot read {path}: {why.strerror or why}; check the path") from None


def _not_utf8(path: str | Path) -> str:
    """The first byte of a file that is not UTF-8, with its line and its place in that."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as why:
                return f"line {number} is not UTF-8: byte 0x{line[why.start]:02x}, byte {why.start + 1} of the line"
    return "the file was not UTF-8 when it was read"  # it has changed since


def _kind(value: object) -> str:
    """The kind of a JSON value, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"a number ({str(value)[:20]})"
        case str():
            return "a string"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "an object"


def conversation(row: Mapping[str, Any], tokenizer: Tokenizer, where: str = "row") -> Conversation:
    """The tokens of a row of messages, or of a prompt and a completion.

    Raises :class:`DataError`, naming ``where``, for a row in an unknown format, for one that the chat template refuses,
    and for one without a token to train on.
    """
    if "messages" in row:
        return _chat(_messages(row["messages"], "messages", where), 0, tokenizer, where)
    if "prompt" in row and "completion" in row:
        return _continued(row["prompt"], row["completion"], "completion", tokenizer, where)
    remedy = "use --method dpo for preferences" if "chosen" in row else "write one form"
    raise DataError(f"{where} has neither 'messages' nor 'prompt' and 'completion', but {_keys(row)}; {remedy}")


def preference(row: Mapping[str, Any], tokenizer: Tokenizer, where: str = "row") -> Preference:
    """The two conversations of a row with ``chosen`` and ``rejected``; raises as :func:`conversation`."""
    if "chosen" not in row or "rejected" not in row:
        raise DataError(f"{where} lacks 'chosen' or 'rejected': it has {_keys(row)}; write both")
    sides: list[Conversation] = []
    for side in ("chosen", "rejected"):
        if "prompt" in row:
            sides.append(_continued(row["prompt"], row[side], side, tokenizer, where))
        else:
            other_side = "rejected" if side == "chosen" else "chosen"
            messages, other = _messages(row[side], side, where), _messages(row[other_side], other_side, where)
            shared = next((i for i, (a, b) in enumerate(zip(messages, other, strict=False)) if a != b), len(messages))
            sides.append(_chat(messages, min(shared, len(messages) - 1), tokenizer, where))
    chosen, rejected = sides
    if chosen == rejected:
        raise DataError(f"{where} has identical tokens in 'chosen' and 'rejected'; remove the row")
    return Preference(chosen, rejected)


def encode_prompt(prompt: object, tokenizer: Tokenizer, where: str = "row") -> list[int]:
    """The prompt's tokens: of a text, or of messages with the generation prompt."""
    if isinstance(prompt, str):
        return _encode(prompt, tokenizer, where, special=True)
    _check_form(prompt, "prompt", where)
    messages = _messages(prompt, "prompt", where)
    _check_template(tokenizer, where)
    return _render(messages, tokenizer, where, add_generation_prompt=True)


def _keys(row: Mapping[str, Any]) -> str:
    return ", ".join(repr(str(key)[:40]) for key in list(row)[:6]) or "nothing"


def _messages(value: object, key: str, where: str) -> list[Message]:
    """``value`` if it is a list of messages with a role and content."""
    if not (isinstance(value, list) and value):
        raise DataError(f"{where}: '{key}' is {_kind(value)}; write a list of messages with 'role' and 'content'")
    messages = cast("list[Any]", value)
    for number, message in enumerate(messages, 1):
        if fault := _message_error(message):
            raise DataError(f"{where}, message {number} of '{key}' {fault}")
    return [_for_template(message) for message in messages]


def _for_template(message: Message) -> Message:
    """A valid message as the server passes it to a chat template: text parts joined, arguments of calls as objects."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    message = {**message, "content": content}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}} for call in calls
        ]
    return message


def _arguments(function: Mapping[str, Any]) -> object:
    """A call's arguments; OpenAI's clients send them as JSON. Raises :class:`ValueError` for text that is not JSON."""
    arguments = function.get("arguments") or {}
    return json.loads(arguments) if isinstance(arguments, str) else arguments


ROLES: tuple[str, ...] = get_args(Role)


def _message_error(message: Any) -> str | None:
    """The fault of a message, and the remedy."""
    if not isinstance(message, dict):
        return f"is {_kind(message)}; write an object with 'role' and 'content'"
    listed = f"{', '.join(map(repr, ROLES[:-1]))} or {ROLES[-1]!r}"
    if "role" not in message:
        return f"has no 'role', but {_keys(message)}; write {listed}"
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        return f"has the role {role!r:.60}; write {listed}"
    if content is None and not message.get("tool_calls"):
        missing = "'content' null" if "content" in message else "no 'content'"
        return f"is of role '{role}' and has {missing}; write text"
    if not (content is None or isinstance(content, str | list)):
        return f"is of role '{role}', and its 'content' is {_kind(content)}; write text"
    if isinstance(content, list) and not all(isinstance(part, dict) and isinstance(part.get("text"), str)
                                             and part.get("type") == "text" for part in content):  # fmt: skip
        return "has parts that are not text; write text"
    if message.get("tool_calls"):
        if role != "assistant":
            return f"is of role '{role}' and has 'tool_calls', which only the assistant may have; remove them"
        if fault := _tool_calls_error(message["tool_calls"]):
            return fault
    if not isinstance(message.get("train", True), bool):
        return f"has 'train': {message['train']!r:.60}; write true or false"
    return None


def _tool_calls_error(calls: object) -> str | None:
    """The fault of ``tool_calls``, and the remedy."""
    if not isinstance(calls, list):
        return f"has 'tool_calls' that are {_kind(calls)}; write a list"
    for number, call in enumerate(calls, 1):
        function = call.get("function") if isinstance(call, dict) else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            return f"has a tool call, number {number}, without 'function' and its 'name'; write both"
        try:
            arguments = _arguments(function)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return f"calls '{function['name']:.60}' with arguments that are not a JSON object; write one"
    return None


def _check_template(tokenizer: Tokenizer, where: str) -> None:
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: this model has no chat template, which lists of messages need; write rows with strings: "
            "'prompt' and 'completion' (dpo: 'prompt', 'chosen' and 'rejected'; grpo: 'prompt')"
        )


def _check_form(value: object, key: str, where: str) -> None:
    if not isinstance(value, str | list):
        raise DataError(f"{where}: '{key}' is {_kind(value)}; write a string or a list of messages")


def _continued(prompt: object, completion: object, key: str, tokenizer: Tokenizer, where: str) -> Conversation:
    """A prompt and its completion; only the completion's tokens are trained on."""
    _check_form(prompt, "prompt", where)
    _check_form(completion, key, where)
    if isinstance(prompt, str) and isinstance(completion, str):
        before, after = (_encode(text, tokenizer, where, special=special) for text, special in
                         ((prompt, True), (completion, False)))  # fmt: skip
        after += tokenizer.eos_ids[:1]
        return _counted(before + after, [False] * len(before) + [True] * len(after), where)
    if isinstance(prompt, str) or isinstance(completion, str):
        text, other = ("prompt", key) if isinstance(prompt, str) else (key, "prompt")
        raise DataError(f"{where}: '{text}' is a string and '{other}' a list of messages; write both in the same form")
    first = _messages(prompt, "prompt", where)
    return _chat([*first, *_messages(completion, key, where)], len(first), tokenizer, where)


def _chat(messages: list[Message], first: int, tokenizer: Tokenizer, where: str) -> Conversation:
    """The conversation; its assistant messages from number ``first`` on are trained on."""
    _check_template(tokenizer, where)
    trained = [
        i >= first and message["role"] == "assistant" and message.get("train", True)
        for i, message in enumerate(messages)
    ]
    messages = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    try:
        marked = tokenizer.encode_generations(messages)
    except RequestError as why:
        raise DataError(f"{where}: {why}") from None
    if marked is not None:
        tokens, part_of_token = marked
        parts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if part_of_token and max(part_of_token) + 1 != len(parts):
            raise DataError(
                f"{where} has {len(parts)} assistant messages, and the chat template marks {max(part_of_token) + 1} "
                "parts with {% generation %}; change the messages or the template"
            )
        return _counted(tokens, [part >= 0 and trained[parts[part]] for part in part_of_token], where)
    tokens = _render(messages, tokenizer, where, add_generation_prompt=False)
    counts = [False] * len(tokens)
    for i in (i for i, wanted in enumerate(trained) if wanted):
        before = _render(messages[:i], tokenizer, where, add_generation_prompt=True) if i else []
        after = _render(messages[: i + 1], tokenizer, where, add_generation_prompt=False)
        if after[: len(before)] != before or tokens[: len(after)] != after:
            raise DataError(
                f"{where}, message {i + 1}: the prompt with it does not begin with the prompt before it, because the "
                "chat template changes earlier messages; use a template with {% generation %}, or one reply per row"
            )
        counts[len(before) : len(after)] = [True] * (len(after) - len(before))
    return _counted(tokens, counts, where)


def _counted(tokens: list[int], counts: list[bool], where: str) -> Conversation:
    counts[:1] = [False] * len(counts[:1])  # nothing predicts the first token
    if not any(counts):
        raise DataError(f"{where} has no token to train on: it needs an assistant message")
    return Conversation(tokens, counts)


def _render(messages: list[Message], tokenizer: Tokenizer, where: str, **variables: Any) -> list[int]:
    try:
        return tokenizer.encode_chat(messages, **variables)
    except RequestError as why:
        raise DataError(f"{where}: {why}") from None


def _encode(text: str, tokenizer: Tokenizer, where: str, *, special: bool) -> list[int]:
    """A text's tokens; special tokens spelled in it are encoded as text."""
    try:
        bos = tokenizer.encode("") if special else []
        return [*bos[:1], *tokenizer.encode_documents([text])[0]]
    except (RequestError, TypeError) as why:
        raise DataError(f"{where}: {why}") from None


class Conversations:
    """Conversations in flat arrays, which are cheap to send to other processes."""

    def __init__(self, rows: Sequence[Conversation]):
        self._starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
        self._tokens_T = _flat((row.tokens for row in rows), np.int64)
        self._counts_T = _flat((row.counts for row in rows), np.bool_)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def at(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, whether each counts) of conversation ``number``."""
        span = slice(self._starts[number], self._starts[number + 1])
        return self._tokens_T[span], self._counts_T[span]

    @property
    def mean_tokens(self) -> float:
        """Mean tokens per conversation."""
        return len(self._tokens_T) / max(len(self), 1)

    @cached_property
    def sha256(self) -> str:
        """Hash of all tokens and of which count, in order."""
        digest = hashlib.sha256()
        for part in (self._starts, self._tokens_T, self._counts_T):
            digest.update(part.tobytes())
        return digest.hexdigest()


def _flat(parts: Iterable[Sequence[int]], dtype: type) -> np.ndarray:
    return np.array([number for part in parts for number in part], dtype)


def fit_conversation(row: Conversation, longest: int, vocab_size: int, where: str, *, truncate: bool) -> Conversation:
    """``row`` if the model supports it, cut to ``longest`` tokens if ``truncate``; raises :class:`DataError`."""
    tokens, counts = row
    if len(tokens) > longest:
        if not truncate:
            raise DataError(
                f"{where} has {len(tokens):,} tokens, more than a sequence of {longest:,}; set --sequence "
                f"{len(tokens)} if the model's context allows it, or --tune.truncate to cut it"
            )
        tokens, counts = tokens[:longest], counts[:longest]
        if not any(counts):
            raise DataError(f"{where} has no token to train on among the first {longest:,}; raise --sequence")
    if not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise DataError(
            f"{where} has token {max(tokens)}, and the vocabulary is 0 to {vocab_size - 1}; use its tokenizer"
        )
    return Conversation(tokens, counts)
