"""The weights of another checkpoint of a served model, read into host memory while the model runs.

    check_replacement(path)   same configuration and tokenizer, and memory for a second copy
    read()                    in a thread: this rank's shard, cast or quantised as the model's own, checked
    finish()                  on all ranks together: quantise what they must quantise together
    copy()                    overwrite the model's weights in place

Everything that can fail happens before :meth:`StagedWeights.copy`.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint.load_model import OpenedModel, open_model
from colonnade.config import ModelConfig, differences, format_bytes
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CapacityError, CheckpointError, ConfigError
from colonnade.kernels.linear.quantise import Quantised, to_blocks
from colonnade.model import Transformer
from colonnade.model.moe import expert_modules
from colonnade.model.weight_only_quant import Requantise, StoredFormat, dense, quantisable_shapes, weight_tensors
from colonnade.parallel.device_memory import usable_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.pooler_spec import PoolerSpec

CPU = torch.device("cpu")

FLOAT32_BYTES = 4
"""Bytes of an element of the largest dtype in which matrices wait for quantisation."""

TRAINING_FIELDS = ("init_std",)
"""Fields of a model's configuration that do not change what it computes when it is served."""
MOE_TRAINING_FIELDS = ("balance", "balance_over", "balance_weight", "z_weight")
"""The same for those of its mixture of experts."""


def check_replacement(path: str | Path, model: Transformer, tokenizer: Tokenizer) -> OpenedModel:
    """Open the checkpoint at ``path`` and check that its weights can replace those of ``model``; reads no weights.

    Raises :class:`ConfigError` for another configuration or tokenizer, :class:`CapacityError` if a second copy does not
    fit into the host's memory, and what :func:`open_model` raises.
    """
    if any(layer.fetch is not None for layer in expert_modules(model)):
        raise ConfigError("experts offloaded to host memory cannot be swapped; restart the server with the new weights")
    opened = open_model(path)
    if differ := differences(_served(model.config), _served(opened.config)):
        raise _differs(opened, *_parse_difference(differ[0]))
    found = Tokenizer.from_model(opened.tokenizer_source)
    if found is None:
        raise CheckpointError(
            f"{opened.path} has no tokenizer to compare with the served model's; add its tokenizer.json"
        )
    if found.fingerprint != tokenizer.fingerprint:
        raise _differs(opened, "tokenizer", f"sha256 {tokenizer.fingerprint[:16]}", f"sha256 {found.fingerprint[:16]}")
    for name in ("bos_id", "eos_ids", "chat_template"):
        if (ours := getattr(tokenizer, name)) != (theirs := getattr(found, name)):
            raise _differs(opened, f"tokenizer.{name}", _short(ours), _short(theirs))
    needed, free = staged_bytes(model), usable_bytes(CPU)
    if needed > free:
        raise CapacityError(
            f"the weights of {opened.path} take {format_bytes(needed)} of host memory in addition to the served ones, "
            f"and {format_bytes(free)} is free; restart the server with the new weights"
        )
    return opened


def check_pooler(opened: OpenedModel, served: PoolerSpec, found: PoolerSpec) -> None:
    """Raise :class:`ConfigError` if the checkpoint's hidden states are pooled differently from the ``served`` one."""
    for name, ours in asdict(served).items():
        if (theirs := getattr(found, name)) != ours:
            raise _differs(opened, name, _short(ours), _short(theirs))


def staged_bytes(model: Transformer) -> int:
    """Host memory of this rank's part of a second copy while it is read [bytes], an upper bound."""
    requantise, shape = Requantise(model), Transformer(model.config, model.axes, device="meta")
    sizes = {name: count * outputs * inputs for name, (count, outputs, inputs) in quantisable_shapes(shape).items()}
    waiting = sum(size for name, size in sizes.items() if requantise.is_collective(name)) * FLOAT32_BYTES
    largest = max(x.numel() for x in shape.parameters()) * FLOAT32_BYTES
    return sum(x.nbytes for x in weight_tensors(model)) + waiting + 2 * largest


