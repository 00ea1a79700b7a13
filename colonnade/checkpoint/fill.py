"""Filling a model from foreign tensors: each rank reads its own boxes, one parameter at a time.

Used by Hugging Face folders and GGUF files alike. First the *names and shapes* of everything are compared, so that a
foreign or damaged file is refused before the model is touched; then each parameter is read, cast and put in place.
Beside the model one parameter's share is in memory, never a second model.
"""

from collections.abc import Mapping

import torch

from colonnade.checkpoint.stored import Box, Shape, Source, Stored
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.parallel.axis import Axis
from colonnade.parallel.layout import Placement, layout_of


@torch.no_grad()
def fill(model: Transformer, source: Source, forms: Mapping[str, Stored], copies: Mapping[str, str]) -> None:
    """Read ``source`` into the parameters of ``model`` (plain local tensors, before FSDP wraps them).

    ``forms`` says how each parameter is stored; ``copies`` which tensors may be there as a copy of another (a tied
    output projection of the embedding). Values are cast to the parameters' type. Raises :class:`CheckpointError`,
    naming file and tensor, for what is missing, has another shape, has no place in the model, or is no true copy.
    """
    shapes, layout, tp = model.whole_shapes(), layout_of(model), model.axes.tp
    for name, form in forms.items():
        _compare(form.shapes(tuple(shapes[name]), model.config), source)
    _refuse_strangers(source, {theirs for form in forms.values() for theirs in form.names} | copies.keys())
    for copy, original in copies.items():
        if copy in source.shapes and not same(source, copy, original):
            raise CheckpointError(
                f"{source.file_of(copy)} holds a '{copy}' that differs from '{original}', but the config ties them; "
                'untie them there ("tie_word_embeddings": false)'
            )
    for name, parameter in model.named_parameters():
        box = box_of(tuple(shapes[name]), layout[name], tp)
        parameter.copy_(forms[name].read(source, box, model.config))


def box_of(shape: Shape, placement: Placement, tp: Axis) -> Box:
    """The part of a parameter of ``shape`` that this rank holds."""
    return tuple(tp.part(n) if dim == placement else (0, n) for dim, n in enumerate(shape))


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


def _compare(wanted: dict[str, Shape], source: Source) -> None:
    for theirs, shape in wanted.items():
        if theirs not in source.shapes:
            raise CheckpointError(
                f"{source.file_of(theirs)} lacks the tensor '{theirs}' {list(shape)}; "
                "the file is incomplete, or the config describes another model"
            )
        if source.shapes[theirs] != shape:
            raise CheckpointError(
                f"{source.file_of(theirs)} holds '{theirs}' of shape {list(source.shapes[theirs])}, but the config "
                f"makes it {list(shape)}; config and weights belong to different models"
            )


def _refuse_strangers(source: Source, known: set[str]) -> None:
    """A tensor that nothing reads would be lost without a word."""
    if strangers := sorted(source.shapes.keys() - known):
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        raise CheckpointError(
            f"{source.file_of(strangers[0])} holds '{strangers[0]}'{more}, for which the model has no place; "
            "the config describes another model, or the file is of an adapter or a quantiser"
        )
