"""Finds a face in a picture and crops it or its mouth: MTCNN, smoothed landmarks, a similarity transform.

MTCNN (Zhang et al., arXiv 1604.02878) is a cascade of three small networks: P proposes windows on a pyramid of scales,
R rejects most of them, O places the box and five landmarks. The weights are the data files of the package
facenet-pytorch (MIT), which is installed without its dependencies and never imported.

A live crop uses past pictures only: the landmarks are those of each fifth picture, smoothed exponentially. There
network O looks where the face was; the cascade runs if it is not there. The crop is placed by the similarity transform
(rotation, scale, shift) that maps a mean face's landmarks to the smoothed ones: one that is misplaced moves it little.
"""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.errors import DataError, RequestError
from colonnade.speech.video import brightness

PACKAGE = "facenet_pytorch"
NETWORKS = ("pnet", "rnet", "onet")
THRESHOLDS = (0.6, 0.7, 0.7)
"""Minimum score of a window after each network."""
CELL, STRIDE, FACTOR = 12, 2, 0.709
"""Window and stride of network P [pixels]; the ratio of neighbouring scales of the pyramid."""
MIN_FACE_SHARE = 0.15
"""Smallest face, as a share of the picture's shorter side."""
MAX_WINDOWS = 256
"""Windows that P passes to R; a picture of a crowd or of noise has thousands."""
DETECTION_INTERVAL = 5
"""Pictures from one detection to the next."""
SMOOTHING = 0.5
"""Weight of new landmarks."""
MAX_SMOOTHED_MOVE = 0.5
"""Landmarks that move by more than this share of the eyes' distance are not smoothed: the picture was cut."""
MAX_MISSES = 5
"""Detections without a face after which the last landmarks are dropped: a second at 25 pictures per second."""
# (x, y): eyes, nose, corners of the mouth, in units of the eyes' distance, from the middle between them.
MEAN_FACE = np.array([-0.5, 0.5, 0.0, -0.41, 0.41]) + 1j * np.array([0.0, 0.0, 0.57, 1.16, 1.16])
REGIONS = {"mouth": (1.16j, 1.4), "face": (0.5j, 2.8)}
"""Middle and side of the crops in these units: a closed mouth is 0.6 of its crop's width."""


@dataclass(frozen=True)
class Face:
    """A face in a picture, in pixels."""

    score: float
    box: tuple[float, float, float, float]
    """left, top, right, bottom."""
    points: np.ndarray
    """(5,) complex, x + iy: left eye, right eye, nose, left and right corner of the mouth, as seen in the picture."""


