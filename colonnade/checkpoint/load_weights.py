"""Filling a model from foreign tensors: each rank reads its own boxes, one parameter at a time.

Used by Hugging Face folders and GGUF files alike. Names and shapes are compared when the file is opened, so that a
foreign or damaged one is refused before a model of its size is even allocated; then each parameter is read, cast and
put in place. Beside the model one parameter's share is in memory, never a second model.
"""

import math
from collections.abc import Mapping

import torch

from colonnade.checkpoint.weight_mapping import Box, Shape, Source, Stored, Table, stored_parameters
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import Place, in_place
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.layout import WHOLE, Experts, Placement, layout_of


class Weights:
    """The tensors of ``source``, known to be those of a model of ``config``.

    ``copies`` names tensors that may be there as a copy of another (a tied output projection of the embedding).
    Raises :class:`CheckpointError`, naming file and tensor, for what is missing, has another shape or no place.
    """

    def __init__(self, config: ModelConfig, source: Source, table: Table, copies: Mapping[str, str]):
        self.config, self.source, self.copies = config, source, copies
        held = sum(math.prod(shape) for shape in source.shapes.values())
        if config.parameters > 16 * held:
            # Said before the list of names is made, which an absurd number of layers would make endless.
            raise CheckpointError(
                f"{source.file_of('')} holds {held:,} numbers, and the config describes a model of "
                f"{config.parameters:,}; they belong to different models"
            )
        meta = Transformer(config, device="meta")
        shapes = {name: tuple(shape) for name, shape in meta.whole_shapes().items()}
        self.forms: dict[str, Stored] = stored_parameters(list(shapes), table, source.file_of(""))
        wanted = {
            theirs: shape
            for name, form in self.forms.items()
            for theirs, shape in form.shapes(shapes[name], config).items()
        }
        for name, shape in wanted.items():
            self._compare(name, shape)
        if strangers := sorted(source.shapes.keys() - wanted.keys() - copies.keys()):
            more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
            raise CheckpointError(
                f"{source.file_of(strangers[0])} holds {strangers[0]!r}{more}, for which the model has no place; "
                "the config describes another model, or the file is of an adapter or a quantiser"
            )

    @torch.no_grad()
    def fill(self, model: Transformer, place: Place = in_place) -> None:
        """Read into ``model``: of our :attr:`config`, with plain local parameters (before FSDP wraps them).

        Values are cast to the parameters' type, or are put where ``place`` puts them. Raises :class:`CheckpointError`
        for data that cannot be read, and for a copy that differs from its original.
        """
        for copy, original in self.copies.items():
            if copy in self.source.shapes and not same(self.source, copy, original):
                raise CheckpointError(
                    f"{self.source.file_of(copy)} holds a '{copy}' that differs from '{original}', but the config ties "
                    'them; untie them there ("tie_word_embeddings": false)'
                )
        shapes, layout = model.whole_shapes(), layout_of(model)
        for name, held in (*model.named_parameters(), *model.named_buffers()):
            box = box_of(tuple(shapes[name]), layout.get(name, WHOLE), model.axes)
            place(name, held, self.forms[name].read(self.source, box, self.config))

    def _compare(self, name: str, shape: Shape) -> None:
        found, file = self.source.shapes.get(name), self.source.file_of(name)
        if found is None:
            raise CheckpointError(
                f"{file} lacks the tensor '{name}' {list(shape)}; it is incomplete, or of another model than the config"
            )
        if found != shape:
            raise CheckpointError(
                f"{file} holds '{name}' of shape {list(found)}, but the config makes it {list(shape)}; "
                "config and weights belong to different models"
            )


def box_of(shape: Shape, placement: Placement, axes: Axes) -> Box:
    """The part of a parameter of ``shape`` that this rank holds."""
    cut: dict[int | None, Axis] = {}
    if isinstance(placement, Experts):
        cut = {placement.hidden: axes.experts.sh, 0: axes.experts.ep}
    elif isinstance(placement, int):
        cut = {placement: axes.tp}
    return tuple(cut[dim].part(n) if dim in cut else (0, n) for dim, n in enumerate(shape))


def same(source: Source, a: str, b: str, rows: int = 4096) -> bool:
    """Whether two tensors hold equal numbers; read in bands of ``rows``, so that memory stays small."""
    shape = source.shapes[a]
    if source.shapes[b] != shape:
        return False
    for start in range(0, shape[0], rows):
        band = ((start, min(start + rows, shape[0])), *((0, n) for n in shape[1:]))
        if not torch.equal(source.read(a, band), source.read(b, band)):
            return False
    return True
