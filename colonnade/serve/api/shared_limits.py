"""Rate limits of API keys over several HTTP processes: the server process holds the buckets, and the fronts query it.

    request of a limited key: front ── start_request ──> server: bucket ── Excess, or nothing ──> front
    its tokens, summed over   front ── take_tokens ────> server
    FLUSH_S

Keys without limits cost no message. The requests of a front that dies end.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from colonnade.serve.api.api_keys import ApiKey, KeyRing, KeyState
from colonnade.serve.api.rate_limit import Excess, Limits
from colonnade.serve.control_channel import ControlChannel
from colonnade.serve.ipc import Message

FLUSH_S = 0.1
"""How long a front collects tokens before it reports them [s]."""


class FrontKeyState(KeyState):
    """A key in a front; its use is counted in the server process."""

    def __init__(self, key: ApiKey, control: ControlChannel):
        super().__init__(key)
        self._control, self._tokens = control, 0

    async def start(self) -> Excess | None:
        """Count a request that begins, unless it would exceed a limit."""
        if self.key.limits == Limits():
            return None
        self._flush()
        answer = await self._control.ask("start_request", key=self.key.sha256)
        return answer["excess"] and Excess(*answer["excess"])

    def end(self) -> None:
        """Count a request that ends."""
        if self.key.limits != Limits():
            self._flush()
            self._control.send("end_request", key=self.key.sha256)

    def take_tokens(self, count: int) -> None:
        """Count tokens of a prompt or a completion."""
        if self.key.tokens_per_minute is not None and count:
            if not self._tokens:
                asyncio.get_running_loop().call_later(FLUSH_S, self._flush)
            self._tokens += count

    async def headers(self) -> dict[str, str]:
        """OpenAI's headers."""
        if self.key.limits == Limits():
            return {}
        self._flush()
        return (await self._control.ask("limit_headers", key=self.key.sha256))["headers"]

    def _flush(self) -> None:
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._control.send("take_tokens", key=self.key.sha256, count=tokens)


class FrontKeyRing(KeyRing):
    """The keys in a front; :meth:`replace` is called with those that the server process has read."""

    def __init__(self, file: str | None, api_key: str | None, keys: Sequence[ApiKey], control: ControlChannel):
        self._control = control
        super().__init__(file, api_key, keys)

    def make_state(self, key: ApiKey) -> KeyState:
        """Its state in this process."""
        return FrontKeyState(key, self._control)


class FrontUsage:
    """In the server process: the requests of one front's clients that count as running."""

    def __init__(self, keys: KeyRing):
        self._keys, self._running = keys, Counter[KeyState]()

    async def handle(self, message: Message) -> dict[str, Any] | None:
        """Handle a message of a :class:`FrontKeyState`; a key that has been removed has no limits."""
        state = self._keys.state(message["key"])
        match message["do"]:
            case "start_request":
                excess = state and await state.start()
                if state and not excess:
                    self._running[state] += 1
                return {"excess": excess}
            case "end_request":
                if state and self._running[state]:
                    self._running[state] -= 1
                    state.end()
            case "take_tokens":
                if state:
                    state.take_tokens(message["count"])
            case _:
                return {"headers": await state.headers() if state else {}}
        return None

    def end_all(self) -> None:
        """The front has exited."""
        for state, count in self._running.items():
            for _ in range(count):
                state.end()
        self._running.clear()
