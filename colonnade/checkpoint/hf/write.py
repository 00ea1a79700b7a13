"""Writes a Hugging Face folder from any layout, which ``transformers`` loads with the same results.

Parameters are gathered over the ranks one at a time and converted to the family's tensors on the writing rank, which
needs memory for one file in addition to the model. The folder is written atomically
(:mod:`colonnade.checkpoint.atomic_folder`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from colonnade.atomic_rename import fsync
from colonnade.checkpoint import atomic_folder
from colonnade.checkpoint.hf import FAMILIES, config_to_hf
from colonnade.checkpoint.hf.read import CONFIG, INDEX, WEIGHTS
from colonnade.checkpoint.hf.write_quantised import (
    is_symmetric,
    quantization_config,
    write_quantised,
    written_quantised,
)
from colonnade.checkpoint.weight_mapping import ParamMapping, map_parameters
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import dense, quantised_parameters
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import WHOLE, Experts, Placement, placements

GENERATION_CONFIG = "generation_config.json"
MESSAGE_BYTES = 2048
"""The longest error message that the writing rank can broadcast."""


class TokenizerWithIds(Protocol):
    """The tokenizer interface that this module uses (:class:`colonnade.data.tokenizer.Tokenizer`)."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        ...

    def save(self, folder: Path) -> Any:
        """Writes tokenizer.json and its other files into an existing folder."""
        ...


