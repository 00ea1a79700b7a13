"""Reads a Whisper model as CTranslate2 stores it (``model.bin`` next to ``config.json`` and ``tokenizer.json``).

    u32 version, name, u32 revision, u32 number of variables; of each its name, u8 rank, u32 sizes, u8 type, u32 bytes,
    data; u32 number of aliases, of each two names              a name: u16 length, bytes, NUL; little-endian

Queries, keys and values of self-attention are one tensor, in cross attention keys and values; biases of keys are
zeros. Linear layers are named by their place in a block.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.checkpoint.weight_loader import WeightLoader
from colonnade.checkpoint.weight_mapping import Box, BridgeKV, FusedQKV, MappingTable, ParamMapping, Shape, TensorSource
from colonnade.config import EncoderConfig, ModelConfig
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import StoreWeight, copy_weight

WEIGHTS, SPEC, VERSION = "model.bin", "WhisperSpec", 6
_TYPES: dict[int, type[np.generic]] = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_MAX_RECORDS = 1 << 16


class _FusedBridgeKV(BridgeKV):
    """Keys, then values of a layer's cross attention in one tensor."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """A tensor for each layer."""
        rows = 2 * config.kv_heads * config.head_width
        return {name: (rows, *shape[1:]) for layer in range(config.layers) for name in self._of_layer(layer)}

    def _read_layer(
        self, source: TensorSource, layer: int, rows: tuple[int, int], rest: Box, config: ModelConfig
    ) -> list[Tensor]:
        (name,), K = self._of_layer(layer), config.kv_heads * config.head_width
        return [source.read(name, ((rows[0] + i * K, rows[1] + i * K), *rest)) for i in range(2)]


_QKV, _CROSS = "self_attention", "attention"


def _norm(ours: str, theirs: str) -> MappingTable:
    return {
        f"{ours}.weight": ParamMapping(f"{theirs}layer_norm/gamma"),
        f"{ours}.bias": ParamMapping(f"{theirs}layer_norm/beta"),
    }


def _linear(ours: str, theirs: str, mapping: type[ParamMapping] = ParamMapping) -> MappingTable:
    return {f"{ours}.{part}": mapping(f"{theirs}/{part}") for part in ("weight", "bias")}


def _stack(ours: str, theirs: str) -> MappingTable:
    layer = f"{theirs}/layer_{{i}}/"
    return {
        **_norm(f"{ours}.norm1", f"{layer}{_QKV}/"),
        **_linear(f"{ours}.attention.qkv", f"{layer}{_QKV}/linear_0", FusedQKV),
        **_linear(f"{ours}.attention.out", f"{layer}{_QKV}/linear_1"),
        **_norm(f"{ours}.norm2", f"{layer}ffn/"),
        **_linear(f"{ours}.ffn.up", f"{layer}ffn/linear_0"),
        **_linear(f"{ours}.ffn.down", f"{layer}ffn/linear_1"),
    }


_LAYER = "decoder/layer_{i}/attention/"
TABLE: MappingTable = {
    "embed.tokens.weight": ParamMapping("decoder/embeddings/weight"),
    "embed.positions.weight": ParamMapping("decoder/position_encodings/encodings"),
    "front_end.positions": ParamMapping("encoder/position_encodings/encodings"),
    **_linear("front_end.conv1", "encoder/conv1"),
    **_linear("front_end.conv2", "encoder/conv2"),
    **_stack("encoder_blocks.{i}", "encoder"),
    **_stack("blocks.{i}", "decoder"),
    **_norm("blocks.{i}.norm_cross", _LAYER),
    **_linear("blocks.{i}.cross.q", f"{_LAYER}linear_0"),
    **_linear("bridge.kv", f"{_LAYER}linear_1", _FusedBridgeKV),
    **_linear("blocks.{i}.cross.out", f"{_LAYER}linear_2"),
    **_norm("encoder_norm", "encoder/"),
    **_norm("norm", "decoder/"),
    "unembed.weight": ParamMapping("decoder/projection/weight"),
}


