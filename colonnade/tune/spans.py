"""Question answering by spans: SQuAD 1.1 and 2.0, with the official normalisation, exact match and F1.

A passage longer than a sequence is cut into windows that begin ``STRIDE`` tokens apart. A window without the answer,
and a question without one, has the answer [CLS]. The score of a span is p_start · p_end; that of no answer is the
lowest of [CLS] over the windows. SQuAD 2.0's threshold between both is chosen on the development set.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from colonnade.config import ModelConfig
from colonnade.model import Transformer
from colonnade.model.output_heads import Spans, sequence_logits
from colonnade.tune.classify import Example, pack_examples
from colonnade.tune.encoder_data import SpanQuestion
from colonnade.tune.encoder_tasks import BATCH, Pair

STRIDE = 128
QUESTION_TOKENS = 64
ANSWER_TOKENS = 30
"""Maximum length of an answer."""
_BEST = 20
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class Window(NamedTuple):
    """A question and a part of its passage."""

    question: int
    example: Example
    offset: int
    """Where the passage's tokens begin in the sequence."""
    characters: list[tuple[int, int]]
    """(start, stop) in the passage of each of its tokens in the window."""


class SpanPrediction(NamedTuple):
    """Probabilities of one question's answers."""

    spans: dict[tuple[int, int], float]
    """Probability of the characters start to stop of the passage."""
    none: float
    """Probability of no answer."""

    @property
    def none_ratio(self) -> float:
        """The probability of no answer divided by that of the best answer."""
        best = max(self.spans.values(), default=0.0)
        return self.none / best if best > 0 else math.inf


