"""A batch: samples laid end to end as one flat run of tokens, with what tells them apart.

Sample i is tokens i·S .. (i+1)·S - 1 of a split's stream, and the target of each token is the one after it. Where
documents are kept apart, attention and positions restart at each document's start and at each sample's; a document's
last word predicts its end token, and the end token predicts nothing: what follows it is another document, so its
target is IGNORE. Where they are not, a sample is one sequence and every target counts (GPT-2's way).

Shapes are for torch.compile, which compiles anew for each new one. T is the samples' number times S; ``longest`` of
ragged sequences is S, their bound, whatever the documents; ``cu_seqlens`` is filled up with T (sequences of length 0)
to 2^k + 1 entries, so that a run sees a handful of lengths, most often one or two. It is not filled up to the T + 1
which would always do, because a kernel's grid grows with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from colonnade.data.corpus import Split
from colonnade.model.loss import IGNORE

_ROW_INDICES = ("cu_seqlens", "predicted_R", "first_R")


@dataclass(frozen=True)
class Batch:
    """What one forward and backward pass is given."""

    tokens_T: Tensor
    """int64 token ids."""
    positions_T: Tensor
    """int64 position of each token within its sequence."""
    targets_T: Tensor
    """int64: the token that follows each, or IGNORE."""
    cu_seqlens: Tensor
    """int32: where each sequence starts, then T, repeated to a length that rarely changes."""
    longest: int
    """No sequence has more tokens; where all are equal, each has exactly so many."""
    equal: bool
    """All sequences have ``longest`` tokens, and ``cu_seqlens`` has no entry beyond theirs."""
    first: int = 0
    """The number of its first token in the step's global batch, over data ranks and micro-batches; then they follow."""
    segments_T: Tensor | None = None
    """int64 segment of each token, in BERT's pairs; this and what follows is None elsewhere."""
    predicted_R: Tensor | None = None
    """int64: the rows of the stream that have a target, and some that have none, so that their count rarely changes."""
    first_R: Tensor | None = None
    """int64: the row at which each sample begins."""
    stride: int | None = None
    """How far apart the numbers of two samples' first tokens are in the global batch; None: T / samples."""
    orders_R: Tensor | None = None
    """int64: whether each pair is in order (0) or swapped (1), or IGNORE."""
    tasks_T: Tensor | None = None
    """int64: the task that each token's document is of; None where documents have none."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same on ``device``; to a GPU the copy runs beside the computation, from pinned memory."""
        gpu = torch.device(device).type == "cuda"
        moved = {
            name: (tensor.pin_memory() if gpu and tensor.device.type == "cpu" else tensor).to(device, non_blocking=gpu)
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor)
        }
        return replace(self, **moved)

    def keep_targets(self, samples: int, sequence: int) -> "Batch":
        """The same with only the first ``samples``' targets kept: the rest is computed, and counts for nothing.

        ``sequence`` is the tokens of a sample, where all have as many (:attr:`first_R` is None).
        """
        T, tokens, orders_R = len(self.targets_T), samples * sequence, self.orders_R
        if self.first_R is not None:
            tokens = int(self.first_R[samples]) if samples < len(self.first_R) else T
        if orders_R is not None:
            orders_R = orders_R.where(torch.arange(len(orders_R), device=orders_R.device) < samples, IGNORE)
        kept_T = torch.arange(T, device=self.targets_T.device) < tokens
        return replace(self, targets_T=self.targets_T.where(kept_T, IGNORE), orders_R=orders_R)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Some batches as one; their tokens follow one another in the step's global batch."""
    first, starts = batches[0], [0, *accumulate(len(batch.tokens_T) for batch in batches)]
    joined: dict[str, Tensor] = {}
    for name in (name for name, value in vars(first).items() if isinstance(value, Tensor)):
        parts = [getattr(batch, name) for batch in batches]
        if name in _ROW_INDICES:  # they point into the stream
            parts = [part + start for part, start in zip(parts, starts, strict=False)]
        if name == "cu_seqlens":
            parts = [first.cu_seqlens[:1], *(part[1:] for part in parts)]
        joined[name] = torch.cat(parts)
    longest = max(batch.longest for batch in batches)
    equal = all(batch.equal and batch.longest == longest for batch in batches)
    return replace(first, **joined, longest=longest, equal=equal)


def count_samples(split: Split, sequence: int) -> int:
    """How many whole samples of ``sequence`` tokens, each with its last target, the split holds."""
    return max(split.tokens - 1, 0) // sequence


def pack(split: Split, samples: Sequence[int] | np.ndarray, sequence: int, separate_documents: bool) -> Batch:
    """The batch of these sample numbers, in this order; T = len(samples) · sequence."""
    rows = [_read_sample(split, int(i) * sequence, sequence, separate_documents) for i in samples]
    tokens_T, targets_T, lengths = (np.concatenate(part) for part in zip(*rows, strict=True))

    starts = np.concatenate([[0], np.cumsum(lengths)])
    T = len(tokens_T)
    positions_T = np.arange(T) - np.repeat(starts[:-1], lengths)
    equal = len(lengths) == len(samples)
    if not equal:
        starts = np.pad(starts, (0, power_of_two(len(lengths)) - len(lengths)), constant_values=T)
    return Batch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(positions_T),
        targets_T=torch.from_numpy(targets_T),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        longest=sequence,
        equal=equal,
        tasks_T=_tasks(split, samples, sequence) if split.has_tasks else None,
    )


def _tasks(split: Split, samples: Sequence[int] | np.ndarray, sequence: int) -> Tensor:
    return torch.from_numpy(np.concatenate([split.tasks(int(i) * sequence, (int(i) + 1) * sequence) for i in samples]))


def _read_sample(split: Split, start: int, sequence: int, separate: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, targets, lengths of the sequences) of the sample that starts at token ``start`` of the stream."""
    stop = start + sequence
    run = split.read(start, stop + 1)
    tokens, targets = run[:-1], run[1:].copy()
    ends = split.document_ends(start, stop) - start if separate else np.empty(0, np.int64)
    targets[ends - 1] = IGNORE
    return tokens, targets, np.diff(ends[ends < sequence], prepend=0, append=sequence)


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
