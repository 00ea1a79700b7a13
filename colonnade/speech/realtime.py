"""The protocol of OpenAI's realtime transcription over a WebSocket, for one connection.

    session.update                                       session.created, session.updated
    input_audio_buffer.append, .commit, .clear           input_audio_buffer.committed, .cleared, conversation.item.added
    input_video_buffer.append
                                                         conversation.item.input_audio_transcription.delta, .completed
                                                         error

Deltas are sent while audio arrives, with the item id that its commit will name. ``audio_ms`` of a delta is the amount
of the item's audio that had arrived. A malformed message is answered with ``error``, and the connection continues.
Audio and pictures are discarded after use and never logged.

Two extensions. ``segment`` and ``lookahead`` in the ``transcription`` of a ``session.update`` are the sizes of the next
items' streams, in frames of 40 ms, among those that were trained. ``input_video_buffer.append`` has a JPEG of the mouth
in base64, ``image``, and the time at which it was taken, ``time_us``. An ``input_audio_buffer.append`` may give the
time of its first sample by the same clock; otherwise time 0 is the item's first sample. The two devices' clocks may
drift: each append corrects the difference. With ``crop`` of the session's video input, "mouth" or "face", pictures
are whole, and the region is found here (:mod:`colonnade.speech.face`).
"""

import asyncio
import base64
import binascii
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from colonnade.errors import CapacityError, ConfigError, DataError, RequestError, WorkerError
from colonnade.model.segments import Segments
from colonnade.speech.face import REGIONS, FaceTracker, face_detector
from colonnade.speech.pcm import RATE, Resampler
from colonnade.speech.stream_engine import StreamEngine
from colonnade.speech.video import MAX_JPEG_BYTES, PictureClock, decode_jpeg, decode_rgb

Event = dict[str, Any]
RATES = (16000, 24000)
MAX_LENGTH_S = 3600
"""Maximum length of an item [s]; a client must commit before."""
MIN_LENGTH_S = 0.1
"""Shortest item that may be committed."""
MAX_TIME_US = 1 << 53
"""Larger numbers are not exact in JavaScript."""


