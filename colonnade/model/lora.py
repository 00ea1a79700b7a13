"""Low-rank adapters: y = W x + s · B A x; only A and B are trained (Hu 2021, arXiv 2106.09685).

    column-parallel W     A is replicated and used for this rank's rows of B: PARTIAL.   B is cut like W, dimension 0.
    row-parallel W        A is cut like W, dimension 1.   B A x is added before the sum over ranks: B is PARTIAL.
    fused W_qkv           three pairs; B's rows are whole heads, added to W's groups of query heads, key and value.
    experts               a pair for each expert, in stacks; W + s · B A is computed, for kernels that read stacks.

A is drawn uniformly within ± 1/√inputs, as torch draws a linear layer and as PEFT does, B is 0: a new adapter changes
nothing. A model has adapters if ``config.lora`` is set.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.config import LoraConfig, ModelConfig
from colonnade.parallel.layout import PARTIAL, Experts, Placement

NAME = ".adapter."
"""Part of the names of all adapters' parameters."""


def is_adapter(name: str) -> bool:
    """Whether a parameter called ``name`` belongs to an adapter."""
    return NAME in f".{name}"


class LowRank(nn.Module):
    """One pair: x to s · B A x."""

    def __init__(
        self, inputs: int, outputs: int, lora: LoraConfig, layout: dict[str, Placement], fan_in: int, **on: Any
    ):
        """``inputs`` and ``outputs`` are this rank's; ``fan_in`` is that of all ranks."""
        super().__init__()
        self.a = nn.Parameter(torch.empty(lora.rank, inputs, **on))
        self.b = nn.Parameter(torch.empty(outputs, lora.rank, **on))
        self.scale, self.layout = lora.scale, layout
        self.initial, self.uniform = {"b": 0.0}, {"a": fan_in**-0.5}

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        return (x @ self.a.T) @ (self.scale * self.b).T


class FusedQkv(nn.Module):
    """Pairs for some of queries, keys and values, as rows of the fused projection."""

    def __init__(self, inputs: int, kv_heads: int, group: int, head_width: int, lora: LoraConfig, **on: Any):
        """``kv_heads`` are this rank's."""
        super().__init__()
        self.heads = {"q": group, "k": 1, "v": 1}
        self.kv_heads, self.head_width = kv_heads, head_width
        for name, heads in self.heads.items():
            if name in lora.targets:
                outputs = kv_heads * heads * head_width
                pair = LowRank(inputs, outputs, lora, {"a": PARTIAL, "b": 0}, inputs, **on)
                self.add_module(name, pair)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) to (…, z): for each key/value head its query heads, its key, its value."""
        pairs = dict(self.named_children())
        return fuse_qkv({name: pair(x) for name, pair in pairs.items()}, self.heads, self.kv_heads, self.head_width)


def fuse_qkv(parts: dict[str, Tensor], heads: dict[str, int], kv_heads: int, head_width: int) -> Tensor:
    """The last dimension of queries, keys and values in fused order; a part that is missing is 0."""
    like = next(iter(parts.values()))

    def part(name: str) -> Tensor:
        size = (kv_heads, heads[name], head_width)
        return parts[name].unflatten(-1, size) if name in parts else like.new_zeros(*like.shape[:-1], *size)

    return torch.cat([part(name) for name in heads], -2).flatten(-3)


class ExpertPairs(nn.Module):
    """Pairs for the stacks (e, f, D) of some experts' matrices."""

    def __init__(self, parts: tuple[str, ...], e: int, f: int, width: int, hidden: int, lora: LoraConfig, **on: Any):
        """``e`` and ``f`` are this rank's; ``hidden`` is F."""
        super().__init__()
        self.layout: dict[str, Placement] = {}
        self.uniform: dict[str, float] = {}
        self.initial: dict[str, float] = {}
        self.scale, self.parts = lora.scale, parts
        for part in parts:
            # x_RD Aᵀ Bᵀ: up has A (e, r, D) and B (e, f, r); down, stored transposed, A (e, f, r) and B (e, r, D).
            shapes = {"a": (e, lora.rank, width), "b": (e, f, lora.rank)}
            if part == "down":
                shapes = {"a": shapes["b"], "b": shapes["a"]}
            for which, shape in shapes.items():
                self.register_parameter(f"{part}_{which}", nn.Parameter(torch.empty(shape, **on)))
                cut = which == ("a" if part == "down" else "b")
                self.layout[f"{part}_{which}"] = Experts(1 if cut else None)
            self.uniform[f"{part}_a"] = (hidden if part == "down" else width) ** -0.5
            self.initial[f"{part}_b"] = 0.0

    def delta(self, part: str) -> Tensor:
        """s · B A of each expert, (e, f, D)."""
        return expert_delta(part, self.get_parameter(f"{part}_a"), self.get_parameter(f"{part}_b"), self.scale)


def expert_delta(part: str, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """s · B A, hidden units first."""
    return torch.bmm(a, scale * b) if part == "down" else torch.bmm(scale * b, a)


def linear_adapter(
    name: str, config: ModelConfig, inputs: int, outputs: int, fan_in: int, *, row: bool, **on: Any
) -> LowRank | None:
    """The adapter of the target ``name``, row- or column-parallel; None if the model has none."""
    if config.lora is None or name not in config.lora.targets:
        return None
    layout: dict[str, Placement] = {"a": 1, "b": PARTIAL} if row else {"a": PARTIAL, "b": 0}
    return LowRank(inputs, outputs, config.lora, layout, fan_in, **on)


def qkv_adapter(config: ModelConfig, kv_heads: int, **on: Any) -> FusedQkv | None:
    """The adapter of the fused projection of this rank's heads; None if the model has none."""
    if config.lora is None or not {"q", "k", "v"} & set(config.lora.targets):
        return None
    return FusedQkv(config.width, kv_heads, config.group, config.head_width, config.lora, **on)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context manager: ``model`` computes as if it had no adapters."""
    adapters = [module for module in model.modules() if isinstance(module, LowRank | ExpertPairs)]
    scales = [adapter.scale for adapter in adapters]
    for adapter in adapters:
        adapter.scale = 0.0
    try:
        yield
    finally:
        for adapter, scale in zip(adapters, scales, strict=True):
            adapter.scale = scale


def merged_delta(name: str, adapters: dict[str, Tensor], config: ModelConfig) -> Tensor | None:
    """s · B A of the parameter ``name`` with ``adapters``, whole or a tensor rank's; None if it has none."""
    assert config.lora is not None
    scale = config.lora.scale
    module, _, leaf = name.rpartition(".")
    prefix = f"{module}{NAME}"

    def pair(of: str) -> Tensor | None:
        a, b = adapters.get(f"{prefix}{of}a"), adapters.get(f"{prefix}{of}b")
        return None if a is None or b is None else scale * b @ a

    if f"{prefix}{leaf}_a" in adapters:
        return expert_delta(leaf, adapters[f"{prefix}{leaf}_a"], adapters[f"{prefix}{leaf}_b"], scale)
    if leaf != "weight":
        return None
    if (delta := pair("")) is not None:
        return delta
    parts = {part: delta.T for part in ("q", "k", "v") if (delta := pair(f"{part}.")) is not None}
    if not parts:
        return None
    heads = {"q": config.group, "k": 1, "v": 1}
    some = next(iter(parts))
    kv_heads = parts[some].shape[-1] // (heads[some] * config.head_width)
    return fuse_qkv(parts, heads, kv_heads, config.head_width).T
