"""Distillation in training: the teacher's forward pass alongside each micro-batch's.

The teacher has the student's tensor- and data-parallel layout and computes without gradients. Everything else in a run
(layouts, resuming, metrics, checkpoints) is unchanged; only the output head of the forward pass differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint.load_model import OpenedModel, open_model
from colonnade.config import ModelConfig, RunConfig, differences
from colonnade.config.distill import DistillConfig
from colonnade.config.feature_checks import check_quantised
from colonnade.data import Batch, Corpus
from colonnade.errors import ConfigError, PlanError
from colonnade.model import Packed, Stream, Transformer
from colonnade.model.attend import AttendBackend
from colonnade.model.class_distill_loss import (
    ClassAnswers,
    ClassDistillation,
    StepClasses,
    StudentClasses,
    TeacherClasses,
)
from colonnade.model.distill_loss import Distillation, DistillLoss, Teacher, TeacherStates
from colonnade.model.distill_top import TopTokens
from colonnade.model.moe import Routing
from colonnade.model.output_heads import ClassLoss, Head
from colonnade.model.weight_only_quant import build, copy_weight
from colonnade.parallel.axis import Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.initial_weights import check_same_tokenizer
from colonnade.train.model_inputs import StepContext, model_inputs
from colonnade.train.teacher_cache import TeacherCache, fingerprint

CACHED_TOKENS = 64
"""The teacher's most likely tokens that a cache keeps."""