def _served(config: ModelConfig) -> ModelConfig:
    """``config`` without the fields that matter only in training."""
    fields: dict[str, Any] = {name: ModelConfig.model_fields[name].default for name in TRAINING_FIELDS}
    if (moe := config.moe) is not None:
        defaults = type(moe).model_fields
        fields["moe"] = moe.replace(**{name: defaults[name].default for name in MOE_TRAINING_FIELDS})
    return config.replace(**fields)


def _parse_difference(line: str) -> tuple[str, str, str]:
    """(field, served value, other value) of a line of :func:`differences`."""
    name, _, values = line.partition(": ")
    ours, _, theirs = values.partition(" -> ")
    return name, ours, theirs


def _differs(opened: OpenedModel, field: str, ours: str, theirs: str) -> ConfigError:
    return ConfigError(
        f"{opened.path} is a checkpoint of a different model: {field} is {theirs}, and {ours} in the served model; "
        "use a checkpoint of the same model, or start another server"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


@dataclass
class _Waiting:
    """A matrix that all ranks quantise together."""

    value: Tensor


class StagedWeights:
    """This rank's shard of another checkpoint, in host memory, in the formats of ``model``'s own weights."""

    def __init__(self, model: Transformer):
        self._model, self._requantise = model, Requantise(model)
        self._staged: dict[str, Tensor | Quantised | _Waiting] = {}

    def read(self, opened: OpenedModel, context: DistributedContext) -> None:
        """Read everything; raises :class:`CheckpointError` for damaged files and for values that are not finite.

        May run in a thread concurrently with the model's steps: it uses neither the device nor collectives.
        """
        weight = next(self._model.parameters())
        shape = Transformer(self._model.config, self._model.axes, device="meta", dtype=weight.dtype)
        with torch.no_grad():
            opened.read_weights(shape, replace(context, device=CPU), self._store)
        missing = {name for name, _ in (*shape.named_parameters(), *shape.named_buffers())} - self._staged.keys()
        assert not missing, f"the loader left out {sorted(missing)}"

    def _store(self, name: str, parameter: Tensor, value: Tensor | Quantised) -> None:
        current = self._requantise.current(name)
        if isinstance(value, Quantised) and current is not None and StoredFormat.of(value) == StoredFormat.of(current):
            finite = bool(value.scales.isfinite().all())
            if value.kind == "float8":  # e4m3 has NaN, and no infinities
                finite = finite and not bool(((value.values.view(torch.uint8) & 0x7F) == 0x7F).any())
            if not finite:
                raise CheckpointError(f"the weight '{name}' is not finite in {value.kind}; use another checkpoint")
            self._staged[name] = value
            return
        value, quantised = dense(name, value), current is not None
        if not quantised:  # copied even if the dtype is the same: the value may be mapped from a file that changes
            value = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(value)
        if not value.isfinite().all():
            dtype = str(value.dtype).removeprefix("torch.")
            raise CheckpointError(f"the weight '{name}' is not finite in {dtype}; use another checkpoint")
        if not quantised:
            self._staged[name] = value
        elif self._requantise.is_collective(name):
            self._staged[name] = _Waiting(value.clone())
        else:
            self._staged[name] = self._requantise(name, value)

    @torch.no_grad()
    def finish(self) -> None:
        """Quantise the matrices whose scales all ranks share; all ranks call this together, after :meth:`read`."""
        for name, waiting in self._staged.items():
            if isinstance(waiting, _Waiting):
                self._staged[name] = self._requantise(name, waiting.value)

    @torch.no_grad()
    def copy(self) -> None:
        """Overwrite the model's weights; CUDA graphs continue to read the same addresses."""
        targets = dict((*self._model.named_parameters(), *self._model.named_buffers()))
        for name, new in self._staged.items():
            if isinstance(new, Quantised):
                current = self._requantise.current(name)
                assert current is not None
                stored = to_blocks(new) if current.blocked else new
                current.values.copy_(stored.values)
                current.scales.copy_(stored.scales)
            else:
                assert isinstance(new, Tensor), "finish() comes before"
                targets[name].copy_(new)
        if (device := next(self._model.parameters()).device).type == "cuda":
            torch.cuda.synchronize(device)