class RealtimeSession:
    """One connection; ``send`` delivers an event. Call :meth:`receive` with each message, one at a time."""

    def __init__(self, engine: StreamEngine, model: str, send: Callable[[Event], Awaitable[None]]):
        self.engine, self.model, self._send = engine, model, send
        self.sizes = engine.sizes
        self.tracker: FaceTracker | None = None
        """Crops the pictures, if the client does not."""
        self.rate, self.seconds = 24000, 0.0
        """``seconds``: of sound in all items."""
        self._stream: int | None = None
        self._resampler: Resampler | None = None
        self._item = _id("item")
        self._previous: str | None = None
        self._samples, self._text, self._clock = 0, list[str](), PictureClock()
        self._id = _id("sess")

    async def start(self) -> None:
        """Greet the client."""
        await self._emit("session.created", session=self._session())

    async def receive(self, message: str) -> None:
        """Handle one message of the client."""
        event_id = None
        try:
            event = _parse(message)
            event_id = event.get("event_id")
            kind = event["type"]
            handler = self._handlers().get(kind)
            if handler is None:
                raise RequestError(
                    f"event type {str(kind)[:64]!r} is unknown; use {', '.join(self._handlers())}", param="type"
                )
            await handler(event)
        except (RequestError, DataError) as error:
            await self._error("invalid_request_error", str(error), getattr(error, "param", None), event_id)
        except CapacityError as error:
            await self._error("server_error", str(error), None, event_id, "server_busy")
        except WorkerError as error:
            await self._error("server_error", str(error), None, event_id, "server_failed")

    def close(self) -> None:
        """The connection has ended."""
        if self._stream is not None:
            self.engine.close(self._stream)
            self._stream = None

    def _handlers(self) -> dict[str, Callable[[Event], Awaitable[None]]]:
        return {
            "session.update": self._update, "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit, "input_audio_buffer.clear": self._clear,
            "input_video_buffer.append": self._append_picture,
        }  # fmt: skip

    async def _update(self, event: Event) -> None:
        session = _table(event, "session")
        if session.get("type", "transcription") != "transcription":
            raise RequestError("session.type is not transcription, the only type served here", param="session.type")
        audio = _table(_table(session, "audio", "session."), "input", "session.audio.")
        form = _table(audio, "format", "session.audio.input.")
        if form.get("type", "audio/pcm") != "audio/pcm":
            raise RequestError("the format is not audio/pcm; send 16-bit samples", param="session.audio.input.format")
        rate = form.get("rate", self.rate)
        if rate not in RATES:
            raise RequestError(f"rate is {rate!r}; use 16000 or 24000", param="session.audio.input.format.rate")
        transcription = _table(audio, "transcription", "session.audio.input.")
        model = transcription.get("model", self.model)
        if model != self.model:
            raise RequestError(
                f"model {str(model)[:64]!r} is not served here; use {self.model}",
                param="session.audio.input.transcription.model",
            )
        if audio.get("turn_detection") is not None:
            raise RequestError(
                "turn detection is not supported; set turn_detection to null, and commit",
                param="session.audio.input.turn_detection",
            )
        sizes = self._sizes(transcription)
        if (rate, sizes) != (self.rate, self.sizes) and self._stream is not None:
            raise RequestError(
                "rate, segment and lookahead cannot change once an item has begun; commit or clear it before"
            )
        tracker = self._cropper(_table(_table(session, "video", "session."), "input", "session.video."))
        self.rate, self.sizes, self.tracker = int(rate), sizes, tracker
        await self._emit("session.updated", session=self._session())

    def _sizes(self, transcription: Event) -> Segments:
        """S and R of the next items."""
        path = "session.audio.input.transcription"
        chosen = {"segment": self.sizes.segment, "lookahead": self.sizes.right}
        for name, current in chosen.items():
            value = transcription.get(name, current)
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"{name} is {str(value)[:64]}; send a number of frames", param=f"{path}.{name}")
            chosen[name] = value
        try:
            return self.engine.listeners.model.choose_segments(**chosen)
        except ConfigError as error:
            raise RequestError(str(error), param=path) from None

    def _cropper(self, video: Event) -> FaceTracker | None:
        """The cropper for the pictures of a session with the video settings ``video``."""
        if "crop" not in video:
            return self.tracker
        size, region = self.engine.listeners.model.config.picture, video["crop"]
        if region is None:
            return None
        if not isinstance(region, str) or region not in REGIONS or not size:
            able = f"null, {' or '.join(REGIONS)}" if size else "null: this recogniser does not accept pictures"
            raise RequestError(f"crop is {str(region)[:64]!r}; use {able}", param="session.video.input.crop")
        return FaceTracker(face_detector(), size, region)

    async def _append(self, event: Event) -> None:
        samples = _samples(event.get("audio"))
        time_s = _time_s(event)
        if (self._samples + len(samples)) / self.rate > MAX_LENGTH_S:
            raise RequestError(f"the item is longer than {MAX_LENGTH_S} s; commit it", param="audio")
        stream = await self._open()
        if time_s is not None:
            self._clock.sound(time_s, self._samples * RATE // self.rate)
        self._samples += len(samples)
        self.seconds += len(samples) / self.rate
        assert self._resampler is not None
        await self._delta(await self.engine.push(stream, torch.from_numpy(self._resampler.push(samples))))

    async def _append_picture(self, event: Event) -> None:
        size = self.engine.listeners.model.config.picture
        if not size:
            raise RequestError(f"{self.model} does not accept pictures; send sound only", param="type")
        time_s = _time_s(event)
        if time_s is None:
            raise RequestError("time_us is missing; send when the picture was taken, in microseconds", param="time_us")
        image = event.get("image")
        if isinstance(image, str) and len(image) > 2 * MAX_JPEG_BYTES:
            raise RequestError(f"the picture is too large; send at most {MAX_JPEG_BYTES:,} bytes", param="image")
        data, tracker = _base64(image, "image", "a JPEG"), self.tracker
        if tracker is None:
            picture = decode_jpeg(data, size)
        else:
            picture = await asyncio.to_thread(lambda: tracker.crop(decode_rgb(data)))
        frame = self._clock.frame(time_s)
        if frame >= 0 and picture is not None:  # without a face, text continues by sound
            await self.engine.add_picture(await self._open(), frame, picture)

    async def _open(self) -> int:
        """The stream of the item."""
        if self._stream is None:
            self._stream = await self.engine.open(self.sizes)
            self._resampler = Resampler(self.rate)
        return self._stream

    async def _commit(self, event: Event) -> None:
        seconds = self._samples / self.rate
        if self._stream is None or seconds < MIN_LENGTH_S:
            raise RequestError(f"the buffer has {seconds:.3f} s of sound; a commit needs at least {MIN_LENGTH_S} s")
        await self._emit("input_audio_buffer.committed", item_id=self._item, previous_item_id=self._previous)
        content = [{"type": "input_audio", "transcript": None}]
        item = {"id": self._item, "type": "message", "role": "user", "status": "completed", "content": content}
        await self._emit("conversation.item.added", previous_item_id=self._previous, item=item)
        assert self._resampler is not None
        await self._delta(await self.engine.push(self._stream, torch.from_numpy(self._resampler.finish())))
        await self._delta(await self.engine.end(self._stream))
        usage = {"type": "duration", "seconds": round(seconds, 3)}
        await self._emit(
            "conversation.item.input_audio_transcription.completed",
            item_id=self._item, content_index=0, transcript="".join(self._text), usage=usage,
        )  # fmt: skip
        self._previous = self._item
        self._reset()

    async def _clear(self, event: Event) -> None:
        self._reset()
        await self._emit("input_audio_buffer.cleared")

    def _reset(self) -> None:
        """Begin a new item."""
        self.close()
        self._item, self._samples, self._text, self._clock = _id("item"), 0, [], PictureClock()

    async def _delta(self, text: str) -> None:
        if text:
            self._text.append(text)
            kind = "conversation.item.input_audio_transcription.delta"
            audio_ms = self._samples * 1000 // self.rate
            await self._emit(kind, item_id=self._item, content_index=0, delta=text, audio_ms=audio_ms)

    def _session(self) -> Event:
        form = {"type": "audio/pcm", "rate": self.rate}
        transcription = {"model": self.model, "segment": self.sizes.segment, "lookahead": self.sizes.right}
        given = {"format": form, "transcription": transcription, "turn_detection": None}
        audio: Event = {"input": given}
        session: Event = {"type": "transcription", "id": self._id, "object": "realtime.session", "audio": audio}
        config = self.engine.listeners.model.config
        if config.picture:
            crop = self.tracker.region if self.tracker else None
            session["video"] = {"input": {"format": {"type": "image/jpeg", "size": config.picture}, "crop": crop}}
        session["mean_latency_ms"] = 10 * config.parts * (2 * self.sizes.right + self.sizes.segment) // 2
        return session

    async def _error(
        self, kind: str, message: str, param: str | None, event_id: object, code: str = "invalid_value"
    ) -> None:
        event_id = event_id[:512] if isinstance(event_id, str) else None
        error = {"type": kind, "code": code, "message": message, "param": param, "event_id": event_id}
        await self._emit("error", error=error)

    async def _emit(self, kind: str, **fields: Any) -> None:
        await self._send({"type": kind, "event_id": _id("event"), **fields})


def _parse(message: str) -> Event:
    try:
        event = json.loads(message)
    except (ValueError, RecursionError):
        raise RequestError("the message is not JSON") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise RequestError("the message is not an object with a type", param="type")
    return event


def _table(values: Event, name: str, path: str = "") -> Event:
    """The object ``name`` of ``values``, empty if it is not given."""
    found = values.get(name)
    if found is not None and not isinstance(found, dict):
        raise RequestError(f"{path}{name} is not an object", param=f"{path}{name}")
    return found or {}


def _base64(value: object, name: str, what: str) -> bytes:
    if not isinstance(value, str):
        raise RequestError(f"{name} is not a string; send {what} in base64", param=name)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{name} is not base64", param=name) from None


def _samples(audio: object) -> np.ndarray:
    """Samples of base64."""
    data = _base64(audio, "audio", "16-bit samples")
    if len(data) % 2:
        raise RequestError(f"audio has {len(data)} bytes, an odd number; samples have 2", param="audio")
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def _time_s(event: Event) -> float | None:
    """``time_us`` of an append in seconds."""
    time_us = event.get("time_us")
    if time_us is None:
        return None
    if isinstance(time_us, bool) or not isinstance(time_us, int) or not 0 <= time_us <= MAX_TIME_US:
        raise RequestError(f"time_us is {str(time_us)[:64]}; send whole microseconds", param="time_us")
    return time_us / 1e6


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(8)}"
