"""Weight initialisation that does not depend on the layout, and a new head for a trained encoder.

A parameter's generator is seeded by the run's seed and the parameter's *name*; the whole tensor is drawn on the CPU in
float32 and each rank takes its share. So any plan, any order of construction and any thread count give the same weights
(drawing 4096² takes 0.2 s). The seed has 128 bits. torch's CPU generator keeps only the low 32 bits of a seed, with
which two of 45,000 names are likely to collide; so the generator is numpy's.

    matrices, embeddings   N(0, init_std)
    residual outputs       N(0, init_std / √(2L))      (Radford 2019; Megatron-LM, section 4)
    norms 1, biases 0                                  or the constant in the module's table ``initial``
    others                                             U(-b, b) with b in the module's table ``uniform`` (adapters)

Each expert is drawn under its own name.
"""

import hashlib
from collections.abc import Callable, Container, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.config.model import TaskHead
from colonnade.model.transformer import Transformer
from colonnade.model.weight_only_quant import copy_weight
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import WHOLE, Experts, Placement, layout_of, local_part

StoreValue = Callable[[str, Tensor, Tensor], object]
"""Called with a parameter's name, the parameter, and this rank's part of its value."""

RESIDUAL_OUTPUTS = ("attention.out.weight", "cross.out.weight", "ffn.down.weight", "shared.down.weight", "experts.down")


def initialise(
    model: Transformer, seed: int, place: StoreValue = copy_weight, leave: Container[str] = ()
) -> Transformer:
    """Initialise ``model`` from ``seed``, one parameter at a time, and its buffers to 0; returns it.

    ``place`` stores this rank's share of each, before FSDP cuts it: a sharded model needs no more memory than its
    shards and one parameter (:meth:`colonnade.parallel.fsdp.Masters.assign`). Names in ``leave`` are not changed.
    """
    std = model.config.init_std
    residual_std = std / (2 * model.config.layers) ** 0.5
    fill(model, model.axes, model.global_shapes(), seed, place, leave, std=std, residual_std=residual_std)
    return model


@torch.no_grad()
def fill(
    model: nn.Module,
    axes: Axes,
    shapes: Mapping[str, torch.Size],
    seed: int,
    place: StoreValue = copy_weight,
    leave: Container[str] = (),
    *,
    std: float,
    residual_std: float,
) -> None:
    """Initialise a module with layout tables; ``shapes`` are those over all ranks, by name."""
    layout = layout_of(model)
    initial, uniform = _module_table(model, "initial"), _module_table(model, "uniform")

    def local_value(name: str) -> Tensor:
        shape, placement = shapes[name], layout.get(name, WHOLE)

        def constant(value: float) -> Tensor:
            return local_part(torch.zeros(()).expand(shape), placement, axes) + value

        if name in initial:
            return constant(initial[name])
        if name in uniform:
            bound = uniform[name]
            return _local_share(
                shape, placement, axes, lambda part, of: _draw_uniform(of, f"{name}{part}", seed, bound)
            )
        if name.endswith("bias") or name not in layout:
            return constant(0.0)
        if len(shape) == 1:
            return constant(1.0)
        name_std = residual_std if name.endswith(RESIDUAL_OUTPUTS) else std
        return _local_share(shape, placement, axes, lambda part, of: _draw(of, f"{name}{part}", seed, name_std))

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in leave:
            place(name, tensor, local_value(name))


def _module_table(model: nn.Module, attribute: str) -> dict[str, float]:
    """The modules' tables ``attribute``, by full parameter name."""
    return {
        f"{prefix}.{name}": value
        for prefix, module in model.named_modules()
        for name, value in getattr(module, attribute, {}).items()
    }


def _draw_uniform(shape: torch.Size, name: str, seed: int, bound: float) -> Tensor:
    return torch.from_numpy(generator(seed, name).random(tuple(shape), dtype=np.float32)).mul_(2 * bound).sub_(bound)


def _draw(shape: torch.Size, name: str, seed: int, std: float) -> Tensor:
    return torch.from_numpy(generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)).mul_(std)


def _local_share(
    shape: torch.Size, placement: Placement, axes: Axes, draw: Callable[[str, torch.Size], Tensor]
) -> Tensor:
    """This rank's share of a drawn tensor; a rank draws its own experts only."""
    if not isinstance(placement, Experts):
        return local_part(draw("", shape), placement, axes)
    units = slice(None) if placement.hidden is None else slice(*axes.experts.etp.part(shape[1]))
    return torch.stack([draw(f".{e}", shape[1:])[units] for e in range(*axes.experts.ep.part(shape[0]))])


@torch.no_grad()
def replace_head(model: Transformer, top: TaskHead, *, classes: int = 0, seed: int = 0) -> Transformer:
    """A copy of the encoder ``model`` (of plain local tensors) with another head, for fine-tuning.

    Parameters that both have are copied, also the pooler's; new ones are drawn from ``seed``. Raises
    :class:`ConfigError` for a head that this model cannot have.
    """
    config = model.config.replace(task_head=top, classes=classes)
    old = dict(model.named_parameters())
    first = next(iter(old.values()))
    new = initialise(Transformer(config, model.axes, device=first.device, dtype=first.dtype), seed)
    for name, parameter in new.named_parameters():
        if name in old and old[name].shape == parameter.shape:
            parameter.copy_(old[name])
    return new


def name_seed(seed: int, name: str) -> int:
    """128 bits that depend only on the seed and the name, in any process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "big")


def generator(seed: int, name: str) -> np.random.Generator:
    """The generator of the values called ``name`` in a run with this ``seed``."""
    return np.random.Generator(np.random.PCG64(name_seed(seed, name)))
