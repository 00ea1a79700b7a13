"""Pipeline parallelism: stages on ranks one after another, micro-batches following each other through them.

The order of forward and backward passes is torch's (torch.distributed.pipelining):

    gpipe        all forwards, then all backwards                              Huang et al., arXiv 1811.06965
    1f1b         one forward, one backward: as many in flight as stages        Narayanan et al., PipeDream, SOSP 2019
    interleaved  several stages a rank: a smaller bubble, more messages        Narayanan et al., arXiv 2104.04473
    zero_bubble  weight gradients apart, where ranks would wait                Qi et al., arXiv 2401.10241

What a micro-batch needs beside the activations (positions, documents, targets) stands on every rank already; only the
micro-batch's number travels through torch, as an index tensor. Torch would cut tensors among the arguments to pieces
and hand anything else whole to every micro-batch (docs/decisions/0004-parallel-rules-on-h200.md).
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.config.plan import MULTI_STAGE_SCHEDULES, Plan
from colonnade.errors import PlanError
from colonnade.parallel import collectives
from colonnade.parallel.axis import Axis

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
"""torch's classes by name: to import them takes a second, which plans without a pipeline do not wait for."""
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def check_schedule(plan: Plan) -> None:
    """Raise :class:`PlanError` where the schedule is ``zero_bubble`` and torch older than 2.13, which adds up gradients
    of different tensors when it computes those of weights apart.
    """
    if not knows(plan):
        raise PlanError(
            f"--plan.schedule zero_bubble needs torch 2.13, and this is {torch.__version__}, whose separate gradients "
            "of weights are wrong; update torch, or use --plan.schedule interleaved"
        )


def knows(plan: Plan) -> bool:
    """Whether this torch computes by the plan's schedule what the others do."""
    return plan.pp == 1 or plan.schedule != "zero_bubble" or TORCH >= (2, 13)


Run = Callable[[tuple[Tensor, ...], int], tuple[Tensor, ...] | Tensor]
"""A stage's forward pass of micro-batch ``i``: what the previous stage sent (nothing for the first) to what this one
sends, or for the last to the result."""


class Stage(nn.Module):
    """One stage: ``run(sent, i)`` is its forward pass of micro-batch ``i``, over the modules it is made of."""

    def __init__(self, number: int, modules: Sequence[nn.Module], run: Run):
        super().__init__()
        self.number = number
        self.held = nn.ModuleList(modules)  # what FSDP gathers for this stage, and torch differentiates by
        self._run = run
        self.after_weights: Callable[[], object] = lambda: None
        """Called when a micro-batch's gradients of weights are there, where the schedule computes them apart."""

    def forward(self, *sent: Tensor, i: Tensor) -> tuple[Tensor, ...] | Tensor:
        """What the previous stage sent (the first stage has nothing) to what this one sends."""
        return self._run(() if self.number == 0 else sent, int(i))


@functools.cache
def _split() -> "type[PipelineStage]":
    """torch's stage, which says when a zero-bubble schedule has added a micro-batch's gradients up: that calls none of
    autograd's hooks.
    """
    from torch.distributed.pipelining import PipelineStage

    class Split(PipelineStage):
        def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
            super().backward_weight_one_chunk(*args, **options)
            assert isinstance(self.submod, Stage)
            self.submod.after_weights()

    return Split


class Pipeline:
    """This rank's stages and how micro-batches go through them.

    ``examples`` are tensors of the shapes and types that travel between stages for each micro-batch, the activations
    first; all micro-batches of a step have the same. The last stage's result is the micro-batch's loss, 0-dim.
    """

    def __init__(self, stages: Sequence[Stage], plan: Plan, axis: Axis, device: torch.device):
        check_schedule(plan)
        self.stages, self.plan, self.axis, self.device = stages, plan, axis, device
        self.total = plan.total_stages
        self._schedules: dict[object, Any] = {}

    def step(self, count: int, examples: Sequence[Tensor]) -> None:
        """Forward and backward of ``count`` micro-batches."""
        key = (count, *((example.shape, example.dtype) for example in examples))
        if key not in self._schedules:  # a schedule serves one shape: gloo aborts the process otherwise
            self._schedules[key] = self._schedule(count, examples)
        numbers = torch.arange(count)
        first = any(stage.number == 0 for stage in self.stages)
        last = any(stage.number == self.total - 1 for stage in self.stages)
        target = torch.zeros(count, device=self.device) if last else None
        self._schedules[key].step(*([numbers] if first else []), i=numbers, target=target, return_outputs=False)

    @torch.no_grad()
    def relay(self, examples: Sequence[Tensor]) -> Tensor | None:
        """The forward pass of micro-batch 0 alone; its result, where the last stage is."""
        result, i = None, torch.tensor(0)
        for stage in self.stages:
            sent = examples
            if stage.number > 0:
                sender = (self.axis.rank - 1) % self.axis.size
                sent = [collectives.receive(example, sender, self.axis.group) for example in examples]
            given = stage(*sent, i=i)
            if stage.number < self.total - 1:
                for tensor in given:
                    collectives.send(tensor, (self.axis.rank + 1) % self.axis.size, self.axis.group)
            else:
                result = given
        return result

    def _schedule(self, count: int, examples: Sequence[Tensor]) -> Any:
        from torch.distributed import pipelining

        group = collectives.group_of(self.axis.group)
        made = [self._stage(stage, examples, group) for stage in self.stages]
        schedule = getattr(pipelining, SCHEDULES[self.plan.schedule])
        held = made if self.plan.schedule in MULTI_STAGE_SCHEDULES else made[0]
        return schedule(held, count, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)  # type: ignore[arg-type]

    def _stage(self, stage: Stage, examples: Sequence[Tensor], group: dist.ProcessGroup) -> "PipelineStage":
        """The shapes are said, not found out: torch would run a forward pass to learn them."""
        travel = tuple(example.detach().to("meta").requires_grad_() for example in examples)
        takes = (torch.arange(1),) if stage.number == 0 else travel
        loss = torch.zeros((), device="meta", dtype=torch.promote_types(examples[0].dtype, torch.float32))
        gives = travel if stage.number < self.total - 1 else (loss,)
        return _split()(stage, stage.number, self.total, self.device, input_args=takes, output_args=gives, group=group)
