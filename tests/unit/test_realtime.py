"""Realtime transcription over WebSockets: OpenAI's events, keys, limits, hostile frames, drain."""

import asyncio
import base64
import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from colonnade.config import ServeConfig
from colonnade.config.speech import SpeechConfig
from colonnade.errors import CapacityError, ConfigError
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.http_server import listen, url_of
from colonnade.speech import server as speech_server
from colonnade.speech.model import SpeechModel
from colonnade.speech.realtime import MAX_LENGTH_S, RealtimeSession
from colonnade.speech.server import SpeechServer, background_server, is_allowed_origin
from colonnade.speech.stream_engine import StreamEngine

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("wsproto")
pytest.importorskip("soxr")

TINY = SpeechConfig(layers=2, width=16, heads=2, ffn_width=24, joint_width=12, mels=10, segment=4, left=6)
PATH = "/v1/realtime?intent=transcription"
LIMIT_S = 120


def model() -> SpeechModel:
    """Random, and it emits labels now and then."""
    it = SpeechModel(TINY).requires_grad_(False).eval()
    it.joint.bias[0] += 2.0
    it.joint.weight *= 6
    return it


def pcm(seconds: float, seed: int, rate: int = 16000) -> bytes:
    return (np.random.default_rng(seed).normal(0, 3000, int(seconds * rate))).astype("<i2").tobytes()


def expected(data: bytes) -> str:
    return model().recognise(torch.from_numpy(np.frombuffer(data, "<i2").astype(np.float32) / 32768))


@asynccontextmanager
async def running(
    keys: KeyRing | None = None,
    streams: int = 4,
    idle_s: float = LIMIT_S,
    stall_s: float = LIMIT_S,
    origins: tuple[str, ...] = (),
    recogniser: SpeechModel | None = None,
    segment: int | None = None,
) -> AsyncIterator[tuple[Any, SpeechServer]]:
    """A server in this process, and a client of it."""
    server = SpeechServer(
        recogniser or model(), "tiny", streams, keys or KeyRing(None, None), idle_s=idle_s, stall_s=stall_s,
        origins=origins, segment=segment,
    )  # fmt: skip
    server.engine.start()
    try:
        with listen(ServeConfig(port=0)) as listener:
            async with background_server(server).running(listener), aiohttp.ClientSession(url_of(listener)) as client:
                yield client, server
    finally:
        server.engine.stop()


