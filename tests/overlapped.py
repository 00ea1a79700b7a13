"""One step's loss and gradients by the benchmarks' overlapped blocks and by the Transformer, for both tests of them."""

from _overlapped import Halved, Overlapped, Ringed
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from _copies import mover_of
from _jobs import filled, random_batch
from colonnade.config import Plan
from colonnade.config.presets import preset
from colonnade.model import Transformer
from colonnade.parallel.layout import layout_of
from colonnade.parallel.mesh import Ground
from colonnade.train import norm
from colonnade.train.graph import Graphed
from colonnade.train.lay import Terms
from colonnade.train.step import passes

CONFIG = preset("gpt2").but(vocab_size=208, layers=3, width=64, heads=4, ffn_width=96, context=16)
KINDS = (Halved, Ringed)


def gradients(
    ground: Ground, kind: type[Transformer], dtype: torch.dtype, *, graphed: bool = False
) -> Mapping[str, Tensor]:
    """And the loss, of random weights; biases are not 0, where adding one on each rank could hide.

    ``graphed`` takes them from the second replay, after other samples.
    """
    model: Any = filled(kind(CONFIG, ground.axes, dtype=dtype, device=ground.device))
    batches = [random_batch(CONFIG, 16, 4, seed, ground.device) for seed in (0, 1)]
    if isinstance(model, Overlapped):
        most = len(batches[0].tokens_T) * CONFIG.width
        model.prepare(mover_of(ground.axes.tp, most, dtype, ground.device), lambda function: function)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim() == 1:
                p.add_(torch.linspace(-0.3, 0.3, len(p), dtype=dtype, device=ground.device) / (1 + i))
            else:
                p.mul_(5)

    def run(*given: Any) -> Tensor:
        return passes(model, *given)

    step = Graphed(run, model.parameters(), ground.device) if graphed else run
    loss = torch.zeros(())
    for batch in [batches[0], batches[0], batches[1], batches[0]] if graphed else batches[:1]:
        model.zero_grad(set_to_none=True)
        loss = step(batch, torch.tensor(64, device=ground.device), Terms(0.1))
    # Which rank has which token differs, so only the sums of what each rank adds are the same.
    norm.sum_partial(dict(model.named_parameters()), layout_of(model), ground.axes.tp)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return found | {"loss": loss}


def laid(device: str) -> AbstractContextManager[Ground]:
    """All processes of the world as tensor ranks."""
    return Ground.build(Plan(tp=torch.distributed.get_world_size(), sequence_parallel=True), device)
