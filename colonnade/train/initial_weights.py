"""Initial weights of a run: random, or those of an existing model (``train.pretrained_checkpoint``); and which ones
are frozen.

``train.pretrained_checkpoint`` serves fine-tuning, upcycled experts, or unfreezing. Only its weights are used: the run
has its own moments, learning-rate schedule and data cursor, and its own settings for routing, balancing, dropping and
context length. Settings that define what a weight means (norms, activations, positions) must match, and so must the
tokenizer.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

import torch

from colonnade.checkpoint.load_model import OpenedModel, open_model
from colonnade.config import ModelConfig, RunConfig, differences
from colonnade.config.feature_checks import check_quantised
from colonnade.data import Corpus
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.model import Transformer, initialise
from colonnade.model.lora import is_adapter
from colonnade.model.moe import Router
from colonnade.model.weight_only_quant import build, copy_weight
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import Experts, layout_of

OVERRIDABLE_FIELDS = ("context", "init_std", "moe", "task_head", "classes", "lora")
"""Fields that may differ from those of ``train.pretrained_checkpoint``; tensors that change show in the shapes."""
GROUP = 32
"""Inputs that share a scale in an int4 base."""
PROBE_TOKENS = 512
"""Tokens of the corpus that both tokenizers must encode identically."""


def initialise_masters(model: Transformer, run: RunConfig, context: DistributedContext, masters: Masters) -> None:
    """Fill ``masters`` with this rank's part of the weights of ``train.pretrained_checkpoint``, or with random ones.

    A new classification head that ``train.pretrained_checkpoint`` lacks is drawn randomly.
    """
    if run.model.lora is not None and not run.train.pretrained_checkpoint:
        raise ConfigError("adapters need a trained model; set train.pretrained_checkpoint to one")
    if run.distill.teacher and run.distill.init == "layers":
        _from_teacher_layers(model, run, context, masters)
        return
    if not run.train.pretrained_checkpoint:
        initialise(model, run.train.seed, masters.assign)
        masters.update_model()
        return
    opened = open_model(run.train.pretrained_checkpoint)
    if run.model.lora is not None:
        base = [name for name, _ in _tensors(model) if not is_adapter(name)]
        initialise(model, run.train.seed, masters.assign, leave=base)
        if run.model.lora.base != "stored":  # loaded by load_quantised_base
            masters.update_model()
            return
    if not _has_new_head(opened.config, run.model):
        opened.load_masters(model, context, masters)
        return
    # The model with the other head is loaded in addition to ours: this rank's weights briefly take twice their memory.
    dtype = next(iter((masters.local | masters.frozen).values())).dtype
    config, spans = opened.config.replace(tied=run.model.tied), [span for _, span in context.stages(run.model.layers)]
    loaded = Transformer(config, context.axes, spans=spans, device=context.device, dtype=dtype)
    opened.load_weights(loaded, context, copy_weight)
    tensors, old_shapes, shapes = dict(_tensors(loaded)), loaded.global_shapes(), model.global_shapes()
    common = {name: tensors[name] for name, _ in _tensors(model) if shapes[name] == old_shapes.get(name)}
    initialise(model, run.train.seed, masters.assign, leave=common)
    for name, tensor in _tensors(model):
        if name in common:
            masters.assign(name, tensor, common[name].detach())
    masters.update_model()


def teacher_layer(layer: int, layers: int, teacher_layers: int) -> int:
    """The teacher's layer that becomes ``layer``: evenly spaced, from the first to the last."""
    return 0 if layers == 1 else round(layer * (teacher_layers - 1) / (layers - 1))


