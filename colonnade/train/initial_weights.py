"""What a run begins with: drawn weights, or those of a model that is there (fine-tuning, experts made of a dense model,
a thaw).

Of a model that is there only the weights are taken. The run has moments, a schedule and a cursor of its own, and says
of itself how experts are chosen and balanced, what is dropped, and how long a context may be; what a weight means
(norms, activations, positions) must be the same, and so must the tokens.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

import torch

from colonnade.checkpoint.open_model import OpenedModel, open_model
from colonnade.config import ModelConfig, RunConfig, differences
from colonnade.data import Corpus
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.model import Transformer, initialise
from colonnade.model.moe import Router
from colonnade.model.weight_only_quant import in_place
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import Experts, layout_of

FREE = ("context", "init_std", "moe", "top", "classes")
"""Fields that a run says for itself; where they make other tensors, the shapes tell."""
PROBE = 512
"""Tokens of the corpus that both tokenizers have to agree on."""


def begin(model: Transformer, run: RunConfig, context: DistributedContext, held: Masters) -> None:
    """Fill the masters ``held`` of ``model`` with this rank's part of the weights of ``train.start``, or with drawn
    ones; what a new top has and ``train.start`` has not is drawn.
    """
    if not run.train.start:
        initialise(model, run.train.seed, held.assign)
        held.update_model()
        return
    it = open_model(run.train.start)
    if not _new_top(it.config, run.model):
        it.into(model, context, held)
        return
    # The model with the other top is read beside ours, which takes this rank's share of the weights once more.
    kept = next(iter((held.local | held.frozen).values())).dtype
    config, spans = it.config.but(tied=run.model.tied), [span for _, span in context.stages(run.model.layers)]
    theirs = Transformer(config, context.axes, spans=spans, device=context.device, dtype=kept)
    it.fill(theirs, context, in_place)
    found, shapes, wanted = dict(_tensors(theirs)), theirs.whole_shapes(), model.whole_shapes()
    same = {name: found[name] for name, _ in _tensors(model) if wanted[name] == shapes.get(name)}
    initialise(model, run.train.seed, held.assign, leave=same)
    for name, tensor in _tensors(model):
        if name in same:
            held.assign(name, tensor, same[name].detach())
    held.update_model()


def _tensors(model: Transformer) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _new_top(theirs: ModelConfig, ours: ModelConfig) -> bool:
    """Whether a run fine-tunes a top that ``train.start`` has not."""
    return ours.top == "classes" and (theirs.top, theirs.classes) != (ours.top, ours.classes)


def freeze(model: Transformer, patterns: Sequence[str]) -> None:
    """Take the parameters that ``train.freeze`` names out of training; raises as :func:`frozen_names`."""
    if not patterns:
        return
    names = frozen_names(model.config, patterns)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.frozen = f"{name}.bias_E" in names


def frozen_names(config: ModelConfig, patterns: Sequence[str]) -> set[str]:
    """The parameters and buffers of the whole model that ``patterns`` match.

    Raises :class:`ConfigError` for a pattern that matches none, with the nearest names, and where nothing is left.
    """
    whole = Transformer(config, device="meta")
    layout, parameters = layout_of(whole), [name for name, _ in whole.named_parameters()]
    names = [*parameters, *(name for name, _ in whole.named_buffers())]
    experts = {name for name, at in layout.items() if isinstance(at, Experts)}
    found: set[str] = set()
    for pattern in patterns:
        if pattern in ("experts", "rest"):
            if config.moe is None:
                raise ConfigError(f"train.freeze {pattern} is about experts, and this model has none; leave it out")
            matched = experts if pattern == "experts" else set(names) - experts
        else:
            matched = {name for name in names if _matches(name, pattern)}
        if not matched:
            known = sorted({prefix for name in names for prefix in _prefixes(name)})
            near = difflib.get_close_matches(pattern.removeprefix("re:"), known, n=3, cutoff=0.3) or known[:3]
            raise ConfigError(f"train.freeze {pattern!r} matches no parameter; the nearest are {', '.join(near)}")
        found |= matched
    if found.issuperset(parameters):
        raise ConfigError(f"train.freeze {' '.join(patterns)} leaves no parameter to train; leave a pattern out")
    return found


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))
    try:
        return re.fullmatch(pattern.removeprefix("re:"), name) is not None
    except re.error as why:
        raise ConfigError(f"train.freeze {pattern!r} is no regular expression: {why}; mend it") from None


def _prefixes(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``: the modules that hold a parameter, and itself."""
    return accumulate(name.split("."), "{}.{}".format)


def check_start(run: RunConfig, corpus: Corpus | None) -> None:
    """Raise :class:`ConfigError` when ``train.start`` is another model than the run's, or reads other tokens, and
    :class:`CheckpointError` when there is none.
    """
    it = open_model(run.train.start)
    _same_model(run.train.start, it.config, run.model)
    if corpus is not None:
        _same_tokens(it, run, corpus)


def _same_model(start: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    if theirs.moe is None and ours.moe is not None:
        raise ConfigError(
            f"train.start {start} has no experts, and the run has {ours.moe.experts} in a layer; make them of it "
            f"first: colonnade convert {start} OUT --format colonnade --upcycle {ours.moe.experts}, then --train.start "
            "OUT"
        )
    new_top = _new_top(theirs, ours)
    other = differences(theirs, ours, leave=(*FREE, "tied") if new_top else FREE)
    if not other:
        shapes, wanted = (dict(Transformer(config, device="meta").whole_shapes()) for config in (theirs, ours))
        names = {
            name for name in shapes.keys() | wanted.keys() if not (new_top and name.startswith(("top.", "unembed.")))
        }
        unlike = sorted(name for name in names if shapes.get(name) != wanted.get(name))
        other = [f"'{name}': {_said(shapes.get(name))} -> {_said(wanted.get(name))}" for name in unlike]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        raise ConfigError(
            f"train.start {start} is another model than the run's: {', '.join(other[:3])}{more}; give the run that "
            "model: leave --preset and --model out, and give --train.start on the command line"
        )


def _said(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(tuple(shape))


def _same_tokens(it: OpenedModel, run: RunConfig, corpus: Corpus) -> None:
    theirs = Tokenizer.beside(it.words)
    corpus = Corpus(run.data.path)
    if (
        theirs is None or not corpus.has_tokenizer
    ):  # tokens without one: the vocabulary's size is all that can be compared
        return
    split = corpus.split("train")
    text = corpus.tokenizer.decode(split.read(0, min(PROBE, split.tokens)).tolist())
    if theirs.encode(text) != corpus.tokenizer.encode(text):
        raise ConfigError(
            f"{run.data.path} was made with another tokenizer than that of train.start {run.train.start}; make it "
            f"again with colonnade corpus … --tokenizer {run.train.start}"
        )
