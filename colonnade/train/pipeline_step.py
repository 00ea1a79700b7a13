"""A step's forward and backward passes through a pipeline, and validation by passing batches on."""

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from colonnade.data import Batch
from colonnade.model import Transformer
from colonnade.model.head import Head
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.pipeline import Pipeline, Stage
from colonnade.train.model_inputs import VALIDATION, Terms, model_inputs


class PipelineStep:
    """This rank's stages of ``model``. Every pipeline rank reads the same batches; only activations travel."""

    def __init__(self, model: Transformer, context: DistributedContext, compute: torch.dtype):
        self.model, self.axes, self.device, self.compute = model, context.axes, context.device, compute
        self.stages = [
            Stage(number, _modules(model, span), functools.partial(self._run, span))
            for number, span in context.stages(model.config.layers)
        ]
        self._pipeline = Pipeline(self.stages, context.plan, context.axes.pp, context.device)
        self._feed([], torch.ones((), device=context.device))

    def step(self, batches: Sequence[Batch], count: Tensor, terms: Terms) -> Tensor:
        """Forward and backward of all micro-batches, each loss divided by ``count``; their undivided sum, 0 on ranks
        without the last stage.
        """
        self._feed(batches, count, terms)
        self._pipeline.step(len(batches), self._examples())
        return self._sum

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], terms: Terms = VALIDATION) -> Tensor:
        """The summed loss of ``batches`` without smoothing, 0 on ranks without the last stage."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            self._feed([batch], torch.ones((), device=self.device), terms)
            self._pipeline.forward(self._examples())
            total += self._sum
        return total

    @torch.no_grad()
    def forward(self, batch: Batch, head: Head) -> Tensor | None:
        """What ``head`` makes of one micro-batch, on the ranks of the last stage."""
        self._feed([batch], torch.ones((), device=self.device), head=head)
        return self._pipeline.forward(self._examples())

    def _feed(
        self,
        batches: Sequence[Batch],
        count: Tensor,
        terms: Terms = VALIDATION,
        head: Head | None = None,
    ) -> None:
        self._laid = [model_inputs(batch, self.model, terms) for batch in batches]  # once for all stages of this rank
        self._count, self._head = count, head
        self._sum = torch.zeros((), dtype=torch.promote_types(self.compute, torch.float32), device=self.device)
        moe = self.model.config.moe
        pools = moe is not None and moe.pools_layers and terms.router_weight is not None
        self._zero_sums = (self._sum.new_zeros(2 * moe.experts + 1),) if moe is not None and pools else ()

    def _examples(self) -> list[Tensor]:
        """What travels between two stages: this rank's rows of the residual stream of one micro-batch, and the sums of
        a balance loss over all layers.
        """
        stream, _, _ = self._laid[0]
        rows = self.axes.rows(len(stream.tokens_T))
        size = (rows.stop - rows.start, self.model.config.width)
        return [torch.empty(size, dtype=self.compute, device=self.device), *self._zero_sums]

    def _run(self, span: range, sent: tuple[Tensor, ...], i: int) -> tuple[Tensor, ...] | Tensor:
        """One stage's part of micro-batch ``i``."""
        stream, attend, loss = self._laid[i]
        x_tD, *sums = sent or (None, *(zero.requires_grad_() for zero in self._zero_sums))
        if stream.routing is not None and sums:
            # A copy: a stage without experts returns it, and torch takes no input for an output.
            stream.routing.pooled.sums = sums[0].clone()
        out = self.model.run(span, x_tD, stream, attend, self._head or loss)
        if span.stop < self.model.config.layers:
            return (out,) if not sums or stream.routing is None else (out, stream.routing.pooled.take())
        if isinstance(out, Tensor):
            return out
        loss_sum, _ = out
        self._sum += loss_sum.detach()
        return loss_sum / self._count


def _modules(model: Transformer, span: range) -> list[nn.Module]:
    """What a stage is made of."""
    held: list[nn.Module] = [model.blocks.get_submodule(str(i)) for i in span]
    if model.embed is not None and (span.start == 0 or (model.copies and span.stop == model.config.layers)):
        held.append(model.embed)
    if span.stop == model.config.layers:
        held += [module for module in (model.norm, model.top, model.unembed) if module is not None]
    return held