class Distiller:
    """The teacher of a run, and the loss that compares the model in training with it."""

    def __init__(self, load: Callable[[], Transformer], loss: DistillLoss, tp: Axis, cache: TeacherCache | None = None):
        """With a ``cache``, the teacher is loaded when a sample is missing there."""
        self.loss, self.tp, self.cache, self._load = loss, tp, cache, load
        self.teacher = load() if cache is None else None

    @torch.no_grad()
    def head(
        self, stream: Stream, attend: AttendBackend, targets_T: Tensor, sampled_T: Tensor | None = None
    ) -> Distillation:
        """The head that replaces the cross-entropy of ``targets_T``; runs the teacher."""
        assert isinstance(attend, Packed)
        if self.cache is not None:
            return Distillation(targets_T, self._cached(self.cache, stream, attend), self.loss, sampled_T)
        return Distillation(targets_T, self._answer(stream, attend), self.loss, sampled_T)

    def class_head(
        self, stream: Stream, attend: AttendBackend, labels: ClassLoss, step: StepClasses | None
    ) -> ClassDistillation:
        """The head that replaces the cross-entropy of a classifier; runs the teacher, unless :meth:`prepare` did."""
        assert isinstance(attend, Packed)
        answers = self._classes(stream, attend, labels.first_R) if step is None else step.teacher
        return ClassDistillation(labels, answers, self.loss, step)

    @torch.no_grad()
    def prepare(self, model: Transformer, batches: Sequence[Batch], step: StepContext) -> Sequence[Batch]:
        """The micro-batches of a step; for a classifier's dist with several of them, with the logits of all examples.

        Dropout and routing are those of the step, so the second pass of ``model`` computes the same logits again.
        """
        if model.config.task_head != "classes" or self.loss.loss != "dist" or self.loss.mix == 1 or len(batches) == 1:
            return batches
        step, dp = replace(step, distiller=None, reports=[], pooled=[]), model.axes.dp
        answers, logits = list[ClassAnswers](), list[Tensor]()
        for batch in batches:
            stream, attend, labels = model_inputs(batch, model, step)
            assert isinstance(attend, Packed)
            assert isinstance(labels, ClassLoss)
            answers.append(self._classes(stream, attend, labels.first_R))
            logits.append(model(stream, attend, StudentClasses(labels)))
        of_rank, exact = sum(map(len, logits)), torch.promote_types(logits[0].dtype, torch.float32)
        teacher_NC, student_NC = (
            dp.all_gather_(torch.cat(parts).to(exact)).flatten(0, 1)
            for parts in ([each.logits_RC for each in answers], logits)
        )
        starts = accumulate(map(len, logits), initial=dp.rank * of_rank)
        return [
            replace(batch, step_classes=StepClasses(teacher, teacher_NC, student_NC, first))
            for batch, teacher, first in zip(batches, answers, starts, strict=False)
        ]

    @torch.no_grad()
    def _classes(self, stream: Stream, attend: Packed, first_R: Tensor) -> ClassAnswers:
        cache = self.cache
        if cache is None:
            return self._teacher_pass(stream, attend, TeacherClasses(first_R))

        def answer() -> TopTokens:
            logp_RC = self._teacher_pass(stream, attend, TeacherClasses(first_R)).logits_RC.float().log_softmax(1)
            return TopTokens(torch.arange(cache.k, device=logp_RC.device).expand_as(logp_RC), logp_RC)

        ends = attend.cu_seqlens[torch.searchsorted(attend.cu_seqlens, first_R.to(attend.cu_seqlens.dtype), right=True)]
        inputs_2T = torch.stack((stream.tokens_T, torch.zeros_like(stream.tokens_T)))
        if stream.segments_T is not None:
            inputs_2T[1] = stream.segments_T
        inputs_2T = inputs_2T.cpu()
        keys = [cache.key(inputs_2T[:, a:b]) for a, b in zip(first_R.tolist(), ends.tolist(), strict=True)]
        return ClassAnswers(self._from_cache(cache, keys, answer, first_R.device).logp_Tk, None)

    def _answer(self, stream: Stream, attend: Packed) -> Teacher:
        return self._teacher_pass(stream, attend, TeacherStates())

    def _teacher_pass(self, stream: Stream, attend: Packed, head: Head) -> Any:
        if self.teacher is None:
            self.teacher = self._load()
        routing = None
        if self.teacher.config.moe is not None:
            routing = Routing(torch.arange(len(stream.tokens_T), device=stream.tokens_T.device))
        stream = stream._replace(dropout=None, routing=routing)
        first_head, _ = self.teacher.axes.tp.part(self.teacher.config.heads)
        return self.teacher(stream, replace(attend, dropout=None, first_head=first_head), head)

    def _cached(self, cache: TeacherCache, stream: Stream, attend: Packed) -> TopTokens:
        """The teacher's outputs for whole samples, from the cache if it has all of them."""

        def answer() -> TopTokens:
            teacher = self._answer(stream, attend)
            assert self.teacher is not None
            return teacher.top(cache.k, self.loss.temperature, self.tp, self.teacher.config.vocab_size)

        samples = stream.tokens_T.split(cache.sequence)
        positions = stream.positions_T.split(cache.sequence)
        keys = [cache.key(torch.cat(pair)) for pair in zip(samples, positions, strict=True)]
        return self._from_cache(cache, keys, answer, stream.tokens_T.device)

    def _from_cache(
        self, cache: TeacherCache, keys: Sequence[bytes], answer: Callable[[], TopTokens], device: torch.device
    ) -> TopTokens:
        """The records of ``keys``; if one is missing, ``answer`` computes them for all, and they are stored."""
        found = [cache.find(key) for key in keys]
        if None in found:  # another rank may have added it
            cache.scan()
            found = [known or cache.find(key) for key, known in zip(keys, found, strict=True)]
        missing = torch.tensor(any(each is None for each in found), dtype=torch.int32, device=device)
        if not int(self.tp.max_(missing)):  # all tensor-parallel ranks, which compute it together
            return TopTokens(*(torch.cat(part).to(device) for part in zip(*(t for t in found if t), strict=True)))
        top = answer()
        for i, (key, known) in enumerate(zip(keys, found, strict=True)):
            if known is None and self.tp.rank == 0:
                cache.add(key, top.rows(slice(i * cache.sequence, (i + 1) * cache.sequence)))
        return top


