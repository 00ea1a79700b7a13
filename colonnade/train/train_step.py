"""One training step: forward and backward of each micro-batch, then the optimizer step.

    loss = Σ token losses / Σ valid tokens          both over data ranks, context ranks and micro-batches
           + Σ order losses / Σ pairs               for BERT, summed the same way
           + Σ router losses / Σ tokens             for a mixture of experts, summed the same way

The valid tokens are counted over all ranks *before* the first backward pass. So each micro-batch's backward already has
the right weight, and gradients are plain sums. (A mean of means over ranks or micro-batches with unequal counts is a
different loss, and depends on the layout.) A step with a non-finite loss or norm updates nothing: weights, moments and
Adam's step count keep their values.

:class:`PipelineStep` runs the same passes through pipeline stages (:mod:`colonnade.parallel.pipeline`).
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from colonnade.config import MoeConfig, TrainConfig
from colonnade.data import Batch
from colonnade.model import IGNORE, Transformer
from colonnade.model.moe import DispatchOptions
from colonnade.model.output_heads import Head
from colonnade.parallel.axis import Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.pipeline import Pipeline, Stage
from colonnade.train.cuda_graph import ForwardBackward, GraphedForwardBackward
from colonnade.train.distill import Distiller
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.model_inputs import VALIDATION, StepContext, model_inputs, step_dropout
from colonnade.train.moe_stats import MoeStats, collect_moe_stats, pooled_balance_loss, update_router_biases
from colonnade.train.optimizer import AdamW
from colonnade.train.optimizer_step import OptimizerStep


class PipelineStep:
    """This rank's stages of ``model``. Every pipeline rank reads the same batches; only activations are sent."""

    def __init__(self, model: Transformer, context: DistributedContext, compute: torch.dtype):
        self.model, self.axes, self.device, self.compute = model, context.axes, context.device, compute
        self.stages = [
            Stage(number, _stage_modules(model, span), functools.partial(self._run_stage, span))
            for number, span in context.stages(model.config.layers)
        ]
        self._pipeline = Pipeline(self.stages, context.plan, context.axes.pp, context.device)
        self._set_batches([], torch.ones((), device=context.device))

    def step(self, batches: Sequence[Batch], divisor: Tensor, step: StepContext) -> Tensor:
        """Forward and backward of all micro-batches, each loss divided by ``divisor``.

        Returns the undivided loss sum; 0 on ranks without the last stage.
        """
        self._set_batches(batches, divisor, step)
        self._pipeline.step(len(batches), self._boundary_tensors())
        return self._loss_sum

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], step: StepContext = VALIDATION) -> Tensor:
        """The summed loss of ``batches``; 0 on ranks without the last stage."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            self._set_batches([batch], torch.ones((), device=self.device), step)
            self._pipeline.forward(self._boundary_tensors())
            total += self._loss_sum
        return total

    @torch.no_grad()
    def forward(self, batch: Batch, head: Head) -> Tensor | None:
        """The output of ``head`` for one micro-batch, on the ranks of the last stage."""
        self._set_batches([batch], torch.ones((), device=self.device), head=head)
        return self._pipeline.forward(self._boundary_tensors())

    def _set_batches(
        self,
        batches: Sequence[Batch],
        divisor: Tensor,
        step: StepContext = VALIDATION,
        head: Head | None = None,
    ) -> None:
        self._inputs = [model_inputs(batch, self.model, step) for batch in batches]  # shared by this rank's stages
        self._divisor, self._head = divisor, head
        self._loss_sum = torch.zeros((), dtype=torch.promote_types(self.compute, torch.float32), device=self.device)
        moe = self.model.config.moe
        pooled = moe is not None and moe.pools_layers and step.router_loss_weight is not None
        self._zero_sums = (self._loss_sum.new_zeros(2 * moe.experts + 1),) if moe is not None and pooled else ()

    def _boundary_tensors(self) -> list[Tensor]:
        """Examples of what one stage sends to the next for a micro-batch.

        This rank's rows of the residual stream, and the sums of a balance loss over all layers.
        """
        stream, _, _ = self._inputs[0]
        rows = self.axes.rows(len(stream.tokens_T))
        size = (rows.stop - rows.start, self.model.config.width)
        return [torch.empty(size, dtype=self.compute, device=self.device), *self._zero_sums]

    def _run_stage(self, span: range, received: tuple[Tensor, ...], i: int) -> tuple[Tensor, ...] | Tensor:
        """Run the blocks of ``span`` on micro-batch ``i``."""
        stream, attend, loss = self._inputs[i]
        x_tD, *sums = received or (None, *(zero.requires_grad_() for zero in self._zero_sums))
        if stream.routing is not None and sums:
            # A copy: a stage without experts returns it, and torch does not accept an input as an output.
            stream.routing.pooled.sums = sums[0].clone()
        out = self.model.run(span, x_tD, stream, attend, self._head or loss)
        if span.stop < self.model.config.layers:
            return (out,) if not sums or stream.routing is None else (out, stream.routing.pooled.take())
        if isinstance(out, Tensor):
            return out
        loss_sum, _ = out
        self._loss_sum += loss_sum.detach()
        return loss_sum / self._divisor


def _stage_modules(model: Transformer, span: range) -> list[nn.Module]:
    modules: list[nn.Module] = [model.blocks.get_submodule(str(i)) for i in span]
    if model.embed is not None and (span.start == 0 or (model.copies and span.stop == model.config.layers)):
        modules.append(model.embed)
    if span.stop == model.config.layers:
        modules += [module for module in (model.norm, model.top, model.unembed) if module is not None]
    return modules


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, on the device: creating them does not synchronise."""

    loss_sum: Tensor
    """Over this rank's tokens."""
    count: Tensor
    """Valid tokens of all data ranks."""
    norm: Tensor
    """Global gradient norm before clipping."""
    lr: float | Tensor
    """Learning rate of the step; on the device where steps may be skipped."""
    loss_scale: Tensor | None = None
    """In float16: the loss scale of the step."""
    skipped: Tensor | None = None
    """In float16: steps of the run skipped after an overflow, this one included."""
    moe: MoeStats | None = None
    """Routing statistics of this pipeline rank's MoE layers, over all ranks."""
    balance: Tensor | None = None
    """The balance loss over all layers together, on the ranks of the last pipeline stage."""
    data_s: float = 0.0
    """Time that this rank spent reading samples."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the samples, by name."""
    memory_bytes: int = 0
    """Peak memory of this rank: of the step on a GPU, of the process on a CPU."""


