"""Serves a Whisper model: OpenAI's ``POST /v1/audio/transcriptions``, a multipart upload of one recording.

    response_format   json (the text), text, srt, vtt, verbose_json (with segments)
    timestamp_granularities[]   of verbose_json: segment, word, or both
    temperature       0: greedy, sampled if the text is repetitive; above 0: sampled at this temperature

Recordings are transcribed one after another in a thread. If a client disconnects, its transcription ends at the next
window. API keys, body limits and allowed origins work as in the server of text models.
"""

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from colonnade.config import ServeConfig
from colonnade.errors import DataError, RequestError
from colonnade.parallel.launch import STOP_SIGNALS
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.api.auth import Authenticate, allowed_models, check_allowed
from colonnade.serve.api.connection import ConnectionLimits, connection_class
from colonnade.serve.api.disconnect import unless_disconnected
from colonnade.serve.api.errors import error_reply
from colonnade.serve.api.middleware import BodyLimit, cors_options
from colonnade.serve.api.parameters import known_parameters
from colonnade.serve.http_server import BackgroundServer, listen, url_of
from colonnade.speech.audio import load_audio
from colonnade.speech.log_mel import RATE
from colonnade.speech.transcribe import Transcriber
from colonnade.speech.transcript import Segment, word_rows, write_transcript
from colonnade.speech.whisper_tokens import Model

MAX_UPLOAD_BYTES = 25 << 20
"""Maximum body size, OpenAI's limit, unless serve.max_body_bytes is set [bytes]."""
QUEUED_BODIES = 8
"""Bodies of maximum size that may be in memory at once (arriving, waiting or running); more if they are smaller."""
MAX_LENGTH_S = 2 * 3600
"""Maximum length of a recording [s]."""
GRANULARITIES = "timestamp_granularities[]"
FIELDS = ("file", "model", "language", "response_format", "temperature", GRANULARITIES)
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "prompt": ("",), "stream": ("false", "False"), "include[]": (), "chunking_strategy": ("auto",),
}  # fmt: skip
FORMATS = {"json": "application/json", "verbose_json": "application/json", "text": "text/plain", "srt": "text/plain",
           "vtt": "text/vtt"}  # fmt: skip


