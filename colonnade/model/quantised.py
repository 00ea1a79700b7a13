"""A model whose matrices are quantised while they are read: beside it one matrix is in memory as it was stored.

Quantised are the products inside the blocks and an output projection of its own; that one has 8 bits where the others
have 4, as each of its rows is a token's logit. What stays as it is stored: embeddings (a row of them is looked up, not
multiplied) and so an output projection tied to them; norms and biases; and a latent attention's up-projection, whose
parts are multiplied one by one.

A weight's bits are the same under every layout: where its columns are cut over ranks, int8 and float8 take each row's
maximum over all of them, and int4's groups are whole (:mod:`colonnade.config.quantised`).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.kernels.linear.quantise import Kind, stored_bytes
from colonnade.model.linear import Linear
from colonnade.model.transformer import Transformer
from colonnade.parallel.axis import SOLO, Axes
from colonnade.parallel.layout import layout_of

Place = Callable[[str, Tensor, Tensor], object]
"""Called with a parameter's name, itself, and this rank's part of what it is to hold."""


def in_place(_name: str, held: Tensor, value: Tensor) -> None:
    """Copy it there."""
    held.copy_(value)


def build(
    config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype, kind: Kind, group: int
) -> tuple[Transformer, Place]:
    """A model whose matrices are nowhere yet, and what puts them there in ``kind`` (others where they belong)."""
    model = Transformer(config, axes, device="meta", dtype=dtype)
    waiting = quantisable(model)
    for module in model.modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name != "weight" or module not in waiting.values():
                made = torch.empty_like(tensor, device=device)
                setattr(module, name, nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made)
    layout = layout_of(model)

    def place(name: str, held: Tensor, value: Tensor) -> None:
        if name not in waiting:
            in_place(name, held, value)
            return
        over = axes.tp if layout[name] == 1 else SOLO
        waiting[name].quantise(value.to(device), _bits(name, kind), group, over.max_)

    return model, place


def quantisable(model: nn.Module) -> dict[str, Linear]:
    """What has a matrix that can be quantised, by the matrix's name."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))
    return {f"{name}.weight": module for name, module in layers if not module.in_parts}


def _bits(name: str, kind: Kind) -> Kind:
    return "int8" if kind == "int4" and name == "unembed.weight" else kind


def kept_bytes(shape: nn.Module, kind: Kind, group: int) -> int:
    """Memory of a model's weights if its matrices were in ``kind`` [bytes]; it may be on the meta device."""
    waiting = quantisable(shape)
    plain = (x.nbytes for name, x in (*shape.named_parameters(), *shape.named_buffers()) if name not in waiting)
    shapes = {name: layer.weight.shape for name, layer in waiting.items()}
    return sum(plain) + sum(stored_bytes(at[0], at[1], _bits(name, kind), group) for name, at in shapes.items())


def kind_of(model: nn.Module) -> Kind | None:
    """What a model's blocks are quantised to, if they are."""
    found = (m.quantised for m in model.modules() if isinstance(m, Linear) and m.quantised is not None)
    return next((weight.kind for weight in found), None)


def weight_bytes(model: nn.Module) -> int:
    """Memory of this rank's share of a model's weights, quantised or not [bytes]."""
    quantised = (m.quantised for m in model.modules() if isinstance(m, Linear))
    plain = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    return plain + sum(weight.nbytes for weight in quantised if weight is not None)
