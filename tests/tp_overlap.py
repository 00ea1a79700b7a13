"""One step's loss and gradients with and without plan.tp_overlap, for tests on CPUs and GPUs."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from colonnade.config import ModelConfig, Plan
from colonnade.config.presets import preset
from colonnade.model import Transformer
from colonnade.model.activation_checkpointing import set_recompute
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import layout_of
from colonnade.parallel.overlapped_matmul import RowTransfer
from colonnade.train import optimizer_step
from colonnade.train.cuda_graph import GraphedForwardBackward
from colonnade.train.model_inputs import StepContext
from colonnade.train.train_step import forward_backward
from harness.training_jobs import random_batch, random_weights

GPT2 = preset("gpt2").replace(vocab_size=208, layers=3, width=64, heads=4, ffn_width=96, context=16)
"""Pre-norm, biases, one GEMM into the feed-forward layer."""
LLAMA = ModelConfig(vocab_size=208, layers=2, width=64, heads=8, kv_heads=4, ffn_width=96, context=16)
"""Gated: two GEMMs with the same input."""


def gradients(
    context: DistributedContext,
    config: ModelConfig,
    dtype: torch.dtype,
    transfer: RowTransfer | None,
    *,
    graphed: bool = False,
    compiled: str = "",
    recomputed: bool = False,
    size: tuple[int, int] = (16, 4),
) -> Mapping[str, Tensor]:
    """Gradients and loss with random weights; biases are not 0, so that adding one on every rank shows.

    ``graphed`` takes results from the second replay, after other samples; ``compiled`` names a backend; ``size`` is
    (tokens of a sequence, sequences).
    """
    model = random_weights(
        Transformer(config, replace(context.axes, row_transfer=transfer), dtype=dtype, device=context.device)
    )
    batches = [random_batch(config, *size, seed, context.device) for seed in (0, 1)]
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim() == 1:
                p.add_(torch.linspace(-0.3, 0.3, len(p), dtype=dtype, device=context.device) / (1 + i))
            else:
                p.mul_(5)
    set_recompute(model.blocks, ["full" if recomputed else "none"] * config.layers)
    for block in model.blocks if compiled else ():
        block.compile(backend=compiled)

    def run(*args: Any) -> Tensor:
        return forward_backward(model, *args)

    step = GraphedForwardBackward(run, model.parameters(), context.device) if graphed else run
    loss = torch.zeros(())
    for batch in [batches[0], batches[0], batches[1], batches[0]] if graphed else batches[:1]:
        model.zero_grad(set_to_none=True)
        loss = step(batch, torch.tensor(size[0] * size[1], device=context.device), StepContext(0.1))
    # Ranks hold different tokens, so only sums over ranks are comparable.
    optimizer_step.sum_partial_grads(dict(model.named_parameters()), layout_of(model), context.axes.tp)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss}


def tp_context(device: str) -> AbstractContextManager[DistributedContext]:
    """A context in which all processes are tensor-parallel ranks."""
    plan = Plan(tp=torch.distributed.get_world_size(), sequence_parallel=True, tp_overlap=True)
    return DistributedContext.build(plan, device)
