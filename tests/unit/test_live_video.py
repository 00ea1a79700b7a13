"""Live pictures: their frames at other rates and clocks, lost and late ones, JPEGs over WebSockets, an hour."""

import asyncio
import base64
import io
import json
import resource
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from colonnade.cli import main
from colonnade.config import ServeConfig
from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.http_server import listen, url_of
from colonnade.speech.audio import load_audio
from colonnade.speech.features import FRAME, RATE
from colonnade.speech.front_end import Frames, stack_pictures
from colonnade.speech.listen import (
    MAX_WAITING_FRAMES,
    MAX_WAITING_PICTURES,
    MISSING_FRAMES,
    StreamingRecogniser,
    listen_film,
)
from colonnade.speech.model import SpeechModel
from colonnade.speech.pcm import write_audio
from colonnade.speech.server import SpeechServer, background_server
from colonnade.speech.video import HOLD_FRAMES, MAX_JPEG_BYTES, PictureClock, decode_jpeg, film_pictures, scaled
from tests.worlds import assert_same

SEEING = SpeechConfig(layers=1, width=16, heads=2, ffn_width=24, joint_width=12, mels=10, segment=4, left=6, picture=16)
LIMIT_S = 120
FRAME_S = FRAME / RATE


def talkative(dtype: torch.dtype = torch.float32) -> SpeechModel:
    """A random model that emits labels now and then."""
    model = SpeechModel(SEEING, 0, dtype).requires_grad_(False).eval()
    model.joint.bias[0] += 2.0
    model.joint.weight *= 6
    return model


def sound(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.1, frames * FRAME))


def hear(listeners: StreamingRecogniser, stream: int, samples: torch.Tensor) -> str:
    """Push a frame and return its text."""
    listeners.push(stream, samples)
    texts = ""
    while found := listeners.step():
        texts += found[stream]
    return texts


def rest(listeners: StreamingRecogniser, stream: int) -> str:
    listeners.end(stream)
    texts = ""
    while found := listeners.step():
        texts += found[stream]
    return texts


def test_a_late_picture_is_waited_for():
    """Pictures up to MAX_WAITING_FRAMES - 1 frames after their sound are used; the text is that of the whole."""
    model, samples = talkative(torch.float64), sound(40)
    pictures = torch.rand(40, 16, 16, dtype=torch.float64)
    listeners = StreamingRecogniser(model)
    stream, text = listeners.open(), ""
    listeners.add_picture(stream, 0, pictures[0])
    for t, part in enumerate(samples.split(FRAME)):
        if 0 < t - (MAX_WAITING_FRAMES - 1) < 38:
            listeners.add_picture(stream, t - (MAX_WAITING_FRAMES - 1), pictures[t - (MAX_WAITING_FRAMES - 1)])
        text += hear(listeners, stream, part)
    for t in (38, 39):
        listeners.add_picture(stream, t, pictures[t])
    assert text + rest(listeners, stream) == model.recognise(samples, pictures) != ""


def test_a_picture_that_is_too_late_is_dropped():
    model, samples, pictures = talkative(torch.float64), sound(20), torch.rand(20, 16, 16, dtype=torch.float64)
    listeners = StreamingRecogniser(model)
    stream = listeners.open()
    listeners.add_picture(stream, 0, pictures[0])
    listeners.push(stream, samples[: 10 * FRAME])
    made = listeners.streams[stream].made
    assert made == 10 - MAX_WAITING_FRAMES
    for t in range(1, 20):
        listeners.add_picture(stream, t, pictures[t])
    listeners.push(stream, samples[10 * FRAME :])
    listeners.end(stream)
    seen = torch.tensor([t == 0 or t >= made for t in range(20)])
    own = torch.where(seen[:, None, None], pictures, 0.0)
    stacked = stack_pictures(torch.cat((own.new_zeros(4, 16, 16), own)), 4)[seen]
    expected = model.front_end(Frames(model.features(samples), None, stacked, seen))
    assert_same(listeners.pool.waiting[stream], expected)