def go(test: Callable[[], Coroutine]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


async def update(socket, rate: int) -> None:
    form = {"type": "audio/pcm", "rate": rate}
    audio = {"input": {"format": form, "transcription": {"model": "tiny"}, "turn_detection": None}}
    await socket.send_json({"type": "session.update", "session": {"type": "transcription", "audio": audio}})
    updated = await until(socket, "session.updated")
    assert updated[-1]["session"]["audio"]["input"]["format"]["rate"] == rate


async def until(socket, kind: str) -> list[dict]:
    """The events up to the first of this kind."""
    events = []
    while not events or events[-1]["type"] != kind:
        message = await socket.receive()
        assert message.type == aiohttp.WSMsgType.TEXT, (message, events)
        events.append(json.loads(message.data))
        assert kind == "error" or events[-1]["type"] != "error", events[-1]
    return events


async def transcribe(socket, data: bytes, cut: int = 2000) -> str:
    """Send, commit, and compare deltas with the transcript."""
    for start in range(0, len(data), cut):
        audio = base64.b64encode(data[start : start + cut]).decode()
        await socket.send_json({"type": "input_audio_buffer.append", "audio": audio})
    await socket.send_json({"type": "input_audio_buffer.commit"})
    events = await until(socket, "conversation.item.input_audio_transcription.completed")
    deltas = [event for event in events if event["type"].endswith(".delta")]
    (committed,) = (event for event in events if event["type"] == "input_audio_buffer.committed")
    assert {event["item_id"] for event in (*deltas, committed)} == {events[-1]["item_id"]}
    assert "".join(event["delta"] for event in deltas) == events[-1]["transcript"]
    assert len({event["event_id"] for event in events}) == len(events)
    assert events.index(deltas[0]) < events.index(committed), "no text came before the commit"
    return events[-1]["transcript"]


def test_two_clients_get_the_texts_of_whole_recordings():
    async def one(client, seeds: list[int]) -> None:
        async with client.ws_connect(PATH + "&model=tiny") as socket:
            assert (await socket.receive_json())["type"] == "session.created"
            await update(socket, 16000)
            for seed in seeds:  # a connection may send several items
                data = pcm(0.7 + 0.3 * seed, seed)
                assert await transcribe(socket, data, 900 + 2 * seed) == expected(data) != ""

    async def test() -> None:
        async with running() as (client, server):
            await asyncio.gather(one(client, [1, 2]), one(client, [3, 0]))
            metrics = await (await client.get("/metrics")).text()
            families = {family.name: family for family in text_string_to_metric_families(metrics)}
            assert families["colonnade:speech_sessions"].samples[0].value == 2
            assert families["colonnade:speech_sessions"].documentation
            assert families["colonnade:speech_streams_running"].type == "gauge"
            assert "process_cpu_seconds" in families
            assert float(re.findall(r"audio_seconds_total ([\d.]+)", metrics)[0]) == pytest.approx(4.6, abs=1e-3)
            assert (await (await client.get("/v1/models")).json())["data"][0]["id"] == "tiny"
            assert (await client.get("/ready")).status == 200
            await asyncio.wait_for(server.empty.wait(), LIMIT_S)
            assert len(server.engine.listeners.pool.cache.free) == 4

    go(test)


def test_sound_at_24_khz_is_resampled():
    import soxr

    async def test() -> None:
        data = pcm(1.5, 1, 24000)
        whole = soxr.resample(np.frombuffer(data, "<i2").astype(np.float32) / 32768, 24000, 16000)
        async with running() as (client, _), client.ws_connect(PATH) as socket:
            assert await transcribe(socket, data) == model().recognise(torch.from_numpy(whole))

    go(test)


def test_a_client_chooses_segment_and_lookahead():
    """The server's flags choose for clients that do not; a choice holds until the next one, between items."""
    many = SpeechModel(TINY.replace(segments=(8,), lookaheads=(0,))).requires_grad_(False).eval()
    many.load_state_dict(model().state_dict())
    data = pcm(1.6, 5)
    samples = torch.from_numpy(np.frombuffer(data, "<i2").astype(np.float32) / 32768)

    def chosen(**sizes) -> dict:
        form = {"type": "audio/pcm", "rate": 16000}
        audio = {"input": {"format": form, "transcription": {"model": "tiny"} | sizes}}
        return {"type": "session.update", "session": {"audio": audio}}

    async def test() -> None:
        async with running(recogniser=many, segment=8) as (client, _), client.ws_connect(PATH) as socket:
            session = (await socket.receive_json())["session"]
            given = session["audio"]["input"]["transcription"]
            assert given == {"model": "tiny", "segment": 8, "lookahead": 2}
            assert session["mean_latency_ms"] == 240
            for sizes, pair, latency_ms in (
                ({}, (8, 2), 240),
                ({"segment": 4, "lookahead": 0}, (4, 0), 80),
                ({"lookahead": 2}, (4, 2), 160),
            ):  # fmt: skip
                await socket.send_json(chosen(**sizes))
                session = (await until(socket, "session.updated"))[-1]["session"]
                given = session["audio"]["input"]["transcription"]
                assert (given["segment"], given["lookahead"]) == pair
                assert session["mean_latency_ms"] == latency_ms
                assert (
                    await transcribe(socket, data) == many.recognise(samples, sizes=many.choose_segments(*pair)) != ""
                )
            for sizes, problem in (
                ({"segment": 5}, "segments of 4, 8 and lookaheads of 0, 2 frames"),
                ({"lookahead": True}, "a number of frames"), ({"segment": "4"}, "a number of frames"),
                ({"segment": None}, "a number of frames"), ({"segment": 1 << 70}, "segments of 4, 8"),
            ):  # fmt: skip
                await socket.send_json(chosen(**sizes))
                assert problem in (await until(socket, "error"))[-1]["error"]["message"]
            await socket.send_json({"type": "input_audio_buffer.append", "audio": ""})
            await socket.send_json(chosen(segment=8))
            assert "once an item has begun" in (await until(socket, "error"))[-1]["error"]["message"]
            await socket.send_json({"type": "input_audio_buffer.clear"})
            await until(socket, "input_audio_buffer.cleared")
            await socket.send_json(chosen(segment=8))
            await until(socket, "session.updated")
        with pytest.raises(ConfigError, match="segments of 4, 8 and lookaheads of 0, 2"):
            SpeechServer(many, "tiny", 2, KeyRing(None, None), lookahead=1)

    go(test)


def test_keys_and_refusals(tmp_path):
    file = tmp_path / "keys.toml"
    hashed = [hashlib.sha256(key).hexdigest() for key in (b"one", b"other")]
    file.write_text(
        f'[[keys]]\nname = "a"\nsha256 = "{hashed[0]}"\nconcurrent_requests = 1\n'
        f'[[keys]]\nname = "b"\nsha256 = "{hashed[1]}"\nmodels = ["large"]\n'
    )
    bearer = {"authorization": "Bearer one"}

    async def refused(client, path: str = PATH, **how) -> int:
        with pytest.raises(aiohttp.WSServerHandshakeError) as error:
            await client.ws_connect(path, **how)
        return error.value.status

    async def test() -> None:
        async with running(KeyRing(str(file), None), streams=1) as (client, server):
            assert await refused(client) == 401
            assert await refused(client, headers={"authorization": "Bearer wrong"}) == 401
            assert await refused(client, headers={"authorization": "Bearer other"}) == 403
            assert await refused(client, "/v1/realtime", headers=bearer) == 400
            assert await refused(client, PATH + "&model=large", headers=bearer) == 404
            assert (await client.get("/v1/models")).status == 401
            assert (await client.get("/health")).status == 200
            protocols = ("realtime", "openai-insecure-api-key.one")  # a browser cannot set headers
            async with client.ws_connect(PATH, protocols=protocols) as socket:
                assert socket.protocol == "realtime"
                assert (await socket.receive_json())["type"] == "session.created"
                assert await refused(client, headers=bearer) == 503  # all streams are taken
                server.engine.streams = 2
                assert await refused(client, headers=bearer) == 429
            await asyncio.wait_for(server.empty.wait(), LIMIT_S)
            async with client.ws_connect(PATH, headers=bearer) as socket:
                assert (await socket.receive_json())["type"] == "session.created"

    go(test)


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://LOCALHOST:8000", "localhost:8000", True),
        ("https://speech.example.com", "speech.example.com", True),
        ("https://speech.example.com", "speech.example.com:443", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:8001", "localhost:8000", False),
        ("http://127.0.0.1:8000", "localhost:8000", False),
        ("https://evil.example.com", "localhost:8000", False),
        ("http://localhost", "localhost:443", False),
        ("http://localhost:8000.evil.example.com", "localhost:8000", False),
        ("http://localhost:x", "localhost:x", False),
        ("null", "localhost:8000", False),
        ("null", "null", False),
        ("", "", False),
        ("file://", "", False),
        ("https://chat.example.com", "localhost:8000", True),
        ("http://chat.example.com", "localhost:8000", False),
    ],
)
def test_origins(origin, host, allowed) -> None:
    assert is_allowed_origin(origin, host, ["https://chat.example.com"]) is allowed
    assert is_allowed_origin(origin, host, ["*"])


