"""OpenAI's response objects, whole and in chunks, for completions and for chats."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from colonnade.serve.output import Output

Reply = dict[str, Any]


@dataclass
class Usage:
    """Tokens of all the answers of one request."""

    prompt: dict[int, int] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)

    def note(self, index: int, output: Output) -> None:
        """Take in the newest output of answer ``index``."""
        self.prompt[index], self.generated[index] = output.prompt_tokens, output.generated_tokens

    def reply(self) -> Reply:
        """As clients know it."""
        prompt, generated = sum(self.prompt.values()), sum(self.generated.values())
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class Completions:
    """The shapes of /v1/completions."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str):
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, texts: list[str], reasons: list[str | None], usage: Usage) -> Reply:
        """The answer at once."""
        choices = [self._choice(i, text, reason) for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))]
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": usage.reply()}

    def opening(self, index: int) -> Reply | None:
        """A chunk before the first text, if there is one."""
        return None

    def chunk(self, index: int, text: str, reason: str | None) -> Reply:
        """New text, or the end."""
        return self._chunk([self._piece(index, text, reason)])

    def last(self, usage: Usage) -> Reply:
        """The chunk that carries only the usage."""
        return {**self._chunk([]), "usage": usage.reply()}

    def _chunk(self, choices: list[Reply]) -> Reply:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def _choice(self, index: int, text: str, reason: str | None) -> Reply:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    _piece = _choice


class Chats(Completions):
    """The shapes of /v1/chat/completions."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Reply | None:
        """The role, once."""
        return self._chunk([self._delta(index, {"role": "assistant", "content": ""}, None)])

    def _choice(self, index: int, text: str, reason: str | None) -> Reply:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def _piece(self, index: int, text: str, reason: str | None) -> Reply:
        return self._delta(index, {"content": text} if text else {}, reason)

    def _delta(self, index: int, delta: Reply, reason: str | None) -> Reply:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
