"""The head of a GGUF file: metadata and the table of tensors, read with every length checked before it is believed.

    "GGUF" version tensors keys | key, type, value … | name, shape, type, offset … | padding | data

(ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian.) The ``gguf`` package, whose dequantisers we use, has a
reader too. It believes the file's counts: an array of 2⁶⁰ elements in a file of 150 bytes made it grow by 86 MB a
second. Here a count is compared with the bytes that are left; and SmolLM2's header takes a twentieth of the time.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colonnade.checkpoint.weight_mapping import Shape
from colonnade.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's value types as struct's codes."""
MAX_DIMS = 4


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: ``rows`` rows of ``row_bytes`` bytes from byte ``start`` of the file."""

    name: str
    shape: Shape
    """As torch has it: ggml writes the fastest dimension first, we last."""
    kind: int
    """ggml's number of the element type."""
    block: int
    """Elements in one quantisation block."""
    block_bytes: int
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last dimension."""
        return self.shape[-1] // self.block * self.block_bytes

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself, and its bytes, mapped rather than read."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: np.ndarray


def read_header(path: Path, block_sizes: Mapping[int, tuple[int, int]]) -> Header:
    """The header of ``path``; ``block_sizes`` gives (elements, bytes) of a block for each element type.

    Raises :class:`CheckpointError`, naming the file, for what is not a whole GGUF file of version 2 or 3.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as why:  # ValueError: an empty file
        raise CheckpointError(f"{path} cannot be read: {why}") from None
    at = _Cursor(path, mapped)
    if at.take(4) != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    version = at.scalar("I")
    if version not in VERSIONS:
        why = "big-endian" if version in [v << 24 for v in VERSIONS] else f"of version {version}"
        raise CheckpointError(
            f"{path} is {why}; only little-endian GGUF of version 2 and 3 can be read, convert it anew"
        )
    tensors, keys = at.count(24), at.count(13)
    values: dict[str, Any] = {}
    for _ in range(keys):
        name = at.text()
        if name in values:
            raise at.damaged(f"the key {name!r} appears twice")
        values[name] = at.value()
    infos = [_tensor_info(at, block_sizes) for _ in range(tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise at.damaged(f"general.alignment is {alignment!r}, which is no power of two")
    begin = -(-at.offset // alignment) * alignment
    table: dict[str, TensorInfo] = {}
    for info in infos:
        placed = TensorInfo(info.name, info.shape, info.kind, info.block, info.block_bytes, begin + info.start)
        if placed.name in table:
            raise at.damaged(f"the tensor {placed.name!r} appears twice")
        if placed.start + placed.bytes > len(mapped):
            raise CheckpointError(
                f"{path} is truncated: {placed.name!r} ends at byte {placed.start + placed.bytes:,} "
                f"of a file of {len(mapped):,}; download it again"
            )
        table[placed.name] = placed
    return Header(path, values, table, np.frombuffer(mapped, np.uint8))


def _tensor_info(at: "_Cursor", block_sizes: Mapping[int, tuple[int, int]]) -> TensorInfo:
    """One row of the table; its ``start`` still counts from the beginning of the data."""
    name, dims = at.text(), at.scalar("I")
    if not 1 <= dims <= MAX_DIMS:
        raise at.damaged(f"the tensor {name!r} has {dims} dimensions")
    shape = tuple(reversed([at.scalar("Q") for _ in range(dims)]))
    kind, start = at.scalar("I"), at.scalar("Q")
    if kind not in block_sizes:
        raise at.damaged(f"the tensor {name!r} has the element type {kind}, which the gguf package does not know")
    block, block_bytes = block_sizes[kind]
    if not all(shape) or shape[-1] % block:
        raise at.damaged(f"the tensor {name!r} of shape {list(shape)} is not made of whole blocks of {block}")
    return TensorInfo(name, shape, kind, block, block_bytes, start)


class _Cursor:
    """A place in the file that moves forward and never beyond the end."""

    def __init__(self, path: Path, mapped: mmap.mmap):
        self.path, self.view, self.offset = path, memoryview(mapped), 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {what}; download it again")

    def need(self, size_bytes: int) -> None:
        if size_bytes > len(self.view) - self.offset:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: its header wants {size_bytes:,} bytes at {self.offset:,} "
                f"of a file of {len(self.view):,}; download it again"
            )

    def take(self, size_bytes: int) -> bytes:
        self.need(size_bytes)
        self.offset += size_bytes
        return bytes(self.view[self.offset - size_bytes : self.offset])

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def count(self, least_bytes: int) -> int:
        """A number of things of at least so many bytes each, which must fit into the rest of the file."""
        number = self.scalar("Q")
        self.need(number * least_bytes)
        return number

    def text(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError as why:
            raise self.damaged(f"the text at byte {self.offset:,} is not UTF-8 ({why.reason})") from None

    def value(self) -> Any:
        """A number, a truth value, a text, or a list of these."""
        kind = self.scalar("I")
        if kind == ARRAY:
            inner = self.scalar("I")
            if inner == STRING:
                return [self.text() for _ in range(self.count(8))]
            code = self._code(inner)
            number = self.count(struct.calcsize(code))
            return list(struct.unpack(f"<{number}{code}", self.take(number * struct.calcsize(code))))
        return self.text() if kind == STRING else self.scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self.damaged(f"the value at byte {self.offset:,} has the type {kind}")
        return SCALARS[kind]