def test_pages_of_other_origins_are_refused():
    async def connect(client, **headers: str) -> int:
        try:
            async with client.ws_connect(PATH, headers=headers) as socket:
                assert (await socket.receive_json())["type"] == "session.created"
        except aiohttp.WSServerHandshakeError as error:
            return error.status
        return 101

    async def test() -> None:
        evil, other = "https://evil.example.com", "https://chat.example.com"
        async with running() as (client, server):
            assert await connect(client) == 101
            assert await connect(client, origin=str(client._base_url.origin())) == 101
            assert await connect(client, origin=evil) == 403
            assert await connect(client, origin="null") == 403
            assert server.counts["refused"] == 2
            # A page whose name resolves to 127.0.0.1 is of the host that its request names.
            assert await connect(client, origin=evil, host="evil.example.com") == 403
            reply = await client.get("/v1/models", headers={"origin": evil})
            assert "access-control-allow-origin" not in reply.headers
        async with running(origins=(other,)) as (client, _):
            assert await connect(client, origin=other) == 101
            assert await connect(client, origin=evil) == 403
            reply = await client.get("/v1/models", headers={"origin": other})
            assert reply.headers["access-control-allow-origin"] == other

    go(test)


HOSTILE = [
    ("{", "not JSON"), ("[]", "type"), ('{"type": 3}', "type"), ("[" * 100_000, "not JSON"),
    ('{"type": "response.create"}', "is unknown"), ('{"type": "input_audio_buffer.append"}', "not a string"),
    ('{"type": "input_audio_buffer.append", "audio": "??"}', "not base64"),
    ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "odd number"),
    ('{"type": "input_audio_buffer.commit"}', "0.000 s"),
    ('{"type": "session.update", "session": []}', "not an object"),
    ('{"type": "session.update", "session": {"type": "realtime"}}', "not transcription"),
    ('{"type": "session.update", "session": {"audio": {"input": {"format": {"rate": 8000}}}}}', "16000 or 24000"),
    ('{"type": "session.update", "session": {"audio": {"input": {"format": {"rate": [1]}}}}}', "16000 or 24000"),
    ('{"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}}', "audio/pcm"),
    ('{"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "x"}}}}}', "use tiny"),
    ('{"type": "session.update", "session": {"audio": {"input": {"turn_detection": {}}}}}', "turn_detection"),
]  # fmt: skip


