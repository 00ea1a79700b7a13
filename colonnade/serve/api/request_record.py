"""State of one HTTP request besides its body: its client, and its use of resources so far.

A client is identified by the name of its API key, or otherwise by its address. For IPv6 only the first 64 bits count:
one subscriber has all addresses of a /64.
"""

import ipaddress
import time
from dataclasses import dataclass, field

from starlette.types import Scope

from colonnade.errors import RequestError
from colonnade.serve.api.api_keys import KeyState
from colonnade.serve.request import Output, Timing

IPV6_PREFIX = 64
"""Bits of an IPv6 address that name a client."""

_SCOPE_KEY = "colonnade.record"


@dataclass
class RequestRecord:
    """One request."""

    client: str
    """In the fair queue."""
    id: str = ""
    """Its x-request-id."""
    model: str | None = None
    """The name of the model that it is for, once that is known."""
    key: KeyState | None = None
    """The API key, if it comes from a key file."""
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    generated_tokens: dict[int, int] = field(default_factory=dict)
    """By completion."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    """Of the completions that have ended."""
    ended_ns: list[int] = field(default_factory=list)
    """When these ended, since the epoch [ns]."""

    def observe(self, index: int, output: Output) -> None:
        """Record an output of completion ``index``, and take its tokens from the key's allowance."""
        if self.key:
            before = self.generated_tokens.get(index, 0) + self.prompt_tokens.get(index, 0)
            self.key.take_tokens(output.prompt_tokens + output.generated_tokens - before)
        self.prompt_tokens[index], self.generated_tokens[index] = output.prompt_tokens, output.generated_tokens
        if output.finish_reason:
            self.finish_reasons[index] = output.finish_reason
        if output.timing:
            self.timings.append(output.timing)
            self.ended_ns.append(time.time_ns())

    def priority(self, asked: int | None) -> int:
        """The request's priority; RequestError (403) if it requests a better one than its key has."""
        best = None if self.key is None else self.key.key.priority
        if asked is None:
            return best or 0
        if best is not None and asked < best:
            raise RequestError(
                f"priority is {asked}; with this API key it must be {best} or more",
                param="priority",
                status=403,
                code="priority_not_allowed",
            )
        return asked


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request with this ASGI scope."""
    if _SCOPE_KEY not in scope:
        scope[_SCOPE_KEY] = RequestRecord(_address(scope))
    return scope[_SCOPE_KEY]


def _address(scope: Scope) -> str:
    """The client's address, or its IPv6 network; empty if there is none (a Unix socket)."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address.packed, IPV6_PREFIX), strict=False))
