"""ASGI middleware against DNS rebinding.

A web page may let its host name resolve to 127.0.0.1 and then use a server on the reader's machine as if the page came
from it. Its requests still name the page's host. A server on a loopback address that needs no API key therefore accepts
requests only for an IP address, ``localhost``, or a host of ``serve.origins``; others get 403.
"""

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from colonnade.config import short_repr
from colonnade.errors import RequestError
from colonnade.serve.api.errors import error_reply


class HostCheck:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]):
        self.app, self.any_host = app, "*" in origins
        self.hosts = {urlsplit(origin).hostname for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or refuse the request."""
        host = Headers(scope=scope).get("host") if scope["type"] in ("http", "websocket") else None
        if host is None or self.any_host or self._is_own(host):
            await self.app(scope, receive, send)
            return
        hint = "allow it with --serve.origins http://HOST, or require an API key"
        refusal = error_reply(
            RequestError(
                f"this server is not at {short_repr(host)}; use its IP address or localhost",
                status=403, code="host_not_allowed", operator_hint=hint,
            )
        )  # fmt: skip
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(refusal)
        else:
            await refusal(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # unbalanced brackets
            return False
        return name == "localhost" or name.endswith(".localhost") or name in self.hosts or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(listener: socket.socket) -> bool:
    """Whether only programs of this machine reach the socket."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
