"""Conversations on a terminal: reads lines, runs commands, and keeps the turns that fit into the context.

It imports no engine: an exported package (:mod:`colonnade.package_chat`) starts faster without.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from rich.console import Console

from colonnade.config import did_you_mean
from colonnade.data.tokenizer import Tokenizer

CONTINUATION_TOKENS = 256
"""Default max_tokens of ``generate``, since a continuation need not end by itself."""

Messages = list[Mapping[str, str]]
"""The messages of a conversation."""

COMMANDS = {
    "/help": "lists the commands",
    "/reset": "starts a new conversation",
    "/quit": "ends the chat (as do /exit and Ctrl-D)",
}
"""Lines that are commands of the chat, not messages."""
HELP = "\n".join([*(f"{name:8}{what}" for name, what in COMMANDS.items()), "Ctrl-C  stops a reply"])


def converse(
    system: str | None,
    tokenizer: Tokenizer,
    max_request_tokens: int,
    max_tokens: int | None,
    answer: Callable[[Messages], Messages],
    console: Console,
) -> None:
    """Read lines until /quit or the end of the input; ``answer`` prints the reply to messages and appends it."""
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    console.print("[dim]/help lists the commands; Ctrl-D ends, Ctrl-C  stops a reply[/dim]")
    while (line := _read_line()) not in (None, "/quit", "/exit"):
        if line == "/reset":
            messages = list(opening)
        elif line == "/help":
            console.print(HELP, markup=False)
        elif re.fullmatch(r"/\w+", line):
            console.print(f"there is no command {line}{did_you_mean(line, list(COMMANDS))}", markup=False)
        elif line:
            asked: Messages = [*messages, {"role": "user", "content": line}]
            fitting = drop_turns(asked, tokenizer, max_request_tokens, max_tokens)
            if len(fitting) < len(asked):
                console.print("[dim]the context or the KV cache is full: the oldest turns are dropped[/dim]")
            messages = answer(fitting)


def drop_turns(
    messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer, max_request_tokens: int, answer_tokens: int | None
) -> Messages:
    """The conversation without its oldest turns, so that prompt and reply have at most ``max_request_tokens``.

    A question is dropped together with its reply; a system message and the last question are kept. Without a limit the
    reply gets an eighth of the tokens.
    """
    opening = [message for message in messages[:1] if message["role"] == "system"]
    turns, room = list(messages[len(opening) :]), max_request_tokens - (answer_tokens or max_request_tokens // 8)
    while len(turns) > 1 and len(tokenizer.encode_chat([dict(each) for each in (*opening, *turns)])) > room:
        turns = turns[next((i for i in range(1, len(turns)) if turns[i]["role"] == "user"), 1) :]
    return [*opening, *turns]


def _read_line() -> str | None:
    """A line of input, or None at its end; on a terminal with line editing and history."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Python may be built without it: then there is no line editing
            import readline  # noqa: F401 - input() uses it once it is imported
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
