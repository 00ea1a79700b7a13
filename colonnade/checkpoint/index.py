"""``tensors.json`` of a native checkpoint: the shape, the type and the pieces of each tensor, by key.

Keys are ``part/parameter`` with the parts ``weights``, ``exp_avg`` and ``exp_avg_sq``.
"""

import math
from pathlib import Path

import torch
from pydantic import Field

from colonnade.checkpoint import folder as folders
from colonnade.config import Config
from colonnade.errors import CheckpointError, ConfigError

INDEX = "tensors.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
)}  # fmt: skip


class Piece(Config):
    """One saved box of a tensor."""

    offsets: tuple[int, ...]
    """Where it begins in the whole."""
    sizes: tuple[int, ...]
    """Its shape."""
    file: str
    """The safetensors file that holds it, under the parameter's name."""


class Entry(Config):
    """One tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: str = Field(pattern=f"^({'|'.join(DTYPES)})$")
    """As torch calls it."""
    pieces: list[Piece]
    """Together the whole."""


class Index(Config):
    """All tensors of a checkpoint, by key."""

    tensors: dict[str, Entry]
    """``part/parameter`` to where it is."""

    @staticmethod
    def read(folder: Path) -> "Index":
        """The index of a checkpoint, whose own checksum has been verified."""
        try:
            index = Index(**folders.read_json(folder / INDEX))
        except ConfigError as why:
            raise CheckpointError(f"{folder / INDEX} is damaged: {why}; use another checkpoint") from None
        for key, entry in index.tensors.items():
            if sum(math.prod(piece.sizes) for piece in entry.pieces) != math.prod(entry.shape):
                raise CheckpointError(f"{folder / INDEX} has only parts of {key}; use another checkpoint")
            if len({piece.offsets for piece in entry.pieces}) < len(entry.pieces):
                raise CheckpointError(f"{folder / INDEX} has parts of {key} twice; use another checkpoint")
            for piece in entry.pieces:
                if not _within(piece, entry.shape) or not piece.file.startswith(f"{part_of(key)[0]}-"):
                    raise CheckpointError(
                        f"{folder / INDEX} has a piece {piece.sizes} at {piece.offsets} in {piece.file} of '{key}' "
                        f"{entry.shape}, where none can be; use another checkpoint"
                    )
        return index


def _within(piece: Piece, shape: tuple[int, ...]) -> bool:
    if not len(piece.offsets) == len(piece.sizes) == len(shape):
        return False
    return all(
        a >= 0 and n > 0 and a + n <= whole for a, n, whole in zip(piece.offsets, piece.sizes, shape, strict=True)
    )


def part_of(key: str) -> tuple[str, str]:
    """``part/parameter`` taken apart."""
    part, _, name = key.partition("/")
    return part, name