def parse_multipart(content_type: str, body: bytes) -> dict[str, bytes]:
    """The fields of a multipart/form-data body; raises :class:`RequestError` for any other or a malformed body."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise RequestError("the body must be multipart/form-data with a file; send the recording as the field 'file'")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise RequestError("the multipart body is not complete; send it again")
    fields: dict[str, bytes] = {}
    for part in parts[1:-1]:
        head, separator, value = part.partition(b"\r\n\r\n")
        name = _field_name(head)
        if not separator or name is None:
            raise RequestError("a part of the multipart body has no name; send each field with a name")
        if name in fields and name != GRANULARITIES:
            raise RequestError(f"the field '{name[:80]}' is given twice; send it once", param=name[:80])
        fields[name] = fields[name] + b"," + value if name in fields else value
    return fields


def _field_name(head: bytes) -> str | None:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            header = Message()
            header["content-disposition"] = value.strip()
            name = header.get_param("name", header="content-disposition")
            return name if isinstance(name, str) else None
    return None


class _Options:
    """The validated fields of a request."""

    def __init__(self, fields: dict[str, bytes], name: str):
        texts = {key: value.decode("utf-8", "replace") for key, value in fields.items() if key != "file"}
        given = known_parameters({**texts, "file": "file"} if "file" in fields else texts, FIELDS, (), UNSUPPORTED)
        if "file" not in fields:
            raise RequestError("the field 'file' is missing; send the recording in it", param="file")
        if given.get("model", name) != name:
            raise RequestError(
                f"the model '{given['model'][:80]}' is not served here; use '{name}'",
                param="model", status=404, code="model_not_found",
            )  # fmt: skip
        self.format = str(given.get("response_format", "json"))
        if self.format not in FORMATS:
            raise RequestError(
                f"response_format is '{self.format[:80]}'; it must be one of {', '.join(FORMATS)}",
                param="response_format",
            )
        self.granularities = frozenset(str(given.get(GRANULARITIES, "segment")).split(","))
        if unknown := self.granularities - {"word", "segment"}:
            raise RequestError(
                f"{GRANULARITIES} is '{min(unknown)[:80]}'; it must be word, segment, or both", param=GRANULARITIES
            )
        if "word" in self.granularities and self.format != "verbose_json":
            raise RequestError(
                f"word times need response_format verbose_json, not '{self.format}'", param=GRANULARITIES
            )
        self.language = str(given.get("language", "en"))
        try:
            self.temperature = float(given.get("temperature", 0))
        except ValueError:
            self.temperature = -1.0
        if not 0 <= self.temperature <= 1:
            raise RequestError(
                f"temperature is '{given['temperature'][:80]}'; it must be a number from 0 to 1", param="temperature"
            )
        self.sound = fields["file"]


class TranscriptionServer:
    """The application: one recording at a time, in a thread."""

    def __init__(self, model: Model, name: str, config: ServeConfig, limits: ConnectionLimits = ConnectionLimits()):
        self.model, self.name, self.config, self.waiting = model, name, config, 0
        self._thread = ThreadPoolExecutor(1, "transcriber")
        default = ServeConfig.model_fields["max_body_bytes"].default
        most = MAX_UPLOAD_BYTES if config.max_body_bytes == default else config.max_body_bytes
        self.keys = KeyRing(config.keys, config.api_key)
        self.app = Starlette(
            routes=[
                Route("/v1/audio/transcriptions", self._transcriptions, methods=["POST"]),
                Route("/v1/models", self._models),
                *(Route(path, _ok) for path in ("/health", "/ready")),
            ],
            middleware=[
                *([Middleware(CORSMiddleware, **cors_options(config.origins))] if config.origins else []),
                Middleware(Authenticate, keys=self.keys, admin_key=None, max_body_bytes=most),
                Middleware(BodyLimit, max_bytes=most, limits=limits, max_held_bytes=QUEUED_BODIES * most),
            ],
        )

    async def _transcriptions(self, request: Request) -> Response:
        try:
            check_allowed(request.scope, self.name)
            # Not request.body(), which would keep a second copy until the response.
            body = b"".join([part async for part in request.stream()])
            options = _Options(parse_multipart(request.headers.get("content-type", ""), body), self.name)
            del body
            if self.waiting > self.config.max_waiting:
                raise RequestError(
                    f"the queue is full: {self.waiting - 1} recordings are already waiting; try again "
                    "later", status=429,
                    code="queue_full",
                )  # fmt: skip
            return await unless_disconnected(request, self._in_turn(options))
        except RequestError as refusal:
            return error_reply(refusal)

    async def _in_turn(self, options: _Options) -> Response:
        left = threading.Event()
        self.waiting += 1
        try:
            run = self._thread.submit(self._transcribe, options, left)
            segments, seconds = await asyncio.wrap_future(run)
        finally:
            left.set()
            self.waiting -= 1
        text = reply(segments, options.format, options.language, seconds, options.granularities)
        return Response(text, media_type=FORMATS[options.format])

    def _transcribe(self, options: _Options, left: threading.Event) -> tuple[list[Segment], float]:
        """(segments, length of the recording [s]); in the thread."""
        words = "word" in options.granularities
        transcriber = Transcriber(self.model, options.language, temperature=options.temperature, words=words)
        with tempfile.TemporaryDirectory(prefix="colonnade-") as folder:
            file = Path(folder) / "recording"
            file.write_bytes(options.sound)
            try:
                samples = load_audio(file, longest_s=MAX_LENGTH_S)
            except DataError as error:
                raise RequestError(str(error).replace(str(file), "the file"), param="file") from None
        segments: list[Segment] = []
        for window in transcriber.windows(samples):
            if left.is_set():
                break
            segments += window
        return segments, len(samples) / RATE

    async def _models(self, request: Request) -> Response:
        allowed = allowed_models(request.scope)
        served = [self.name] if allowed is None or self.name in allowed else []
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "colonnade"} for name in served]}
        )


async def _ok(_: Request) -> Response:
    return PlainTextResponse("ok")


def reply(
    segments: list[Segment],
    format: str,
    language: str,
    seconds: float,
    granularities: Collection[str] = ("segment",),
) -> str:
    """The response body in one of :data:`FORMATS`; verbose_json contains the times named by ``granularities``."""
    if format in ("srt", "vtt"):
        return write_transcript(segments, "srt" if format == "srt" else "vtt")
    text = " ".join(segment.text.strip() for segment in segments)
    if format == "text":
        return f"{text}\n"
    if format == "json":
        return json.dumps({"text": text}, ensure_ascii=False)
    rows: list[dict[str, Any]] = [
        {
            "id": i, "start": s.start_s, "end": s.end_s, "text": s.text, "tokens": list(s.tokens),
            "temperature": s.temperature, "avg_logprob": s.mean_logprob, "compression_ratio": s.compression_ratio,
            "no_speech_prob": s.silence,
        }
        for i, s in enumerate(segments)
    ]  # fmt: skip
    whole: dict[str, Any] = {
        "task": "transcribe", "language": language, "duration": round(seconds, 3), "text": text,
    }  # fmt: skip
    if "word" in granularities:
        whole["words"] = [word for s in segments for word in word_rows(s.words)]
    if "segment" in granularities:
        whole["segments"] = rows
    return json.dumps(whole, ensure_ascii=False)


def serve(model: Model, name: str, config: ServeConfig, announce: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM; then running transcriptions have ``config.drain_s`` seconds to end."""
    with listen(config) as listener:
        asyncio.run(_serve(TranscriptionServer(model, name, config), config, listener, announce))


async def _serve(
    server: TranscriptionServer, config: ServeConfig, listener: socket.socket, announce: Callable[[str], object]
) -> None:
    http = BackgroundServer(
        uvicorn.Config(
            server.app, http=connection_class(ConnectionLimits().within_files()), lifespan="off", ws="none",
            log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        ),
        server.keys, config.origins,
    )  # fmt: skip

    def stop() -> None:
        http.force_exit, http.should_exit = http.should_exit, True

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop)
    announce(f"serving {server.name} at {url_of(listener)} (/v1/audio/transcriptions; Ctrl-C stops)")
    await http.serve(sockets=[listener])