def open_teacher(run: RunConfig) -> OpenedModel | None:
    """The run's teacher without its weights, None without one; raises if the run cannot learn from it."""
    if not run.distill.teacher:
        return None
    opened, plan = open_model(run.distill.teacher), run.plan
    _check_models(run, opened.config)
    if plan.pp > 1 or plan.cp > 1:
        raise PlanError(
            f"distillation runs the teacher alongside the model under tp, dp and ep, but the plan has pp={plan.pp} and "
            f"cp={plan.cp}; set them to 1"
        )
    plan.check(opened.config)
    weights = run.distill.weights
    if weights in ("ternary", "file"):
        raise ConfigError(f"distill.weights {weights} is not supported for a teacher; use int8, int4 or float8")
    if opened.formats and weights not in ("stored", "dense"):
        raise ConfigError(
            f"distill.teacher already stores its weights in {opened.weights}; remove --distill.weights {weights}"
        )
    forms = opened.formats.values() if opened.formats and weights == "stored" else ()
    for form in forms:
        check_quantised(opened.config, form.kind, form.group, plan.tp, plan.etp, grouped=form.grouped)
    check_quantised(opened.config, weights, run.distill.weight_group, plan.tp, plan.etp)
    if opened.config.moe is not None and plan.ep * plan.etp > 1 and (forms or weights not in ("stored", "dense")):
        raise PlanError(
            f"training alongside quantised experts is not supported on ep={plan.ep} and etp={plan.etp}; set "
            "--distill.weights dense"
        )
    return opened


def check_teacher(run: RunConfig, corpus: Corpus | None) -> None:
    """Check the teacher against the run's model and tokenizer; raises as :func:`open_teacher`."""
    opened = open_teacher(run)
    if opened is not None and corpus is not None:
        check_same_tokenizer(opened, run.distill.teacher, "distill.teacher", corpus)


def check_same_objective(checkpoint: Path, was: DistillConfig, now: DistillConfig) -> None:
    """Raise :class:`ConfigError` if a run that resumes ``checkpoint`` has another teacher or another loss than it."""
    if not was.teacher and not now.teacher:
        return
    ignored = ("init", "cache", "weights", "weight_group")
    if changes := differences(was, now, ignore=ignored, prefix="distill."):
        raise ConfigError(
            f"{checkpoint} was trained with another teacher or loss ({', '.join(changes)}); resume with its settings, "
            f"or start a run with another name from its weights: --train.pretrained_checkpoint {checkpoint}"
        )


def load_distiller(run: RunConfig, context: DistributedContext) -> Distiller | None:
    """The run's teacher, on every rank its share; None without one."""
    opened, settings = open_teacher(run), run.distill
    if opened is None:
        return None
    loss = DistillLoss(
        settings.loss, settings.mix, settings.temperature, settings.beta, settings.hidden, run.data.sequence
    )
    cache = None
    if settings.cache:
        identity = {
            "teacher": fingerprint(opened.path), "weights": settings.weights, "weight_group": settings.weight_group,
            "dtype": run.resolved(context.device.type).train.compute_dtype,
        }  # fmt: skip
        if run.model.task_head == "classes":
            cache = TeacherCache(Path(settings.cache), identity, 1, opened.config.classes)
        else:
            k = min(CACHED_TOKENS, opened.config.vocab_size)
            cache = TeacherCache(
                Path(settings.cache), identity | {"temperature": loss.temperature}, run.data.sequence, k
            )
    return Distiller(lambda: _load(opened, run, context), loss, context.axes.tp, cache)


def _load(opened: OpenedModel, run: RunConfig, context: DistributedContext) -> Transformer:
    settings = run.distill
    options = {"device": context.device, "dtype": getattr(torch, run.train.compute_dtype)}
    formats = opened.formats if opened.formats and settings.weights == "stored" else None
    if formats is None and settings.weights in ("stored", "dense"):
        teacher, put = Transformer(opened.config, context.axes, **options), copy_weight
    else:
        assert settings.weights != "file", "open_teacher refuses it"
        kind = "int8" if settings.weights in ("stored", "dense") else settings.weights
        teacher, put = build(
            opened.config, context.axes, **options, kind=kind, group=settings.weight_group, formats=formats
        )
    # Without collectives: with a cache, a rank loads the teacher when it needs it.
    opened.read_weights(teacher.eval().requires_grad_(False), context, put)
    return teacher


def check_classifier(name: str, teacher: ModelConfig) -> None:
    """Raise :class:`ConfigError` unless the teacher ``name`` classifies."""
    if teacher.task_head != "classes":
        raise ConfigError(
            f"distill.teacher {name} has the output head '{teacher.task_head}' and is not a classifier; fine-tune it "
            "first"
        )


