"""Servers on a loopback address answer only requests for their own names; over real sockets."""

import asyncio
import socket
from collections.abc import Sequence

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from colonnade.config import ServeConfig
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.http_server import BackgroundServer, listen


async def answer(_: object) -> PlainTextResponse:
    return PlainTextResponse("yes")


def statuses(
    hosts: Sequence[str], key: str | None = None, origins: tuple[str, ...] = (), address: str = "127.0.0.1"
) -> list[int]:
    """What a server at ``address`` answers to requests that name ``hosts``."""

    async def ask() -> list[int]:
        app = Starlette(routes=[Route("/", answer)])
        config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
        server = BackgroundServer(config, KeyRing(None, key), origins)
        with listen(ServeConfig(host=address, port=0)) as listener:
            port = listener.getsockname()[1]
            async with server.running(listener), httpx.AsyncClient() as client:
                url = f"http://127.0.0.1:{port}/"
                got = [await client.get(url, headers={"host": host.replace("PORT", str(port))}) for host in hosts]
        for reply in got:
            if reply.status_code == 403:
                assert reply.json()["error"]["code"] == "host_not_allowed"
                assert "localhost" in reply.json()["error"]["message"]
        return [reply.status_code for reply in got]

    return asyncio.run(ask())


OWN = ("127.0.0.1:PORT", "localhost:PORT", "LOCALHOST", "a.localhost:1", "[::1]:PORT", "10.1.2.3", "192.168.0.7:80")
FOREIGN = ("evil.example:PORT", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example", "[", "", "a@b:c")


def test_only_own_names_are_answered() -> None:
    assert statuses(OWN) == [200] * len(OWN)
    assert statuses(FOREIGN) == [403] * len(FOREIGN)


def test_origins_keys_and_open_addresses_allow_other_names() -> None:
    """A page of another name has no key; and other machines name a server on an open address as they like."""
    assert statuses(["chat.example:PORT", "evil.example"], origins=("https://chat.example",)) == [200, 403]
    assert statuses(["evil.example"], origins=("*",)) == [200]
    assert statuses(["evil.example"], key="secret") == [200]
    assert statuses(["evil.example"], address="0.0.0.0") == [200]


def test_a_request_without_a_host_is_answered() -> None:
    """HTTP/1.0; browsers always name the host."""

    async def ask() -> bytes:
        config = uvicorn.Config(Starlette(routes=[Route("/", answer)]), lifespan="off", log_config=None, ws="none")
        with listen(ServeConfig(port=0)) as listener:
            async with BackgroundServer(config, KeyRing(None, None), ()).running(listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                reply = await reader.read()
                writer.close()
                return reply

    assert asyncio.run(ask()).endswith(b"yes")


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6_loopback() -> None:
    from colonnade.serve.api.host_check import is_loopback

    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", 0))
        assert is_loopback(listener)
