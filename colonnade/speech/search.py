"""Greedy and time-synchronous beam search over a transducer's labels, batched over streams.

Both keep state between calls, so a stream may arrive in segments of any length: the final result does not depend on
where the segments were cut. ``deltas`` returns labels that are final: greedy ones immediately, a beam's when all
hypotheses agree; ``finish`` returns the rest of a stream that has ended. At each frame a hypothesis emits labels until
it emits the blank, which moves it to the next frame (Graves, arXiv 1211.3711, section 2.5). Hypotheses with equal
labels are merged: their probabilities are summed. A language model's log-probabilities may be added to a beam's scores
(:mod:`colonnade.speech.letter_lm`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.speech.letter_lm import ORDER, START, Fusion
from colonnade.speech.predictor import Predictor, States

LogProbs = Callable[[Tensor, Tensor], Tensor]
"""(e_RD, p_RD) to log-probabilities (R, V): :meth:`colonnade.model.transducer_loss.Joint.logprobs`."""

MAX_OPEN_LABELS = 100
"""Maximum number of labels on which the hypotheses of a stream may disagree; then the best one decides the first."""


class Search(Protocol):
    """A search over streams that begin and end at any time."""

    def reset(self, stream: int) -> None:
        """Begin a new stream in this slot."""
        ...

    def deltas(self, frames: Sequence[Tensor]) -> list[list[int]]:
        """The labels of each stream that its new frames (t, D) make final; t may be 0."""
        ...

    def finish(self, stream: int) -> list[int]:
        """The labels after all deltas of a stream that has ended."""
        ...


class GreedySearch:
    """Emits the most probable label until it is the blank; at most ``max_labels`` labels per frame."""

    def __init__(self, predictor: Predictor, logprobs: LogProbs, streams: int, blank: int = 0, max_labels: int = 5):
        self.predictor, self.logprobs, self.blank, self.max_labels = predictor, logprobs, blank, max_labels
        first_R = torch.full((streams,), blank, device=_device(predictor, streams))
        self.output_RD, self.states = predictor.step(first_R, predictor.start(streams))
        self.frames = [0] * streams

    def reset(self, stream: int) -> None:
        """Begin a new stream in this slot."""
        label_R = torch.full((1,), self.blank, device=self.output_RD.device)
        output_RD, states = self.predictor.step(label_R, self.predictor.start(1))
        self.output_RD, self.states = _replace((self.output_RD, *self.states), [stream], (output_RD, *states))
        self.frames[stream] = 0

    @torch.inference_mode()
    def push(self, frames: Sequence[Tensor]) -> list[list[tuple[int, int]]]:
        """The new (frame, label) pairs of each stream, from its new frames (t, D); t may be 0."""
        if len(frames) != len(self.frames):
            raise DataError(f"{len(frames)} runs of frames for {len(self.frames)} streams; pass one per stream")
        found: list[list[tuple[int, int]]] = [[] for _ in frames]
        for t in range(max(map(len, frames), default=0)):
            rows = [r for r, own in enumerate(frames) if t < len(own)]
            for _ in range(self.max_labels):
                e_RD = torch.stack([frames[r][t] for r in rows])
                label_R = self.logprobs(e_RD, self.output_RD[rows]).argmax(1)
                emits = (label_R != self.blank).tolist()
                rows = [r for r, emit in zip(rows, emits, strict=True) if emit]
                if not rows:
                    break
                new_R = label_R[torch.tensor(emits, device=label_R.device)]
                output_RD, states = self.predictor.step(new_R, tuple(x[rows] for x in self.states))
                self.output_RD, self.states = _replace((self.output_RD, *self.states), rows, (output_RD, *states))
                for r, label in zip(rows, new_R.tolist(), strict=True):
                    found[r].append((self.frames[r] + t, label))
        self.frames = [n + len(own) for n, own in zip(self.frames, frames, strict=True)]
        return found

    def deltas(self, frames: Sequence[Tensor]) -> list[list[int]]:
        """All new labels of each stream: they are final."""
        return [[label for _, label in pairs] for pairs in self.push(frames)]

    def finish(self, stream: int) -> list[int]:
        """Nothing: all labels have been returned."""
        return []


@dataclass(frozen=True)
class Hypothesis:
    """Labels that are not final, the log-probability of all its labels over all alignments so far, and the
    predictor's state after them.
    """

    labels: tuple[int, ...]
    score: float
    output_D: Tensor
    states: tuple[Tensor, ...]
    context: tuple[int, ...] = (START,)
    """The last labels, final ones too, for a language model."""


class BeamSearch:
    """The ``beam`` most probable hypotheses of each stream.

    After each frame, the labels that all hypotheses begin with are removed from them. If more than MAX_OPEN_LABELS
    labels remain, hypotheses whose first label is not that of the best one are dropped. So a stream's memory is
    constant.
    """

    def __init__(
        self,
        predictor: Predictor,
        logprobs: LogProbs,
        streams: int,
        blank: int = 0,
        beam: int = 10,
        max_labels: int = 5,
        fusion: Fusion | None = None,
    ):
        if beam < 1:
            raise DataError(f"beam is {beam}; use at least 1")
        self.predictor, self.logprobs, self.blank = predictor, logprobs, blank
        self.beam, self.max_labels, self.fusion = beam, max_labels, fusion
        self.hypotheses: list[list[Hypothesis]] = [[] for _ in range(streams)]
        self.committed = [0] * streams
        """Number of labels of each stream that are final."""
        self.final: list[list[int]] = [[] for _ in range(streams)]
        """Final labels that :meth:`deltas` has not returned."""
        for stream in range(streams):
            self.reset(stream)

    @torch.inference_mode()
    def reset(self, stream: int) -> None:
        """Begin a new stream in this slot."""
        label_R = torch.full((1,), self.blank, device=_device(self.predictor, 1))
        output_RD, states = self.predictor.step(label_R, self.predictor.start(1))
        self.hypotheses[stream] = [Hypothesis((), 0.0, output_RD[0], tuple(x[0] for x in states))]
        self.committed[stream], self.final[stream] = 0, []

    @torch.inference_mode()
    def push(self, frames: Sequence[Tensor]) -> None:
        """Continue each stream by its new frames (t, D); t may be 0."""
        if len(frames) != len(self.hypotheses):
            raise DataError(f"{len(frames)} runs of frames for {len(self.hypotheses)} streams; pass one per stream")
        for t in range(max(map(len, frames), default=0)):
            self._frame({r: own[t] for r, own in enumerate(frames) if t < len(own)})

    def best(self, stream: int) -> list[Hypothesis]:
        """The stream's hypotheses by score / (labels + 1), best first: short text is not preferred."""
        before = self.committed[stream] + 1
        return sorted(self.hypotheses[stream], key=lambda h: -h.score / (before + len(h.labels)))

    def deltas(self, frames: Sequence[Tensor]) -> list[list[int]]:
        """The labels of each stream on which all its hypotheses agree since the last delta."""
        self.push(frames)
        found, self.final = self.final, [[] for _ in frames]
        return found

    def finish(self, stream: int) -> list[int]:
        """The rest of the best hypothesis."""
        return list(self.best(stream)[0].labels)

    def _commit(self, stream: int) -> None:
        """Remove final labels from the hypotheses."""
        while True:
            labels, own = self.stable(stream), self.hypotheses[stream]
            own = self.hypotheses[stream] = [replace(h, labels=h.labels[len(labels) :]) for h in own]
            self.committed[stream] += len(labels)
            self.final[stream] += labels
            if max(len(h.labels) for h in own) <= MAX_OPEN_LABELS:
                return
            first = self.best(stream)[0].labels[:1]
            self.hypotheses[stream] = [h for h in own if h.labels[:1] == first]

    def stable(self, stream: int) -> tuple[int, ...]:
        """The labels that all hypotheses of a stream begin with: later frames cannot change them."""
        first, *others = (h.labels for h in self.hypotheses[stream])
        length = 0
        while length < len(first) and all(x[: length + 1] == first[: length + 1] for x in others):
            length += 1
        return first[:length]

    def _frame(self, frame_of: dict[int, Tensor]) -> None:
        """Processes one frame of these streams: a blank ends the frame, a label continues it."""
        live = {r: self.hypotheses[r] for r in frame_of}
        ended: dict[int, dict[tuple[int, ...], Hypothesis]] = {r: {} for r in frame_of}
        for emitted in range(self.max_labels + 1):
            rows = [(r, h) for r, own in live.items() for h in own]
            if not rows:
                break
            e_RD, p_RD = torch.stack([frame_of[r] for r, _ in rows]), torch.stack([h.output_D for _, h in rows])
            logprobs_RV = self.logprobs(e_RD, p_RD).double()
            for (r, h), blank in zip(rows, logprobs_RV[:, self.blank].tolist(), strict=True):
                _add(ended[r], h, h.score + blank)
            if emitted == self.max_labels:
                break
            live = self._extend(rows, logprobs_RV)
        for r, own in ended.items():
            self.hypotheses[r] = sorted(own.values(), key=lambda h: -h.score)[: self.beam]
            self._commit(r)

    def _extend(self, rows: list[tuple[int, Hypothesis]], logprobs_RV: Tensor) -> dict[int, list[Hypothesis]]:
        """The best hypotheses of each stream with one more label, from a single predictor step."""
        logprobs_RV = logprobs_RV.clone()
        if self.fusion is not None:
            logprobs_RV += self.fusion.logprobs([h.context for _, h in rows]).to(logprobs_RV.device)
        logprobs_RV[:, self.blank] = -torch.inf
        values, labels = logprobs_RV.topk(min(self.beam, logprobs_RV.shape[1]), 1)
        choices: dict[int, list[tuple[float, int, int]]] = {}
        for i, ((r, h), own_values, own_labels) in enumerate(zip(rows, values.tolist(), labels.tolist(), strict=True)):
            new = [(h.score + v, i, label) for v, label in zip(own_values, own_labels, strict=True) if v > -math.inf]
            choices.setdefault(r, []).extend(new)
        chosen = [(r, x) for r, own in choices.items() for x in sorted(own, key=lambda x: -x[0])[: self.beam]]
        live: dict[int, list[Hypothesis]] = {r: [] for r in choices}
        if not chosen:
            return live
        label_R = torch.tensor([label for _, (_, _, label) in chosen], device=logprobs_RV.device)
        parents = [rows[i][1] for _, (_, i, _) in chosen]
        states = tuple(torch.stack(x) for x in zip(*(h.states for h in parents), strict=True))
        output_RD, states = self.predictor.step(label_R, states)
        for j, ((r, (score, _, label)), parent) in enumerate(zip(chosen, parents, strict=True)):
            own_states, context = tuple(x[j] for x in states), (*parent.context, label)[-(ORDER - 1) :]
            live[r].append(Hypothesis((*parent.labels, label), score, output_RD[j], own_states, context))
        return live


def _add(ended: dict[tuple[int, ...], Hypothesis], new: Hypothesis, score: float) -> None:
    """Sum the probabilities of hypotheses with equal labels."""
    old = ended.get(new.labels)
    if old is not None and old.score > -math.inf:
        high, low = max(old.score, score), min(old.score, score)
        score = high + math.log1p(math.exp(low - high))
    ended[new.labels] = replace(new, score=score)


def _device(predictor: Predictor, streams: int) -> torch.device:
    return predictor.start(streams)[0].device


def _replace(old: States, rows: list[int], new: States) -> tuple[Tensor, States]:
    """``old`` with these rows replaced, the output apart from the states."""
    index = torch.tensor(rows, device=old[0].device)
    output, *states = (x.index_copy(0, index, y.to(x.dtype)) for x, y in zip(old, new, strict=True))
    return output, tuple(states)
