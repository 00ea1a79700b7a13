"""CTC: Viterbi alignment of known labels, and prefix beam search (Graves et al., 2006).

Connectionist temporal classification gives each frame a label or the blank; repeats are merged, then blanks dropped.
A known text has 2L + 1 states, ∅ y₁ ∅ y₂ … ∅. From state s a path stays, moves to s + 1, or skips a blank to s + 2
where the labels on both sides differ. :func:`align` finds the best path, all states of a frame at once.
:func:`prefix_beam` sums over the paths of a prefix, kept apart by whether they end in a blank (Hannun et al., arXiv
1408.2873, algorithm 1).
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.errors import DataError


class Span(NamedTuple):
    """Frames ``start`` to ``stop`` (exclusive) of one label, and the mean probability of the label in them."""

    start: int
    stop: int
    score: float


def align(logprobs_TV: Tensor, labels: Sequence[int], blank: int = 0) -> list[Span]:
    """The most probable frames of each label, one path for all; raises DataError if there is no path."""
    T, V = logprobs_TV.shape
    repeats = sum(a == b for a, b in itertools.pairwise(labels))
    if any(not 0 <= label < V or label == blank for label in labels):
        raise DataError(f"labels must be in 0..{V - 1} and not the blank, {blank}")
    if len(labels) + repeats > T:
        raise DataError(
            f"{T} frames cannot hold {len(labels)} labels and {repeats} repeats, which need a blank in between; "
            "use shorter text or longer audio"
        )
    if not labels:
        return []
    own_L = torch.tensor(list(labels), device=logprobs_TV.device)
    state_S = own_L.new_full((2 * len(labels) + 1,), blank)
    state_S[1::2] = own_L
    skips_S = torch.zeros_like(state_S, dtype=torch.bool)
    skips_S[3::2] = own_L[1:] != own_L[:-1]
    score_S = logprobs_TV.new_full((len(state_S),), -torch.inf)
    score_S[:2] = logprobs_TV[0, state_S[:2]]
    moves = torch.zeros(T, len(state_S), dtype=torch.uint8, device=logprobs_TV.device)
    never = score_S.new_full((2,), -torch.inf)
    for t in range(1, T):
        one_S = torch.cat((never[:1], score_S[:-1]))
        two_S = torch.where(skips_S, torch.cat((never, score_S[:-2])), -torch.inf)
        best_S, move_S = torch.stack((score_S, one_S, two_S)).max(0)
        moves[t], score_S = move_S, best_S + logprobs_TV[t, state_S]
    last = len(state_S) - 1
    s = last if score_S[last] >= score_S[last - 1] else last - 1
    if not math.isfinite(float(score_S[s])):
        raise DataError("every path to this text has probability 0")
    path, steps = [s], moves.cpu().numpy()
    for t in range(T - 1, 0, -1):
        s -= int(steps[t, s])
        path.append(s)
    path.reverse()
    frames: list[list[int]] = [[] for _ in labels]
    for t, s in enumerate(path):
        if s % 2:
            frames[s // 2].append(t)
    probabilities = logprobs_TV.exp().cpu()
    return [
        Span(own[0], own[-1] + 1, float(probabilities[own, label].mean()))
        for own, label in zip(frames, labels, strict=True)
    ]


def greedy(logprobs_TV: Tensor, blank: int = 0) -> list[int]:
    """The labels of the most probable path."""
    path = torch.unique_consecutive(logprobs_TV.argmax(1)).tolist() if len(logprobs_TV) else []
    return [label for label in path if label != blank]


def prefix_beam(
    logprobs_TV: Tensor, blank: int = 0, beam: int = 10, skip_blank: float = 0.95
) -> list[tuple[tuple[int, ...], float]]:
    """The ``beam`` most probable label sequences with their log-probabilities, best first.

    A frame whose blank has a probability over ``skip_blank`` counts as a certain blank, which saves most frames; 1
    skips none. Each prefix is extended by the ``beam`` most probable labels of a frame.
    """
    if beam < 1:
        raise DataError(f"beam is {beam}; use at least 1")
    # prefix -> (log-probability of its paths that end in a blank, in its last label)
    prefixes: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    for row_V in logprobs_TV.double().cpu():
        stay = float(row_V[blank])
        if stay > math.log(skip_blank) and skip_blank < 1:
            prefixes = {prefix: (_add(*both), -math.inf) for prefix, both in prefixes.items()}
            continue
        values, labels = row_V.topk(min(beam + 1, len(row_V)))
        likely = [(label, p) for label, p in zip(labels.tolist(), values.tolist(), strict=True) if label != blank]
        grown: dict[tuple[int, ...], tuple[float, float]] = {}
        for prefix, (ends_blank, ends_label) in prefixes.items():
            total = _add(ends_blank, ends_label)
            _merge(grown, prefix, total + stay, -math.inf)
            if prefix:
                _merge(grown, prefix, -math.inf, ends_label + float(row_V[prefix[-1]]))
            for label, p in likely:
                before = ends_blank if prefix and label == prefix[-1] else total
                _merge(grown, (*prefix, label), -math.inf, before + p)
        possible = [item for item in grown.items() if _add(*item[1]) > -math.inf]
        prefixes = dict(sorted(possible, key=lambda item: -_add(*item[1]))[:beam])
    result = [(prefix, _add(*both)) for prefix, both in prefixes.items()]
    return sorted(result, key=lambda item: -item[1])


def _merge(grown: dict[tuple[int, ...], tuple[float, float]], prefix: tuple[int, ...], blank: float, label: float):
    old = grown.get(prefix, (-math.inf, -math.inf))
    grown[prefix] = (_add(old[0], blank), _add(old[1], label))


def _add(a: float, b: float) -> float:
    """log(exp a + exp b)."""
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