class FaceDetector:
    """MTCNN on a CPU; calls from several threads may overlap."""

    def __init__(self, folder: Path | None = None):
        """``folder`` has pnet.pt, rnet.pt and onet.pt; by default that of the package facenet-pytorch."""
        folder = folder or weights_folder()
        self.weights: list[dict[str, Tensor]] = []
        for name in NETWORKS:
            path = folder / f"{name}.pt"
            try:
                tensors = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as why:  # OSError, RuntimeError, EOFError, UnpicklingError: it depends on the bytes
                raise DataError(f"{path} cannot be read: {why}; install facenet-pytorch again") from why
            self.weights.append({key: x.float() for key, x in tensors.items()})

    @torch.inference_mode()
    def find(self, picture: np.ndarray, near: Face | None = None) -> Face | None:
        """The largest face of an RGB picture, (height, width, 3) uint8; None if there is none.

        ``near`` is the face of an earlier picture: it is looked for there first, which is several times faster.
        """
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise DataError(f"a picture of shape {picture.shape} and {picture.dtype}; use (height, width, 3) uint8")
        x_1CHW = torch.tensor(picture).permute(2, 0, 1)[None]
        boxes = torch.tensor([near.box] if near else []).view(-1, 4)
        # The second pass is for a face that has moved: points of a window off its middle are worse.
        scores, boxes, points = self._place(x_1CHW, self._place(x_1CHW, boxes)[1])
        if not len(boxes):
            scores, boxes, points = self._place(x_1CHW, self._refine(x_1CHW, self._propose(x_1CHW)))
        if not len(boxes):
            return None
        best = int(_areas(boxes).argmax())
        x, y = points[best].double().numpy()
        left, top, right, bottom = boxes[best].tolist()
        return Face(float(scores[best]), (left, top, right, bottom), x + 1j * y)

    def _propose(self, x_1CHW: Tensor) -> Tensor:
        """Windows (n, 4) of network P over a pyramid of scales."""
        height, width = x_1CHW.shape[2:]
        scale = CELL / max(CELL, MIN_FACE_SHARE * min(height, width))
        found, scores = [torch.zeros(0, 4)], [torch.zeros(0)]
        x_1CHW = _normalised(x_1CHW)
        while min(height, width) * scale >= CELL:
            size = (int(height * scale), int(width * scale))
            score_HW, shift_4HW = _pnet(F.interpolate(x_1CHW, size, mode="area"), self.weights[0])
            rows, columns = (score_HW > THRESHOLDS[0]).nonzero(as_tuple=True)
            corner = torch.stack((columns, rows, columns, rows), 1).float() * STRIDE
            corner[:, 2:] += CELL
            score = score_HW[rows, columns]
            kept = suppress(corner, score, 0.5)
            found.append(_moved(corner / scale, shift_4HW[:, rows, columns].T)[kept])
            scores.append(score[kept])
            scale *= FACTOR
        boxes, score = torch.cat(found), torch.cat(scores)
        return boxes[suppress(boxes, score, 0.7)[:MAX_WINDOWS]]

    def _refine(self, x_1CHW: Tensor, boxes: Tensor) -> Tensor:
        """The windows that network R keeps, moved."""
        boxes, windows = _windows(x_1CHW, boxes, 24)
        if not len(boxes):
            return boxes
        score, shift = _rnet(windows, self.weights[1])
        kept = score > THRESHOLDS[1]
        boxes, score = _moved(boxes[kept], shift[kept]), score[kept]
        return boxes[suppress(boxes, score, 0.7)]

    def _place(self, x_1CHW: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, boxes and points (n, 2, 5) of the faces that network O finds."""
        boxes, windows = _windows(x_1CHW, boxes, 48)
        if not len(boxes):
            return boxes.new_zeros(0), boxes, boxes.new_zeros(0, 2, 5)
        score, shift, points = _onet(windows, self.weights[2])
        sides = (boxes[:, 2:] - boxes[:, :2])[:, :, None]
        points = boxes[:, :2, None] + points.view(-1, 2, 5) * sides
        kept = score > THRESHOLDS[2]
        boxes, score, points = _moved(boxes[kept], shift[kept]), score[kept], points[kept]
        kept = suppress(boxes, score, 0.7, contained=True)
        return score[kept], boxes[kept], points[kept]


class FaceTracker:
    """Crops one camera's pictures, in order: to a region of :data:`REGIONS`."""

    def __init__(self, detector: FaceDetector, size: int, region: str = "mouth"):
        self.detector, self.size, self.region = detector, size, region
        self.face: Face | None = None
        self.points: np.ndarray | None = None
        """Smoothed landmarks."""
        self._seen = self._missed = 0

    def crop(self, picture: np.ndarray) -> Tensor | None:
        """(size, size) float32 brightness, 0 to 1; None while there is no face."""
        if self._seen % DETECTION_INTERVAL == 0:
            self._update(self.detector.find(picture, self.face))
        self._seen += 1
        return None if self.points is None else crop_region(picture, self.points, self.size, self.region)

    def _update(self, face: Face | None) -> None:
        self.face = face
        if face is None:
            self._missed += 1
            if self._missed >= MAX_MISSES:
                self.points = None
            return
        self._missed = 0
        old, new = self.points, face.points
        if old is None or abs(new - old).max() > MAX_SMOOTHED_MOVE * abs(new[1] - new[0]):
            self.points = new
        else:
            self.points = old + SMOOTHING * (new - old)


def similarity(points: np.ndarray) -> tuple[complex, complex]:
    """(a, b) so that a·w + b maps the mean face's points w to ``points`` with the least sum of squares."""
    middle, mean = points.mean(), MEAN_FACE.mean()
    centred = MEAN_FACE - mean
    a = complex((np.conj(centred) * (points - middle)).sum() / (abs(centred) ** 2).sum())
    return a, complex(middle - a * mean)


def crop_region(picture: np.ndarray, points: np.ndarray, size: int, region: str) -> Tensor:
    """(size, size) float32 brightness of a square in which the face is upright; black outside of the picture."""
    a, b = similarity(points)
    middle, side = REGIONS[region]
    oversample = max(1, min(8, round(abs(a) * side / size)))  # fewer samples than pixels would alias
    steps = (np.arange(size * oversample) + 0.5) / (size * oversample) - 0.5
    places = a * (middle + side * (steps[None, :] + 1j * steps[:, None])) + b
    (left, right), (top, bottom) = (
        (max(0, int(z.min()) - 1), max(0, min(length, int(z.max()) + 2)))
        for z, length in ((places.real, picture.shape[1]), (places.imag, picture.shape[0]))
    )
    if left >= right or top >= bottom:
        return torch.zeros(size, size)
    seen = brightness(picture[top:bottom, left:right])
    x, y = (places.real - left) / (right - left), (places.imag - top) / (bottom - top)
    grid = torch.from_numpy(np.stack((2 * x - 1, 2 * y - 1), -1))[None].float()
    return F.avg_pool2d(F.grid_sample(seen, grid, align_corners=False)[0], oversample)[0]


def suppress(boxes: Tensor, scores: Tensor, overlap: float, contained: bool = False) -> Tensor:
    """Indices of boxes (n, 4), best first, without those that overlap a better one by more than ``overlap``.

    The overlap is the intersection over the union, with ``contained`` over the smaller box.
    """
    order = scores.argsort(descending=True)
    boxes, areas = boxes[order], _areas(boxes[order])
    low, high = (
        torch.maximum(boxes[:, None, :2], boxes[None, :, :2]),
        torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:]),
    )
    both = (high - low).clamp(min=0).prod(2)
    least = torch.minimum(areas[:, None], areas[None])
    whole = least if contained else areas[:, None] + areas[None] - both
    clash = (both > overlap * whole).numpy()
    kept: list[int] = []
    open_ = np.ones(len(boxes), bool)
    for i in range(len(boxes)):
        if open_[i]:
            kept.append(i)
            open_ &= ~clash[i]
    return order[kept]


