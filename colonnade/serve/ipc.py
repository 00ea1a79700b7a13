"""What the HTTP process and the engine's process say to each other: one JSON object a line, over a Unix socket.

    HTTP -> engine    {"do": "submit", "ids", "prompts", "messages", "params"}  {"do": "cancel", "ids"}  {"do": "stop"}
    engine -> HTTP    {"event": "ready", "context", "cache_tokens", "stats": {…}}
                      {"event": "outputs", "outputs": […], "stats": {…}}        {"event": "refused", "ids", "error"}

What a client asks for at once is submitted at once, and all of it is queued or none.

The socket lies in a directory that only its user may enter. Plain data both ways: nothing is unpickled. That the engine
has died is not a message but the end of the line.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from colonnade.errors import CapacityError, ColonnadeError, RequestError
from colonnade.serve.output import Output, Timing
from colonnade.serve.sampling_params import SamplingParams

Message = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """What one client asks for at once: continuations of prompts, or the answer to the messages of a chat."""

    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Message] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def answers(self) -> int:
        """How many there will be."""
        return len(self.prompts) if self.messages is None else 1


def to_line(message: Message) -> bytes:
    """One message, with its newline; all ASCII, so that whatever a client sent gets across."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> Message:
    """The inverse of :func:`to_line`."""
    return json.loads(line)


def submit_message(keys: Sequence[str], ask: Ask) -> Message:
    """``ask``, its answers under the names ``keys``."""
    return {"do": "submit", "ids": list(keys), **dataclasses.asdict(ask)}


_FIELDS = tuple(each.name for each in dataclasses.fields(Output))


def plain_output(output: Output) -> Message:
    """The fields of an :class:`Output`; ``asdict``, which copies all that it finds, takes ten times as long."""
    plain = {name: getattr(output, name) for name in _FIELDS}
    return plain if output.timing is None else plain | {"timing": dataclasses.asdict(output.timing)}


def output_from(plain: Message) -> Output:
    """An :class:`Output` from its fields."""
    timing = plain["timing"]
    return Output(**{**plain, "timing": timing and Timing(**timing)})


def error_message(error: ColonnadeError) -> Message:
    """What a client must know of ``error``."""
    if isinstance(error, RequestError):
        return {"message": str(error), "param": error.param, "status": error.status, "code": error.code}
    if isinstance(error, CapacityError):
        return {"message": str(error), "param": "prompt", "status": 400, "code": "cache_too_small"}
    return {"message": str(error), "param": None, "status": 500, "code": "server_error"}


def error_from(plain: Message) -> RequestError:
    """The error of :func:`error_message`, to be raised on the HTTP side."""
    return RequestError(plain["message"], param=plain["param"], status=plain["status"], code=plain["code"])
