"""The peer of tensor parallelism: a GPT-2 in plain modules, sharded by torch's ``parallelize_module``.

Sharded as in torch's tutorials: column-parallel projections into attention and FFN, row-parallel ones out of them,
vocabulary-parallel embedding, output and loss; with sequence parallelism norms and the residual stream are sharded by
tokens. Asynchronous tensor parallelism is inductor's pass ``_micro_pipeline_tp``, which fuses all-gather with GEMM and
GEMM with reduce-scatter over symmetric memory; it matches only GEMMs without a bias, so the linear layers have none.

It does less work than ours, at lower precision: parameters, gradients and moments are bfloat16, without clipping and
biases; but its output projection is not tied to the embedding (the styles shard the weights of each module).
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.parallel.distributed_context import DistributedContext
from harness.training_jobs import Job, random_batch


class Attention(nn.Module):
    """Causal attention over sequences of ``sequence`` tokens laid end to end, on this rank's heads."""

    def __init__(self, config: ModelConfig, sequence: int):
        super().__init__()
        self.head_width, self.sequence = config.head_width, sequence
        self.q, self.k, self.v, self.out = (nn.Linear(config.width, config.width, bias=False) for _ in range(4))

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (T, D), or to this rank's rows of it."""
        q, k, v = (
            project(x_TD).unflatten(0, (-1, self.sequence)).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2).flatten(0, 1))


class FeedForward(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (T, D), or to this rank's rows of it."""
        return self.down(F.gelu(self.up(x_TD), approximate="tanh"))


class Block(nn.Module):
    """Pre-norm Transformer block."""

    def __init__(self, config: ModelConfig, sequence: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention, self.ffn = Attention(config, sequence), FeedForward(config)

    def forward(self, x_tD: Tensor) -> Tensor:
        """x_tD to x_tD."""
        x_tD = x_tD + self.attention(self.norm1(x_tD))
        return x_tD + self.ffn(self.norm2(x_tD))


class Plain(nn.Module):
    """The complete model."""

    def __init__(self, config: ModelConfig, sequence: int):
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, config.width) for n in (config.vocab_size, config.context))
        self.blocks = nn.ModuleList(Block(config, sequence) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.init_std)

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """logits_TV."""
        x_tD = self.tokens(tokens_T) + self.positions(positions_T)
        for block in self.blocks:
            x_tD = block(x_tD)
        return self.head(self.norm(x_tD))


def shard(model: Plain, mesh: DeviceMesh, *, by_tokens: bool) -> None:
    """Shard ``model`` over ``mesh``; ``by_tokens`` for sequence parallelism."""
    into: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    into["ffn.up"] = ColwiseParallel()
    stream = Shard(0) if by_tokens else Replicate()
    out = {name: RowwiseParallel(output_layouts=stream) for name in ("attention.out", "ffn.down")}
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    ends: dict[str, ParallelStyle] = {
        "tokens": table,
        "positions": table,
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if by_tokens:
        norms = {name: SequenceParallel(sequence_dim=0) for name in ("norm1", "norm2")}
        gathers = {
            name: PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
            for name in ("attention", "ffn")
        }
        into = {**norms, **gathers, **into}
        ends["norm"] = SequenceParallel(sequence_dim=0)
    for block in model.blocks:
        parallelize_module(block, mesh, {**into, **out})
    parallelize_module(model, mesh, ends)


@dataclass(frozen=True)
class TorchJob(Job):
    """The same work by torch's own tensor parallelism, over the ``tp`` ranks of the plan."""

    asynchronous: bool = False
    """Inductor's overlapping operators; needs GPUs and sequence parallelism."""

    def start(self, context: DistributedContext) -> Callable[[int], Tensor]:
        """``step(i)`` runs a training step and returns the mean loss of its tokens."""
        dtype: torch.dtype = getattr(torch, self.train.dtype)
        torch.manual_seed(0)
        with torch.device(context.device):
            model = Plain(self.config, self.sequence).to(dtype)
        ranks = self.plan.tp
        if ranks > 1:
            mesh = init_device_mesh(context.device.type, (ranks,))
            shard(model, mesh, by_tokens=self.plan.sequence_parallel)
            if self.asynchronous:
                allow_symmetric_memory(mesh.get_group().group_name)
        if self.train.compile:
            for block in model.blocks:
                block.compile(options={"_micro_pipeline_tp": True} if self.asynchronous else None)
        # A fused optimizer does not mix DTensors and plain tensors in a group.
        groups = [
            {"params": [p for p in model.parameters() if isinstance(p, DTensor) is is_dtensor]}
            for is_dtensor in (True, False)
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self.train.lr, weight_decay=0.01, fused=True
        )
        batches = [random_batch(self.config, self.sequence, self.batch, seed, context.device) for seed in (0, 1)]

        def step(i: int) -> Tensor:
            batch = batches[i % 2]
            with loss_parallel() if ranks > 1 else nullcontext():
                loss = F.cross_entropy(model(batch.tokens_T, batch.positions_T).float(), batch.targets_T)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss = loss.detach()
            return loss.full_tensor() if isinstance(loss, DTensor) else loss

        return step


def allow_symmetric_memory(group: str) -> None:
    """Enable symmetric memory for the group; newer versions of torch only warn that it is not needed."""
    enable = getattr(symmetric, "enable_symm_mem_for_group", None)
    if enable is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            enable(group)
