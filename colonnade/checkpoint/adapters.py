"""Adapters next to their base model: read from a run, and merged into weights while these are loaded.

    W ← W + s · B A

Each parameter is merged in the dtype in which it is loaded, before it is quantised.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint import native
from colonnade.checkpoint.peft import CONFIG as PEFT_CONFIG
from colonnade.checkpoint.peft import Adapter, is_peft, read_peft
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError
from colonnade.kernels.linear.quantise import Quantised
from colonnade.model import Transformer
from colonnade.model.lora import merged_delta
from colonnade.model.weight_only_quant import StoreWeight
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import WHOLE, layout_of, local_part

LoadWeights = Callable[[Transformer, DistributedContext, StoreWeight], object]


def read_adapter(path: str | Path, base: ModelConfig | None = None) -> Adapter:
    """The adapters in ``path``: PEFT's folder, a run or a checkpoint of a run.

    ``base`` is the model that they are for, which a folder of PEFT needs. Raises :class:`CheckpointError` for anything
    else, and for adapters of a different model.
    """
    folder = Path(path)
    if is_peft(folder):
        if base is None:
            raise CheckpointError(f"{folder} contains PEFT adapters, which need their base model; specify it")
        return read_peft(folder, base)
    location = folder if native.is_native(folder) else native.newest(folder)
    meta = None if location is None else native.read_meta(location)
    if location is None or meta is None or meta.model.lora is None:
        raise CheckpointError(
            f"{path} has no adapters; use a run trained with --lora.rank, or a folder with {PEFT_CONFIG}"
        )
    if base is not None:
        check_base(meta.model, base, str(location))
    return Adapter(
        meta.model, _read_native(location, meta.model), meta.run.train.pretrained_checkpoint if meta.run else ""
    )


def _read_native(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The whole adapters of a checkpoint of a model ``config``, by name, on the CPU."""
    found: dict[str, Tensor] = {}

    def keep(name: str, _: Tensor, value: Tensor | Quantised) -> None:
        assert isinstance(value, Tensor), "adapters are not quantised"
        found[name] = value

    model = Transformer(config, device="meta")
    native.load(folder, model, DistributedContext.solo(), place=keep, collective=False)
    return found


def merge_after_load(load: LoadWeights, adapter: Adapter) -> LoadWeights:
    """``load`` of the base model, followed by the merge of ``adapter``."""
    adapters, config = adapter.tensors, adapter.model

    @torch.no_grad()
    def load_merged(model: Transformer, context: DistributedContext, place: StoreWeight) -> None:
        layout = layout_of(Transformer(model.config, model.axes, device="meta"))  # a quantised model lacks parameters
        merged: set[str] = set()

        def delta_of(name: str, like: Tensor) -> Tensor | None:
            delta = merged_delta(name, adapters, config)
            if delta is None:
                return None
            merged.add(name)
            exact = torch.promote_types(like.dtype, torch.float32)
            return local_part(delta.to(like.device, exact), layout.get(name, WHOLE), model.axes)

        def place_merged(name: str, parameter: Tensor, value: Tensor | Quantised) -> None:
            if isinstance(value, Quantised):
                raise CheckpointError(
                    f"adapters cannot be merged into {name!r}, which is quantised; load the model with weights=dense"
                )
            delta = delta_of(name, value)
            place(name, parameter, value if delta is None else (value.to(delta.dtype) + delta).to(value.dtype))

        before = {name for name, p in model.named_parameters() if not p.is_meta}
        load(model, context, place_merged)
        for name, parameter in model.named_parameters():
            if name in before and name not in merged and (delta := delta_of(name, parameter)) is not None:
                parameter.copy_(parameter.to(delta.dtype) + delta)  # loaded in place, without a call

    return load_merged


def check_base(adapter: ModelConfig, base: ModelConfig, where: str) -> None:
    """Raise :class:`CheckpointError` unless adapters of a model ``adapter`` fit the model ``base``."""
    mine, theirs = (dict(Transformer(config.replace(lora=adapter.lora), device="meta").global_shapes())
                    for config in (adapter, base))  # fmt: skip
    if different := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
        raise CheckpointError(
            f"{where} has adapters for a different model: {different[0]!r} differs; use the model it was trained on"
        )
