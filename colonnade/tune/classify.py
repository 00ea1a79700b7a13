"""Fine-tuning an encoder to classify texts, or pairs of texts (Devlin 2019, section 4.1).

    run = RunConfig(name="mnli", model=classifier("bert-base", classes=3),
                    train=TrainConfig(pretrained_checkpoint="bert-base", …))
    fit(run, examples, held_out)
    accuracy(colonnade.load(run.folder).transformer, test)

The training session is that of :mod:`colonnade.train` with labelled examples in place of a corpus, so plans, precision,
clipping, dropout, recomputation, checkpoints, resuming and trackers work as in pre-training. A step's loss is the mean
over its examples. Each epoch is a seeded permutation of the examples.

Another task needs another head in :mod:`colonnade.train.model_inputs` and a feed like :class:`ExampleFeed`, which
stores labelled examples in flat arrays and packs them into micro-batches.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.checkpoint import native
from colonnade.checkpoint.load_model import open_model
from colonnade.config import DataConfig, ModelConfig, RunConfig
from colonnade.data import Batch, Loader, Tokenizer
from colonnade.data.batch import power_of_two
from colonnade.errors import ConfigError, DataError
from colonnade.model import IGNORE, Classes, Packed, Stream, Transformer
from colonnade.train.data_feed import EVAL_EVERY, MakeFeed
from colonnade.train.initial_weights import check_same_encoding
from colonnade.train.loop import Trainer
from colonnade.train.run_log import Summary
from colonnade.train.trackers import OpenTracker


class Example(NamedTuple):
    """A text or a pair of texts with its class."""

    tokens: list[int]
    """Including the tokenizer's control tokens, [CLS] first."""
    label: int
    """0 .. classes − 1."""
    segments: list[int] | None = None
    """The segment of each token, as ``tokenizer.encode_pair`` gives it; None: segment 0 everywhere."""
    end: int | None = None
    """For span answers: the last token of the answer; ``label`` is the first."""


