"""Screenshots compared with small reference pictures, tolerant of rasterisers."""

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

TOLERANCE = 6.0
"""Largest mean difference of a colour channel, of 255."""
SIZE = (160, 160)


def reduced(picture: bytes | Path) -> np.ndarray:
    """A picture averaged over blocks, so that points may move by a pixel."""
    opened = Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture)
    return np.asarray(opened.convert("RGB").resize(SIZE, Image.Resampling.BOX), float)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Mean difference of two reduced pictures, 0 to 255."""
    return float(np.abs(a - b).mean())


def check_references(shots: dict[str, bytes], folder: Path) -> None:
    """Each shot is its reference, and nearer to it than to any other.

    COLONNADE_WRITE_REFERENCES=1 writes them anew: look at each.
    """
    seen = {name: reduced(shot) for name, shot in shots.items()}
    if os.environ.get("COLONNADE_WRITE_REFERENCES"):
        folder.mkdir(exist_ok=True)
        for name, pixels in seen.items():
            small = Image.fromarray(pixels.round().astype(np.uint8))
            small.quantize(48).save(folder / f"{name}.png", optimize=True)
    references = {name: reduced(folder / f"{name}.png") for name in shots}
    worst = {name: difference(pixels, references[name]) for name, pixels in seen.items()}
    assert max(worst.values()) < TOLERANCE, worst
    for name, pixels in seen.items():
        others = min((difference(pixels, references[other]) for other in shots if other != name), default=np.inf)
        assert worst[name] < others, name
