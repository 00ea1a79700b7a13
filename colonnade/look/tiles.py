"""Tensor tiles: a JSON header and float16 values.

    4 bytes       length of the header, little-endian
    header        {"shape": [rows, cols], "scale": s, "parts": p, "offset": o, …}, then zeros up to byte o
    p planes      float16, row by row; value = s · (plane_0 + plane_1 / 2048)

One plane has 11 bits, enough for drawing; two have 22, enough for computing. ``reduce`` keeps, of each square of
n × n elements, the one of largest magnitude, so that a large matrix fits on a screen and no outlier is lost.
"""

import json
import re
import struct

import numpy as np

from colonnade.errors import RequestError

MAX_TILE = 1 << 24
"""Maximum number of elements of one response."""
_SPAN = re.compile(r"(\d{1,9}):(\d{1,9})")


def span(text: str | None, size: int, name: str) -> slice:
    """``"a:b"`` as a slice of a dimension; raises :class:`RequestError` outside of it."""
    if text is None:
        return slice(0, size)
    match = _SPAN.fullmatch(text)
    if match is None or not int(match[1]) < int(match[2]) <= size:
        raise RequestError(f"{name}={text[:40]} is not a range within 0:{size}; use first:last+1", param=name)
    return slice(int(match[1]), int(match[2]))


def reduce_tile(x: np.ndarray, by: int) -> np.ndarray:
    """Of each square of ``by`` × ``by`` elements the one of largest magnitude."""
    if by == 1:
        return x
    rows, cols = (-(-size // by) for size in x.shape)
    padded = np.zeros((rows * by, cols * by), x.dtype)
    padded[: x.shape[0], : x.shape[1]] = x
    squares = padded.reshape(rows, by, cols, by).transpose(0, 2, 1, 3).reshape(rows, cols, by * by)
    return np.take_along_axis(squares, np.abs(squares).argmax(-1)[..., None], -1)[..., 0]


def encode_tile(x: np.ndarray, parts: int, **header: object) -> bytes:
    """``x`` as a tile; raises :class:`RequestError` for values that are not finite."""
    x = x.astype(np.float64)
    if not np.isfinite(x).all():
        raise RequestError("this tensor has values that are not finite; look at an earlier layer")
    scale = max(float(np.abs(x).max(initial=0)), 1e-30) / 1024
    planes, rest = [], x / scale
    for _ in range(parts):
        planes.append(rest.astype("<f2"))
        rest = (rest - planes[-1].astype(np.float64)) * 2048
    fields = {"shape": list(x.shape), "scale": scale, "parts": parts, **header}
    length = len(json.dumps(fields | {"offset": 10**6}).encode())
    offset = -(-(4 + length) // 8) * 8
    text = json.dumps(fields | {"offset": offset}).encode().ljust(length)
    return struct.pack("<I", length) + text + bytes(offset - 4 - length) + b"".join(map(np.ndarray.tobytes, planes))


def decode_tile(data: bytes) -> np.ndarray:
    """The values of a tile, in float64."""
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    rows, cols = header["shape"]
    planes = np.frombuffer(data, "<f2", header["parts"] * rows * cols, header["offset"]).astype(np.float64)
    weights = header["scale"] / 2048.0 ** np.arange(header["parts"])
    return (planes.reshape(-1, rows, cols) * weights[:, None, None]).sum(0)
