"""Tiny models and ragged batches on which training under any plan must equal training in one process."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colonnade.config import ModelConfig, Plan, TrainConfig
from colonnade.data import Batch
from colonnade.model import IGNORE, Packed, Transformer, initialise
from colonnade.model.moe import DispatchOptions
from colonnade.parallel.axis import Axis, world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters, masters
from colonnade.parallel.layout import Experts, Placement, layout_of, local_part
from colonnade.train.optimizer import AdamW
from colonnade.train.train_step import PipelineStep, TrainStep
from colonnade.train.training_state import make_optimizer

COMMON: dict[str, Any] = {"layers": 2, "width": 24, "context": 32}
BERT: dict[str, Any] = {
    "vocab_size": 101, "heads": 12, "head_width": 2, "ffn_width": 37, "positions": "learned", "norm": "layernorm",
    "activation": "gelu", "gated": False, "qkv_bias": True, "out_bias": True, "ffn_bias": True, "tied": True,
    "causal": False, "segments": 2, "task_head": "pretraining", **COMMON,
}  # fmt: skip
CASES = {
    "gpt2": ModelConfig(
        family="gpt2", vocab_size=101, heads=12, head_width=2, ffn_width=37, positions="learned", norm="layernorm",
        activation="gelu_tanh", gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, tied=True, **COMMON,
    ),
    "llama": ModelConfig(family="llama", vocab_size=101, heads=24, kv_heads=12, head_width=2, ffn_width=37, **COMMON),
    "qwen3": ModelConfig(
        family="qwen3", vocab_size=53, heads=12, kv_heads=12, head_width=4, ffn_width=30, qk_norm=True, tied=True,
        **COMMON,
    ),
    "bert": ModelConfig(family="bert", norm_order="post", embed_norm=True, **BERT),
    "megatron-bert": ModelConfig(family="megatron-bert", **BERT),
}  # fmt: skip
"""12 key/value heads can be divided over tp of 1, 2, 3 and 4; the other sizes only over 1."""

TRAIN = TrainConfig(
    steps=20, warmup=2, lr=3e-3, min_lr=1e-4, clip=0.1, weight_decay=0.1, dtype="float64", label_smoothing=0.05
)


def ragged(seed: int, config: ModelConfig) -> Batch:
    """A micro-batch of 13 tokens in documents of unequal lengths; some targets (and orders) are ignored."""
    vocab_size = config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    cuts = sorted(torch.randint(1, 13, (2,), generator=generator).tolist())
    lengths = [b - a for a, b in itertools.pairwise([0, *cuts, 13])]
    tokens_T = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    targets_T = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    targets_T[torch.rand(sum(lengths), generator=generator) < 0.2 * (seed % 4)] = IGNORE
    packed = Packed.of(lengths)
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    batch = Batch(tokens_T, positions_T, targets_T, packed.cu_seqlens, packed.longest, packed.equal)
    if config.causal:
        return batch
    valid_T = targets_T != IGNORE
    return replace(
        batch,
        segments_T=(positions_T > 2).long(),
        predicted_R=torch.cat((valid_T.nonzero()[:, 0], (~valid_T).nonzero()[:1, 0])),
        first_R=packed.cu_seqlens[:-1].long(),
        orders_R=torch.tensor([seed % 2, IGNORE if seed % 3 else 1, 0 if seed % 4 else IGNORE]),
    )


def micro_batches(step: int, dp: Axis, config: ModelConfig, total: int = 4) -> list[Batch]:
    """This data rank's micro-batches of a step with ``total`` micro-batches over all data ranks (1, 2 or 4)."""
    batches = [ragged(100 * step + i, config) for i in range(total)]
    firsts = itertools.accumulate((len(batch.tokens_T) for batch in batches), initial=0)
    numbered = [replace(batch, first=first) for batch, first in zip(batches, firsts, strict=False)]
    return numbered[slice(*dp.part(total))]


@dataclass
class Run:
    """A model in training in one context."""

    model: Transformer
    masters: Masters
    optimizer: AdamW
    step: TrainStep
    context: DistributedContext

    @staticmethod
    def start(config: ModelConfig, context: DistributedContext, train: TrainConfig = TRAIN, seed: int = 7) -> "Run":
        spans = [span for _, span in context.stages(config.layers)]
        model = initialise(Transformer(config, context.axes, spans=spans, dtype=torch.float64), seed)
        pipeline = PipelineStep(model, context, torch.float64) if context.plan.pp > 1 else None
        weights = masters(model, context, torch.float64, pipeline and pipeline.stages)
        optimizer = make_optimizer(weights, train)
        world = world_axis() if context.world > 1 else context.axes.dp
        plan = context.plan
        assert plan.adaptive_r != "auto", "every degree is a separate plan here"
        spread = [DispatchOptions(plan.adaptive_r, plan.overlap, plan.shadows)]
        step = TrainStep(model, weights, optimizer, train, world, pipeline, spread=spread)
        return Run(model, weights, optimizer, step, context)

    def go(self, first: int, stop: int) -> list[tuple[float, float]]:
        """Steps ``first`` to ``stop``; (mean loss, gradient norm) of each."""
        found = []
        for number in range(first, stop):
            batches = micro_batches(number, self.context.axes.dp, self.model.config)
            out = self.step(number, batches)
            loss = self.context.axes.global_sum(out.loss_sum) / out.count
            found.append((loss.item(), out.norm.item()))
        return found

    @functools.cached_property
    def layout(self) -> dict[str, Placement]:
        return layout_of(self.model)

    def shard_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a full tensor: sliced by the layout over tp, then by rows over data and context
        ranks.
        """
        placement = self.layout[name]
        part = local_part(whole, placement, self.context.axes)
        if isinstance(placement, Experts):
            return part
        start, stop = self.context.shard.part(part.shape[0])
        return part[start:stop]


@functools.cache
def alone(config: ModelConfig, steps: int, train: TrainConfig = TRAIN) -> tuple[Run, list[tuple[float, float]]]:
    """One process's run of ``steps`` steps, cached: workers live on from plan to plan."""
    one = Run.start(config, DistributedContext.solo(), train)
    return one, one.go(0, steps)


def raw(config: ModelConfig, context: DistributedContext, number: int, train: TrainConfig = TRAIN) -> Run:
    """A new run with the gradients of step ``number``, without clipping or an update."""
    it = Run.start(config, context, train.replace(clip=float("inf")))
    it.optimizer.step = lambda *_, **__: None
    it.go(number, number + 1)
    return it


@functools.cache
def raw_alone(config: ModelConfig, number: int, train: TrainConfig = TRAIN) -> Run:
    """:func:`raw` in one process."""
    return raw(config, DistributedContext.solo(), number, train)


PLANS = {
    1: [Plan()],
    2: [Plan(tp=2), Plan(dp=2), Plan(tp=2, sequence_parallel=True), Plan(cp=2), Plan(replicate=2)],
    3: [Plan(tp=3), Plan(cp=3)],
    4: [
        Plan(tp=2, dp=2),
        Plan(tp=4),
        Plan(dp=4),
        Plan(tp=2, cp=2, sequence_parallel=True),
        Plan(cp=4, reshard=False),
        Plan(dp=2, cp=2),
        Plan(dp=2, replicate=2),
        Plan(tp=2, replicate=2, sequence_parallel=True),
    ],
    8: [Plan(tp=4, dp=2), Plan(tp=2, dp=4)],
}
