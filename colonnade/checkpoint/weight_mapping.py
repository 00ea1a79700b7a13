"""Mapping of our parameters to the tensors of Hugging Face folders and GGUF files.

Our parameters are cut into *boxes* (one half-open range per dimension): tensor parallelism shards one dimension, FSDP
may shard another. A :class:`ParamMapping` describes the names and the row order under which foreign files store one of
our parameters; ``read`` reads one box of it, ``write`` converts the whole parameter to their tensors.

    ParamMapping    the same tensor under another name, optionally transposed (GPT-2's Conv1D stores (in, out))
    SplitQKV        query, key and value in three tensors; ours interleaves them by key/value head
    FusedQKV        all queries, all keys, all values in one tensor (GPT-2's c_attn)

Our qkv rows are in Megatron-LM's order (arXiv 1909.08053): for each key/value head its G query heads, then its key
head, then its value head, so that a contiguous share of the rows consists of whole heads.

:mod:`colonnade.checkpoint.weight_loader` checks and loads the weights of a file with these mappings.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.kernels.linear.quantise import FLOAT8, Quantised
from colonnade.model.weight_only_quant import StoredFormat

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""A half-open range for each dimension."""


class TensorSource(Protocol):
    """A file or folder of foreign tensors that can read any box of a tensor."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor, by its name in the file."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """Reads one box of one tensor, in its dtype on disk (dequantised if it was quantised)."""
        ...

    def file_of(self, name: str) -> str:
        """The file that contains, or should contain, ``name``; for messages."""
        ...


class QuantisedTensorSource(TensorSource, Protocol):
    """A source with some tensors in quantised forms that our kernels multiply."""

    def stored_format(self, name: str) -> StoredFormat | None:
        """The form of tensor ``name``; None if it is read as a dense one."""
        ...

    def read_quantised(self, name: str, box: Box) -> Quantised:
        """Reads one box, in whole groups, of a tensor that has a form."""
        ...


@dataclass(frozen=True)
class _Component:
    """The values (or the scales) of quantised tensors, as tensors whose rows a mapping may reorder."""

    source: QuantisedTensorSource
    which: Literal["values", "scales"]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self.source.shapes

    def file_of(self, name: str) -> str:
        return self.source.file_of(name)

    def read(self, name: str, box: Box) -> Tensor:
        found = getattr(self.source.read_quantised(name, box), self.which)
        return found.view(torch.int8) if found.dtype == FLOAT8 else found  # not every torch can concatenate float8


class ParamMapping:
    """A parameter stored under another name, or ``transposed``; ``names`` contain ``{i}`` for the layer."""

    def __init__(self, *names: str, transposed: bool = False):
        self.names, self.transposed = names, transposed

    def for_layer(self, layer: int) -> Self:
        """Returns a copy with the number of a layer in its names."""
        mapping = copy.copy(self)
        mapping.names = tuple(name.replace("{i}", str(layer)) for name in self.names)
        return mapping

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """Names and shapes of the file's tensors, when our parameter has ``shape``."""
        return {self.names[0]: shape[::-1] if self.transposed else shape}

    def read(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads a box of *our* parameter."""
        return self._read(source, self.names[0], box)

    @property
    def keeps_inputs_last(self) -> bool:
        """Whether the file's tensors have our rows, so that quantised ones can be kept."""
        return not self.transposed

    def read_quantised(
        self, source: QuantisedTensorSource, box: Box, form: StoredFormat, config: ModelConfig
    ) -> Quantised:
        """Reads a box of our parameter, whose inputs are cut in whole groups, from quantised tensors."""
        values, scales = (self.read_component(_Component(source, of), box, config) for of in ("values", "scales"))
        if form.kind == "float8":
            values = values.view(FLOAT8)
        start, stop = self.inputs_of(box)
        grouped = form.grouped or form.kind == "int4"
        return Quantised(form.kind, values, scales, stop - start, form.group if grouped else stop - start)

    def read_component(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads values or scales of a box."""
        return self.read(source, box, config)

    def write_component(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts the values or scales of our whole quantised parameter to their tensors, by the names of these."""
        return self.write(parameter, config)

    def inputs_of(self, box: Box) -> tuple[int, int]:
        """The range of inputs in a box of our parameter."""
        return box[-1]

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts our whole parameter to their tensors."""
        return {self.names[0]: (parameter.t() if self.transposed else parameter).contiguous()}

    def _read(self, source: TensorSource, name: str, box: Box) -> Tensor:
        return source.read(name, box[::-1]).t() if self.transposed else source.read(name, box)


class SplitQKV(ParamMapping):
    """Query, key and value weights (or biases) in three tensors, each with its heads in order."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """Three tensors of N·H, K·H and K·H rows."""
        rows = (config.kv_heads * n for n in _rows_per_kv_head(config))
        return {name: (n, *shape[1:]) for name, n in zip(self.names, rows, strict=True)}

    def read(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads the heads that the box touches, interleaved by key/value head."""
        (start, stop), rest = box[0], box[1:]
        group = sum(_rows_per_kv_head(config))
        # FSDP's boxes may cut through a group: read whole groups, then trim.
        first, last = start // group, -(-stop // group)
        parts = [
            self._read_part(source, which, (first * n, last * n), rest, config).unflatten(0, (last - first, n))
            for which, n in enumerate(_rows_per_kv_head(config))
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)[start - first * group : stop - first * group]

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts to three tensors."""
        return dict(zip(self.names, _split_qkv(parameter, config), strict=True))

    def _read_part(
        self, source: TensorSource, which: int, rows: tuple[int, int], rest: Box, config: ModelConfig
    ) -> Tensor:
        """Reads some rows of the query (0), key (1) or value (2) part."""
        return source.read(self.names[which], (rows, *rest))


class FusedQKV(SplitQKV):
    """All query rows, then all key rows, then all value rows, in one tensor, optionally ``transposed``."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """One tensor of our shape."""
        return ParamMapping.shapes(self, shape, config)

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts to one tensor with its rows in three blocks."""
        return ParamMapping.write(self, torch.cat(_split_qkv(parameter, config)), config)

    def _read_part(
        self, source: TensorSource, which: int, rows: tuple[int, int], rest: Box, config: ModelConfig
    ) -> Tensor:
        before = config.kv_heads * sum(_rows_per_kv_head(config)[:which])
        return self._read(source, self.names[0], ((before + rows[0], before + rows[1]), *rest))


class BridgeKV(ParamMapping):
    """Keys and values of all decoder layers' cross attention, ``names`` with ``{i}`` for the layer.

    Our rows are grouped by key/value head, then by layer (:class:`colonnade.model.cross_attention.Bridge`). With one
    name instead of two, keys have no bias: ours is read as 0 and not written, because a constant added to all scores
    of a query does not change its softmax.
    """

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """A tensor of K·H rows for each layer and name."""
        rows = config.kv_heads * config.head_width
        return {name: (rows, *shape[1:]) for layer in range(config.layers) for name in self._of_layer(layer)}

    def read(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads the heads that the box touches, then trims."""
        (start, stop), rest, H = box[0], box[1:], config.head_width
        group = config.layers * 2 * H
        first, last = start // group, -(-stop // group)
        rows = (first * H, last * H)
        parts: list[Tensor] = []
        for layer in range(config.layers):
            both = [part.unflatten(0, (-1, H)) for part in self._read_layer(source, layer, rows, rest, config)]
            parts += both if len(both) == 2 else [torch.zeros_like(both[0]), both[0]]
        return torch.cat(parts, 1).flatten(0, 1)[start - first * group : stop - first * group]

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts to the tensors of all layers."""
        each = parameter.unflatten(0, (config.kv_heads, config.layers, 2, config.head_width))
        names = [self._of_layer(layer) for layer in range(config.layers)]
        return {
            name: each[:, layer, 2 - len(of) + which].flatten(0, 1).contiguous()
            for layer, of in enumerate(names)
            for which, name in enumerate(of)
        }

    def _read_layer(
        self, source: TensorSource, layer: int, rows: tuple[int, int], rest: Box, config: ModelConfig
    ) -> list[Tensor]:
        """Some rows of a layer's keys and values, or of its values alone."""
        return [source.read(name, (rows, *rest)) for name in self._of_layer(layer)]

    def _of_layer(self, layer: int) -> list[str]:
        return [name.replace("{i}", str(layer)) for name in self.names]


class SplitQKVWithoutKeyBias(SplitQKV):
    """Biases of queries and values in two tensors: ours of the keys are read as 0 and not written (Whisper)."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """Two tensors, of N·H and K·H rows."""
        q, _, v = (config.kv_heads * n for n in _rows_per_kv_head(config))
        return {self.names[0]: (q,), self.names[1]: (v,)}

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts to two tensors."""
        q, _, v = _split_qkv(parameter, config)
        return {self.names[0]: q, self.names[1]: v}

    def _read_part(
        self, source: TensorSource, which: int, rows: tuple[int, int], rest: Box, config: ModelConfig
    ) -> Tensor:
        if which == 1:
            return torch.zeros(rows[1] - rows[0], dtype=source.read(self.names[1], ((0, 1),)).dtype)
        return source.read(self.names[which // 2], (rows, *rest))


MappingTable = Mapping[str, ParamMapping]
"""Our parameter names, with ``{i}`` for the layer, to their mappings."""


def weight_and_bias(
    ours: str, *theirs: str, mapping: type[ParamMapping] = ParamMapping, transposed: bool = False
) -> MappingTable:
    """Mappings of a layer's ``weight`` (optionally ``transposed``) and ``bias``."""
    return {
        f"{ours}.weight": mapping(*(f"{name}.weight" for name in theirs), transposed=transposed),
        f"{ours}.bias": mapping(*(f"{name}.bias" for name in theirs)),
    }


def map_parameters(names: list[str], table: MappingTable, file: str) -> dict[str, ParamMapping]:
    """The mapping of each of our parameters ``names``.

    Raises :class:`CheckpointError`, naming ``file``, when the table lacks one.
    """
    mappings: dict[str, ParamMapping] = {}
    for name in names:
        layer = re.match(r"(?:encoder_)?blocks\.(\d+)\.", name)
        template = f"{name[: layer.start(1)]}{{i}}.{name[layer.end() :]}" if layer else name
        if template not in table:
            raise CheckpointError(
                f"{file}: models of this family have no parameter '{name}'; choose another family, or write "
                "--format colonnade"
            )
        mappings[name] = table[template].for_layer(int(layer[1])) if layer else table[template]
    return mappings


def _rows_per_kv_head(config: ModelConfig) -> list[int]:
    """Rows of the query, key and value part that belong to one key/value head."""
    return [config.group * config.head_width, config.head_width, config.head_width]


def _split_qkv(parameter: Tensor, config: ModelConfig) -> list[Tensor]:
    """Splits our whole parameter into query, key and value rows, each with its heads in order."""
    groups = parameter.unflatten(0, (config.kv_heads, -1))
    return [part.flatten(0, 1).contiguous() for part in groups.split(_rows_per_kv_head(config), dim=1)]