class Examples:
    """Examples in flat arrays, which are cheap to send to other processes."""

    def __init__(self, examples: Sequence[Example], choices: int = 1):
        """``choices`` consecutive examples are one question, with the label of the first."""
        self.choices = choices
        self._starts = np.cumsum([0, *(len(example.tokens) for example in examples)])
        self._tokens_T = _flat(example.tokens for example in examples)
        self._segments_T = _flat(example.segments or [0] * len(example.tokens) for example in examples)
        self._labels = np.array([example.label for example in examples], np.int64)
        self._ends = np.array([IGNORE if example.end is None else example.end for example in examples], np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def at(self, number: int) -> tuple[np.ndarray, np.ndarray, int]:
        """(tokens, segments, label) of example ``number``."""
        span = slice(self._starts[number], self._starts[number + 1])
        return self._tokens_T[span], self._segments_T[span], int(self._labels[number])

    def end(self, number: int) -> int:
        """The last token of the answer of example ``number``."""
        return int(self._ends[number])

    @property
    def mean_tokens(self) -> float:
        """Mean tokens per sample."""
        return len(self._tokens_T) * self.choices / max(len(self), 1)

    @cached_property
    def sha256(self) -> str:
        """Hash of all tokens, segments and labels in order."""
        digest = hashlib.sha256()
        for part in (self._starts, self._tokens_T, self._segments_T, self._labels):
            digest.update(part.tobytes())
        if (self._ends != IGNORE).any() or self.choices > 1:
            choices = self.choices.to_bytes((self.choices.bit_length() + 7) // 8, "little")
            digest.update(self._ends.tobytes() + choices)
        return digest.hexdigest()


def _flat(parts: Any) -> np.ndarray:
    return np.array([number for part in parts for number in part], np.int64)


class LabelledSamples:
    """The samples of a classifier: the target of each example's first token is its label.

    Examples are packed without padding. If all micro-batches must have the same shape (``fixed_shape``), they are
    filled up to ``data.sequence`` tokens per sample, with sequences that no sample attends to and that have no targets.
    """

    def __init__(
        self, examples: Examples, config: DataConfig, *, segments: bool, fixed_shape: bool, spans: bool = False
    ):
        """``spans``: the targets of the first two tokens are the first and the last token of the answer."""
        self._examples, self._sequence = examples, config.sequence
        self._segments, self._fixed_shape, self._spans = segments, fixed_shape, spans
        self.samples = len(examples) // examples.choices
        """Samples in one epoch."""

    def pack(self, samples: np.ndarray, numbers: Any) -> Batch:
        """The batch of these examples; uses no random numbers."""
        choices = self._examples.choices
        numbers = [int(i) * choices + j for i in samples for j in range(choices)]
        rows = [self._examples.at(number) for number in numbers]
        lengths = [len(tokens) for tokens, _, _ in rows]
        first = np.cumsum([0, *lengths])[:-1]
        rest = len(rows) * self._sequence - sum(lengths) if self._fixed_shape else 0
        fill = [min(self._sequence, rest - start) for start in range(0, rest, self._sequence)]
        lengths, empty = [*lengths, *fill], np.zeros(rest, np.int64)
        T = sum(lengths)
        longest = self._sequence if self._fixed_shape else max(lengths)
        equal = set(lengths) == {longest}
        starts = np.cumsum([0, *lengths])
        if not equal:
            starts = np.pad(starts, (0, power_of_two(len(lengths)) - len(lengths)), constant_values=T)
        targets = np.full(T, IGNORE)
        targets[first] = [label for _, _, label in rows]
        predicted = first
        if self._spans:
            targets[first + 1] = [self._examples.end(number) for number in numbers]
            predicted = np.stack((first, first + 1), 1).reshape(-1)
        segments = np.concatenate([*(segments for _, segments, _ in rows), empty])
        return Batch(
            tokens_T=torch.from_numpy(np.concatenate([*(tokens for tokens, _, _ in rows), empty])),
            positions_T=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
            targets_T=torch.from_numpy(targets),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
            longest=longest,
            equal=equal,
            segments_T=torch.from_numpy(segments) if self._segments else None,
            predicted_R=torch.from_numpy(predicted),
            first_R=torch.from_numpy(first[::choices].copy()),
            stride=self._sequence * choices,
        )


class ExampleFeed:
    """The examples of data rank ``rank`` of ``ranks``; see :class:`colonnade.train.data_feed.DataFeed`.

    Raises :class:`DataError` for examples that the model does not support, :class:`ConfigError` for settings that do
    not apply to fine-tuning.
    """

    def __init__(
        self,
        examples: Examples,
        held_out: Examples,
        class_names: Sequence[str],
        run: RunConfig,
        rank: int = 0,
        ranks: int = 1,
    ):
        self._class_names = list(class_names)
        self.name, self.corpus, self.sample_tokens = "this list of examples", None, examples.mean_tokens
        fixed_shape = check_settings(run)
        self._sha256 = examples.sha256
        self.tokenizer = start_tokenizer(run)
        if run.distill.teacher and self.tokenizer is not None:
            teacher = open_model(run.distill.teacher)
            some = [token for i in range(min(16, len(examples))) for token in examples.at(i)[0].tolist()]
            remedy = "use a student with the teacher's tokenizer"
            check_same_encoding(
                teacher, run.distill.teacher, "distill.teacher", self.tokenizer, some, self.name, remedy
            )

        def loader(part: Examples) -> Loader:
            t = run.train
            objective = LabelledSamples(
                part,
                run.data,
                segments=run.model.segments > 0,
                fixed_shape=fixed_shape,
                spans=run.model.task_head == "spans",
            )
            return Loader(None, run.data, t.batch, t.micro_batch, rank, ranks, objective)

        self.samples, every = loader(examples), run.train.eval_every
        if every and not len(held_out):
            raise DataError(
                f"train.eval_every is {every}, and no examples are held out; pass held_out, or omit train.eval_every"
            )
        self.no_validation_reason = "no examples are held out" if every is None and not len(held_out) else None
        self.eval_every = 0 if self.no_validation_reason else EVAL_EVERY if every is None else every
        self.held_out = loader(held_out) if self.eval_every else None

    @property
    def identity(self) -> dict[str, Any]:
        """Hash of the training examples in order, and the names of their classes."""
        return {"examples": self._sha256, **({"classes": self._class_names} if self._class_names else {})}

    def difference(self, old: Mapping[str, Any]) -> str | None:
        """How the examples differ from a checkpoint's, if at all."""
        return None if old.get("examples") == self._sha256 else "other examples, or another order of them"


def check_examples(
    examples: Sequence[Example], model: ModelConfig, longest: int, what: str = "example", choices: int = 1
) -> None:
    """Raise :class:`DataError` for examples that ``model`` does not support, or of more than ``longest`` tokens."""
    if len(examples) % choices:
        raise DataError(f"{len(examples)} {what}s are not whole questions of {choices} choices")
    for number, (tokens, label, segments, end) in enumerate(examples):
        if not 0 < len(tokens) <= longest:
            raise DataError(
                f"{what} {number} has {len(tokens)} tokens; each needs 1 to {longest}; truncate longer texts"
            )
        if model.task_head == "spans":
            if end is None or len(tokens) < 2 or not 0 <= label <= end < len(tokens):
                raise DataError(
                    f"{what} {number} has the answer {label} to {end} in {len(tokens)} tokens; pass its first and last "
                    "token"
                )
        elif choices > 1 and not (0 <= label < choices if number % choices == 0 else label == IGNORE):
            raise DataError(
                f"{what} {number} has the label {label}; the first of {choices} choices has one from 0 on, the others "
                f"have {IGNORE}"
            )
        elif choices == 1 and not 0 <= label < model.classes:
            raise DataError(f"{what} {number} has the label {label}, and there are {model.classes} classes from 0 on")
        if not (min(tokens) >= 0 and max(tokens) < model.vocab_size):
            raise DataError(
                f"{what} {number} has tokens from {min(tokens)} to {max(tokens)}, and the vocabulary is 0 to "
                f"{model.vocab_size - 1}; encode it with the model's tokenizer"
            )
        if segments is None:
            continue
        if len(segments) != len(tokens):
            raise DataError(
                f"{what} {number} has {len(segments)} segments for {len(tokens)} tokens; pass one per token"
            )
        if not (min(segments) >= 0 and max(segments) < max(model.segments, 1)):
            raise DataError(
                f"{what} {number} has segments from {min(segments)} to {max(segments)}, and the model has "
                f"{model.segments}; use 0 to {max(model.segments, 1) - 1}, or omit the segments"
            )


def check_settings(run: RunConfig) -> bool:
    """Raise :class:`ConfigError` for settings that do not apply to fine-tuning.

    Returns whether all micro-batches must have the same shape.
    """
    model, t, defaults = run.model, run.train, DataConfig()
    if run.plan.cp > 1 and (model.task_head == "spans" or model.classes == 1):
        raise ConfigError(
            f"plan.cp is {run.plan.cp}, and the choices of a question, or the tokens of an answer, are compared within "
            "one rank; omit plan.cp"
        )
    if model.task_head not in ("classes", "spans"):
        raise ConfigError(
            f"fine-tuning a classifier needs a model with task_head = 'classes', not '{model.task_head}'; "
            f"make its config with "
            "colonnade.tune.classifier(START, classes)"
        )
    for name in ("path", "separate_documents", "mask_share", "mask_ngram", "short_seq_prob"):
        if (value := getattr(run.data, name)) != (default := getattr(defaults, name)):
            raise ConfigError(
                f"data.{name} is {value}, and applies to text: fine-tuning uses examples; omit it (the default is "
                f"{default})"
            )
    if run.distill.teacher and (model.task_head == "spans" or model.classes == 1):
        raise ConfigError(
            f"distill.teacher is {run.distill.teacher}, and distillation compares classes, not spans or choices; "
            "omit distill.teacher"
        )
    if model.moe is not None and model.moe.router.kind == "task":
        raise ConfigError("router 'task' needs the task of each token, and examples have none; use another router")
    needs_fixed_shape = {"plan.pp": run.plan.pp > 1, "train.compile": t.compile, "train.cuda_graph": t.cuda_graph,
             "train.recompute budget": t.recompute == "budget"}  # fmt: skip
    reasons = [name for name, applies in needs_fixed_shape.items() if applies]
    if reasons and model.moe is not None:
        raise ConfigError(
            f"{reasons[0]} needs micro-batches of one shape, and experts would be balanced over the padding; "
            f"omit {reasons[0]}, or fine-tune a dense model"
        )
    return bool(reasons)


def start_tokenizer(run: RunConfig) -> Tokenizer | None:
    """The tokenizer of the resumed checkpoint, of ``train.pretrained_checkpoint``, or of the teacher."""
    source = native.newest(run.folder) or run.train.pretrained_checkpoint or run.distill.teacher
    return Tokenizer.from_model(open_model(source).tokenizer_source) if source else None


def classifier(start: str | Path, classes: int) -> ModelConfig:
    """The config of the encoder ``start`` (anything that ``load`` accepts) with a classifier on its pooler.

    A run starts from the weights of ``train.pretrained_checkpoint``; new parameters are drawn from ``train.seed``.
    Raises :class:`CheckpointError` if there is no such model, :class:`ConfigError` if it is not an encoder.
    """
    return open_model(start).config.replace(task_head="classes", classes=classes, tied=True)


def fit(
    run: RunConfig,
    examples: Sequence[Example],
    held_out: Sequence[Example] = (),
    trackers: Sequence[OpenTracker] = (),
    choices: int = 1,
    class_names: Sequence[str] = (),
) -> Summary:
    """Fine-tune ``run.model`` on ``examples``, resuming from the run's newest checkpoint.

    Validation uses the ``held_out`` examples. ``choices`` consecutive examples are one question, of which the
    model (with ``classes = 1``) chooses one. ``class_names``, by number, are stored in the checkpoints. Raises
    :class:`DataError` without examples, and for examples that the model does not support or that are longer than
    ``data.sequence``, :class:`ConfigError` for settings that do not apply to fine-tuning, and what
    :class:`~colonnade.train.loop.Trainer` raises.
    """
    return Trainer(run, trackers, example_feed(run, examples, held_out, choices, class_names)).fit()


def example_feed(
    run: RunConfig,
    examples: Sequence[Example],
    held_out: Sequence[Example] = (),
    choices: int = 1,
    class_names: Sequence[str] = (),
) -> MakeFeed:
    """The data feed of such a run; raises as :func:`fit`."""
    check_settings(run)
    if not examples:
        raise DataError("there are no examples; pass at least one")
    if class_names and len(class_names) != run.model.classes:
        raise ConfigError(
            f"{len(class_names)} class names were given for {run.model.classes} classes; pass one name per class"
        )
    check_examples(examples, run.model, run.data.sequence, choices=choices)
    check_examples(held_out, run.model, run.data.sequence, "held-out example", choices)
    return partial(ExampleFeed, Examples(examples, choices), Examples(held_out, choices), tuple(class_names))


@torch.no_grad()
def accuracy(model: Transformer, examples: Sequence[Example], at_once: int = 32) -> float:
    """The share of ``examples`` classified correctly, in batches of ``at_once``.

    Raises :class:`DataError` without examples, and for examples that the model does not support.
    """
    if not examples:
        raise DataError("there are no examples; pass at least one")
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
    stream, attend = pack_examples(model, examples)
    return model(stream, attend, Classes(attend.cu_seqlens[:-1].long()))


def pack_examples(model: Transformer, examples: Sequence[Example]) -> tuple[Stream, Packed]:
    """(stream, attend) of ``examples``, one sequence each."""
    device, lengths = next(model.parameters()).device, [len(example.tokens) for example in examples]
    segments = [example.segments or [0] * len(example.tokens) for example in examples]

    def flat(parts: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([number for part in parts for number in part], device=device)

    stream = Stream(
        flat([example.tokens for example in examples]),
        flat([range(n) for n in lengths]),
        flat(segments) if model.config.segments else None,
    )
    return stream, Packed.of(lengths, device, causal=False)