def _check_classifiers(run: RunConfig, teacher: ModelConfig) -> None:
    name, model, settings = run.distill.teacher, run.model, run.distill
    check_classifier(name, teacher)
    if teacher.classes != model.classes:
        raise ConfigError(
            f"distill.teacher {name} has {teacher.classes} classes and the run's model {model.classes}; use a teacher "
            "with the same labels"
        )
    if settings.weights not in ("stored", "dense"):
        raise ConfigError(
            f"distill.weights {settings.weights} is for teachers that generate text, and {name} classifies; remove it"
        )
    if model.classes == 1:
        raise ConfigError("distillation compares classes, but a model with classes = 1 has none; remove the teacher")
    if teacher.segments != model.segments:
        raise ConfigError(
            f"distill.teacher {name} has {teacher.segments} segments and the run's model {model.segments}; set "
            f"model.segments {teacher.segments}"
        )
    if settings.on_policy:
        raise ConfigError("distill.on_policy generates text, which a classifier cannot do; remove it")
    if settings.cache and settings.hidden:
        raise ConfigError(
            "distill.cache stores only the teacher's classes, but hidden compares pooled vectors; remove one of them"
        )
    if settings.loss == "dist" and run.train.batch == 1:
        raise ConfigError(
            "distill.loss dist compares the examples of a step, but train.batch is 1; set it to 2 or more"
        )


def _check_models(run: RunConfig, teacher: ModelConfig) -> None:
    name, model = run.distill.teacher, run.model
    if teacher.vocab_size != model.vocab_size:
        raise ConfigError(
            f"distill.teacher {name} has a vocabulary of {teacher.vocab_size}, and the run's model one of "
            f"{model.vocab_size}; use a teacher with the same tokenizer"
        )
    if model.task_head == "classes":
        _check_classifiers(run, teacher)
    elif not (teacher.causal and model.causal) or (teacher.task_head, model.task_head) != ("unembed", "unembed"):
        raise ConfigError(
            f"distillation is for models that predict the next token, here '{model.task_head}' from "
            f"'{teacher.task_head}', and for classifiers (colonnade finetune --method classify); remove the teacher"
        )
    if teacher.positions == "learned" and teacher.context < run.data.sequence:
        raise ConfigError(
            f"data.sequence {run.data.sequence} is longer than the context {teacher.context} of distill.teacher "
            f"{name}; set --data.sequence {teacher.context}"
        )
    if run.distill.init == "layers":
        if run.train.pretrained_checkpoint:
            raise ConfigError(
                "distill.init layers and train.pretrained_checkpoint both set the initial weights; set one of them"
            )
        if different := differences(model.replace(layers=teacher.layers), teacher, ignore=("context", "init_std")):
            raise ConfigError(
                f"distill.init layers needs a model that differs from the teacher in its layers only: "
                f"{', '.join(different[:3])}; remove --preset and all --model flags except layers, or set init random"
            )
        if model.layers > teacher.layers:
            raise ConfigError(
                f"distill.init layers takes {model.layers} of the teacher's {teacher.layers} layers; set "
                f"--model.layers {teacher.layers // 2 or 1}"
            )
    if run.distill.cache:
        if model.task_head != "classes" and (run.distill.loss != "kl" or run.distill.hidden):
            raise ConfigError(
                f"distill.cache keeps the teacher's most likely tokens, which only kl can use, not {run.distill.loss} "
                f"with hidden {run.distill.hidden:g}; remove distill.cache"
            )
        if run.plan.ep * run.plan.etp > 1:
            raise PlanError(
                f"with distill.cache each data rank runs the teacher by itself, and ep={run.plan.ep} with etp="
                f"{run.plan.etp} runs it on all ranks together; remove distill.cache"
            )
    if run.distill.hidden and teacher.width != model.width:
        raise ConfigError(
            f"distill.hidden needs equal widths, but the teacher has {teacher.width} and the model "
            f"{model.width}; set --distill.hidden 0"
        )
    if run.train.label_smoothing:
        raise ConfigError("train.label_smoothing and distillation both soften the targets; set one of them")
    if run.train.cuda_graph:
        raise ConfigError("train.cuda_graph captures one model, but distillation runs two; remove it")
