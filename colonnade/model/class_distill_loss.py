"""Distillation loss of a classifier: the losses of :mod:`colonnade.model.distill_loss` over classes.

    L = Σ_i  mix · CE_i + (1 − mix) · D_i + hidden · ‖v_i − v'_i‖² / ‖v'_i‖²

v is the pooled vector of an example, the input of the class layer. Rows are the classes of an example. In dist columns
are the N examples of the step, over data ranks and micro-batches, and all classes count equally (arXiv 2205.10536):

    Σ D_i / τ²  =  Σ_i 2 (1 − ρ_i)  +  N · mean_c 2 (1 − ρ_c)

A column cannot be computed by micro-batches. With several of them, :meth:`colonnade.train.distill.Distiller.prepare`
first computes the logits of all examples without gradients, and each micro-batch replaces its own rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.model.distill_loss import TINY, DistillLoss
from colonnade.model.output_heads import ClassLoss, OutputProjection, Pooled, class_logits
from colonnade.parallel.axis import Axis


@dataclass(frozen=True)
class ClassAnswers:
    """The teacher's outputs for the same examples."""

    logits_RC: Tensor
    """Up to a constant for each example."""
    pooled_RD: Tensor | None
    """None: from a cache."""


@dataclass(frozen=True)
class TeacherClasses:
    """A head: the :class:`ClassAnswers` of a forward pass."""

    first_R: Tensor

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> ClassAnswers:
        """The logits, and the pooled vectors they come from."""
        pooled_RD = Pooled(self.first_R)(x_tD, T, output)
        return ClassAnswers(class_logits(pooled_RD, output), pooled_RD)


@dataclass(frozen=True)
class StudentClasses:
    """A head: the logits of the model in training, with the dropout of its loss."""

    labels: ClassLoss

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logits_RC."""
        return self.labels.logits(Pooled(self.labels.first_R)(x_tD, T, output), output)


@dataclass(frozen=True)
class StepClasses:
    """The logits of all examples of a step, without gradients, and the teacher's outputs for one micro-batch."""

    teacher: ClassAnswers
    teacher_NC: Tensor
    student_NC: Tensor
    first: int
    """The row of the micro-batch's first example."""


@dataclass(frozen=True)
class ClassDistillation:
    """A head: the summed loss of the examples, and their number."""

    labels: ClassLoss
    teacher: ClassAnswers
    loss: DistillLoss
    step: StepClasses | None = None
    """dist with several micro-batches."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of examples), the same on all tp ranks."""
        pooled_RD = Pooled(self.labels.first_R)(x_tD, T, output)
        z_RC = self.labels.logits(pooled_RD, output)
        total = class_distillation_sum(z_RC, self.labels.labels_R, self.teacher, self.loss, output.axes.dp, self.step)
        if self.loss.hidden > 0:
            assert self.teacher.pooled_RD is not None, "a cache has no pooled vectors"
            ours_RD, theirs_RD = pooled_RD.to(total.dtype), self.teacher.pooled_RD.to(total.dtype)
            norms_R = theirs_RD.square().sum(1).clamp(min=TINY)
            total = total + self.loss.hidden * ((ours_RD - theirs_RD).square().sum(1) / norms_R).sum()
        return total, torch.full((), len(z_RC), device=z_RC.device)


def class_distillation_sum(
    z_RC: Tensor,
    labels_R: Tensor,
    teacher: ClassAnswers,
    loss: DistillLoss,
    dp: Axis,
    step: StepClasses | None = None,
) -> Tensor:
    """The summed loss of the examples without the hidden term, float32 (float64 for float64 logits)."""
    exact = torch.promote_types(z_RC.dtype, torch.float32)
    z_RC, t_RC, tau = z_RC.to(exact), teacher.logits_RC.to(exact), loss.temperature
    total = z_RC.new_zeros(())
    if loss.mix > 0:
        total = loss.mix * F.cross_entropy(z_RC, labels_R, reduction="sum")
    if loss.mix == 1:
        return total
    divergence = _dist(z_RC, t_RC, tau, dp, step) if loss.loss == "dist" else _divergence(z_RC / tau, t_RC / tau, loss)
    return total + (1 - loss.mix) * tau**2 * divergence


def _divergence(z_RC: Tensor, t_RC: Tensor, loss: DistillLoss) -> Tensor:
    logq, logp = z_RC.log_softmax(1), t_RC.log_softmax(1)
    if loss.loss == "kl":
        return (logp.exp() * (logp - logq)).sum()
    if loss.loss == "reverse":
        return (logq.exp() * (logq - logp)).sum()
    logm = torch.logaddexp(logp + math.log(loss.beta), logq + math.log(1 - loss.beta))
    return (loss.beta * logp.exp() * (logp - logm) + (1 - loss.beta) * logq.exp() * (logq - logm)).sum()


def _dist(z_RC: Tensor, t_RC: Tensor, tau: float, dp: Axis, step: StepClasses | None) -> Tensor:
    rows = len(z_RC)
    if step is None:  # the only micro-batch: the step's examples are those of all data ranks
        t_NC, others_NC, first = dp.all_gather_(t_RC).flatten(0, 1), dp.all_gather_(z_RC).flatten(0, 1), dp.rank * rows
    else:
        t_NC, others_NC, first = step.teacher_NC, step.student_NC, step.first
    z_NC = torch.cat((others_NC[:first], z_RC, others_NC[first + rows :]))
    within = 2 * (1 - _correlation((t_RC / tau).softmax(1), (z_RC / tau).softmax(1), 1)).sum()
    p_NC, q_NC = (t_NC / tau).softmax(1), (z_NC / tau).softmax(1)
    between = len(z_NC) * 2 * (1 - _correlation(p_NC, q_NC, 0)).mean()
    # Its gradient by this micro-batch's rows is whole; of its value each micro-batch counts its share.
    return within + between - between.detach() * (1 - rows / len(z_NC))


def _correlation(p: Tensor, q: Tensor, dim: int) -> Tensor:
    """Pearson's correlations along ``dim``; 0 where one of both is constant."""
    a, b = p - p.mean(dim, keepdim=True), q - q.mean(dim, keepdim=True)
    return (a * b).sum(dim) / ((a * a).sum(dim) * (b * b).sum(dim) + TINY).sqrt()
