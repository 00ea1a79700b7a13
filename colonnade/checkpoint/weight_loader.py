"""Loads the weights of foreign files into a model: each rank reads, casts and assigns its own boxes.

:class:`WeightLoader` compares all names and shapes when a file is opened, so that a wrong or damaged one is refused
before a model of its size is allocated. Then the parameters are read one at a time: apart from the model only one
parameter's shard is in memory, never a second model.
"""

import math
from collections.abc import Mapping
from typing import cast

import torch

from colonnade.checkpoint.weight_mapping import (
    Box,
    MappingTable,
    ParamMapping,
    QuantisedTensorSource,
    Shape,
    TensorSource,
    map_parameters,
)
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.model.lora import is_adapter
from colonnade.model.weight_only_quant import StoredFormat, StoreWeight, copy_weight, quantisable_modules
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.layout import WHOLE, Experts, Placement, layout_of


class WeightLoader:
    """The tensors of ``source``, checked to be those of a model of ``config``.

    ``duplicates`` maps tensors that may be a copy of another one to that one (a tied output projection to the
    embedding). Raises :class:`CheckpointError`, naming file and tensor, for missing and unexpected tensors and for
    wrong shapes.
    """

    def __init__(self, config: ModelConfig, source: TensorSource, table: MappingTable, duplicates: Mapping[str, str]):
        self.config, self.source, self.duplicates = config, source, duplicates
        stored = sum(math.prod(shape) for shape in source.shapes.values())
        if config.parameters > 16 * stored:
            # Checked before the names are listed, which an absurd number of layers would make endless.
            raise CheckpointError(
                f"{source.file_of('')} contains {stored:,} values, but the config describes a model of "
                f"{config.parameters:,} parameters; they belong to different models"
            )
        shapes = {name: tuple(shape) for name, shape in Transformer(config, device="meta").global_shapes().items()}
        self.mappings: dict[str, ParamMapping] = map_parameters(list(shapes), table, source.file_of(""))
        expected = {
            theirs: shape
            for name, mapping in self.mappings.items()
            for theirs, shape in mapping.shapes(shapes[name], config).items()
        }
        for name, shape in expected.items():
            self._check_shape(name, shape)
        self.formats: dict[str, StoredFormat] = self._find_formats(shapes)
        if unexpected := sorted(source.shapes.keys() - expected.keys() - duplicates.keys()):
            more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
            raise CheckpointError(
                f"{source.file_of(unexpected[0])} contains {unexpected[0]!r}{more}, which the model does not have; "
                "the config describes another model, or the file belongs to an adapter or a quantised model"
            )

    @torch.no_grad()
    def load_weights(self, model: Transformer, place: StoreWeight = copy_weight) -> None:
        """Reads this rank's share into ``model``, built from :attr:`config`, before FSDP wraps its parameters.

        ``place`` assigns each value; by default it copies and casts it into the parameter. Raises
        :class:`CheckpointError` for data that cannot be read, and for a duplicate that differs from its original.
        """
        for duplicate, original in self.duplicates.items():
            if duplicate in self.source.shapes and not tensors_equal(self.source, duplicate, original):
                raise CheckpointError(
                    f"{self.source.file_of(duplicate)} contains a '{duplicate}' that differs from '{original}', but "
                    'the config ties them; untie them there ("tie_word_embeddings": false)'
                )
        shapes, layout = model.global_shapes(), layout_of(model)
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if is_adapter(name):
                continue
            box, mapping = local_box(tuple(shapes[name]), layout.get(name, WHOLE), model.axes), self.mappings[name]
            if (form := self.formats.get(name)) is None:
                place(name, parameter, mapping.read(self.source, box, self.config))
            else:
                source = cast(QuantisedTensorSource, self.source)
                place(name, parameter, mapping.read_quantised(source, box, form, self.config))

    def _find_formats(self, shapes: Mapping[str, Shape]) -> dict[str, StoredFormat]:
        """The parameters that are kept quantised: all their tensors are, in the same form."""
        form_of = getattr(self.source, "stored_format", None)
        if form_of is None:
            return {}
        found: dict[str, StoredFormat] = {}
        for name in quantisable_modules(Transformer(self.config, device="meta")):
            mapping = self.mappings[name]
            forms = {form_of(theirs) for theirs in mapping.shapes(shapes[name], self.config)}
            if mapping.keeps_inputs_last and len(forms) == 1 and (form := forms.pop()) is not None:
                found[name] = form
        return found

    def _check_shape(self, name: str, shape: Shape) -> None:
        stored, file = self.source.shapes.get(name), self.source.file_of(name)
        if stored is None:
            raise CheckpointError(
                f"{file} lacks the tensor '{name}' {list(shape)}; it is incomplete, or the config describes another "
                "model"
            )
        if stored != shape:
            raise CheckpointError(
                f"{file} contains '{name}' of shape {list(stored)}, but the config makes it {list(shape)}; "
                "config and weights belong to different models"
            )


def local_box(shape: Shape, placement: Placement, axes: Axes) -> Box:
    """This rank's box of a parameter of ``shape``."""
    sharded: dict[int | None, Axis] = {}
    if isinstance(placement, Experts):
        sharded = {placement.hidden: axes.experts.etp, 0: axes.experts.ep}
    elif isinstance(placement, int):
        sharded = {placement: axes.tp}
    return tuple(sharded[dim].part(n) if dim in sharded else (0, n) for dim, n in enumerate(shape))


def tensors_equal(source: TensorSource, a: str, b: str, rows: int = 4096) -> bool:
    """Whether two tensors are equal; reads ``rows`` rows at a time to save memory."""
    shape = source.shapes[a]
    if source.shapes[b] != shape:
        return False
    for start in range(0, shape[0], rows):
        box = ((start, min(start + rows, shape[0])), *((0, n) for n in shape[1:]))
        if not torch.equal(source.read(a, box), source.read(b, box)):
            return False
    return True
