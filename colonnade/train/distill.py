"""Distillation in training: the teacher's forward pass beside each micro-batch's.

The teacher has the student's tensor- and data-parallel layout and computes without gradients. Whatever a run does
otherwise (layouts, resuming, metrics, checkpoints) does not change: only the head of the forward pass is another.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colonnade.checkpoint.load_model import OpenedModel, open_model
from colonnade.config import ModelConfig, RunConfig
from colonnade.config.feature_checks import check_quantised
from colonnade.data import Corpus
from colonnade.errors import ConfigError, PlanError
from colonnade.model import Packed, Stream, Transformer
from colonnade.model.attend import AttendBackend
from colonnade.model.distill_loss import Distillation, DistillLoss, TeacherStates
from colonnade.model.moe import Routing
from colonnade.model.weight_only_quant import build, copy_weight
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.initial_weights import check_same_tokenizer


@dataclass(frozen=True)
class Distiller:
    """A loaded teacher and the loss that compares the model in training with it."""

    teacher: Transformer
    loss: DistillLoss

    @torch.no_grad()
    def head(self, stream: Stream, attend: AttendBackend, targets_T: Tensor) -> Distillation:
        """The head that replaces the cross-entropy of ``targets_T``; runs the teacher."""
        assert isinstance(attend, Packed)
        routing = None
        if self.teacher.config.moe is not None:
            routing = Routing(torch.arange(len(stream.tokens_T), device=stream.tokens_T.device))
        stream = stream._replace(dropout=None, routing=routing)
        first_head, _ = self.teacher.axes.tp.part(self.teacher.config.heads)
        attend = replace(attend, dropout=None, first_head=first_head)
        return Distillation(targets_T, self.teacher(stream, attend, TeacherStates()), self.loss)


def open_teacher(run: RunConfig) -> OpenedModel | None:
    """The run's teacher without its weights, None without one; raises if the run cannot learn from it."""
    if not run.distill.teacher:
        return None
    opened, plan = open_model(run.distill.teacher), run.plan
    _check_models(run, opened.config)
    if plan.pp > 1 or plan.cp > 1:
        raise PlanError(
            f"distillation runs the teacher beside the model under tp, dp and ep, and the plan has pp={plan.pp} and "
            f"cp={plan.cp}; set them to 1"
        )
    plan.check(opened.config)
    weights = run.distill.weights
    if opened.formats and weights not in ("stored", "dense"):
        raise ConfigError(
            f"distill.teacher stores its weights in {opened.weights} already; leave --distill.weights {weights} out"
        )
    forms = opened.formats.values() if opened.formats and weights == "stored" else ()
    for form in forms:
        check_quantised(opened.config, form.kind, form.group, plan.tp, plan.etp)
    check_quantised(opened.config, weights, run.distill.weight_group, plan.tp, plan.etp)
    if opened.config.moe is not None and plan.ep * plan.etp > 1 and (forms or weights not in ("stored", "dense")):
        raise PlanError(
            f"quantised experts are not trained beside on ep={plan.ep} and etp={plan.etp}; set --distill.weights dense"
        )
    return opened


def check_teacher(run: RunConfig, corpus: Corpus | None) -> None:
    """Check the teacher against the run's model and tokenizer; raises as :func:`open_teacher`."""
    opened = open_teacher(run)
    if opened is not None and corpus is not None:
        check_same_tokenizer(opened, run.distill.teacher, "distill.teacher", corpus)


def load_distiller(run: RunConfig, context: DistributedContext) -> Distiller | None:
    """The run's teacher, on every rank its share; None without one."""
    opened, settings = open_teacher(run), run.distill
    if opened is None:
        return None
    options = {"device": context.device, "dtype": getattr(torch, run.train.compute_dtype)}
    formats = opened.formats if opened.formats and settings.weights == "stored" else None
    if formats is None and settings.weights in ("stored", "dense"):
        teacher, put = Transformer(opened.config, context.axes, **options), copy_weight
    else:
        kind = "int8" if settings.weights in ("stored", "dense") else settings.weights
        teacher, put = build(
            opened.config, context.axes, **options, kind=kind, group=settings.weight_group, formats=formats
        )
    opened.load_weights(teacher.eval().requires_grad_(False), context, put)
    loss = DistillLoss(
        settings.loss, settings.mix, settings.temperature, settings.beta, settings.hidden, run.data.sequence
    )
    return Distiller(teacher, loss)


def _check_models(run: RunConfig, teacher: ModelConfig) -> None:
    name, model = run.distill.teacher, run.model
    if teacher.vocab_size != model.vocab_size:
        raise ConfigError(
            f"distill.teacher {name} has a vocabulary of {teacher.vocab_size}, and the run's model one of "
            f"{model.vocab_size}; use a teacher with the same tokenizer"
        )
    if not (teacher.causal and model.causal) or (teacher.task_head, model.task_head) != ("unembed", "unembed"):
        raise ConfigError("distillation is for models that predict the next token; leave distill.teacher out")
    if teacher.positions == "learned" and teacher.context < run.data.sequence:
        raise ConfigError(
            f"data.sequence {run.data.sequence} is longer than the context {teacher.context} of distill.teacher "
            f"{name}; set --data.sequence {teacher.context}"
        )
    if run.distill.hidden and teacher.width != model.width:
        raise ConfigError(
            f"distill.hidden compares states of equal widths, and the teacher has {teacher.width} and the model "
            f"{model.width}; set --distill.hidden 0"
        )
    if run.train.label_smoothing:
        raise ConfigError("train.label_smoothing and distillation both soften the targets; set one of them")
    if run.train.cuda_graph:
        raise ConfigError("train.cuda_graph captures one model, and distillation runs two; leave it out")