class TrainStep:
    """``step(number, micro_batches)``: forward, backward and
    :class:`~colonnade.train.optimizer_step.OptimizerStep`.
    """

    def __init__(
        self,
        model: Transformer,
        masters: Masters,
        optimizer: AdamW,
        train: TrainConfig,
        world: Axis,
        pipeline: PipelineStep | None = None,
        scaler: LossScaler | None = None,
        spread: Sequence[DispatchOptions] = (DispatchOptions(),),
        cuda_graph: bool = False,
        distiller: Distiller | None = None,
    ):
        """``pipeline`` when ``model`` is one rank's pipeline stages, ``scaler`` for float16. ``spread`` is the expert
        parallelism of the MoE layers and may change between steps. ``cuda_graph`` replays forward and backward of a
        step's only micro-batch. ``distiller`` has a teacher to imitate.
        """
        self.distiller = distiller
        self.spread = spread
        self.pipeline, self.scaler = pipeline, scaler
        self.model, self.masters, self.train, self.axes = model, masters, train, model.axes
        self.optimizer_step = OptimizerStep(model, masters, optimizer, train, world, scaler)
        self.forward_backward: ForwardBackward = functools.partial(forward_backward, model)
        if cuda_graph:
            grad_tensors = (*model.parameters(), *masters.local.values())
            device = next(model.parameters()).device
            self.forward_backward = GraphedForwardBackward(self.forward_backward, grad_tensors, device)

    def __call__(self, number: int, micro_batches: Sequence[Batch]) -> StepMetrics:
        """Train on this data rank's ``micro_batches`` as step ``number`` (from 0)."""
        count = count_targets(micro_batches, self.axes.dp)
        divisor = count if self.scaler is None else self.scaler.scaled_divisor(count)
        step = StepContext(
            self.train.label_smoothing,
            order_loss_weight(micro_batches, count, self.axes.dp),
            step_dropout(self.train, number, self.model.config, count.device),
            distiller=self.distiller,
        )
        sizes = [len(batch.tokens_T) for batch in micro_batches]
        sources = [len(batch.source_tokens_S) for batch in micro_batches if batch.source_tokens_S is not None]
        if self.model.config.moe is not None:
            local_tokens = torch.full((), sum(sizes), device=count.device)  # a copy from the host would synchronise
            tokens = self.axes.dp.sum_(local_tokens).clamp(min=1)
            # In float64, because torch divides integers in float32.
            weight = count.double() / divisor
            step = replace(step, router_loss_weight=weight / tokens, spread=self.spread)
            if self.model.config.encoder is not None:
                of_sources = self.axes.dp.sum_(torch.full((), sum(sources), device=count.device)).clamp(min=1)
                step = replace(step, source_router_loss_weight=weight / of_sources)
        if self.distiller is not None:
            micro_batches = self.distiller.prepare(self.model, micro_batches, step)
        if self.pipeline is None:
            loss_sum = self._accumulate(micro_batches, divisor, step)
        else:
            loss_sum = self.pipeline.step(micro_batches, divisor, step)
        norm, lr, skip = self.optimizer_step(number, loss_sum)
        moe = collect_moe_stats(self.model, step.reports, sizes, self.spread, sources)
        if moe is not None:
            update_router_biases(self.model, moe, skip)
        metrics = StepMetrics(loss_sum, count, norm, lr, moe=moe, balance=pooled_balance_loss(step.pooled, sizes))
        if self.scaler is None:
            return metrics
        return replace(metrics, loss_scale=self.scaler.used_scale, skipped=self.scaler.skipped)

    @property
    def capture_peak_bytes(self) -> int:
        """Peak memory during CUDA graph capture; the allocator does not see it in a replay."""
        run = self.forward_backward
        return run.peak_bytes if isinstance(run, GraphedForwardBackward) else 0

    def _accumulate(self, micro_batches: Sequence[Batch], divisor: Tensor, step: StepContext) -> Tensor:
        """Forward and backward of one micro-batch after another; the summed loss."""
        loss_sum = 0
        for i, batch in enumerate(micro_batches):
            self.masters.begin_micro_batch(last=i == len(micro_batches) - 1)
            loss_sum += self.forward_backward(batch, divisor, step)
        assert isinstance(loss_sum, Tensor), "a step needs at least one micro-batch"
        return loss_sum


