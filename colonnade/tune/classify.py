"""Fine-tuning an encoder to classify texts, or pairs of texts (Devlin 2019, section 4.1).

    run = RunConfig(name="mnli", model=classifier("bert-base", classes=3), train=TrainConfig(start="bert-base", …))
    fit(run, examples, held_out)
    accuracy(colonnade.load(run.folder).transformer, test)

A run like any other: the training session of :mod:`colonnade.train` with labelled examples in the place of a corpus, so
that plans, precision, clipping, dropout, recomputation, checkpoints, resumption and trackers are those of pre-training.
A step's loss is the mean over its examples. The order of examples is a seeded permutation an epoch.

Another task is another head in :mod:`colonnade.train.model_inputs` and another feed beside :class:`ExampleFeed`.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint.open_model import open_model
from colonnade.config import ModelConfig, RunConfig
from colonnade.errors import DataError
from colonnade.model import Classes, Packed, Stream, Transformer
from colonnade.train.data_feed import MakeFeed
from colonnade.train.loop import Trainer
from colonnade.train.run_log import Summary
from colonnade.train.trackers import OpenTracker
from colonnade.tune.examples import Example, ExampleFeed, Examples, check_examples, check_settings


def classifier(start: str | Path, classes: int) -> ModelConfig:
    """The config of the encoder ``start`` (anything that load takes) with a classifier on its pooler.

    A run of it begins with the weights of ``train.start``; what is new in it is drawn from ``train.seed``. Raises
    :class:`CheckpointError` where there is no such model, :class:`ConfigError` for one that is no encoder.
    """
    return open_model(start).config.but(top="classes", classes=classes, tied=True)


def fit(
    run: RunConfig, examples: Sequence[Example], held_out: Sequence[Example] = (), trackers: Sequence[OpenTracker] = ()
) -> Summary:
    """Fine-tune ``run.model`` on ``examples``, from the run's newest checkpoint where there is one.

    ``held_out`` is what validations measure the loss on. Raises :class:`DataError` for no examples, and for those that
    do not fit the model or are longer than ``data.sequence``, :class:`ConfigError` for settings that fine-tuning has no
    use for, and what :class:`~colonnade.train.loop.Trainer` raises.
    """
    return Trainer(run, trackers, example_feed(run, examples, held_out)).fit()


def example_feed(run: RunConfig, examples: Sequence[Example], held_out: Sequence[Example] = ()) -> MakeFeed:
    """The data of such a run, for a session; raises as :func:`fit`."""
    check_settings(run)
    if not examples:
        raise DataError("there are no examples; give at least one")
    check_examples(examples, run.model, run.data.sequence)
    check_examples(held_out, run.model, run.data.sequence, "held-out example")
    return partial(ExampleFeed, Examples(examples), Examples(held_out))


@torch.no_grad()
def accuracy(model: Transformer, examples: Sequence[Example], at_once: int = 32) -> float:
    """The share of ``examples`` whose likeliest class is theirs; raises :class:`DataError` for none, and for those that
    do not fit the model.
    """
    if not examples:
        raise DataError("there are no examples; give at least one")
    check_examples(examples, model.config, model.config.context)
    right = 0
    for i in range(0, len(examples), at_once):
        part = examples[i : i + at_once]
        found_R = class_logits(model, part).argmax(1)
        right += int((found_R == torch.tensor([example.label for example in part], device=found_R.device)).sum())
    return right / len(examples)


def class_logits(model: Transformer, examples: Sequence[Example]) -> Tensor:
    """logits_RC of some examples, whatever their labels."""
    device, lengths = next(model.parameters()).device, [len(example.tokens) for example in examples]
    segments = [example.segments or [0] * len(example.tokens) for example in examples]

    def flat(parts: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([number for part in parts for number in part], device=device)

    stream = Stream(
        flat([example.tokens for example in examples]),
        flat([range(n) for n in lengths]),
        flat(segments) if model.config.segments else None,
    )
    attend = Packed.of(lengths, device, causal=False)
    return model(stream, attend, Classes(attend.cu_seqlens[:-1].long()))
