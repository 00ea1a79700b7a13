"""The trial run under every plan: two training steps, a checkpoint, and greedy decoding.

The two steps differ on purpose. The first reads ragged documents with an odd number of tokens and does not clip, so
that the raw gradients can be compared; the second reads sequences of equal length and clips.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint import native
from colonnade.config import ModelConfig, TrainConfig
from colonnade.data import Batch
from colonnade.data.batch import concatenate
from colonnade.model import IGNORE, Packed, Rows, Transformer, initialise
from colonnade.model.moe import DispatchOptions
from colonnade.parallel.axis import SOLO, Axis, world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters, masters
from colonnade.parallel.layout import Experts, layout_of, local_part
from colonnade.train.model_inputs import model_inputs
from colonnade.train.optimizer import AdamW
from colonnade.train.train_step import PipelineStep, StepMetrics, TrainStep

MICRO_BATCHES = 4
"""At least, per step over all data ranks; and two per process, so that each data rank accumulates several, and a
pipeline of all processes fills and drains."""
RAGGED, EQUAL = [9, 1, 13, 4, 2], [32, 32]
"""Sequence lengths of a micro-batch in the first and in the second step."""
TRAIN = TrainConfig(
    steps=10,
    warmup=0,
    lr=1e-3,
    min_lr=1e-4,
    weight_decay=0.1,
    label_smoothing=0.05,
    dtype="float64",
    clip=float("inf"),
    dropout=0.1,
    attention_dropout=0.1,
    embedding_dropout=0.1,
    expert_dropout=0.1,
)
CLIP = 0.3
GREEDY = 5


class _RecordingAdamW(AdamW):
    """Records the gradients of the last step."""

    gradients: dict[str, Tensor]

    def step(self, lr: float | Tensor, *rest: Any, **options: Any) -> None:
        """Record, then update."""
        self.gradients = {name: w.grad.clone() for name, w in self.weights.items() if w.grad is not None}
        super().step(lr, *rest, **options)


@dataclass
class Trial:
    """One model in training under one plan."""

    context: DistributedContext
    model: Transformer
    piped: PipelineStep | None
    masters: Masters
    optimizer: _RecordingAdamW
    world: Axis
    micro_batches: int
    """Per step over all data ranks: a multiple of the processes, so that every plan can distribute them."""
    merged: int = 1
    """Micro-batches merged into one here, which other plans run on as many data ranks: experts are balanced over all
    that run at the same time."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, as the optimizer gets them; not clipped."""

    @staticmethod
    def start(
        config: ModelConfig, context: DistributedContext, processes: int, seed: int = 0, merged: int = 1
    ) -> "Trial":
        """Initialise by ``seed``, equally under every plan; ``processes`` are those of all plans, not of this one."""
        spans = [span for _, span in context.stages(config.layers)]
        device = "meta" if context.sharded else context.device
        model = Transformer(config, context.axes, spans=spans, device=device, dtype=torch.float64)
        piped = PipelineStep(model, context, torch.float64) if context.plan.pp > 1 else None
        weights = masters(model, context, torch.float64, piped.stages if piped else None)
        initialise(model, seed, weights.assign)
        weights.update_model()
        world = world_axis() if context.world > 1 else SOLO
        total = max(2, -(-MICRO_BATCHES // processes)) * processes
        return Trial(context, model, piped, weights, _RecordingAdamW(weights.local, TRAIN), world, total, merged)

    def train(self) -> "Trial":
        """Run the two steps and record losses, norms and gradients; returns itself."""
        self._step(0)
        self.gradients = self.optimizer.gradients
        self._step(1)
        return self

    def _step(self, number: int) -> None:
        train = TRAIN if number == 0 else TRAIN.replace(clip=CLIP)
        degree = self.context.plan.adaptive_r
        assert degree != "auto", "verify runs every degree as a plan of its own"
        spread = [DispatchOptions(degree, self.context.plan.overlap, self.context.plan.shadows)]
        step = TrainStep(self.model, self.masters, self.optimizer, train, self.world, self.piped, spread=spread)
        lengths, dp = RAGGED if number == 0 else EQUAL, self.context.axes.dp
        numbers = range(dp.rank, self.micro_batches, dp.size)
        drawn = [batch(lengths, i, 1000 * number + i, self.model.config) for i in numbers]
        drawn = [concatenate(drawn[i : i + self.merged]) for i in range(0, len(drawn), self.merged)]
        batches = [each.to(self.context.device) for each in drawn]
        outcome: StepMetrics = step(number, batches)
        self.losses.append((self.context.axes.global_sum(outcome.loss_sum) / outcome.count).item())
        self.norms.append(outcome.norm.item())

    def shard_of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole parameter, or of its gradient or moment."""
        placement = layout_of(self.model)[name]
        part = local_part(whole, placement, self.context.axes)
        if isinstance(placement, Experts):
            return part
        start, stop = self.context.shard.part(part.shape[0])
        return part[start:stop]

    def save(self, folder: Path) -> None:
        """Save weights and moments."""
        meta = native.Meta(model=self.model.config, step=self.optimizer.steps)
        native.save(folder, self.model, meta, self.context, masters=self.masters, optimizer=self.optimizer)

    def load(self, folder: Path) -> None:
        """Load weights and moments, saved under any plan."""
        native.load(folder, self.model, self.context, masters=self.masters, optimizer=self.optimizer)

    def greedy(self) -> list[int]:
        """Decode :data:`GREEDY` tokens greedily after a short prompt; none for an encoder."""
        if not self.model.config.causal:
            return []
        tokens = [3, 1, 4, 1, 5]
        for _ in range(GREEDY):
            tokens.append(int(self._last_logits(tokens).argmax()))
        return tokens

    @torch.no_grad()
    def _last_logits(self, tokens: list[int]) -> Tensor:
        """logits_V of the token after ``tokens``, on every rank."""
        ids, T, axes = torch.tensor(tokens), len(tokens), self.context.axes
        packed = Packed.of([T])
        text = Batch(ids, torch.arange(T), ids, packed.cu_seqlens, T, equal=True)
        if self.model.config.encoder is not None:
            text = _with_sources(text, [T], torch.Generator().manual_seed(5), self.model.config)
        text = text.to(self.context.device)
        stream, attend, _ = model_inputs(text, self.model)
        # Only one of the context ranks has the last token.
        positions = text.positions_T if axes.cp.size == 1 else attend.index_t  # type: ignore[union-attr]
        head = Rows((positions == T - 1).nonzero().flatten())
        logits = self.model(stream, attend, head) if self.piped is None else self.piped.forward(text, head)
        logits_V = torch.zeros(self.model.config.vocab_size, dtype=torch.float64, device=self.context.device)
        if logits is not None:
            logits_V += logits.sum(0)
        return axes.pp.sum_(axes.cp.sum_(logits_V))


def batch(lengths: list[int], number: int, seed: int, config: ModelConfig) -> Batch:
    """Make micro-batch ``number`` of a step: random tokens and targets, some ignored; for an encoder sequence pairs."""
    generator, T = torch.Generator().manual_seed(seed), sum(lengths)
    draw: Callable[[], Tensor] = lambda: torch.randint(config.vocab_size, (T,), generator=generator)  # noqa: E731
    tokens_T, targets_T = draw(), draw()
    targets_T[torch.rand(T, generator=generator) < 0.2 * (seed % 4)] = IGNORE
    packed = Packed.of(lengths)
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    plain = Batch(tokens_T, positions_T, targets_T, packed.cu_seqlens, packed.longest, packed.equal, first=number * T)
    if config.encoder is not None:
        return _with_sources(plain, lengths, generator, config)
    if config.causal:
        return plain
    return replace(
        plain,
        segments_T=(positions_T > 2).long(),
        predicted_R=torch.arange(0, T, 3),
        first_R=packed.cu_seqlens[:-1].long(),
        orders_R=torch.tensor([(i + seed) % 2 if (i + seed) % 3 else IGNORE for i in range(len(lengths))]),
    )


def _with_sources(plain: Batch, lengths: list[int], generator: torch.Generator, config: ModelConfig) -> Batch:
    """``plain`` with a random source for each sequence, with lengths that differ from the targets'."""
    sizes = [1 + (3 * n) % 11 for n in lengths]
    sources = Packed.of(sizes)
    stride = max(*lengths, *sizes, 32)
    return replace(
        plain,
        first=plain.first // max(sum(lengths), 1) * len(lengths) * stride,
        first_R=plain.cu_seqlens[:-1].long(),
        stride=stride,
        source_tokens_S=torch.randint(config.vocab_size, (sum(sizes),), generator=generator),
        source_positions_S=torch.cat([torch.arange(n) for n in sizes]),
        cu_sources=sources.cu_seqlens,
        longest_source=sources.longest,
        equal_sources=sources.equal,
    )