def forward_backward(model: Transformer, batch: Batch, divisor: Tensor, step: StepContext) -> Tensor:
    """Forward and backward of a micro-batch with its loss divided by ``divisor``; the undivided sum."""
    batch_sum = forward(model, batch, step)
    (batch_sum / divisor).backward()
    return batch_sum.detach()


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Iterable[Batch], pipeline: PipelineStep | None = None, moe: MoeConfig | None = None
) -> Tensor:
    """The mean loss over all data ranks' ``batches``, without label smoothing.

    Experts are routed by ``moe`` if given, otherwise by the model's own settings.
    """
    batches = list(batches)
    count = count_targets(batches, model.axes.dp)
    step = StepContext(order_loss_weight=order_loss_weight(batches, count, model.axes.dp), moe=moe)
    if pipeline is None:
        loss_sum = torch.stack([forward(model, batch, step).double() for batch in batches]).sum()
    else:
        loss_sum = pipeline.evaluate(batches, step)
    return model.axes.global_sum(loss_sum) / count


def forward(model: Transformer, batch: Batch, step: StepContext = VALIDATION) -> Tensor:
    """The summed loss of a micro-batch, or of this context rank's share of its tokens."""
    stream, attend, head = model_inputs(batch, model, step)
    loss_sum, _ = model(stream, attend, head)
    return loss_sum


def count_targets(batches: Iterable[Batch], dp: Axis) -> Tensor:
    """The valid targets of this step over all data ranks, or another divisor of its loss; at least 1, so that an
    empty step has loss 0.
    """

    def count(batch: Batch) -> Tensor:
        if batch.units is not None:
            return batch.units
        return (batch.targets_T != IGNORE).sum() if batch.sequence_T is None else batch.pairs.sum()

    return dp.sum_(torch.stack([count(batch) for batch in batches]).sum()).clamp(min=1)


def order_loss_weight(batches: Sequence[Batch], count: Tensor, dp: Axis) -> Tensor | float:
    """Weight of a pair's order loss relative to a token's (float64): tokens / pairs.

    Dividing the sum of both losses by ``count`` tokens then gives a mean over each.
    """
    pairs = [(batch.orders_R != IGNORE).sum() for batch in batches if batch.orders_R is not None]
    return count.double() / dp.sum_(torch.stack(pairs).sum()).clamp(min=1) if pairs else 1.0
