"""Draws pictures of a mouth from phoneme times; they are easier to read than real lips.

They test fusion, synchronisation and streaming. Results with them say nothing about the gain from a real face, so every
published number states that the mouths are drawn. The class of the phoneme determines the width and opening of the lips
and the visible part of the teeth; speaker, light and camera shake vary.
"""

from collections.abc import Sequence

import numpy as np

from colonnade.speech.synth import Phoneme

SHAPES = (
    ("pbm", (0.62, 0.02, 0.0)), ("fv", (0.62, 0.10, 0.9)), ("w", (0.30, 0.18, 0.0)), ("uUoO", (0.36, 0.34, 0.0)),
    ("aA3@V&0", (0.60, 0.62, 0.2)), ("iI", (0.82, 0.22, 0.5)), ("eE", (0.74, 0.40, 0.4)), ("szZSTD", (0.68, 0.12, 1.0)),
    ("tdnlr", (0.60, 0.22, 0.4)), ("kgNhjx", (0.58, 0.30, 0.1)),
)  # fmt: skip
"""(first letters of espeak-ng's names, (width, opening, teeth))."""
REST = (0.58, 0.04, 0.0)


def draw_mouths(phonemes: Sequence[Phoneme], frames: int, size: int, random: np.random.Generator) -> np.ndarray:
    """(frames, size, size) float32 pictures, one for each 40 ms, at the middle of the frame."""
    times = (np.arange(frames) + 0.5) * 0.04
    starts = np.array([p.start_s for p in phonemes])
    shapes = np.array([_shape(p.name) for p in phonemes] or [REST])
    # A shape is reached in the middle of its phoneme, and mouths move smoothly between.
    middles = starts + np.diff(starts, append=starts[-1:] + 0.1) / 2 if len(starts) else np.zeros(1)
    width, opening, teeth = (np.interp(times, middles, column, REST[i]) for i, column in enumerate(shapes.T))
    scale, light, skin = random.uniform(0.85, 1.15), random.uniform(0.8, 1.2), random.uniform(0.5, 0.8)
    shake = np.cumsum(random.normal(0, 0.004, (frames, 2)), 0) + random.normal(0, 0.03, 2)
    grid, shake = np.linspace(-1, 1, size, dtype=np.float32), shake.astype(np.float32)
    x, y = grid[None, None, :] - shake[:, 0, None, None], grid[None, :, None] - shake[:, 1, None, None]
    half_width, half_height, teeth = (
        v[:, None, None].astype(np.float32) for v in (scale * width, scale * (opening + 0.03), teeth)
    )
    outside = (x / half_width) ** 2 + (y / (half_height + 0.14)) ** 2
    inside = (x / half_width) ** 2 + (y / half_height) ** 2
    lips, hole = _edge(outside), _edge(inside)
    tooth = hole * teeth * (y < 0.1 * half_height)
    picture = skin * (1 - lips) + 0.35 * skin * (lips - hole).clip(0) + 0.9 * tooth
    return light * picture + 0.02 * random.standard_normal(picture.shape, np.float32)


def _edge(value: np.ndarray) -> np.ndarray:
    """1 inside of the curve value = 1, 0 outside, smooth in between."""
    return 1 / (1 + np.exp(np.clip(8 * (value - 1), -30, 30)))


def _shape(name: str) -> tuple[float, float, float]:
    first = name.lstrip("'%,_:;|=")[:1]
    return next((shape for letters, shape in SHAPES if first and first in letters), REST)
