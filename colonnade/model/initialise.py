"""Initial weights that do not depend on the layout.

A parameter's generator is seeded by the run's seed and the parameter's *name*; the whole tensor is drawn on the CPU in
float32 and each rank keeps its share. So any plan, any order of construction and any thread count start from the same
numbers (drawing 4096² costs 0.2 s).

    matrices, embeddings   N(0, init_std)
    residual outputs       N(0, init_std / √(2L))      (Radford 2019; Megatron-LM, section 4)
    norms 1, biases 0                                  and what a module's table ``initial`` says of others

Each expert is drawn by a name of its own.
"""

from collections.abc import Callable, Container, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.model.transformer import Transformer
from colonnade.model.weight_only_quant import Place, in_place
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import WHOLE, Experts, Placement, layout_of, local_part
from colonnade.parallel.rng_keys import generator

RESIDUAL_OUTPUTS = ("attention.out.weight", "ffn.down.weight", "shared.down.weight", "experts.down")


def initialise(model: Transformer, seed: int, place: Place = in_place, leave: Container[str] = ()) -> Transformer:
    """Fill ``model`` from ``seed``, one parameter after another, and its buffers with 0; returns it.

    ``place`` gets this rank's share of each, before FSDP cuts it: a sharded model needs no more memory than its shards
    and one parameter (:meth:`colonnade.parallel.fsdp.Masters.assign`). Names in ``leave`` are left as they are.
    """
    std = model.config.init_std
    residual_std = std / (2 * model.config.layers) ** 0.5
    fill(model, model.axes, model.whole_shapes(), seed, place, leave, std=std, residual_std=residual_std)
    return model


@torch.no_grad()
def fill(
    model: nn.Module,
    axes: Axes,
    shapes: Mapping[str, torch.Size],
    seed: int,
    place: Place = in_place,
    leave: Container[str] = (),
    *,
    std: float,
    residual_std: float,
) -> None:
    """Fill a module that has layout tables from ``seed``; ``shapes`` are those over all ranks, by name."""
    layout = layout_of(model)
    initial = {
        f"{prefix}.{name}": value
        for prefix, module in model.named_modules()
        for name, value in getattr(module, "initial", {}).items()
    }

    def mine(name: str) -> Tensor:
        shape, placement = shapes[name], layout.get(name, WHOLE)

        def filled(value: float) -> Tensor:
            return local_part(torch.zeros(()).expand(shape), placement, axes) + value

        if name in initial:
            return filled(initial[name])
        if name.endswith("bias") or name not in layout:
            return filled(0.0)
        if len(shape) == 1:
            return filled(1.0)
        own = residual_std if name.endswith(RESIDUAL_OUTPUTS) else std
        return _share(shape, placement, axes, lambda part, of: _drawn(of, f"{name}{part}", seed, own))

    for name, held in (*model.named_parameters(), *model.named_buffers()):
        if name not in leave:
            place(name, held, mine(name))


def _drawn(shape: torch.Size, name: str, seed: int, std: float) -> Tensor:
    return torch.from_numpy(generator(seed, name).standard_normal(tuple(shape), dtype=np.float32)).mul_(std)


def _share(shape: torch.Size, placement: Placement, axes: Axes, drawn: Callable[[str, torch.Size], Tensor]) -> Tensor:
    """This rank's part of what is drawn whole; each expert by a name of its own, so that a rank draws only those that
    it has.
    """
    if not isinstance(placement, Experts):
        return local_part(drawn("", shape), placement, axes)
    units = slice(*axes.experts.sh.part(shape[1]))
    return torch.stack([drawn(f".{e}", shape[1:])[units] for e in range(*axes.experts.ep.part(shape[0]))])