def test_text_goes_on_when_the_video_is_lost():
    """Sound waits at most MAX_WAITING_FRAMES frames, and not at all after MISSING_FRAMES frames without video."""
    model, samples = talkative(torch.float64), sound(80)
    pictures = torch.rand(20, 16, 16, dtype=torch.float64)
    listeners = StreamingRecogniser(model)
    stream, text, waiting = listeners.open(), "", []
    for t, part in enumerate(samples.split(FRAME)):
        if t < 20:
            listeners.add_picture(stream, t, pictures[t])
        text += hear(listeners, stream, part)
        waiting.append(len(listeners.streams[stream].waiting_TA))
    assert max(waiting[:20]) == 0
    assert max(waiting) == MAX_WAITING_FRAMES
    assert waiting[20 + MISSING_FRAMES :] == [0] * (60 - MISSING_FRAMES)
    assert text + rest(listeners, stream) == model.recognise(samples, pictures) != ""


@pytest.mark.parametrize("fps", [12.5, 15, 25, 30, 60])
def test_cameras_of_other_rates_leave_no_gap(fps):
    """Each frame has a picture taken at most two frames before its end, and the newest that it can have."""
    listeners, clock = StreamingRecogniser(talkative()), PictureClock()
    stream, taken = listeners.open(), []
    shown: dict[int, float] = {}
    for i in range(int(4 * fps)):
        time_s = 0.003 + i / fps
        taken.append(time_s)
        listeners.add_picture(stream, clock.frame(time_s), torch.full((16, 16), time_s), HOLD_FRAMES)
    own = listeners.streams[stream]
    for frame in range(98):
        picture = own.pictures.get(frame, own.held.get(frame))
        assert picture is not None, f"frame {frame} has no picture"
        shown[frame] = float(picture[0, 0])
    for frame, time_s in shown.items():
        end_s = (frame + 1) * FRAME_S
        assert -1e-6 <= end_s - time_s <= 2 * FRAME_S + 1e-6
        newest = max(t for t in taken if t < end_s)
        assert time_s == pytest.approx(newest, abs=1e-5)


