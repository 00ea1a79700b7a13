"""Pipeline parallelism: consecutive stages on consecutive ranks, by torch.distributed.pipelining.

The schedules of forward and backward passes are torch's:

    gpipe        all forwards, then all backwards                              Huang et al., arXiv 1811.06965
    1f1b         one forward, one backward: as many in flight as stages        Narayanan et al., PipeDream, SOSP 2019
    interleaved  several stages per rank: a smaller bubble, more messages      Narayanan et al., arXiv 2104.04473
    zero_bubble  weight gradients computed in the bubbles                      Qi et al., arXiv 2401.10241

Every rank already has what a micro-batch needs besides the activations (positions, documents, targets), so only the
micro-batch's number passes through torch, as an index tensor. Torch would chunk tensor arguments and replicate all
others to every micro-batch (docs/decisions/0004-parallel-rules-on-h200.md).
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
"""torch's classes by name: importing them takes a second, which plans without a pipeline need not pay."""
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def check_schedule(plan: Plan) -> None:
    """Raise :class:`PlanError` for ``zero_bubble`` before torch 2.13, whose separate weight gradients are wrong."""
    if not schedule_supported(plan):
        raise PlanError(
            f"--plan.schedule zero_bubble needs torch 2.13, and this is {torch.__version__}, whose separate gradients "
            "of weights are wrong; update torch, or use --plan.schedule interleaved"
        )


def schedule_supported(plan: Plan) -> bool:
    """Whether this version of torch computes the plan's schedule correctly."""
    return plan.pp == 1 or plan.schedule != "zero_bubble" or TORCH_VERSION >= (2, 13)


StageForward = Callable[[tuple[Tensor, ...], int], tuple[Tensor, ...] | Tensor]
"""``run(received, i)``: a stage's forward pass of micro-batch ``i``, from the previous stage's tensors (none for the
first) to those for the next, or to the result on the last."""


class Stage(nn.Module):
    """One pipeline stage: ``modules``, and ``run``, its forward pass over them."""

    def __init__(self, number: int, modules: Sequence[nn.Module], run: StageForward):
        super().__init__()
        self.number = number
        self.members = nn.ModuleList(modules)  # FSDP gathers these, and torch computes their gradients
        self._run = run
        self.after_weight_gradients: Callable[[], object] = lambda: None
        """Called after each separate weight-gradient pass of a zero-bubble schedule."""

    def forward(self, *received: Tensor, i: Tensor) -> tuple[Tensor, ...] | Tensor:
        """Run micro-batch ``i`` on the previous stage's tensors; the first stage ignores them."""
        return self._run(() if self.number == 0 else received, int(i))


@functools.cache
def _stage_class() -> "type[PipelineStage]":
    """torch's stage with a hook after each zero-bubble weight-gradient pass, which bypasses autograd's hooks."""
    from torch.distributed.pipelining import PipelineStage

    class HookedStage(PipelineStage):
        def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
            super().backward_weight_one_chunk(*args, **options)
            assert isinstance(self.submod, Stage)
            self.submod.after_weight_gradients()

    return HookedStage


class Pipeline:
    """This rank's stages and their schedule.

    ``examples`` are tensors with the shapes and dtypes that pass between stages for each micro-batch, activations
    first; they are the same for all micro-batches of a step. The last stage returns the micro-batch's loss, 0-dim.
    """

    def __init__(self, stages: Sequence[Stage], plan: Plan, axis: Axis, device: torch.device):
        check_schedule(plan)
        self.stages, self.plan, self.axis, self.device = stages, plan, axis, device
        self.total = plan.total_stages
        self._schedules: dict[object, Any] = {}

    def step(self, count: int, examples: Sequence[Tensor]) -> None:
        """Run the forward and backward passes of ``count`` micro-batches."""
        key = (count, *((example.shape, example.dtype) for example in examples))
        if key not in self._schedules:  # one schedule per shape: gloo aborts the process otherwise
            self._schedules[key] = self._schedule(count, examples)
        numbers = torch.arange(count)
        first = any(stage.number == 0 for stage in self.stages)
        last = any(stage.number == self.total - 1 for stage in self.stages)
        target = torch.zeros(count, device=self.device) if last else None
        self._schedules[key].step(*([numbers] if first else []), i=numbers, target=target, return_outputs=False)

    @torch.no_grad()
    def forward(self, examples: Sequence[Tensor]) -> Tensor | None:
        """Run the forward pass of micro-batch 0 only; returns its result on the rank of the last stage."""
        result, i = None, torch.tensor(0)
        for stage in self.stages:
            received = examples
            if stage.number > 0:
                sender = (self.axis.rank - 1) % self.axis.size
                received = [collectives.receive(example, sender, self.axis.group) for example in examples]
            output = stage(*received, i=i)
            if stage.number < self.total - 1:
                for tensor in output:
                    collectives.send(tensor, (self.axis.rank + 1) % self.axis.size, self.axis.group)
            else:
                result = output
        return result

    def _schedule(self, count: int, examples: Sequence[Tensor]) -> Any:
        from torch.distributed import pipelining

        group = collectives.group_of(self.axis.group)
        stages = [self._stage(stage, examples, group) for stage in self.stages]
        schedule = getattr(pipelining, SCHEDULES[self.plan.schedule])
        one_or_all = stages if self.plan.schedule in MULTI_STAGE_SCHEDULES else stages[0]
        return schedule(one_or_all, count, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)  # type: ignore[arg-type]

    def _stage(self, stage: Stage, examples: Sequence[Tensor], group: dist.ProcessGroup) -> "PipelineStage":
        # With explicit shapes torch need not run a forward pass to infer them.
        between = tuple(example.detach().to("meta").requires_grad_() for example in examples)
        inputs = (torch.arange(1),) if stage.number == 0 else between
        loss = torch.zeros((), device="meta", dtype=torch.promote_types(examples[0].dtype, torch.float32))
        outputs = between if stage.number < self.total - 1 else (loss,)
        return _stage_class()(
            stage, stage.number, self.total, self.device, input_args=inputs, output_args=outputs, group=group
        )
