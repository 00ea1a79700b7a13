"""``tensors.json`` of a native checkpoint: shape, dtype and saved pieces of each tensor, by key.

Keys are ``part/parameter`` with the parts ``weights``, ``exp_avg`` and ``exp_avg_sq``. This module does not import
torch.distributed.checkpoint, which takes a second.
"""

import math
from pathlib import Path

import torch
from pydantic import Field

from colonnade.checkpoint.atomic_folder import read_json
from colonnade.config import Config
from colonnade.errors import CheckpointError, ConfigError

INDEX = "tensors.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int16, torch.int8,
    torch.float8_e4m3fn,
)}  # fmt: skip


class Piece(Config):
    """One saved box of a tensor: a chunk, in the terms of torch.distributed.checkpoint."""

    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    sizes: tuple[int, ...]
    """Its shape."""
    file: str
    """The safetensors file that contains it, under the parameter's name."""


class Entry(Config):
    """One tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str = Field(pattern=f"^({'|'.join(DTYPES)})$")
    pieces: list[Piece]
    """They cover the whole tensor without overlap."""


class Index(Config):
    """All tensors of a checkpoint, by key."""

    tensors: dict[str, Entry]

    @staticmethod
    def read(folder: Path) -> "Index":
        """Reads and checks the index of ``folder``, whose checksum has been verified."""
        file = folder / INDEX
        try:
            index = Index(**read_json(file))
        except ConfigError as why:
            raise CheckpointError(f"{file} is damaged: {why}; use another checkpoint") from None
        for key, entry in index.tensors.items():
            if sum(math.prod(piece.sizes) for piece in entry.pieces) != math.prod(entry.shape):
                raise CheckpointError(f"{file} does not list all pieces of {key}; use another checkpoint")
            for piece in entry.pieces:
                if not _is_inside(piece, entry.shape) or not piece.file.startswith(f"{split_key(key)[0]}-"):
                    raise CheckpointError(
                        f"{file} lists a piece {piece.sizes} at {piece.offsets} in {piece.file} of '{key}' "
                        f"{entry.shape}, which does not fit; use another checkpoint"
                    )
            if _overlap(entry.pieces):  # so that something else is missing
                raise CheckpointError(f"{file} lists a part of {key} twice; use another checkpoint")
        return index


def split_key(key: str) -> tuple[str, str]:
    """Splits ``part/parameter``."""
    part, _, name = key.partition("/")
    return part, name


def _is_inside(piece: Piece, shape: tuple[int, ...]) -> bool:
    if not len(piece.offsets) == len(piece.sizes) == len(shape):
        return False
    return all(a >= 0 and n > 0 and a + n <= size for a, n, size in zip(piece.offsets, piece.sizes, shape, strict=True))


def _overlap(pieces: list[Piece]) -> bool:
    """Whether two pieces have an element in common."""
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    for i, piece in enumerate(ordered):
        for other in ordered[i + 1 :]:
            apart = [
                a + n <= b or b + m <= a
                for a, n, b, m in zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            ]
            if not any(apart):
                return True
            if apart[0]:  # so are those after it
                break
    return False
