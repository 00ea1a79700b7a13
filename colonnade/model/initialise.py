"""Initial weights that do not depend on the layout.

A parameter's generator is seeded by the run's seed and the parameter's *name*; the whole tensor is drawn on the CPU in
float32 and each rank keeps its share. So any plan, any order of construction and any thread count start from the same
numbers (DESIGN §5; drawing 4096² costs 0.1 s).

    matrices, embeddings   N(0, init_std)
    residual outputs       N(0, init_std / √(2L))      (Radford 2019; Megatron-LM, section 4)
    norms 1, biases 0
"""

import zlib

import torch

from colonnade.model.transformer import Transformer
from colonnade.parallel.layout import layout_of, share

RESIDUAL_OUTPUTS = ("attention.out.weight", "ffn.down.weight")


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> Transformer:
    """Fill ``model`` (of plain local tensors, before FSDP wraps it) from ``seed``; returns it."""
    config, shapes, layout = model.config, model.whole_shapes(), layout_of(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif len(shapes[name]) == 1:
            parameter.fill_(1.0)
        else:
            std = config.init_std / (2 * config.layers) ** 0.5 if name.endswith(RESIDUAL_OUTPUTS) else config.init_std
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            whole = torch.empty(shapes[name]).normal_(0.0, std, generator=generator)
            parameter.copy_(share(whole, layout[name], model.axes.tp))
    return model
