"""Initial weights that do not depend on the layout.

A parameter's generator is seeded by the run's seed and the parameter's *name*; the whole tensor is drawn on the CPU in
float32 and each rank keeps its share. So any plan, any order of construction and any thread count start from the same
numbers (DESIGN §5; drawing 4096² costs 0.1 s).

    matrices, embeddings   N(0, init_std)
    residual outputs       N(0, init_std / √(2L))      (Radford 2019; Megatron-LM, section 4)
    norms 1, biases 0                                  and what a module's table ``initial`` says of others

Each expert is drawn by a name of its own.
"""

import zlib

import torch
from torch import Tensor

from colonnade.model.transformer import Transformer
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Experts, layout_of, share

RESIDUAL_OUTPUTS = ("attention.out.weight", "ffn.down.weight", "shared.down.weight", "experts.down")


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> Transformer:
    """Fill ``model`` (of plain local tensors, before FSDP wraps it) from ``seed``; returns it."""
    config, shapes, layout = model.config, model.whole_shapes(), layout_of(model)
    initial = {
        f"{prefix}.{name}": value
        for prefix, module in model.named_modules()
        for name, value in getattr(module, "initial", {}).items()
    }
    for name, parameter in model.named_parameters():
        if name in initial:
            parameter.fill_(initial[name])
        elif name.endswith("bias"):
            parameter.zero_()
        elif len(shapes[name]) == 1:
            parameter.fill_(1.0)
        else:
            std = config.init_std / (2 * config.layers) ** 0.5 if name.endswith(RESIDUAL_OUTPUTS) else config.init_std
            if isinstance(layout[name], Experts):
                _experts(parameter, shapes[name], name, seed, std, model.axes)
            else:
                parameter.copy_(share(_drawn(shapes[name], name, seed, std), layout[name], model.axes))
    return model


def _drawn(shape: torch.Size, name: str, seed: int, std: float) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _experts(stack: Tensor, shape: torch.Size, name: str, seed: int, std: float, axes: Axes) -> None:
    """Each expert by a name of its own, so that a rank draws only those that it has."""
    first, stop = axes.grid.ep.part(shape[0])
    for e in range(first, stop):
        whole = _drawn(shape[1:], f"{name}.{e}", seed, std)
        stack[e - first].copy_(whole[slice(*axes.grid.sh.part(shape[1]))])
