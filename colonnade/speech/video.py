"""Pictures of a live camera: JPEG to the recogniser's size, and the frame that each belongs to.

A camera has a rate and a clock of its own. A picture belongs to the frame of 40 ms in which it was taken, the last one
if a frame has several (30 a second). It also stands for the next frame until that has its own, so that 15 a second
leave no gap.
"""

import re

import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.speech.features import FRAME, RATE
from colonnade.speech.pcm import require

MAX_JPEG_BYTES = 1 << 17
MAX_PIXELS = 640 * 480
MAX_SEGMENTS = 64
"""Frame headers, Huffman tables and scans of a JPEG; thousands of empty ones would take a second to decode."""
HOLD = 1
"""Frames after its own that a picture stands for."""
SMOOTHING = 0.1
"""Weight of each new measurement of the clocks' difference, since the arrival times of sound jitter."""


def decode_jpeg(data: bytes, size: int) -> Tensor:
    """(size, size) float32 brightness, 0 to 1; raises DataError for what is no JPEG or too large."""
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
    grey = frames[0].reformat(size, size, "gray", interpolation="AREA").to_ndarray()
    return torch.from_numpy(grey).float() / 255


class PictureClock:
    """Frames of pictures by their times [s]; the clock of the pictures may differ from that of the samples."""

    def __init__(self):
        self.start_s = 0.0
        """When sample 0 was taken, by the clock of the pictures."""
        self._known = False

    def sound(self, time_s: float, samples: int) -> None:
        """A run of sound began at ``time_s``, after ``samples`` at 16 kHz."""
        start_s = time_s - samples / RATE
        self.start_s += (SMOOTHING if self._known else 1.0) * (start_s - self.start_s)
        self._known = True

    def frame(self, time_s: float) -> int:
        """The frame in which a picture was taken; negative before the first sample."""
        return int((time_s - self.start_s) * RATE // FRAME)
