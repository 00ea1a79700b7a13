"""Fine-tuning an encoder to classify texts, or pairs of texts (Devlin 2019, section 4.1).

    run = RunConfig(name="mnli", model=classifier("bert-base", classes=3), train=TrainConfig(start="bert-base", …))
    fit(run, examples, held_out)
    accuracy(colonnade.load(run.folder).transformer, test)

The training session is that of :mod:`colonnade.train` with labelled examples in place of a corpus, so plans, precision,
clipping, dropout, recomputation, checkpoints, resuming and trackers work as in pre-training. A step's loss is the mean
over its examples. Each epoch is a seeded permutation of the examples.

Another task needs another head in :mod:`colonnade.train.model_inputs` and another feed beside :class:`ExampleFeed`.
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

    A run starts from the weights of ``train.start``; new parameters are drawn from ``train.seed``. Raises
    :class:`CheckpointError` if there is no such model, :class:`ConfigError` if it is not an encoder.
    """
    return open_model(start).config.replace(top="classes", classes=classes, tied=True)


def fit(
    run: RunConfig, examples: Sequence[Example], held_out: Sequence[Example] = (), trackers: Sequence[OpenTracker] = ()
) -> Summary:
    """Fine-tune ``run.model`` on ``examples``, resuming from the run's newest checkpoint.

    Validation uses the ``held_out`` examples. Raises :class:`DataError` without examples, and for examples that the
    model does not support or that are longer than ``data.sequence``, :class:`ConfigError` for settings that do not
    apply to fine-tuning, and what :class:`~colonnade.train.loop.Trainer` raises.
    """
    return Trainer(run, trackers, example_feed(run, examples, held_out)).fit()


def example_feed(run: RunConfig, examples: Sequence[Example], held_out: Sequence[Example] = ()) -> MakeFeed:
    """The data feed of such a run; raises as :func:`fit`."""
    check_settings(run)
    if not examples:
        raise DataError("there are no examples; give at least one")
    check_examples(examples, run.model, run.data.sequence)
    check_examples(held_out, run.model, run.data.sequence, "held-out example")
    return partial(ExampleFeed, Examples(examples), Examples(held_out))


@torch.no_grad()
def accuracy(model: Transformer, examples: Sequence[Example], at_once: int = 32) -> float:
    """The share of ``examples`` classified correctly, in batches of ``at_once``.

    Raises :class:`DataError` without examples, and for examples that the model does not support.
    """
    if not examples:
        raise DataError("there are no examples; give at least one")
    check_examples(examples, model.config, model.config.context)
    correct = 0
    for i in range(0, len(examples), at_once):
        batch = examples[i : i + at_once]
        predicted_R = class_logits(model, batch).argmax(1)
        labels_R = torch.tensor([example.label for example in batch], device=predicted_R.device)
        correct += int((predicted_R == labels_R).sum())
    return correct / len(examples)


def class_logits(model: Transformer, examples: Sequence[Example]) -> Tensor:
    """logits_RC of ``examples``; their labels are ignored."""
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
