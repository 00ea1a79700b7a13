"""Adapters in the files of the PEFT library: adapter_config.json and adapter_model.safetensors.

    base_model.model.{their module}.lora_A.weight     our A (r, inputs)
    base_model.model.{their module}.lora_B.weight     our B (outputs, r)

Modules have the names of the family's Hugging Face files; our fused qkv has a pair for each of q, k and v already. Only
plain LoRA of linear layers is read: every other key of the configuration must have the value that changes nothing.
Families whose files fuse queries, keys and values (GPT-2), and routed experts, are not supported.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colonnade.atomic_rename import fsync
from colonnade.checkpoint import atomic_folder
from colonnade.checkpoint.atomic_folder import read_json
from colonnade.checkpoint.hf import FAMILIES
from colonnade.checkpoint.hf.read import FLOATS
from colonnade.checkpoint.weight_mapping import FusedQKV, ParamMapping, SplitQKV
from colonnade.config import LORA_TARGETS, LoraConfig, LoraTarget, ModelConfig
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model import Transformer
from colonnade.model.lora import is_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRICES = {"attention.out": "out", "ffn.gate": "gate", "ffn.up": "up", "ffn.down": "down"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "bias": ("none", None), "modules_to_save": (None, []), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "fan_in_fan_out": (False, None), "trainable_token_indices": (None,),
    "target_parameters": (None, []), "layer_replication": (None,), "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,), "megatron_config": (None,), "exclude_modules": (None, []),
}  # fmt: skip
"""Keys that would change the numbers, and the values with which they do not."""


class Adapter(NamedTuple):
    """Adapters of a model, whole, by our names."""

    model: ModelConfig
    """With ``lora``."""
    tensors: dict[str, Tensor]
    base: str
    """The name of the base model, or ""."""


def is_peft(folder: Path) -> bool:
    """Whether ``folder`` looks like adapters of PEFT."""
    return (folder / CONFIG).is_file()


def read_base(folder: Path) -> str:
    """The name of the base model that the adapters in ``folder`` belong to, or ""."""
    base = _read_config(folder).get("base_model_name_or_path")
    return base if isinstance(base, str) else ""


def read_peft(folder: Path, base: ModelConfig) -> Adapter:
    """The adapters in ``folder`` for a model ``base``; a layer without one gets zeros.

    Raises :class:`CheckpointError` for damaged files, for tensors of another model, and for PEFT features beyond plain
    LoRA.
    """
    config = _read_config(folder)
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise CheckpointError(
                f"{folder / CONFIG} has {key} = {str(config[key])[:60]!r}, and only plain LoRA is read; merge the "
                "adapter with PEFT"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA" or not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder / CONFIG} describes no LoRA with r and lora_alpha; use a LoRA adapter")
    file = folder / WEIGHTS
    try:
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            dtypes = {opened.get_slice(name).get_dtype() for name in names}
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            if unknown := dtypes - set(FLOATS):
                raise CheckpointError(f"{file} contains {unknown.pop()}, but only {', '.join(FLOATS)} can be read")
            model = base.replace(lora=_lora(rank, float(alpha), config.get("use_rslora"), names, base, file))
            expected = Transformer(model, device="meta").global_shapes()
            tensors: dict[str, Tensor] = {}
            for ours, theirs in _names(model):
                if theirs not in names:
                    tensors[ours] = torch.zeros(expected[ours])
                    continue
                if shapes[theirs] != tuple(expected[ours]):
                    raise CheckpointError(
                        f"{file} contains {theirs!r} of shape {list(shapes[theirs])}, but the model needs "
                        f"{list(expected[ours])}; use the model that it was trained on"
                    )
                tensors[ours] = opened.get_tensor(theirs)
    except (SafetensorError, OSError) as why:
        raise CheckpointError(f"{file} is missing or damaged ({why}); download it again") from None
    except ConfigError as why:
        raise CheckpointError(f"{folder / CONFIG}: {why}") from None
    return Adapter(model, tensors, read_base(folder))


def write_peft(folder: Path, adapter: Adapter, *, overwrite: bool = False) -> None:
    """Write ``adapter`` as the new ``folder``, completely or not at all.

    Raises :class:`ConfigError` for a family or experts with adapters that PEFT's files cannot represent, and
    :class:`CheckpointError` if the folder exists or cannot be written.
    """
    lora = adapter.model.lora
    assert lora is not None
    names = dict(_names(adapter.model))
    if missing := sorted(adapter.tensors.keys() - names.keys()):
        raise ConfigError(f"PEFT's files have no place for {missing[0]!r}; convert the merged model instead")
    modules = {theirs.removeprefix(_PREFIX).rpartition(".lora_")[0] for theirs in names.values()}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": adapter.base or None,
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "lora_dropout": 0.0, "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}), "fan_in_fan_out": False,
        "inference_mode": True,
    }  # fmt: skip
    tensors = {names[name]: tensor for name, tensor in adapter.tensors.items()}
    atomic_folder.create_partial(folder, overwrite)
    partial = atomic_folder.partial_path(folder)
    try:
        atomic_folder.write_json(partial / CONFIG, config)
        atomic_folder.write_tensors(partial / WEIGHTS, tensors, {"format": "pt"})
        for name in (CONFIG, WEIGHTS):
            fsync(partial / name)
        atomic_folder.rename_into_place(folder)
    except BaseException:
        atomic_folder.remove_partial(folder)
        raise


def _read_config(folder: Path) -> Mapping[str, Any]:
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} contains no JSON object; download it again")
    return config


def _lora(rank: int, alpha: float, rslora: object, names: set[str], base: ModelConfig, file: Path) -> LoraConfig:
    """The settings, with the targets that the file has; raises :class:`CheckpointError` for unknown tensors."""
    every = base.replace(lora=LoraConfig(rank=rank, alpha=alpha, rslora=bool(rslora)))
    target_of = {theirs: _target(ours) for ours, theirs in _names(every)}
    if unknown := sorted(names - target_of.keys()):
        raise CheckpointError(
            f"{file} contains {unknown[0]!r}, which is no adapter of a {base.family} model; use the model that it was "
            "trained on, or merge the adapter with PEFT"
        )
    if not names:
        raise CheckpointError(f"{file} contains no tensors; download it again")
    found = {target_of[name] for name in names}
    targets: tuple[LoraTarget, ...] = tuple(target for target in LORA_TARGETS if target in found)
    return LoraConfig(rank=rank, alpha=alpha, rslora=bool(rslora), targets=targets)


def _target(ours: str) -> str:
    """The target that an adapter's parameter belongs to."""
    module, _, rest = ours.partition(".adapter.")
    if "." in rest:
        return rest.partition(".")[0]
    return next(target for end, target in _MATRICES.items() if module.endswith(end))


def _names(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Our name and PEFT's of each adapter's parameter that its files can have."""
    table = FAMILIES[model.family].table
    for ours in Transformer(model, device="meta").global_shapes():
        if not is_adapter(ours) or ".experts." in ours or ".shared." in ours:
            continue
        module, _, rest = ours.partition(".adapter.")
        _, layer, local = module.split(".", 2)
        mapping: ParamMapping | None = table.get(f"blocks.{{i}}.{local}.weight")
        if mapping is None or isinstance(mapping, FusedQKV) or mapping.transposed:
            continue
        part, _, which = rest.rpartition(".")
        number = "qkv".index(part) if part and isinstance(mapping, SplitQKV) else 0
        theirs = mapping.for_layer(int(layer)).names[number].removesuffix(".weight")
        yield ours, f"{_PREFIX}{theirs}.lora_{which.upper()}.weight"