def test_clocks_that_drift_keep_pictures_on_their_frames():
    """Ten minutes, the microphone 0.1% slow against the camera: 0.6 s apart without correction."""
    clock, random, drift = PictureClock(), np.random.default_rng(0), 1.001
    run, start_s = 1280, 5000.0
    for i in range(600 * RATE // run):
        samples = i * run
        clock.sound(start_s + samples / RATE * drift + random.normal(0, 0.002), samples)
        middle = samples // FRAME
        time_s = start_s + (middle + 0.5) * FRAME_S * drift
        assert clock.frame(time_s) == middle
    assert clock.frame(start_s - 1) < 0


def write_film(path: Path, lights: list[int], samples: np.ndarray, fps: int = 25) -> None:
    """A film of plain pictures, 64 × 48, with sound."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=fps)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for light in lights:
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), light, np.uint8), format="rgb24")
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        for start in range(0, len(samples), FRAME):
            part = av.AudioFrame.from_ndarray(samples[None, start : start + FRAME], format="s16", layout="mono")
            part.sample_rate, part.pts = RATE, start
            container.mux(sound.encode(part))
        container.mux(sound.encode(None))


@pytest.mark.parametrize("fps", [25, 50])
def test_a_film_is_heard_and_seen(tmp_path, fps, monkeypatch):
    """The text is that of the whole recording with the last picture of each frame."""
    frames = 40
    lights = [int(x) for x in np.random.default_rng(7).integers(20, 230, frames * fps // 25)]
    data = np.random.default_rng(8).normal(0, 3000, frames * FRAME).astype("<i2")
    write_film(tmp_path / "film.mkv", lights, data, fps)
    found = list(film_pictures(tmp_path / "film.mkv"))
    assert [round(time_s * fps) for time_s, _ in found] == list(range(len(lights)))
    assert max(abs(float(picture.mean()) - light) for (_, picture), light in zip(found, lights, strict=True)) < 6
    model, samples = talkative(), torch.from_numpy(data.astype(np.float32) / 32768)
    pictures = torch.stack([scaled(picture, 16) for _, picture in found[fps // 25 - 1 :: fps // 25]])
    seen: dict[int, torch.Tensor] = {}
    see = StreamingRecogniser.add_picture

    def record(self, stream: int, frame: int, picture: torch.Tensor, hold: int) -> None:
        assert frame >= self.streams[stream].made, "the picture comes after its frame was recognised"
        seen[frame] = picture
        see(self, stream, frame, picture, hold)

    monkeypatch.setattr(StreamingRecogniser, "add_picture", record)
    chunks = load_audio(tmp_path / "film.mkv").split(1600)
    text = "".join(listen_film(model, tmp_path / "film.mkv", chunks, "none"))
    assert list(seen) == list(range(frames))
    assert torch.equal(torch.stack(list(seen.values())), pictures)
    assert text == model.recognise(samples, pictures) != ""


def test_films_that_cannot_be_seen(tmp_path, capsys):
    av = pytest.importorskip("av")
    sound = np.random.default_rng(8).normal(0, 3000, 4 * FRAME).astype("<i2")
    write_audio(tmp_path / "sound.wav", sound / 32768)
    (tmp_path / "noise.mp4").write_bytes(b"\x00\x01" * 500)
    with av.open(str(tmp_path / "large.mkv"), "w") as container:
        video = container.add_stream("mpeg4", rate=25)
        video.width, video.height, video.pix_fmt = 4096, 4096, "yuv420p"
        container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        container.mux(video.encode(av.VideoFrame(4096, 4096, "yuv420p")))
        container.mux(video.encode(None))
    for name, problem in (
        ("sound.wav", "lacks pictures"), ("noise.mp4", "cannot be read as video"), ("none.mp4", "does not exist"),
        ("large.mkv", "4096 × 4096"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=problem):
            list(film_pictures(tmp_path / name))
    talkative().save(tmp_path / "step-1")
    SpeechModel(SEEING.replace(picture=0)).save(tmp_path / "step-2")
    write_film(tmp_path / "film.mkv", [9, 99, 199, 99], sound)
    for step, crop in (("step-1", "none"), ("step-2", "mouth")):
        words = ["speech", "listen", str(tmp_path / step), str(tmp_path / "film.mkv"), "--crop", crop]
        if step == "step-1":
            main(words)
            continue
        with pytest.raises(SystemExit):
            main(words)
        assert "this recogniser has no pictures" in " ".join(capsys.readouterr().err.split())


def jpeg(picture: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(picture).save(file, "JPEG", quality=95)
    return file.getvalue()


def test_jpegs_become_pictures():
    pytest.importorskip("av")
    bright = np.zeros((96, 64, 3), np.uint8)
    bright[:48] = 255
    picture = decode_jpeg(jpeg(bright), 16)
    assert picture.shape == (16, 16)
    assert picture[:7].min() > 0.95
    assert picture[9:].max() < 0.05
    assert decode_jpeg(jpeg(bright[..., 0]), 24).shape == (24, 24)  # grey
    good = jpeg(bright)
    for data, problem in (
        (b"", "not a JPEG"), (b"GIF89a", "not a JPEG"), (b"\xff\xd8", "cannot be read"), (good[:200], "cannot be read"),
        (good[:2] + b"\x00" * 500, "cannot be read"), (jpeg(np.zeros((2000, 2000), np.uint8)), "pixels"),
        (b"\xff\xd8" + bytes(MAX_JPEG_BYTES), "bytes"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=problem):
            decode_jpeg(data, 16)


@asynccontextmanager
async def connected(model: SpeechModel):
    aiohttp = pytest.importorskip("aiohttp")
    pytest.importorskip("wsproto")
    server = SpeechServer(model, "tiny", 2, KeyRing(None, None))
    server.engine.start()
    try:
        with listen(ServeConfig(port=0)) as listener:
            async with (
                background_server(server).running(listener),
                aiohttp.ClientSession(url_of(listener)) as client,
                client.ws_connect("/v1/realtime?intent=transcription") as socket,
            ):
                yield socket
    finally:
        server.engine.stop()


async def until(socket, kind: str) -> dict:
    """The first event of this kind."""
    while True:
        event = json.loads((await socket.receive()).data)
        if event["type"] == kind:
            return event
        assert event["type"] != "error", event


def go(test) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


FORMAT = {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": RATE}}}}}


def segment(marker: int, data: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(data) + 2).to_bytes(2, "big") + data


def test_a_jpeg_of_thousands_of_tables_or_scans_is_refused():
    """128 KB of empty scans would take more than a second of the event loop, which serves all connections."""
    pytest.importorskip("av")
    tables = segment(0xC4, b"\x00\x01" + bytes(15) + b"\x00") + segment(0xC4, b"\x10\x01" + bytes(15) + b"\xe0")
    frame = segment(0xC2, b"\x08" + (480).to_bytes(2, "big") + (640).to_bytes(2, "big") + b"\x01\x01\x11\x00")
    head = b"\xff\xd8" + segment(0xDB, b"\x00" + b"\x01" * 64) + frame + tables
    head += segment(0xDA, b"\x01\x01\x00\x00\x00\x00") + bytes(600)  # grey
    scan = segment(0xDA, b"\x01\x01\x00\x01\x3f\x00") + b"\x40\x00\x00"  # no coefficient of any block
    assert decode_jpeg(head + 10 * scan + b"\xff\xd9", 16).mean() == pytest.approx(0.5, abs=0.01)
    for more in (scan, segment(0xC4, b"\x10\x01" + bytes(15) + b"\xe0"), frame):
        bomb = head + more * ((MAX_JPEG_BYTES - len(head) - 2) // len(more)) + b"\xff\xd9"
        with pytest.raises(DataError, match="tables and scans; send a JPEG with at most 64"):
            decode_jpeg(bomb, 16)


@pytest.mark.parametrize("start_us", [None, 7_000_000_123])
def test_pictures_over_the_websocket(start_us):
    """With and without times of the sound, the text is that of the whole recording with its decoded pictures."""
    pytest.importorskip("av")
    model, random = talkative(), np.random.default_rng(3)
    data = random.normal(0, 3000, 40 * FRAME).astype("<i2")
    files = [jpeg(random.integers(0, 255, (16, 16), np.uint8)) for _ in range(40)]
    pictures = torch.stack([decode_jpeg(file, 16) for file in files])
    whole = torch.from_numpy(data.astype(np.float32) / 32768)
    expected = model.recognise(whole, pictures)
    assert expected != model.recognise(whole)

    async def test() -> None:
        async with connected(model) as socket:
            session = (await until(socket, "session.created"))["session"]
            assert session["video"]["input"]["format"] == {"type": "image/jpeg", "size": 16}
            assert session["mean_latency_ms"] == 160
            await socket.send_json(FORMAT)
            if start_us is not None:  # the first picture comes before the first sound, which tells the time
                await socket.send_json({"type": "input_audio_buffer.append", "audio": "", "time_us": start_us})
            for t, file in enumerate(files):
                time_us = (start_us or 0) + t * 40_000
                picture = {"type": "input_video_buffer.append", "image": base64.b64encode(file).decode()}
                await socket.send_json(picture | {"time_us": time_us + 20_000})
                part = base64.b64encode(data[t * FRAME : (t + 1) * FRAME].tobytes()).decode()
                sound = {"type": "input_audio_buffer.append", "audio": part}
                await socket.send_json(sound if start_us is None else sound | {"time_us": time_us})
            await socket.send_json({"type": "input_audio_buffer.commit"})
            done = await until(socket, "conversation.item.input_audio_transcription.completed")
            assert done["transcript"] == expected

    go(test)


def test_hostile_pictures_are_answered_and_sound_goes_on():
    pytest.importorskip("av")
    model, data = talkative(), np.random.default_rng(4).normal(0, 3000, 20 * FRAME).astype("<i2")
    good = base64.b64encode(jpeg(np.zeros((16, 16), np.uint8))).decode()
    hostile = [
        ({"time_us": 0}, "image is not a string"), ({"time_us": 0, "image": "??"}, "image is not base64"),
        ({"time_us": 0, "image": "AAAA"}, "not a JPEG"), ({"image": good}, "time_us is missing"),
        ({"time_us": -1, "image": good}, "whole microseconds"), ({"time_us": 0.5, "image": good}, "whole microseconds"),
        ({"time_us": True, "image": good}, "whole microseconds"), ({"time_us": 1 << 60, "image": good}, "microseconds"),
        ({"time_us": 40_000 * (MAX_WAITING_PICTURES + 60), "image": good}, "ahead of the sound"),
        ({"time_us": 0, "image": "A" * (2 * MAX_JPEG_BYTES + 4)}, "too large"),
    ]  # fmt: skip

    async def test() -> None:
        async with connected(model) as socket:
            await socket.send_json(FORMAT)
            await until(socket, "session.updated")
            for fields, problem in hostile:
                await socket.send_json({"type": "input_video_buffer.append"} | fields)
                error = json.loads((await socket.receive()).data)["error"]
                assert problem in error["message"], fields
            await socket.send_json({
                "type": "input_audio_buffer.append", "audio": base64.b64encode(data.tobytes()).decode()
            })  # fmt: skip
            await socket.send_json({"type": "input_audio_buffer.commit"})
            done = await until(socket, "conversation.item.input_audio_transcription.completed")
            assert done["transcript"] == model.recognise(torch.from_numpy(data.astype(np.float32) / 32768))

    go(test)


def test_a_recogniser_without_pictures_says_so():
    async def test() -> None:
        async with connected(SpeechModel(SEEING.replace(picture=0)).requires_grad_(False).eval()) as socket:
            assert "video" not in (await until(socket, "session.created"))["session"]
            await socket.send_json({"type": "input_video_buffer.append", "image": "", "time_us": 0})
            error = json.loads((await socket.receive()).data)["error"]
            assert "does not accept pictures" in error["message"]

    go(test)


@pytest.mark.slow
def test_an_hour_takes_the_memory_of_ten_minutes():
    """One stream with pictures at 15 a second on a drifting clock."""
    config = SEEING.replace(segment=32, left=32, width=8, heads=1, ffn_width=8, joint_width=4, picture_history=1)
    listeners, clock = StreamingRecogniser(SpeechModel(config).requires_grad_(False).eval()), PictureClock()
    stream, samples, picture = listeners.open(), sound(250).float(), torch.rand(16, 16)

    def state() -> list[int]:
        own = listeners.streams[stream]
        return [
            len(own.waiting_TA),
            len(own.pictures),
            len(own.held),
            len(own.sound.tail),
            len(listeners.pool.waiting[stream]),
        ]

    peak_kib, sizes = 0, []
    for run in range(360):  # 10 s each
        clock.sound(run * 10 * 1.001, run * len(samples))
        for i in range(150):
            listeners.add_picture(stream, clock.frame(run * 10.01 + i / 15), picture, HOLD_FRAMES)
        listeners.push(stream, samples)
        while listeners.step():
            pass
        if run == 60:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if run >= 60:
            sizes.append(state())
    assert listeners.streams[stream].made > 89_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 4096
    assert all(max(size) < 2000 for size in sizes)
