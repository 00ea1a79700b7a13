"""How others store a parameter of ours, and how a part of it is read without reading the rest.

Our parameters are cut into *boxes* (one half-open range per dimension): tensor parallelism cuts one dimension, FSDP
may cut another. A :class:`Stored` knows under which names, and in which order of rows, a foreign file keeps one of our
parameters; ``read`` fetches exactly one box of it, ``write`` turns the whole back into their tensors.

    Stored      the same tensor under another name, perhaps transposed (GPT-2's Conv1D keeps (in, out))
    SplitQKV    query, key and value in three tensors; ours interleaves them by key/value head
    FusedQKV    all queries, all keys, all values in one tensor (GPT-2's c_attn)

Our qkv rows are Megatron-LM's (arXiv 1909.08053): for each key/value head its G query heads, then its key head, then
its value head, so that a contiguous share of the rows is whole heads.
"""

import copy
import re
from collections.abc import Mapping
from typing import Protocol, Self

import torch
from torch import Tensor

from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""A half-open range for each dimension."""


class Source(Protocol):
    """A file or folder of foreign tensors, of which any box can be read."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor that the source holds, by its name there."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """One box of one tensor, in the type it has on disk (dequantised where it was quantised)."""
        ...

    def file_of(self, name: str) -> str:
        """The file that holds (or should hold) ``name``, for messages."""
        ...


def whole(shape: Shape) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, n) for n in shape)


class Stored:
    """A parameter stored plainly under another name, or ``transposed``; ``names`` have ``{i}`` for the layer."""

    def __init__(self, *names: str, transposed: bool = False):
        self.names, self.transposed = names, transposed

    def at(self, layer: int) -> Self:
        """The same for one layer."""
        form = copy.copy(self)
        form.names = tuple(name.replace("{i}", str(layer)) for name in self.names)
        return form

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """Their tensors' names and shapes, when our parameter has ``shape``."""
        return {self.names[0]: shape[::-1] if self.transposed else shape}

    def read(self, source: Source, box: Box, config: ModelConfig) -> Tensor:
        """A box of *our* parameter."""
        return self._fetch(source, self.names[0], box)

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Their tensors, from our whole parameter."""
        return {self.names[0]: (parameter.t() if self.transposed else parameter).contiguous()}

    def _fetch(self, source: Source, name: str, box: Box) -> Tensor:
        return source.read(name, box[::-1]).t() if self.transposed else source.read(name, box)


class SplitQKV(Stored):
    """Query, key and value weights (or biases) in three tensors, each of whole heads in their order."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """Three tensors: N·H, K·H and K·H rows."""
        rows = (config.kv_heads * n for n in _rows(config))
        return {name: (n, *shape[1:]) for name, n in zip(self.names, rows, strict=True)}

    def read(self, source: Source, box: Box, config: ModelConfig) -> Tensor:
        """The heads that the box touches, laid group by group."""
        (start, stop), rest = box[0], box[1:]
        group = sum(_rows(config))
        # A box may cut through a group (FSDP's do): fetch whole groups, then trim.
        first, last = start // group, -(-stop // group)
        parts = [
            self._part(source, which, (first * n, last * n), rest, config).unflatten(0, (last - first, n))
            for which, n in enumerate(_rows(config))
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)[start - first * group : stop - first * group]

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """The three tensors."""
        return dict(zip(self.names, _ungrouped(parameter, config), strict=True))

    def _part(self, source: Source, which: int, rows: tuple[int, int], rest: Box, config: ModelConfig) -> Tensor:
        """Some rows of the query (0), key (1) or value (2) part."""
        return source.read(self.names[which], (rows, *rest))


class FusedQKV(SplitQKV):
    """All query rows, then all key rows, then all value rows, in one tensor, perhaps ``transposed``."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """One tensor of our shape."""
        return Stored.shapes(self, shape, config)

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """One tensor, its rows in three blocks."""
        return Stored.write(self, torch.cat(_ungrouped(parameter, config)), config)

    def _part(self, source: Source, which: int, rows: tuple[int, int], rest: Box, config: ModelConfig) -> Tensor:
        before = config.kv_heads * sum(_rows(config)[:which])
        return self._fetch(source, self.names[0], ((before + rows[0], before + rows[1]), *rest))


Table = Mapping[str, Stored]
"""Our parameter names, with ``{i}`` for the layer, to the form in which others store them."""


def stored_parameters(names: list[str], table: Table, where: str) -> dict[str, Stored]:
    """The stored form of each of our parameters ``names``.

    Raises :class:`CheckpointError`, naming ``where``, when the table has no place for one.
    """
    forms: dict[str, Stored] = {}
    for name in names:
        layer = re.match(r"blocks\.(\d+)\.", name)
        template = f"blocks.{{i}}.{name[layer.end() :]}" if layer else name
        if template not in table:
            raise CheckpointError(
                f"{where}: this family has no place for the parameter '{name}'; choose another one, or write "
                "--format colonnade"
            )
        forms[name] = table[template].at(int(layer[1])) if layer else table[template]
    return forms


def _rows(config: ModelConfig) -> list[int]:
    """Rows that one key/value head has in the query, key and value part."""
    return [config.group * config.head_width, config.head_width, config.head_width]


def _ungrouped(parameter: Tensor, config: ModelConfig) -> list[Tensor]:
    """The query, key and value rows of our whole parameter, heads in their order."""
    groups = parameter.unflatten(0, (config.kv_heads, -1))
    return [part.flatten(0, 1).contiguous() for part in groups.split(_rows(config), dim=1)]
