"""A model whose matrices are quantised while they are read: beside it one matrix is in memory as it was stored (of
experts those of one layer, stored together).

Quantised are the products inside the blocks, those of every expert among them, and an output projection of its own;
that one has 8 bits where the others have 4, as each of its rows is a token's logit. What stays as it is stored:
embeddings (a row of them is looked up, not multiplied) and so an output projection tied to them; norms and biases; a
latent attention's up-projection, whose parts are multiplied one by one; and what decides where a token goes and how
much of it: routers, and the gate of shared experts.

A weight's bits are the same under every layout: where its columns are cut over ranks, int8 and float8 take each row's
maximum over all of them, and int4's groups are whole (:mod:`colonnade.config.feature_checks`).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, Weights
from colonnade.kernels.linear.quantise import Kind, stored_bytes
from colonnade.model.linear import Linear
from colonnade.model.moe.expert_offload import plain_bytes
from colonnade.model.moe.experts import Experts
from colonnade.model.transformer import Transformer
from colonnade.parallel.axis import SOLO, Axes
from colonnade.parallel.layout import layout_of

Place = Callable[[str, Tensor, Tensor], object]
"""Called with a parameter's name, itself, and this rank's part of what it is to hold."""


def in_place(_name: str, held: Tensor, value: Tensor) -> None:
    """Copy it there."""
    held.copy_(value)


def build(
    config: ModelConfig,
    axes: Axes,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kind: Kind,
    group: int,
    experts_on: torch.device | None = None,
) -> tuple[Transformer, Place]:
    """A model whose matrices are nowhere yet, and what puts them there in ``kind`` (others where they belong); experts
    wait on ``experts_on``, if not on ``device``.
    """
    model = Transformer(config, axes, device="meta", dtype=dtype)
    waiting = quantisable(model)
    for prefix, module in model.named_modules():
        home = device
        if isinstance(module, Experts):
            home = module.stored_on = experts_on or device
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if _joined(prefix, name) not in waiting:
                made = torch.empty_like(tensor, device=home)
                setattr(module, name, nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made)
    layout = layout_of(model)

    def place(name: str, held: Tensor, value: Tensor) -> None:
        layer = waiting.get(name)
        if layer is None:
            in_place(name, held, value)
        elif isinstance(layer, Experts):
            layer.quantise(_part(name), value, kind, group, axes.experts.sh, device)
        else:
            over = axes.tp if layout[name] == 1 else SOLO
            layer.quantise(value.to(device), _bits(name, kind), group, over.max_)

    return model, place


def quantisable(model: nn.Module) -> dict[str, Linear | Experts]:
    """What has a matrix that can be quantised, or a stack of them, by its name."""
    found: dict[str, Linear | Experts] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not module.as_stored:
            found[_joined(name, "weight")] = module
        elif isinstance(module, Experts):
            parts = ("up", "down") if module.gate is None else ("up", "down", "gate")
            found |= {_joined(name, part): module for part in parts}
    return found


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def _bits(name: str, kind: Kind) -> Kind:
    return "int8" if kind == "int4" and name == "unembed.weight" else kind


def matrices(shape: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Of what can be quantised of a model, which may be on the meta device: (how many of it, outputs, inputs)."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, layer in quantisable(shape).items():
        *stack, outputs, inputs = layer.get_parameter(_part(name)).shape
        if stack and _part(name) == "down":  # stored inputs first
            outputs, inputs = inputs, outputs
        found[name] = (stack[0] if stack else 1, outputs, inputs)
    return found


def kept_bytes(shape: nn.Module, weights: Weights, group: int) -> int:
    """Memory of a model's weights, or of a part's, if they were kept so [bytes]; it may be on the meta device."""
    if weights == "stored":
        return plain_bytes(shape)
    waiting = matrices(shape)
    plain = (x.nbytes for name, x in (*shape.named_parameters(), *shape.named_buffers()) if name not in waiting)
    return sum(plain) + sum(
        count * stored_bytes(outputs, inputs, _bits(name, weights), group)
        for name, (count, outputs, inputs) in waiting.items()
    )


def kind_of(model: nn.Module) -> Kind | None:
    """What a model's blocks are quantised to, if they are."""
    found = (m.quantised for m in model.modules() if isinstance(m, Linear) and m.quantised is not None)
    return next((weight.kind for weight in found), None)


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """All that a model's weights are made of, quantised or not."""
    yield from (*model.parameters(), *model.buffers())
    for module in model.modules():
        held = []
        if isinstance(module, Linear) and module.quantised is not None:
            held = [module.quantised]
        elif isinstance(module, Experts):
            held = module.quantised.values()
        for weight in held:
            yield from (weight.values, weight.scales)


def weight_bytes(model: nn.Module) -> int:
    """Memory of this rank's share of a model's weights, quantised or not [bytes]."""
    return sum(x.nbytes for x in tensors_of(model))
