"""Screenshots compared with small reference pictures, tolerant of rasterisers."""

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

TOLERANCE = 6.0
"""Largest mean difference of a colour channel, of 255."""
SIZE = (160, 160)


def difference(a: bytes | Path, b: bytes | Path) -> float:
    """Mean difference of two pictures, 0 to 255, averaged over blocks so that points may move by a pixel."""
    pictures = [Image.open(io.BytesIO(each) if isinstance(each, bytes) else each) for each in (a, b)]
    x, y = (np.asarray(each.convert("RGB").resize(SIZE, Image.Resampling.BOX), float) for each in pictures)
    return float(np.abs(x - y).mean())


def check_references(shots: dict[str, bytes], folder: Path) -> None:
    """Each shot is its reference, and nearer to it than to any other.

    COLONNADE_WRITE_REFERENCES=1 writes them anew: look at each.
    """
    worst = {}
    for name, shot in shots.items():
        file = folder / f"{name}.png"
        if os.environ.get("COLONNADE_WRITE_REFERENCES"):
            folder.mkdir(exist_ok=True)
            small = Image.open(io.BytesIO(shot)).convert("RGB").resize(SIZE, Image.Resampling.BOX)
            small.quantize(48).save(file, optimize=True)
        worst[name] = difference(shot, file)
    assert max(worst.values()) < TOLERANCE, worst
    for name, shot in shots.items():
        others = min(difference(shot, folder / f"{other}.png") for other in shots if other != name)
        assert worst[name] < others, name
