"""Reads a GGUF file under any layout: each rank dequantises its own rows and columns.

Weights are memory-mapped; a box of one is cut out in whole blocks, dequantised by the ``gguf`` package a few rows at a
time and assigned. For the ``llama`` architecture llama.cpp's converter permuted the rows of the query and key weights
from Hugging Face's order (RoPE pairs half a head apart) to Meta's (adjacent pairs); they are permuted back here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.checkpoint.gguf.config import ROPE_DIVISORS, config_from_header
from colonnade.checkpoint.gguf.header import Header, TensorInfo, read_header
from colonnade.checkpoint.gguf.tokenizer import TokenizerParts, tokenizer_from_header
from colonnade.checkpoint.weight_loader import WeightLoader
from colonnade.checkpoint.weight_mapping import (
    Box,
    FusedQKV,
    MappingTable,
    ParamMapping,
    Shape,
    SplitQKV,
    TensorSource,
    weight_and_bias,
)
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.kernels.linear.quantise import Quantised, pack_int4
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import Formats, StoredFormat, StoreWeight, copy_weight

INT4_NUMBERS = {2: 1, 3: 2}
"""Types that are int4 in groups of 32 with float16 numbers, and how many of these: Q4_0 (a scale), Q4_1 (and a low)."""
Q8_0 = 8
"""The type that is int8 in groups of 32 with a float16 scale."""
CHUNK_ELEMENTS = 1 << 23
"""Elements dequantised at once (32 MiB in float32)."""


class InterleavedQKV(SplitQKV):
    """Split tensors with query and key rows in Meta's order: adjacent RoPE pairs, not half a head apart."""

    def _read_part(
        self, source: TensorSource, which: int, rows: tuple[int, int], rest: Box, config: ModelConfig
    ) -> Tensor:
        part = super()._read_part(source, which, rows, rest, config)
        if which == 2:  # RoPE does not apply to values
            return part
        pairs = part.unflatten(0, (-1, config.head_width // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts to three tensors."""
        found = super().write(parameter, config)
        for name in self.names[:2]:
            halves = found[name].unflatten(0, (-1, 2, config.head_width // 2))
            found[name] = halves.transpose(1, 2).flatten(0, 2).contiguous()
        return found


_BLOCK = "blk.{i}."
_QKV = "blocks.{i}.attention.qkv"
_SPLIT = [f"{_BLOCK}attn_{part}" for part in "qkv"]


_COMMON: MappingTable = {
    "embed.tokens.weight": ParamMapping("token_embd.weight"),
    "embed.positions.weight": ParamMapping("position_embd.weight"),
    **weight_and_bias("blocks.{i}.norm1", f"{_BLOCK}attn_norm"),
    "blocks.{i}.attention.q_norm.weight": ParamMapping(f"{_BLOCK}attn_q_norm.weight"),
    "blocks.{i}.attention.k_norm.weight": ParamMapping(f"{_BLOCK}attn_k_norm.weight"),
    **weight_and_bias("blocks.{i}.attention.out", f"{_BLOCK}attn_output"),
    **weight_and_bias("blocks.{i}.norm2", f"{_BLOCK}ffn_norm"),
    **weight_and_bias("blocks.{i}.ffn.gate", f"{_BLOCK}ffn_gate"),
    **weight_and_bias("blocks.{i}.ffn.up", f"{_BLOCK}ffn_up"),
    **weight_and_bias("blocks.{i}.ffn.down", f"{_BLOCK}ffn_down"),
    **weight_and_bias("norm", "output_norm"),
    "unembed.weight": ParamMapping("output.weight"),
}
TABLES: dict[str, MappingTable] = {
    "llama": {**_COMMON, **weight_and_bias(_QKV, *_SPLIT, mapping=InterleavedQKV)},
    "qwen2": {**_COMMON, **weight_and_bias(_QKV, *_SPLIT, mapping=SplitQKV)},
    "qwen3": {**_COMMON, **weight_and_bias(_QKV, *_SPLIT, mapping=SplitQKV)},
    "gpt2": {**_COMMON, **weight_and_bias(_QKV, f"{_BLOCK}attn_qkv", mapping=FusedQKV)},
}
"""Our parameter names to llama.cpp's, for each architecture."""


class GGUFFile:
    """A GGUF file: reads :attr:`config` and tensor shapes immediately, values and tokenizer on demand.

    Raises :class:`CheckpointError` for a file that is damaged or of an unknown architecture, and when the ``gguf``
    package is not installed.
    """

    def __init__(self, path: Path | str, *, keep: bool = False):
        """``keep``: leave Q4_0, Q4_1 and Q8_0 matrices quantised, bit for bit; :attr:`formats` lists them."""
        self.path = Path(path)
        self.header = read_header(self.path, block_sizes())
        if (parts := self.header.values.get("split.count")) not in (None, 0, 1):
            raise CheckpointError(f"{self.path} is one of {parts} parts; join them first: llama-gguf-split --merge")
        source = QuantisedGGUFSource(self.header) if keep else GGUFSource(self.header)
        tied = self._is_tied(source)
        self.config: ModelConfig = config_from_header(self.header, tied=tied, rope_divisors=source.rope_divisors())
        table = TABLES[self.header.values["general.architecture"]]
        duplicates = {"output.weight": "token_embd.weight"} if tied else {}
        self._weights = WeightLoader(self.config, source, table, duplicates)

    @property
    def formats(self) -> Formats:
        """The formats of the matrices that are kept quantised."""
        return self._weights.formats

    def load_weights(self, model: Transformer, place: StoreWeight = copy_weight) -> None:
        """Reads this rank's share into ``model``, built from :attr:`config`; see :meth:`WeightLoader.load_weights`."""
        self._weights.load_weights(model, place)

    def tokenizer(self) -> TokenizerParts:
        """Builds the tokenizer of the file, with its special ids and chat template."""
        return tokenizer_from_header(self.header, self.config.vocab_size)

    def _is_tied(self, source: "GGUFSource") -> bool:
        """Whether the output projection is absent or equals the embedding byte for byte."""
        head, embedding = (self.header.tensors.get(name) for name in ("output.weight", "token_embd.weight"))
        if head is None or embedding is None:
            return True
        same_type = (head.shape, head.kind) == (embedding.shape, embedding.kind)
        return same_type and np.array_equal(source.raw(head), source.raw(embedding))


class GGUFSource:
    """The tensors of one file; each box is dequantised when it is read."""

    def __init__(self, header: Header):
        self.header = header
        self.shapes: Mapping[str, Shape] = {
            name: info.shape for name, info in header.tensors.items() if name != ROPE_DIVISORS
        }

    def read(self, name: str, box: Box) -> Tensor:
        """Reads one box of one tensor as float32."""
        info = self.header.tensors[name]
        (top, bottom), (left, right) = box if len(box) == 2 else ((0, 1), box[0])  # a vector is read as one row
        # Read the whole quantisation blocks that the box touches, then trim.
        first, last = left // info.block, -(-right // info.block)
        raw = self.raw(info)[top:bottom, first * info.block_bytes : last * info.block_bytes]
        out = torch.empty(bottom - top, right - left)
        rows = max(1, CHUNK_ELEMENTS // max(1, (last - first) * info.block))
        for row in range(0, bottom - top, rows):
            values = _dequantise(np.ascontiguousarray(raw[row : row + rows]), info, self.file_of(name))
            np.copyto(out.numpy()[row : row + rows], values[:, left - first * info.block : right - first * info.block])
        return out if len(box) == 2 else out[0]

    def rope_divisors(self) -> np.ndarray | None:
        """The divisors of the RoPE frequencies, one per pair, if the file has them."""
        if ROPE_DIVISORS not in self.header.tensors:
            return None
        info = self.header.tensors[ROPE_DIVISORS]
        return self.read(info.name, tuple((0, n) for n in info.shape)).numpy().reshape(-1)

    def raw(self, info: TensorInfo) -> np.ndarray:
        """The memory-mapped bytes of a tensor, (rows, bytes of a row)."""
        return np.asarray(self.header.data[info.start : info.start + info.bytes]).reshape(-1, info.row_bytes)

    def file_of(self, name: str) -> str:
        """The file, for any tensor."""
        return str(self.header.path)


class QuantisedGGUFSource(GGUFSource):
    """The same, with int4 and int8 matrices also as we store them: w = q s + m or q s, s and m in float32."""

    def stored_format(self, name: str) -> StoredFormat | None:
        """int4 or int8 in groups of 32; None for all other types."""
        info = self.header.tensors[name]
        if info.kind == Q8_0 and len(info.shape) == 2:
            return StoredFormat(kind="int8", group=info.block, grouped=True)
        kept = info.kind in INT4_NUMBERS and len(info.shape) == 2
        return StoredFormat(kind="int4", group=info.block, wide_scales=True) if kept else None

    def read_quantised(self, name: str, box: Box) -> Quantised:
        """Reads one box, in whole blocks: a scale and 32 int8 values, or byte j of a block has values j and j + 16."""
        info, ((top, bottom), (left, right)) = self.header.tensors[name], box
        first, last = left // info.block, -(-right // info.block)
        raw = self.raw(info)[top:bottom, first * info.block_bytes : last * info.block_bytes]
        blocks = torch.from_numpy(np.array(raw)).unflatten(1, (last - first, info.block_bytes))
        if info.kind == Q8_0:
            scales = blocks[..., :2].contiguous().view(torch.float16).float()[..., 0]
            values = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)[:, : right - left]
            return Quantised("int8", values.contiguous(), scales, right - left, info.block)
        count = INT4_NUMBERS[info.kind]
        numbers = blocks[..., : 2 * count].contiguous().view(torch.float16).float()
        scale, low = numbers[..., 0], numbers[..., 1] if count == 2 else -8 * numbers[..., 0]
        packed = blocks[..., 2 * count :].to(torch.int32)
        q = torch.cat((packed & 15, packed >> 4), 2).flatten(1)[:, : right - left]
        return Quantised("int4", pack_int4(q, info.block), torch.stack((scale, low), -1), right - left, info.block)


def block_sizes() -> dict[int, tuple[int, int]]:
    """(elements, bytes) of one block, for each quantisation type of the ``gguf`` package."""
    return {int(kind): sizes for kind, sizes in gguf_package().GGML_QUANT_SIZES.items()}


def _dequantise(raw: np.ndarray, info: TensorInfo, file: str) -> np.ndarray:
    gguf = gguf_package()
    kind = gguf.GGMLQuantizationType(info.kind)
    try:
        with np.errstate(all="ignore"):  # a damaged block may contain NaN, which is left to the reader of the weights
            return gguf.quants.dequantize(raw, kind)
    except NotImplementedError:
        raise CheckpointError(
            f"{file} contains {info.name!r} as {kind.name}, which the gguf package cannot dequantise; "
            "use a file of another quantisation type, such as Q8_0"
        ) from None


def gguf_package() -> Any:
    """The ``gguf`` package; raises :class:`CheckpointError` if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError("GGUF files need the gguf package: pip install 'colonnade[gguf]'") from None
    return gguf
