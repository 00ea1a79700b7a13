"""ASGI middleware that checks API keys and applies their limits.

    401   no key, or an unknown one          403   /admin without the admin key
    429   over a rate limit, with Retry-After

It runs before the body is read. Whether the key may use the model is checked when the body has been read
(:func:`check_allowed`). Every response to a limited key has OpenAI's x-ratelimit headers.
"""

import hmac
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colonnade.errors import RequestError
from colonnade.serve.api.api_keys import KeyRing, KeyState
from colonnade.serve.api.errors import error_reply
from colonnade.serve.api.rate_limit import Excess
from colonnade.serve.api.request_record import record_of

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/look", "/look/", "/look/viewer.js", "/look/viewer.css"})
"""Paths that need no key."""

ADMIN_PREFIXES = ("/admin/", "/v1/look/")


class Authenticate:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, keys: KeyRing, admin_key: str | None, max_body_bytes: int):
        self.app, self.keys, self.max_body_bytes = app, keys, max_body_bytes
        self._admin_key = None if admin_key is None else admin_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or refuse the request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            state = self._authenticate(scope)
        except RequestError as refusal:
            await self._refuse(refusal, scope, receive, send)
            return
        if state is None:
            await self.app(scope, receive, send)
            return
        record = record_of(scope)
        record.key, record.client = state, state.key.name

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(await state.headers())
            await send(message)

        excess = await state.start()
        if excess:
            await self._refuse(_over_limit(excess), scope, receive, send_with_limits)
            return
        try:
            await self.app(scope, receive, send_with_limits)
        finally:
            state.end()

    def _authenticate(self, scope: Scope) -> KeyState | None:
        """The state of the request's key, if it has one; raises :class:`RequestError` (401, 403)."""
        secret = _bearer(Headers(scope=scope))
        if scope["path"].startswith(ADMIN_PREFIXES):
            if self._admin_key is None or not hmac.compare_digest(secret or b"", self._admin_key):
                raise RequestError(
                    "this address needs the admin key; send it in the header 'authorization: Bearer KEY'",
                    status=403,
                    code="admin_key_required",
                )
            return None
        if not self.keys.required or scope["path"] in OPEN_PATHS:
            return None
        if secret is None:
            raise _unauthorised("there is no API key; send one in the header 'authorization: Bearer KEY'")
        known, state = self.keys.find(secret)
        if not known:
            raise _unauthorised("the API key is not valid; check it, or ask the operator of this server for one")
        return state

    async def _refuse(self, refusal: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        """Send ``refusal`` after reading and dropping the body: a client that is still writing would not see it."""
        seen, more = 0, True
        while more and seen <= self.max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            seen, more = seen + len(message.get("body", b"")), message.get("more_body", False)
        await error_reply(refusal)(scope, receive, send)


def allowed_models(scope: Scope) -> Collection[str] | None:
    """The models that the request's key may use; None: all."""
    state = record_of(scope).key
    return None if state is None else state.key.models


def check_allowed(scope: Scope, model: str) -> None:
    """Raise :class:`RequestError` (403) if the request's key may not use ``model``."""
    allowed = allowed_models(scope)
    if allowed is not None and model not in allowed:
        raise RequestError(
            f"this API key may not use the model '{model}'; use another key",
            param="model",
            status=403,
            code="model_not_allowed",
        )


def _bearer(headers: Headers) -> bytes | None:
    """The key in the authorization header."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip().encode("latin-1") if scheme.lower() == "bearer" and secret.strip() else None


def _unauthorised(what: str) -> RequestError:
    return RequestError(what, status=401, code="invalid_api_key")


def _over_limit(excess: Excess) -> RequestError:
    if excess.wait_s is None:
        what = f"{excess.limit} requests of this API key are already running, its maximum"
        remedy = "wait for one to end"
    else:
        what = f"this API key has used its {excess.limit} {excess.name} per minute"
        remedy = f"try again in {excess.wait_s:.3g} s"
    return RequestError(f"{what}; {remedy}", status=429, code="rate_limit_exceeded", retry_after_s=excess.wait_s)
