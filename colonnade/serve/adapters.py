"""Adapters of one served model, chosen by each request and mixed in one step.

    y_t = W x_t + s · B_i A_i x_t        i: the adapter of token t's request, or none

The step's tokens are grouped by adapter, and each group takes two additional products: a step with k adapters costs 2k
small products per matrix. A step without adapters costs nothing extra and runs the fused kernels. A and B are sharded
over tensor-parallel ranks like W (:mod:`colonnade.model.lora`). In the prefix cache each adapter has its own pages.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from colonnade.checkpoint.adapters import read_adapter
from colonnade.config import ModelConfig, ServeConfig
from colonnade.errors import CheckpointError, ConfigError
from colonnade.kernels.device import upload
from colonnade.model import Transformer
from colonnade.model.lora import NAME, fuse_qkv
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.parallel.layout import layout_of, local_part
from colonnade.serve.work import Slice


class Group(NamedTuple):
    """The tokens of a step that use one adapter."""

    adapter: int
    """From 1."""
    rows_R: Tensor | None
    """Their rows; None: all of the step's."""


class AdapterChoice:
    """The adapter of each token of the running step, shared by all layers of a model."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def set(self, slices: Sequence[Slice], device: torch.device) -> None:
        """Choose the adapters of the tokens of ``slices``."""
        rows: dict[int, list[int]] = {}
        first = 0
        for piece in slices:
            if piece.adapter:
                rows.setdefault(piece.adapter, []).extend(range(first, first + len(piece.tokens)))
            first += len(piece.tokens)
        self.groups = [
            Group(i, None if len(rows[i]) == first else upload(rows[i], torch.int64, device)) for i in sorted(rows)
        ]

    def clear(self) -> None:
        """No adapter."""
        self.groups = []


class ServedAdapters(nn.Module):
    """The adapters of one matrix: maps x to the term added to x Wᵀ, or None if the step uses no adapter."""

    def __init__(self, choice: AdapterChoice, outputs: int):
        super().__init__()
        self._choice, self._outputs = choice, outputs
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        """(A, s · B) by adapter; plain tensors, which are not the model's parameters."""

    @property
    def active(self) -> bool:
        """Whether the running step uses any adapter."""
        return any(group.adapter in self.pairs for group in self._choice.groups)

    def forward(self, x_TD: Tensor) -> Tensor | None:
        """(T, inputs) to (T, outputs)."""
        if not self.active:
            return None
        y_Tz = None
        for adapter, rows_R in self._choice.groups:
            if adapter not in self.pairs:
                continue
            a, b = self.pairs[adapter]
            if rows_R is None:
                return (x_TD @ a.T) @ b.T
            if y_Tz is None:
                y_Tz = x_TD.new_zeros(len(x_TD), self._outputs)
            y_Tz[rows_R] = (x_TD[rows_R] @ a.T) @ b.T
        return y_Tz


class EngineAdapters:
    """The adapters of an engine's model, by name."""

    def __init__(self, model: Transformer, config: ServeConfig):
        """Read the adapters that ``config`` names and attach them to ``model``; raises :class:`CheckpointError`."""
        self.choice = AdapterChoice()
        self.names = list(config.adapter_paths)
        layout = layout_of(Transformer(model.config, model.axes, device="meta")) if self.names else {}
        weight = next(model.parameters())
        for number, path in enumerate(config.adapter_paths.values(), 1):
            for module_name, (a, b) in global_lora_pairs(path, model.config).items():
                linear = model.get_submodule(module_name)
                assert isinstance(linear, Linear)
                at = layout[f"{module_name}.weight"]
                local = (local_part(a, 1, model.axes), b) if at == 1 else (a, local_part(b, 0, model.axes))
                if linear.adapter is None:
                    linear.adapter = ServedAdapters(self.choice, len(local[1]))
                assert isinstance(linear.adapter, ServedAdapters)
                a_rz, b_zr = (x.contiguous().to(weight.device, weight.dtype) for x in local)
                linear.adapter.pairs[number] = a_rz, b_zr

    def number(self, name: str | None) -> int:
        """The number of an adapter, 0 for none; raises :class:`ConfigError` for an unknown one."""
        if not name:
            return 0
        if name not in self.names:
            known = ", ".join(self.names) or "none"
            raise ConfigError(f"there is no adapter '{name}' here, only {known}; name one of these, or none")
        return self.names.index(name) + 1


def global_lora_pairs(path: str, base: ModelConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, s · B) of all ranks by the name of the linear layer; q, k and v are one pair of the fused projection.

    Raises :class:`CheckpointError` for adapters of a different model, and of experts.
    """
    model, tensors, _ = read_adapter(path, base)
    assert model.lora is not None
    scale, heads = model.lora.scale, {"q": base.group, "k": 1, "v": 1}
    by_module: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, rest = name.partition(NAME)
        if rest.partition("_")[0] in ("gate", "up", "down"):
            raise CheckpointError(
                f"{path} has adapters of routed experts, which can only be served merged: colonnade serve {path}"
            )
        by_module.setdefault(module, {})[rest] = tensor
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for module, parts in by_module.items():
        if "a" in parts:
            found[module] = parts["a"], scale * parts["b"]
            continue
        names = [part for part in heads if f"{part}.a" in parts]
        rows = [
            fuse_qkv({part: scale * parts[f"{part}.b"].T}, heads, base.kv_heads, base.head_width).T for part in names
        ]
        found[module] = torch.cat([parts[f"{part}.a"] for part in names]), torch.cat(rows, 1)
    return found


def check_adapters(config: ServeConfig, base: ModelConfig) -> None:
    """Raise an error unless the adapters that ``config`` names fit the model ``base``."""
    for path in config.adapter_paths.values():
        global_lora_pairs(path, base)
