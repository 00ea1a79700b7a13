"""The tasks of section 5.3 of the Megatron-LM paper as examples of an encoder, and their scores.

    classify   [CLS] first [SEP] second [SEP]                     accuracy (MNLI, QQP)
    choice     [CLS] passage [SEP] question answer [SEP], each    accuracy (RACE): softmax over the options' logits
    span       [CLS] question [SEP] passage [SEP], in windows     exact match and F1 (SQuAD), with the official rules

A task turns rows into examples, a trained model into an array of predictions, and predictions into a score; the
predictions of several models are averaged for an ensemble.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.model import IGNORE, Transformer
from colonnade.tune.classify import Example, class_logits
from colonnade.tune.encoder_data import Question, Text

QUESTION_TOKENS = 128
"""Maximum tokens of a question with an option (choice)."""
BATCH = 32


class EncoderTask(Protocol):
    """The interface of the three tasks."""

    @property
    def choices(self) -> int:
        """Number of consecutive examples in one sample."""
        ...

    def config(self, start: ModelConfig) -> ModelConfig:
        """The config of the encoder ``start`` with the task's head."""
        ...

    def examples(self, rows: Sequence[Any]) -> list[Example]:
        """Examples to train on."""
        ...

    def predict(self, model: Transformer, rows: Sequence[Any]) -> Any:
        """Arrays that :meth:`average` averages."""
        ...

    def average(self, predictions: Sequence[Any]) -> Any:
        """The prediction of an ensemble."""
        ...

    def score(
        self, prediction: Any, rows: Sequence[Any], chosen: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Metrics; the first one selects between runs. ``chosen``: the development set's metrics, when scoring a test
        set.
        """
        ...


@dataclass(frozen=True)
class Pair:
    """Puts two texts into one sequence of at most ``longest`` tokens."""

    tokenizer: Tokenizer
    longest: int

    def __post_init__(self) -> None:
        if self.tokenizer.bos_id is None or not self.tokenizer.eos_ids:
            raise DataError("the tokenizer has no [CLS] and [SEP]; use an encoder with its own tokenizer")

    def join(self, first: Sequence[int], second: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """(tokens, segments); the longer part is cut first."""
        room = self.longest - (2 if second is None else 3)
        a, b = list(first), list(second or ())
        if len(a) + len(b) > room:
            keep_b = min(len(b), max(room // 2, room - len(a)))
            a, b = a[: room - keep_b], b[:keep_b]
        cls, sep = [self.tokenizer.bos_id or 0], [self.tokenizer.eos_ids[0]]
        tokens, segments = [*cls, *a, *sep], [0] * (len(a) + 2)
        if second is not None:
            tokens, segments = [*tokens, *b, *sep], [*segments, *[1] * (len(b) + 1)]
        return tokens, segments

    def encode(self, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        return self.tokenizer.encode_documents([text])[0]


@dataclass(frozen=True)
class ClassifyTask:
    """Classes of texts and of pairs of texts."""

    pair: Pair
    labels: tuple[str, ...]
    choices: int = 1

    def config(self, start: ModelConfig) -> ModelConfig:
        """With a classifier on the pooler."""
        return start.replace(task_head="classes", classes=len(self.labels), tied=True)

    def examples(self, rows: Sequence[Text]) -> list[Example]:
        """One sequence for each text or pair."""
        made: list[Example] = []
        for first, second, label in rows:
            tokens, segments = self.pair.join(
                self.pair.encode(first), None if second is None else self.pair.encode(second)
            )
            made.append(Example(tokens, self.labels.index(label), segments))
        return made

    def predict(self, model: Transformer, rows: Sequence[Text]) -> np.ndarray:
        """Probabilities (rows, classes)."""
        return _probabilities(model, self.examples(rows), len(self.labels))

    def average(self, predictions: Sequence[np.ndarray]) -> np.ndarray:
        """Mean probabilities."""
        return np.mean(np.stack(predictions), 0)

    def score(
        self, prediction: np.ndarray, rows: Sequence[Text], chosen: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """The share of correct classes."""
        truth = np.array([self.labels.index(row.label) for row in rows])
        return {"accuracy": float((prediction.argmax(1) == truth).mean())}


@dataclass(frozen=True)
class ChoiceTask:
    """One of several options for a question about a passage."""

    pair: Pair
    choices: int

    def config(self, start: ModelConfig) -> ModelConfig:
        """With one logit on the pooler."""
        return start.replace(task_head="classes", classes=1, tied=True)

    def examples(self, rows: Sequence[Question]) -> list[Example]:
        """A sequence for each option; the question's label is that of the first."""
        made: list[Example] = []
        for passage, question, options, label in rows:
            if len(options) != self.choices:
                raise DataError(f"'{question[:60]}' has {len(options)} options, but others have {self.choices}")
            ids = self.pair.encode(passage)
            for number, option in enumerate(options):
                asked = self.pair.encode(_with_answer(question, option))[: min(QUESTION_TOKENS, self.pair.longest // 2)]
                tokens, segments = self.pair.join(ids[: self.pair.longest - 3 - len(asked)], asked)
                made.append(Example(tokens, IGNORE if number else label, segments))
        return made

    def predict(self, model: Transformer, rows: Sequence[Question]) -> np.ndarray:
        """Probabilities (questions, choices): the softmax over the options' logits."""
        return _probabilities(model, self.examples(rows), self.choices)

    def average(self, predictions: Sequence[np.ndarray]) -> np.ndarray:
        """Mean probabilities."""
        return np.mean(np.stack(predictions), 0)

    def score(
        self, prediction: np.ndarray, rows: Sequence[Question], chosen: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """The share of correct options."""
        return {"accuracy": float((prediction.argmax(1) == np.array([row.label for row in rows])).mean())}


def _with_answer(question: str, option: str) -> str:
    """The option in the question's gap, or after the question (as in BERT's code for RACE)."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"


@torch.no_grad()
def _probabilities(model: Transformer, examples: Sequence[Example], classes: int) -> np.ndarray:
    batches = [examples[i : i + BATCH] for i in range(0, len(examples), BATCH)]
    logits = [class_logits(model, batch).double().cpu() for batch in batches]
    return torch.cat(logits).reshape(-1, classes).softmax(1).numpy()