class CT2File:
    """A folder with CTranslate2's Whisper: reads :attr:`config` and the tensors' offsets immediately.

    Raises :class:`CheckpointError` for a file that is damaged, truncated, quantised or belongs to another model.
    """

    def __init__(self, folder: Path):
        self.path = folder / WEIGHTS
        self._records: dict[str, tuple[type[np.generic], Shape, int]] = {}
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                self._read_records(_Reader(file.read(size)))
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}; make it readable") from None
        self.shapes: Mapping[str, Shape] = {
            name: shape for name, (kind, shape, _) in self._records.items() if shape and kind is not np.int8
        }
        self.config = self._config()
        self._weights = WeightLoader(self.config, self, TABLE, {"decoder/projection/weight": ""})

    def load_weights(self, model: Transformer, place: StoreWeight = copy_weight) -> None:
        """Reads this rank's share into ``model``; see :meth:`WeightLoader.load_weights`."""
        self._weights.load_weights(model, place)

    def read(self, name: str, box: Box) -> Tensor:
        """Reads one box of one tensor."""
        kind, shape, offset = self._records[name]
        array = np.memmap(self.path, kind, mode="r", offset=offset, shape=shape)
        return torch.from_numpy(np.array(array[tuple(slice(start, stop) for start, stop in box)]))

    def file_of(self, name: str) -> str:
        """The file."""
        return str(self.path)

    def _read_records(self, reader: "_Reader") -> None:
        version, spec = reader.number("I"), reader.name()
        if (version, spec) != (VERSION, SPEC):
            raise CheckpointError(
                f"{self.path} is version {version} of {spec!r}; only version {VERSION} of {SPEC} can be read: convert "
                "the model from Hugging Face's format again"
            )
        reader.number("I")  # revision of the specification
        count = reader.number("I")
        if count > _MAX_RECORDS:
            raise CheckpointError(f"{self.path} lists {count:,} tensors, more than any model has; download it again")
        for _ in range(count):
            name, rank = reader.name(), reader.number("B")
            shape = tuple(reader.number("I") for _ in range(rank))
            kind, size = reader.number("B"), reader.number("I")
            if kind not in _TYPES:
                raise CheckpointError(f"{self.path} contains {name!r} of an unknown type {kind}; convert it to float16")
            elements = 1
            for n in shape:
                elements *= n
            if elements * np.dtype(_TYPES[kind]).itemsize != size:
                raise CheckpointError(
                    f"{self.path}: {name!r} of shape {list(shape)} has {size} bytes; download it again"
                )
            self._records[name] = _TYPES[kind], shape, reader.skip(size)
        if quantised := next((n for n in self._records if n.endswith("weight_scale")), None):
            raise CheckpointError(f"{self.path} is quantised ({quantised!r}); convert the model to float16 or float32")

    def _scalar(self, name: str) -> int:
        if name not in self._records:
            raise CheckpointError(f"{self.path} lacks {name!r}; it is damaged, or belongs to another model")
        kind, shape, offset = self._records[name]
        return int(np.memmap(self.path, kind, mode="r", offset=offset, shape=shape or (1,)).flat[0])

    def _shape(self, name: str, rank: int) -> Shape:
        shape = self.shapes.get(name, ())
        if len(shape) != rank:
            raise CheckpointError(
                f"{self.path} lacks {name!r} of {rank} dimensions; it is damaged, or belongs to another model"
            )
        return shape

    def _config(self) -> ModelConfig:
        layers = {
            stack: sum(name.endswith("self_attention/linear_0/weight") for name in self.shapes if stack in name)
            for stack in ("encoder/layer_", "decoder/layer_")
        }
        vocab_size, width = self._shape("decoder/embeddings/weight", 2)
        heads = self._scalar("decoder/num_heads")
        if self._scalar("encoder/num_heads") != heads or not all(layers.values()):
            raise CheckpointError(f"{self.path}: encoder and decoder have unequal heads, or no layers")
        context, _ = self._shape("decoder/position_encodings/encodings", 2)
        frames, _ = self._shape("encoder/position_encodings/encodings", 2)
        encoder_ffn, ffn = (
            self._shape(f"{stack}/layer_0/ffn/linear_0/weight", 2)[0] for stack in ("encoder", "decoder")
        )
        mels = self._shape("encoder/conv1/weight", 3)[1]
        # In multilingual vocabularies English's token is one further.
        start = 50258 if vocab_size >= 51865 else 50257
        try:
            return whisper_config(
                vocab_size=vocab_size, layers=layers["decoder/layer_"], width=width, heads=heads, ffn_width=ffn,
                context=context,
                encoder=EncoderConfig(
                    layers=layers["encoder/layer_"], ffn_width=0 if encoder_ffn == ffn else encoder_ffn,
                    context=frames, reads="audio", mels=mels, start_token=start,
                ),
            )  # fmt: skip
        except ConfigError as error:
            raise CheckpointError(f"{self.path}: {error}") from None


def whisper_config(**sizes: Any) -> ModelConfig:
    """A Whisper of these sizes."""
    return ModelConfig(
        family="whisper", positions="learned", norm="layernorm", activation="gelu", gated=False, qkv_bias=True,
        out_bias=True, ffn_bias=True, tied=True, **sizes,
    )  # fmt: skip


def is_ct2(folder: Path) -> bool:
    """Whether ``folder`` has a model of CTranslate2."""
    return (folder / WEIGHTS).is_file() and not (folder / "model.safetensors").is_file()


class _Reader:
    """Numbers and names from the bytes of a file."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def number(self, kind: str) -> int:
        size = struct.calcsize(f"<{kind}")
        (value,) = struct.unpack_from(f"<{kind}", self._data, self.skip(size))
        return value

    def name(self) -> str:
        size = self.number("H")
        at = self.skip(size)
        return self._data[at : at + size].rstrip(b"\0").decode("utf-8", errors="replace")

    def skip(self, size: int) -> int:
        """Moves on; returns where it was."""
        at, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise CheckpointError(
                f"model.bin is truncated: {size} bytes are missing at {at} of {len(self._data)}; download it again"
            )
        return at
