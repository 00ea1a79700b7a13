"""Writing a Hugging Face folder from any layout: ``transformers`` loads it and computes the same.

Parameters are joined over the ranks one at a time and turned into the family's tensors on the rank that writes, which
holds one shard beside the model. The folder appears whole or not at all (:mod:`colonnade.checkpoint.atomic_folder`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint.hf.families import FAMILIES, config_to_hf
from colonnade.checkpoint.hf.read import CONFIG, INDEX, SINGLE
from colonnade.checkpoint.weight_mapping import Stored, stored_parameters
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.model import Transformer
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import WHOLE, Experts, Placement, layout_of

GENERATION = "generation_config.json"
MESSAGE_BYTES = 2048
"""Room for a failure's message on its way from the writing rank to the others."""


class SavesItself(Protocol):
    """A tokenizer, as far as this file must know one (:class:`colonnade.data.tokenizer.Tokenizer`)."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end one."""
        ...

    def save(self, folder: Path) -> Any:
        """Write tokenizer.json and its companions into an existing folder."""
        ...


def write_hf(
    model: Transformer,
    path: Path | str,
    *,
    tokenizer: SavesItself | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Save ``model`` as the new folder ``path``; all ranks of the model's axes must call it together.

    ``dtype`` is the type on disk (by default the parameters' own); ``shard_bytes`` the largest file, unless a single
    parameter is larger; ``overwrite`` replaces a model that is there. Raises :class:`CheckpointError`, on all ranks,
    when the folder exists already or cannot be written, or when the family cannot express the model; nothing is left
    behind then.
    """
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes {shard_bytes} is not positive; 5000000000 is usual")
    path = Path(path).absolute()
    dtype = dtype or next(model.parameters()).dtype
    shapes = model.whole_shapes()
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    family = FAMILIES[model.config.family]
    forms = stored_parameters(list(sizes), family.table, str(path))
    special = _special_ids(tokenizer)
    texts = {
        CONFIG: config_to_hf(model.config) | special | {"dtype": str(dtype).removeprefix("torch.")},
        GENERATION: special,
    }
    shards = plan_shards(sizes, shard_bytes)
    if len(shards) > 1:
        weight_map = {
            theirs: file
            for file, names in shards.items()
            for name in names
            for theirs in forms[name].shapes(tuple(shapes[name]), model.config)
        }
        texts[INDEX] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}

    on_writer(model.axes, partial(folders.begin, path, overwrite))
    try:
        for file, names in shards.items():
            tensors = _shard(model, forms, names, dtype)
            save = partial(folders.write_tensors, folders.partial(path) / file, tensors, {"format": "pt"})
            on_writer(model.axes, save)
        on_writer(model.axes, partial(_finish, path, texts, tokenizer))
    except CheckpointError:
        if _writes(model.axes):
            folders.discard(path)
        raise


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """File name to the parameters it holds, in the model's order; ``sizes`` are theirs in bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


@torch.no_grad()
def _shard(model: Transformer, forms: Mapping[str, Stored], names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Their tensors of the parameters ``names``, on the rank that writes; {} on the others, which help to join."""
    shapes, layout, axes = model.whole_shapes(), layout_of(model), model.axes
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors: dict[str, Tensor] = {}
    for name in names:
        parameter: Any = held[name]
        if hasattr(parameter, "full_tensor"):  # FSDP's: first over the data ranks
            parameter = parameter.full_tensor()
        joined = joined_over(parameter, shapes[name], layout.get(name, WHOLE), axes)
        if _writes(axes):
            # A balancing bias moves in steps too small for 16 bits; transformers keeps it in float32 as well.
            kind = torch.promote_types(dtype, torch.float32) if name.endswith("bias_E") else dtype
            tensors |= forms[name].write(joined.to("cpu", kind), model.config)
    return tensors


def joined_over(part: Tensor, shape: torch.Size, placement: Placement, axes: Axes) -> Tensor:
    """The whole parameter of which each rank has its share."""
    if isinstance(placement, Experts):
        if placement.hidden is not None:
            part = axes.experts.sh.join(part, placement.hidden, shape[placement.hidden])
        return axes.experts.ep.join(part, 0, shape[0])
    return axes.tp.join(part, placement, shape[placement]) if isinstance(placement, int) else part


def _finish(path: Path, texts: Mapping[str, Any], tokenizer: SavesItself | None) -> None:
    place = folders.partial(path)
    for file, values in texts.items():
        folders.write_json(place / file, values)
    if tokenizer is not None:
        tokenizer.save(place)
    for file in place.iterdir():
        folders.flush(file)
    folders.appear(path)


def _special_ids(tokenizer: SavesItself | None) -> dict[str, Any]:
    """Said even when unknown: the classes of transformers have defaults of their own."""
    ends = list(tokenizer.eos_ids) if tokenizer else []
    return {
        "bos_token_id": tokenizer.bos_id if tokenizer else None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }


def _writes(axes: Axes) -> bool:
    return axes.tp.rank == 0 and axes.dp.rank == 0


def on_writer(axes: Axes, action: Callable[[], Any]) -> None:
    """Run ``action`` on one rank of the model's axes; when it fails there, all ranks raise the same error."""
    message = ""
    if _writes(axes):
        try:
            action()
        except (ColonnadeError, SafetensorError, OSError) as why:
            message = str(why) or type(why).__name__
    sent = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    text = message.encode()[:MESSAGE_BYTES]
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    axes.dp.broadcast_(axes.tp.broadcast_(sent))
    if text := bytes(sent.tolist()).rstrip(b"\0").decode(errors="ignore"):
        raise CheckpointError(text)