@functools.cache
def face_detector() -> FaceDetector:
    """The detector of this process; raises RequestError if its weights are not installed."""
    return FaceDetector()


def has_weights() -> bool:
    """Whether the package with the detector's weights is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def weights_folder() -> Path:
    """The data folder of the package facenet-pytorch; raises RequestError if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise RequestError("face detection needs weights: pip install --no-deps facenet-pytorch==2.6.0")
    return Path(spec.origin).parent / "data"


def _normalised(x: Tensor) -> Tensor:
    """Bytes as the networks take them."""
    return x.float().sub(127.5).div(128)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)


def _moved(boxes: Tensor, shift: Tensor) -> Tensor:
    """Boxes whose sides are moved by ``shift``, in units of width and height."""
    return boxes + shift * (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)


def _windows(x_1CHW: Tensor, boxes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Squares around boxes, and their pictures (n, 3, size, size); those outside the picture are skipped."""
    height, width = x_1CHW.shape[2:]
    half = (boxes[:, 2:] - boxes[:, :2]).amax(1, keepdim=True) / 2
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    squares = torch.cat((middle - half, middle + half), 1)
    kept: list[int] = []
    pictures: list[Tensor] = []
    for i, (left, top, right, bottom) in enumerate(squares.round().int().tolist()):
        part = x_1CHW[:, :, max(0, top) : max(0, bottom), max(0, left) : max(0, right)]
        if min(part.shape[2:]) > 0 and (right - left) <= 2 * max(height, width):
            sides = (max(0, -left), max(0, right - width), max(0, -top), max(0, bottom - height))
            padded = F.pad(_normalised(part), sides)  # grey
            pictures.append(F.interpolate(padded, (size, size), mode="area"))
            kept.append(i)
    return squares[kept], torch.cat(pictures) if pictures else torch.zeros(0, 3, size, size)


def _pnet(x_1CHW: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores (h, w) and shifts (4, h, w)."""
    x = F.max_pool2d(_conv(x_1CHW, weights, 1), 2, 2, ceil_mode=True)
    x = _conv(_conv(x, weights, 2), weights, 3)
    score = F.conv2d(x, weights["conv4_1.weight"], weights["conv4_1.bias"]).softmax(1)[0, 1]
    return score, F.conv2d(x, weights["conv4_2.weight"], weights["conv4_2.bias"])[0]


def _rnet(x: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores (n,) and shifts (n, 4) of pictures of 24 × 24."""
    x = F.max_pool2d(_conv(x, weights, 1), 3, 2, ceil_mode=True)
    x = F.max_pool2d(_conv(x, weights, 2), 3, 2, ceil_mode=True)
    x = _flat(_conv(x, weights, 3))
    x = F.prelu(_linear(x, weights, "dense4"), weights["prelu4.weight"])
    return _linear(x, weights, "dense5_1").softmax(1)[:, 1], _linear(x, weights, "dense5_2")


def _onet(x: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (n,), shifts (n, 4) and points (n, 10) of pictures of 48 × 48: five x, then five y."""
    x = F.max_pool2d(_conv(x, weights, 1), 3, 2, ceil_mode=True)
    x = F.max_pool2d(_conv(x, weights, 2), 3, 2, ceil_mode=True)
    x = F.max_pool2d(_conv(x, weights, 3), 2, 2, ceil_mode=True)
    x = _flat(_conv(x, weights, 4))
    x = F.prelu(_linear(x, weights, "dense5"), weights["prelu5.weight"])
    score = _linear(x, weights, "dense6_1").softmax(1)[:, 1]
    return score, _linear(x, weights, "dense6_2"), _linear(x, weights, "dense6_3")


def _conv(x: Tensor, weights: dict[str, Tensor], number: int) -> Tensor:
    x = F.conv2d(x, weights[f"conv{number}.weight"], weights[f"conv{number}.bias"])
    return F.prelu(x, weights[f"prelu{number}.weight"])


def _linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _flat(x_NCHW: Tensor) -> Tensor:
    """(n, W·H·C): the order in which the dense layers were trained."""
    return x_NCHW.permute(0, 3, 2, 1).flatten(1)