def test_hostile_frames_are_answered_and_the_connection_goes_on():
    async def test() -> None:
        async with running() as (client, server):
            async with client.ws_connect(PATH) as socket:
                await update(socket, 16000)
                for message, problem in HOSTILE:
                    await socket.send_str(message)
                    error = (await until(socket, "error"))[-1]["error"]
                    assert problem in error["message"], message
                data = pcm(1.0, 1)
                append = {"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm(0.5, 9)).decode()}
                await socket.send_json(append | {"event_id": "mine"})
                await socket.send_json(
                    {"type": "session.update", "session": {"audio": {"input": {"format": {"rate": 24000}}}}}
                )
                assert "cannot change" in (await until(socket, "error"))[-1]["error"]["message"]
                await socket.send_json({"type": "input_audio_buffer.clear"})
                await until(socket, "input_audio_buffer.cleared")
                assert await transcribe(socket, data) == expected(data)
                await socket.send_bytes(b"\x00")
                assert (await socket.receive()).extra == "messages are text"
                assert socket.close_code == 1003
            async with client.ws_connect(PATH) as socket:
                await socket.receive_json()
                await socket.send_str("x" * (speech_server.MAX_MESSAGE_BYTES + 1))
                assert (await socket.receive()).type == aiohttp.WSMsgType.CLOSE
                assert socket.close_code == 1009
            await asyncio.wait_for(server.empty.wait(), LIMIT_S)
            assert len(server.engine.listeners.pool.cache.free) == 4

    go(test)


def test_a_silent_client_is_dropped_and_one_that_does_not_read():
    async def test() -> None:
        async with running(idle_s=0.1) as (client, server), client.ws_connect(PATH) as socket:
            await until(socket, "session.created")
            assert (await socket.receive()).type == aiohttp.WSMsgType.CLOSE
            assert socket.close_code == 1008
        async with running(stall_s=0.2) as (client, server):
            host, port = client._base_url.host, client._base_url.port
            _, writer = await asyncio.open_connection(host, port, limit=1)
            handshake = (
                f"GET {PATH} HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
                "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            writer.write(handshake.encode())
            frame = bytes([0x81, 0x82, 0, 0, 0, 0]) + b"{}"  # a text frame; each is answered with an error
            for _ in range(10_000):
                if server.counts["sessions"] and server.empty.is_set():
                    break
                if not writer.transport.get_write_buffer_size():
                    writer.write(frame * 1000)
                await asyncio.sleep(0.01)
            await asyncio.wait_for(server.empty.wait(), LIMIT_S)
            writer.transport.abort()

    go(test)


def test_drain_refuses_new_clients_and_ends_old_ones():
    async def test() -> None:
        async with running() as (client, server):
            async with client.ws_connect(PATH) as socket:
                await update(socket, 16000)
                draining = asyncio.create_task(server.drain(0.2))
                await asyncio.sleep(0)
                with pytest.raises(aiohttp.WSServerHandshakeError) as error:
                    await client.ws_connect(PATH)
                assert error.value.status == 503
                assert (await client.get("/ready")).status == 503
                assert (await socket.receive()).type == aiohttp.WSMsgType.CLOSE
                assert socket.close_code == 1001
            await draining
            assert server.empty.is_set()

    go(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_recogniser_that_fails_answers_the_call_that_failed_and_all_others():
    async def check() -> None:
        async with running() as (client, server):

            def fail(*_: object) -> None:
                raise RuntimeError("out of memory")

            server.engine.listeners.push = fail
            async with client.ws_connect(PATH) as socket:
                await socket.receive_json()
                for _ in range(2):
                    audio = base64.b64encode(pcm(0.1, 1)).decode()
                    await socket.send_json({"type": "input_audio_buffer.append", "audio": audio})
                    error = (await socket.receive_json())["error"]
                    assert error["code"] == "server_failed"
                    assert "out of memory" in error["message"]
            async with client.get("/health") as health:
                assert health.status == 503

    go(check)


def test_drain_does_not_wait_for_a_client_that_cannot_be_closed(caplog):
    async def check() -> None:
        async with running() as (client, server), client.ws_connect(PATH) as stuck, client.ws_connect(PATH) as other:
            for socket in (stuck, other):
                await socket.receive_json()
            first = next(iter(server.sessions))
            first.close = lambda *_: asyncio.Event().wait()  # type: ignore[method-assign]
            draining = asyncio.create_task(server.drain(0))
            assert (await other.receive()).type == aiohttp.WSMsgType.CLOSE
            draining.cancel()

    go(check)
    assert background_server(SpeechServer(model(), "tiny", 1, KeyRing(None, None))).config.ws_ping_interval is None
    assert "Exception in ASGI" not in caplog.text


def test_an_item_has_a_longest_length_and_full_pools_say_so():
    async def test() -> None:
        engine, events = StreamEngine(model(), 1), []

        async def send(event: dict) -> None:
            events.append(event)

        engine.start()
        try:
            first, second = (RealtimeSession(engine, "tiny", send) for _ in range(2))
            append = json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm(0.2, 0)).decode()})
            await first.receive(append)
            await second.receive(append)
            assert events[-1]["error"]["code"] == "server_busy"
            first._samples = MAX_LENGTH_S * 24000
            await first.receive(append)
            assert "longer than" in events[-1]["error"]["message"]
            first.close()
            await second.receive(append)  # the stream is free again
            assert events[-1]["type"] != "error" or "server_busy" not in str(events[-1])
            with pytest.raises(CapacityError):
                await engine.open()
        finally:
            engine.stop()

    go(test)


def test_the_command_line_serves_and_stops(tmp_path):
    checkpoint = tmp_path / "tiny" / "step-1"
    model().save(checkpoint)
    command = [sys.executable, "-m", "colonnade", "speech", "serve", str(checkpoint), "--port", "0", "--streams", "2"]
    command += ["--origins", "https://chat.example.com"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = re.findall(r"serving tiny at (\S+)", process.stderr.readline())[0]

            async def test() -> None:
                page = {"origin": "https://chat.example.com"}
                async with aiohttp.ClientSession(url) as client, client.ws_connect(PATH, headers=page) as socket:
                    await update(socket, 16000)
                    data = pcm(0.8, 4)
                    assert await transcribe(socket, data) == expected(data)

            go(test)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0
            assert re.fullmatch(r"stopping: [01] streams? may run for 30 s; .*\n", process.stderr.read())
        finally:
            process.kill()