@dataclass(frozen=True)
class SpanTask:
    """The first and last token of an answer."""

    pair: Pair
    impossible: bool
    """Whether questions may have no answer (SQuAD 2.0)."""
    choices: int = 1

    def config(self, start: ModelConfig) -> ModelConfig:
        """With two logits for each token."""
        return start.replace(task_head="spans", classes=0, tied=True)

    def windows(self, rows: Sequence[SpanQuestion]) -> list[Window]:
        """The windows of all questions."""
        made: list[Window] = []
        for number, row in enumerate(rows):
            asked = self.pair.encode(row.question)[: min(QUESTION_TOKENS, self.pair.longest // 3)]
            ids, places = self.pair.tokenizer.encode_with_offsets(row.passage)
            room = self.pair.longest - 3 - len(asked)
            stride = min(STRIDE, max(1, room // 2))
            stop = row.start + len(row.answers[0]) if row.answers else -1
            for start in range(0, max(1, len(ids) - room + stride), stride):
                tokens, segments = self.pair.join(asked, ids[start : start + room])
                characters, offset = places[start : start + room], len(asked) + 2
                first, last = _tokens_of(characters, row.start, stop) if row.answers else (-1, -1)
                label, end = (0, 0) if first < 0 else (first + offset, last + offset)
                made.append(Window(number, Example(tokens, label, segments, end), offset, characters))
        return made

    def examples(self, rows: Sequence[SpanQuestion]) -> list[Example]:
        """Windows to train on; if all questions have answers, only windows with the answer."""
        return [w.example for w in self.windows(rows) if self.impossible or w.example.label > 0]

    @torch.no_grad()
    def predict(self, model: Transformer, rows: Sequence[SpanQuestion]) -> list[SpanPrediction]:
        """The most probable answers of each question."""
        spans: list[dict[tuple[int, int], float]] = [{} for _ in rows]
        none = [1.0] * len(rows)
        windows = self.windows(rows)
        for i in range(0, len(windows), BATCH):
            batch = windows[i : i + BATCH]
            stream, attend = pack_examples(model, [each.example for each in batch])
            logits = model(stream, attend, Spans()).double()
            longest = max(len(each.example.tokens) for each in batch)
            cu = attend.cu_seqlens
            logp_R2S = sequence_logits(logits, cu, longest, cu[:-1].long()).log_softmax(-1).cpu()
            for window, (start_S, end_S) in zip(batch, logp_R2S, strict=True):
                none[window.question] = min(none[window.question], math.exp(start_S[0] + end_S[0]))
                found = spans[window.question]
                for place, logp in _best_spans(window, start_S, end_S):
                    found[place] = max(found.get(place, 0.0), math.exp(logp))
        return [SpanPrediction(found, each) for found, each in zip(spans, none, strict=True)]

    def average(self, predictions: Sequence[list[SpanPrediction]]) -> list[SpanPrediction]:
        """Mean probabilities; a span that a model does not list has 0."""
        together: list[SpanPrediction] = []
        for each in zip(*predictions, strict=True):
            sums: Counter[tuple[int, int]] = Counter()
            for prediction in each:
                for place, value in prediction.spans.items():
                    sums[place] += value / len(each)  # type: ignore[assignment] - a counter of floats
            together.append(SpanPrediction(dict(sums), sum(p.none for p in each) / len(each)))
        return together

    def answers(self, prediction: list[SpanPrediction], rows: Sequence[SpanQuestion], threshold: float) -> list[str]:
        """The answer texts; empty if no answer is more than ``threshold`` times as probable as the best one."""
        texts: list[str] = []
        for each, row in zip(prediction, rows, strict=True):
            best = max(each.spans, key=lambda place: (each.spans[place], -place[0]), default=None)
            unanswered = best is None or (self.impossible and each.none_ratio > threshold)
            texts.append("" if unanswered or best is None else row.passage[best[0] : best[1]])
        return texts

    def score(
        self,
        prediction: list[SpanPrediction],
        rows: Sequence[SpanQuestion],
        chosen: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """F1 and exact match; with unanswerable questions at the threshold of ``chosen``, the scores on the development
        set, or without it at the best threshold, which is returned too.
        """
        if not self.impossible:
            return squad_scores(self.answers(prediction, rows, 1.0), rows)
        if chosen is not None:
            threshold = chosen["threshold"]
            return squad_scores(self.answers(prediction, rows, threshold), rows) | {"threshold": threshold}
        # In the order of their ratios, questions are answered one after the other.
        ratios = np.array([each.none_ratio for each in prediction])
        order = np.argsort(ratios, kind="stable")
        empty = _question_scores([""] * len(rows), rows)
        gained = (_question_scores(self.answers(prediction, rows, math.inf), rows) - empty)[order]
        sums = empty.sum(0) + np.concatenate([np.zeros((1, 2)), np.cumsum(gained, 0)])
        thresholds = np.concatenate([[0.0], ratios[order]])
        sums[np.flatnonzero(thresholds[1:] == thresholds[:-1])] = -1  # equal ratios are answered together
        best = int(sums[:, 0].argmax())
        f1, exact = 100 * sums[best] / len(rows)
        return {"f1": float(f1), "exact_match": float(exact), "threshold": float(thresholds[best])}


def _tokens_of(characters: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
    """(first, last) of the tokens that cover the characters ``start`` to ``stop``; (-1, -1) if the window lacks
    some.
    """
    inside = [i for i, (a, b) in enumerate(characters) if b > start and a < stop]
    if not inside or characters[inside[0]][0] > start or characters[inside[-1]][1] < stop:
        return -1, -1
    return inside[0], inside[-1]


def _best_spans(window: Window, start_S: torch.Tensor, end_S: torch.Tensor) -> list[tuple[tuple[int, int], float]]:
    """The most probable spans of a window: characters and log-probability."""
    count = len(window.characters)
    if not count:
        return []
    starts, ends = start_S[window.offset : window.offset + count], end_S[window.offset : window.offset + count]
    sums = starts[:, None] + ends[None, :]
    allowed = torch.ones(count, count, dtype=torch.bool).triu().tril(ANSWER_TOKENS - 1)
    sums = sums.masked_fill(~allowed, -math.inf).flatten()
    found = sums.topk(min(_BEST, len(sums)))
    return [
        ((window.characters[int(at) // count][0], window.characters[int(at) % count][1]), float(value))
        for value, at in zip(found.values, found.indices, strict=True)
        if value > -math.inf
    ]


def normalise_answer(text: str) -> str:
    """Lower case without punctuation, articles and repeated white space (SQuAD's official script)."""
    kept = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def squad_scores(answers: Sequence[str], rows: Sequence[SpanQuestion]) -> dict[str, float]:
    """F1 and exact match [%]: for each question the best over its answers; "" is right if there is none."""
    f1, exact = 100 * _question_scores(answers, rows).mean(0)
    return {"f1": float(f1), "exact_match": float(exact)}


def _question_scores(answers: Sequence[str], rows: Sequence[SpanQuestion]) -> np.ndarray:
    """(questions, 2): F1 and exact match of each."""
    scores = np.zeros((len(rows), 2))
    for number, (answer, row) in enumerate(zip(answers, rows, strict=True)):
        given = normalise_answer(answer)
        truths = [each for each in map(normalise_answer, row.answers) if each] or [""]
        scores[number] = max(_f1(given, truth) for truth in truths), given in truths
    return scores


def _f1(answer: str, truth: str) -> float:
    """F1 of the words of two normalised texts."""
    given, wanted = answer.split(), truth.split()
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else 0.0
