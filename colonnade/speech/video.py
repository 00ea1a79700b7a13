"""Pictures of a live camera or a video: decodes them and assigns them to frames.

A camera has its own rate and clock. A picture belongs to the frame of 40 ms in which it was taken; if a frame has
several (30 per second), the last one is used. It is reused for the next frame until that one has its own, so that 15
per second leave no gap.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.errors import DataError
from colonnade.speech.audio import FORMATS
from colonnade.speech.features import FRAME, RATE
from colonnade.speech.pcm import require

MAX_JPEG_BYTES = 1 << 17
MAX_PIXELS = 640 * 480
MAX_FILM_PIXELS = 3840 * 2160
MAX_SEGMENTS = 64
"""Frame headers, Huffman tables and scans of a JPEG; thousands of empty ones would take a second to decode."""
HOLD_FRAMES = 1
"""Number of following frames for which a picture is reused."""
SMOOTHING = 0.1
"""Weight of each new measurement of the clocks' difference, since the arrival times of audio jitter."""


def decode_jpeg(data: bytes, size: int) -> Tensor:
    """(size, size) float32 brightness, 0 to 1; raises DataError for data that is not a JPEG or too large."""
    grey = _decode(data).reformat(size, size, "gray", interpolation="AREA").to_ndarray()
    return torch.from_numpy(grey).float() / 255


def decode_rgb(data: bytes) -> np.ndarray:
    """(height, width, 3) uint8; raises DataError for data that is not a JPEG or too large."""
    return _decode(data).to_ndarray(format="rgb24")


def _decode(data: bytes) -> Any:
    """PyAV's frame of a JPEG."""
    av = require("av")
    if len(data) > MAX_JPEG_BYTES:
        raise DataError(f"the picture has {len(data):,} bytes; send at most {MAX_JPEG_BYTES:,}")
    if not data.startswith(b"\xff\xd8"):
        raise DataError("the picture is not a JPEG; send one in base64")
    # Such pairs of bytes do not occur in a picture's coded data, where zeros are stuffed.
    if (segments := len(re.findall(rb"\xff[\xc0-\xcf\xda]", data))) > MAX_SEGMENTS:
        raise DataError(f"the picture has {segments:,} tables and scans; send a JPEG with at most {MAX_SEGMENTS}")
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.options = {"max_pixels": str(MAX_PIXELS)}
    try:
        frames = [*decoder.decode(av.Packet(data)), *decoder.decode(None)]
    except (av.FFmpegError, ValueError, MemoryError) as why:
        raise DataError(f"the picture cannot be read: {why}; send a JPEG of at most {MAX_PIXELS:,} pixels") from None
    if not frames:
        raise DataError(f"the picture is not complete; send a whole JPEG of at most {MAX_PIXELS:,} pixels")
    return frames[0]


def film_pictures(path: Path) -> Iterator[tuple[float, np.ndarray]]:
    """Time [s] after the first sample of the sound, and (height, width, 3) uint8 of at most MAX_PIXELS, of a video.
    Raises DataError for a file without pictures, or with larger ones than MAX_FILM_PIXELS.
    """
    av = require("av")
    if not path.is_file():
        raise DataError(f"{path} does not exist; use a video file")
    try:
        with av.open(str(path), options={"format_whitelist": FORMATS}) as container:
            if not container.streams.video or not container.streams.audio:
                raise DataError(f"{path} lacks pictures or sound; use a video with both, or remove --crop")
            video, sound = container.streams.video[0], container.streams.audio[0]
            if video.width * video.height > MAX_FILM_PIXELS:
                raise DataError(
                    f"{path} has pictures of {video.width} × {video.height}, at most {MAX_FILM_PIXELS:,} pixels are "
                    "read; make them smaller"
                )
            start_s = float((sound.start_time or 0) * sound.time_base)
            shrink = min(1.0, (MAX_PIXELS / max(1, video.width * video.height)) ** 0.5)
            width, height = (max(1, int(shrink * n)) for n in (video.width, video.height))
            for frame in container.decode(video):
                if frame.time is not None:
                    yield frame.time - start_s, frame.reformat(width, height).to_ndarray(format="rgb24")
    except (av.FFmpegError, ValueError) as why:
        raise DataError(f"{path} cannot be read as video: {why}; convert it to MP4") from None


def scaled(picture: np.ndarray, size: int) -> Tensor:
    """(size, size) float32 brightness, 0 to 1, of a whole RGB picture."""
    return F.interpolate(brightness(picture), (size, size), mode="area")[0, 0]


def brightness(picture: np.ndarray) -> Tensor:
    """(1, 1, height, width) float32, 0 to 1, of an RGB picture."""
    return torch.tensor(picture).float().mean(2)[None, None] / 255


class PictureClock:
    """Assigns pictures to frames by their times [s]; the clocks of pictures and samples may differ."""

    def __init__(self):
        self.start_s = 0.0
        """Time of sample 0 by the pictures' clock."""
        self._known = False

    def sound(self, time_s: float, samples: int) -> None:
        """Audio at ``time_s`` begins after ``samples`` samples at 16 kHz."""
        start_s = time_s - samples / RATE
        self.start_s += (SMOOTHING if self._known else 1.0) * (start_s - self.start_s)
        self._known = True

    def frame(self, time_s: float) -> int:
        """The frame in which a picture was taken; negative before the first sample."""
        return int((time_s - self.start_s) * RATE // FRAME)