def _from_teacher_layers(model: Transformer, run: RunConfig, context: DistributedContext, masters: Masters) -> None:
    """Fill ``masters`` from the teacher, which is loaded temporarily."""
    opened = open_model(run.distill.teacher)
    dtype = next(iter((masters.local | masters.frozen).values())).dtype
    teacher = Transformer(opened.config, context.axes, device=context.device, dtype=dtype)
    opened.load_weights(teacher, context, copy_weight)
    tensors = dict(_tensors(teacher))
    for name, tensor in _tensors(model):
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = str(teacher_layer(int(parts[1]), run.model.layers, opened.config.layers))
        value = tensors[".".join(parts)].detach()
        assert value.shape == tensor.shape or context.sharded, name
        masters.assign(name, tensor, value)
    masters.update_model()


def load_quantised_base(
    run: RunConfig, context: DistributedContext, dtype: torch.dtype, spans: Sequence[range]
) -> Transformer:
    """A model with the frozen matrices of ``train.pretrained_checkpoint``, quantised while they are read; no new
    adapters yet.

    Raises :class:`ConfigError` for a layout in which they cannot be quantised.
    """
    lora = run.model.lora
    assert lora is not None
    if run.model.moe is not None:
        raise ConfigError(f"lora.base {lora.base} is for dense models; remove it to train a mixture of experts")
    if lora.base == "stored" or run.train.float8 != "none":
        raise ConfigError(
            f"train.float8 {run.train.float8} and lora.base {lora.base} are mutually exclusive; remove one of them"
        )
    opened = open_model(run.train.pretrained_checkpoint)
    check_quantised(run.model, lora.base, GROUP, run.plan.tp, run.plan.etp)
    model, store = build(
        run.model, context.axes, device=context.device, dtype=dtype, kind=lora.base, group=GROUP, spans=spans
    )
    opened.load_weights(model, context, store)
    return model


def _tensors(model: Transformer) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _has_new_head(start: ModelConfig, ours: ModelConfig) -> bool:
    """Whether the run trains a head for a task that ``train.pretrained_checkpoint`` lacks."""
    return ours.task_head in ("classes", "spans") and (start.task_head, start.classes) != (ours.task_head, ours.classes)


def freeze(model: Transformer, patterns: Sequence[str]) -> None:
    """Exclude the parameters that match ``train.freeze`` from training; raises as :func:`frozen_names`.

    In a model with adapters, only these are trained.
    """
    adapters = model.config.lora is not None
    if not patterns and not adapters:
        return
    names = frozen_names(model.config, patterns)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names and (is_adapter(name) or not adapters))
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.frozen = adapters or f"{name}.bias_E" in names


def frozen_names(config: ModelConfig, patterns: Sequence[str]) -> set[str]:
    """The parameters and buffers of the whole model that match ``patterns``.

    Raises :class:`ConfigError` for a pattern without a match, with the closest names, and if nothing is left to train.
    """
    whole = Transformer(config, device="meta")
    layout, parameters = layout_of(whole), [name for name, _ in whole.named_parameters()]
    names = [*parameters, *(name for name, _ in whole.named_buffers())]
    if config.lora is not None:
        parameters = [name for name in parameters if is_adapter(name)]
    experts = {name for name, placement in layout.items() if isinstance(placement, Experts)}
    frozen: set[str] = set()
    for pattern in patterns:
        if pattern in ("experts", "rest"):
            if config.moe is None:
                raise ConfigError(f"train.freeze {pattern} applies to experts, and this model has none; remove it")
            matched = experts if pattern == "experts" else set(names) - experts
        else:
            matched = {name for name in names if _matches(name, pattern)}
        if not matched:
            known = sorted({prefix for name in names for prefix in _prefixes(name)})
            near = difflib.get_close_matches(pattern.removeprefix("re:"), known, n=3, cutoff=0.3) or known[:3]
            raise ConfigError(f"train.freeze {pattern!r} matches no parameter; the closest are {', '.join(near)}")
        frozen |= matched
    if frozen.issuperset(parameters):
        raise ConfigError(f"train.freeze {' '.join(patterns)} leaves no parameter to train; remove a pattern")
    return frozen


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))
    try:
        return re.fullmatch(pattern.removeprefix("re:"), name) is not None
    except re.error as why:
        raise ConfigError(f"train.freeze {pattern!r} is not a valid regular expression: {why}; fix it") from None


