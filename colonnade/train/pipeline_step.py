"""Forward and backward passes of a training step through pipeline stages, and pipelined validation."""

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from colonnade.data import Batch
from colonnade.model import Transformer
from colonnade.model.head import Head
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.pipeline import Pipeline, Stage
from colonnade.train.model_inputs import VALIDATION, StepContext, model_inputs


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