def write_hf(
    model: Transformer,
    path: Path | str,
    *,
    tokenizer: TokenizerWithIds | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes ``model`` as the new folder ``path``; all ranks of the model's axes must call it together.

    ``dtype`` is the dtype on disk (by default the parameters' own); ``shard_bytes`` the largest file, unless a single
    parameter is larger; ``overwrite`` replaces an existing model. Raises :class:`CheckpointError`, on all ranks, when
    the folder exists already or cannot be written, or when the family cannot represent the model; no file is left then.
    """
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes {shard_bytes} is not positive; 5000000000 is usual")
    path = Path(path).absolute()
    dtype = dtype or next(model.parameters()).dtype
    if (moe := model.config.moe) is not None and moe.merged:
        raise CheckpointError(
            f"'{model.config.family}' files cannot represent that {moe.experts} experts are merged into {moe.merged}; "
            "write --format colonnade"
        )
    if any(weight.kind == "ternary" for weight in quantised_parameters(model).values()):
        raise CheckpointError("Hugging Face's formats have no ternary weights; write --format colonnade")
    shapes = model.global_shapes()
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    mappings = map_parameters(list(sizes), FAMILIES[model.config.family].table, str(path))
    special_ids = _special_ids(tokenizer)
    config = config_to_hf(model.config) | special_ids | {"dtype": str(dtype).removeprefix("torch.")}
    compressed, names_of = _compress(model, mappings), {}
    for name, tensors in compressed.items():
        sizes[name], names_of[name] = sum(tensor.nbytes for tensor in tensors.values()), list(tensors)
    if compressed:
        config["quantization_config"] = _quantization_config(model, mappings, shapes)
    texts = {CONFIG: config, GENERATION_CONFIG: special_ids}
    shards = plan_shards(sizes, shard_bytes)
    if len(shards) > 1:
        weight_map = {
            theirs: file
            for file, names in shards.items()
            for name in names
            for theirs in names_of.get(name, mappings[name].shapes(tuple(shapes[name]), model.config))
        }
        texts[INDEX] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}

    run_on_writer(model.axes, partial(atomic_folder.create_partial, path, overwrite))
    try:
        for file, names in shards.items():
            tensors = _gather_shard(model, mappings, [name for name in names if name not in compressed], dtype)
            for name in names:
                tensors |= compressed.get(name, {})
            save = partial(
                atomic_folder.write_tensors, atomic_folder.partial_path(path) / file, tensors, {"format": "pt"}
            )
            run_on_writer(model.axes, save)
        run_on_writer(model.axes, partial(_finish, path, texts, tokenizer))
    except CheckpointError:
        if _is_writer(model.axes):
            atomic_folder.remove_partial(path)
        raise


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """File name to the parameters it contains, in the model's order; ``sizes`` are theirs in bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


@torch.no_grad()
def _gather_shard(
    model: Transformer, mappings: Mapping[str, ParamMapping], names: list[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of one file on the writing rank; {} on the others, which take part in the gathers."""
    shapes, layout, axes = model.global_shapes(), placements(model), model.axes
    local = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    local |= {name: dense(name, weight) for name, weight in quantised_parameters(model).items() if name in names}
    tensors: dict[str, Tensor] = {}
    for name in names:
        parameter: Any = local[name]
        if hasattr(parameter, "full_tensor"):  # FSDP: gather over the data ranks first
            parameter = parameter.full_tensor()
        whole = gather_parameter(parameter, shapes[name], layout.get(name, WHOLE), axes)
        if _is_writer(axes):
            # The updates of a balancing bias are too small for 16 bits; transformers keeps it in float32 as well.
            on_disk = torch.promote_types(dtype, torch.float32) if name.endswith("bias_E") else dtype
            tensors |= mappings[name].write(whole.to("cpu", on_disk), model.config)
    return tensors


def _compress(model: Transformer, mappings: Mapping[str, ParamMapping]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each parameter that is written quantised; raises :class:`ConfigError` if that is impossible."""
    weights = written_quantised(quantised_parameters(model))
    if not weights:
        return {}
    if (ranks := model.axes.tp.size * model.axes.experts.tokens.size) > 1:
        raise ConfigError(
            f"quantised weights are written for transformers by one process, and these are sharded over {ranks}; load "
            "the model without a plan, or write --format colonnade"
        )
    symmetric = is_symmetric(weights.values())
    return {
        name: write_quantised(name, weight, mappings[name], model.config, symmetric=symmetric)
        for name, weight in weights.items()
    }


def _quantization_config(
    model: Transformer, mappings: Mapping[str, ParamMapping], shapes: Mapping[str, torch.Size]
) -> dict[str, Any]:
    weights = written_quantised(quantised_parameters(model))
    ignore = [
        theirs.removesuffix(".weight")
        for name, shape in shapes.items()
        if name not in weights and len(shape) == 2 and not name.startswith("embed.")
        for theirs in mappings[name].shapes(tuple(shape), model.config)
    ]
    if model.config.tied:  # no file has it, but transformers' model has such a layer, which would become quantised
        ignore.append("lm_head")
    return quantization_config(weights, ignore)


def gather_parameter(part: Tensor, shape: torch.Size, placement: Placement, axes: Axes) -> Tensor:
    """Gathers the whole parameter from the parts of all ranks."""
    if isinstance(placement, Experts):
        if placement.hidden is not None:
            part = axes.experts.etp.join(part, placement.hidden, shape[placement.hidden])
        return axes.experts.ep.join(part, 0, shape[0])
    return axes.tp.join(part, placement, shape[placement]) if isinstance(placement, int) else part


def _finish(path: Path, texts: Mapping[str, Any], tokenizer: TokenizerWithIds | None) -> None:
    folder = atomic_folder.partial_path(path)
    for file, values in texts.items():
        atomic_folder.write_json(folder / file, values)
    if tokenizer is not None:
        tokenizer.save(folder)
    for file in folder.iterdir():
        fsync(file)
    atomic_folder.rename_into_place(path)


def _special_ids(tokenizer: TokenizerWithIds | None) -> dict[str, Any]:
    """Written even when unknown, because the config classes of transformers have their own defaults."""
    eos_ids = list(tokenizer.eos_ids) if tokenizer else []
    return {
        "bos_token_id": tokenizer.bos_id if tokenizer else None,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
    }


def _is_writer(axes: Axes) -> bool:
    return axes.tp.rank == 0 and axes.dp.rank == 0


def run_on_writer(axes: Axes, action: Callable[[], Any]) -> None:
    """Runs ``action`` on one rank of the model's axes; if it fails, all ranks raise the same error."""
    message = ""
    if _is_writer(axes):
        try:
            action()
        except (ColonnadeError, SafetensorError, OSError) as why:
            message = str(why) or type(why).__name__
    buffer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    text = message.encode()[:MESSAGE_BYTES]
    buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    axes.dp.broadcast_(axes.tp.broadcast_(buffer))
    if text := bytes(buffer.tolist()).rstrip(b"\0").decode(errors="ignore"):
        raise CheckpointError(text)