def _prefixes(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``: the modules that contain a parameter, and itself."""
    return accumulate(name.split("."), "{}.{}".format)


def check_start(run: RunConfig, corpus: Corpus | None) -> None:
    """Check that ``train.pretrained_checkpoint`` exists and matches the run's model and tokens.

    Raises :class:`ConfigError` for a different model or tokenizer, :class:`CheckpointError` when there is no model.
    """
    opened = open_model(run.train.pretrained_checkpoint)
    if opened.adapters:
        raise ConfigError(
            f"train.pretrained_checkpoint {run.train.pretrained_checkpoint} is a run with adapters; merge "
            f"them first with colonnade convert {run.train.pretrained_checkpoint} OUT, and start from OUT"
        )
    _check_same_model(run.train.pretrained_checkpoint, opened.config, run.model)
    if corpus is not None:
        check_same_tokenizer(opened, run.train.pretrained_checkpoint, "train.pretrained_checkpoint", corpus)


def _check_same_model(start: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    if theirs.moe is None and ours.moe is not None:
        raise ConfigError(
            f"train.pretrained_checkpoint {start} has no experts, and the run has {ours.moe.experts} in a "
            f"layer; upcycle it first: colonnade convert {start} OUT --format colonnade --upcycle "
            f"{ours.moe.experts}, then --train.pretrained_checkpoint OUT"
        )
    new_head = _has_new_head(theirs, ours)
    different = differences(theirs, ours, ignore=(*OVERRIDABLE_FIELDS, "tied") if new_head else OVERRIDABLE_FIELDS)
    if not different:
        old, new = (dict(Transformer(config, device="meta").global_shapes()) for config in (theirs, ours))
        names = {name for name in old.keys() | new.keys() if not (new_head and name.startswith(("top.", "unembed.")))}
        names = {name for name in names if not is_adapter(name)}
        changed = sorted(name for name in names if old.get(name) != new.get(name))
        different = [f"'{name}': {_shape_text(old.get(name))} -> {_shape_text(new.get(name))}" for name in changed]
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise ConfigError(
            f"train.pretrained_checkpoint {start} is a different model from the run's: "
            f"{', '.join(different[:3])}{more}; to use its model, remove --preset and --model, and pass "
            "--train.pretrained_checkpoint on the command line"
        )


def _shape_text(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(tuple(shape))


def check_same_tokenizer(opened: OpenedModel, model: str, setting: str, corpus: Corpus) -> None:
    """Raise :class:`ConfigError` if ``corpus`` was made with a different tokenizer from that of ``model``, which
    ``setting`` names.

    Without both tokenizers only the vocabulary sizes can be compared.
    """
    if corpus.has_tokenizer:
        split = corpus.split("train")
        tokens = split.read(0, min(PROBE_TOKENS, split.tokens)).tolist()
        remedy = f"rebuild it with colonnade corpus … --tokenizer {model}"
        check_same_encoding(opened, model, setting, corpus.tokenizer, tokens, str(corpus.path), remedy)


def check_same_encoding(
    opened: OpenedModel, model: str, setting: str, tokenizer: Tokenizer, tokens: list[int], data: str, remedy: str
) -> None:
    """Raise :class:`ConfigError` if ``model``'s tokenizer encodes the text of ``tokens``, by ``tokenizer``,
    differently.

    ``data`` has these tokens.
    """
    theirs = Tokenizer.from_model(opened.tokenizer_source)
    if theirs is None:
        return
    text = tokenizer.decode(tokens)
    if theirs.encode(text) != tokenizer.encode(text):
        raise ConfigError(f"{data} was made with a different tokenizer from that of {setting} {model}; {remedy}")
