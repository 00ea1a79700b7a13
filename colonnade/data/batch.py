"""A batch: several samples packed into one flat run of T tokens, with their positions, targets and boundaries.

Sample i is tokens i·S .. (i+1)·S - 1 of a split's stream, and the target of each token is the next one. With
``separate_documents`` attention and positions restart at the start of each document and sample; the last word of a
document predicts its end token, and the target of the end token is IGNORE, because the next token belongs to another
document. Without it, a sample is one sequence and every target counts (as in GPT-2).

Shapes vary little, because torch.compile recompiles for each new one. T is the number of samples times S; ``longest``
is S for any sequences of unequal lengths; ``cu_seqlens`` is padded with T (sequences of length 0) to 2^k + 1 entries,
so a run has only one or two different lengths, seldom more. Padding to the maximum of T + 1 entries would enlarge the
grid of the attention kernels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from colonnade.data.corpus import Split
from colonnade.model.loss import IGNORE

_ROW_INDICES = ("cu_seqlens", "predicted_R", "first_R")


@dataclass(frozen=True)
class Batch:
    """The input of one forward and backward pass."""

    tokens_T: Tensor
    """int64 token ids."""
    positions_T: Tensor
    """int64 position of each token within its sequence."""
    targets_T: Tensor
    """int64: the next token of each token, or IGNORE."""
    cu_seqlens: Tensor
    """int32: start of each sequence, then T, repeated as padding so that the length rarely changes."""
    longest: int
    """Upper bound of the sequences' lengths; the length of each if ``equal``."""
    equal: bool
    """Whether all sequences have ``longest`` tokens and ``cu_seqlens`` has no padding."""
    first: int = 0
    """Index of the first token in the step's global batch, over all data ranks and micro-batches."""
    segments_T: Tensor | None = None
    """int64 segment of each token (BERT's sentence pairs); this and the following fields are None otherwise."""
    predicted_R: Tensor | None = None
    """int64: the rows that have a target, padded with rows that have none so that the length rarely changes."""
    first_R: Tensor | None = None
    """int64: first row of each sample."""
    stride: int | None = None
    """Distance of consecutive samples' first tokens in the global batch; None: T / samples."""
    orders_R: Tensor | None = None
    """int64: 0 for a sentence pair in order, 1 for a swapped one, or IGNORE."""
    sequence_T: Tensor | None = None
    """int64: for preferences, the number of the sequence of each token; sequences 2i and 2i + 1 are pair i."""
    reference_S: Tensor | None = None
    """float64: for preferences, the reference model's log-probability of each sequence."""
    preference: tuple[float, Literal["dpo", "ipo"], float] | None = None
    """For preferences: beta, the kind of loss, and the share of flipped pairs; None: only log-probabilities."""
    policy_4T: Tensor | None = None
    """float64: for reward tuning, of each token's target the weight, the advantage, and the log-probability when it was
    sampled and under the reference model."""
    units: Tensor | None = None
    """int64, 0-dim: what the loss is divided by; None: the number of targets, or of pairs."""
    text_ids_S: Tensor | None = None
    """int64: for embeddings, a number for each text, equal for equal tokens."""
    contrast: Any = None
    """For embeddings: the :class:`colonnade.model.contrastive.Contrast`."""
    embedding_gradient_SD: Tensor | None = None
    """For embeddings: the gradient of the global loss by each; None: the loss is that of the batch over data ranks."""
    embedding_loss: Tensor | None = None
    """For embeddings: the loss of the batch's queries, with the gradient."""
    observed: list[Tensor] | None = None
    """Output, for reward tuning: how far the sampled log-probabilities are from the trainer's."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """For reward tuning: the fields of :class:`colonnade.model.policy_loss.PolicySettings`."""
    sampled_T: Tensor | None = None
    """bool: tokens that the model in training has sampled, in on-policy distillation."""
    step_classes: Any = None
    """For distillation of a classifier: the :class:`colonnade.model.class_distill_loss.StepClasses`."""
    tasks_T: Tensor | None = None
    """int64: the task of each token's document; None if documents have no tasks."""
    source_tokens_S: Tensor | None = None
    """int64: the sources of an encoder–decoder, one for each sequence; this and the following fields belong to them."""
    source_positions_S: Tensor | None = None
    """int64: position of each of their tokens."""
    cu_sources: Tensor | None = None
    """int32: start of each source, then S."""
    longest_source: int = 0
    """The longest source."""
    equal_sources: bool = True
    """Whether all sources have this length."""

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on ``device``; the copy to a GPU is asynchronous, from pinned memory."""
        gpu = torch.device(device).type == "cuda"
        moved = {
            name: (tensor.pin_memory() if gpu and tensor.device.type == "cpu" else tensor).to(device, non_blocking=gpu)
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor)
        }
        return replace(self, **moved)

    @property
    def pairs(self) -> Tensor:
        """For preferences: whether each pair has targets."""
        return (self.targets_per_sequence.view(-1, 2) > 0).all(1)

    @property
    def targets_per_sequence(self) -> Tensor:
        """For preferences: the number of targets of each sequence."""
        assert self.sequence_T is not None
        assert self.reference_S is not None
        valid_T = (self.targets_T != IGNORE).long()
        return torch.zeros_like(self.reference_S, dtype=torch.int64).index_add(0, self.sequence_T, valid_T)

    def keep_targets(self, samples: int, sequence: int) -> "Batch":
        """A copy in which only the targets of the first ``samples`` samples count; the others are IGNORE.

        ``sequence`` is the number of tokens per sample, used if all are equal (:attr:`first_R` is None).
        """
        T, tokens, orders_R = len(self.targets_T), samples * sequence, self.orders_R
        if self.first_R is not None:
            tokens = int(self.first_R[samples]) if samples < len(self.first_R) else T
        if orders_R is not None:
            orders_R = orders_R.where(torch.arange(len(orders_R), device=orders_R.device) < samples, IGNORE)
        in_samples_T = torch.arange(T, device=self.targets_T.device) < tokens
        return replace(self, targets_T=self.targets_T.where(in_samples_T, IGNORE), orders_R=orders_R)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Several batches as one; their tokens must be consecutive in the step's global batch."""
    first, starts = batches[0], [0, *accumulate(len(batch.tokens_T) for batch in batches)]
    joined: dict[str, Any] = {}
    for name in (name for name, value in vars(first).items() if isinstance(value, Tensor)):
        parts = [getattr(batch, name) for batch in batches]
        if name in _ROW_INDICES:  # indices of rows
            parts = [part + start for part, start in zip(parts, starts, strict=False)]
        if name == "cu_sources":
            ends = [0, *accumulate(int(part[-1]) for part in parts)]
            parts = [part + end for part, end in zip(parts, ends, strict=False)]
        if name in ("cu_seqlens", "cu_sources"):
            parts = [parts[0][:1], *(part[1:] for part in parts)]
        joined[name] = torch.cat(parts)
    longest = max(batch.longest for batch in batches)
    equal = all(batch.equal and batch.longest == longest for batch in batches)
    longest_source = max(batch.longest_source for batch in batches)
    return replace(
        first, **joined, longest=longest, equal=equal, longest_source=longest_source,
        equal_sources=all(batch.equal_sources and batch.longest_source == longest_source for batch in batches),
    )  # fmt: skip


def count_samples(split: Split, sequence: int) -> int:
    """Number of whole samples of ``sequence`` tokens, each with its last target, in the split."""
    return max(split.tokens - 1, 0) // sequence


def pack(split: Split, samples: Sequence[int] | np.ndarray, sequence: int, separate_documents: bool) -> Batch:
    """The batch of these samples, in this order; T = len(samples) · sequence."""
    rows = [_read_sample(split, int(i) * sequence, sequence, separate_documents) for i in samples]
    tokens_T, targets_T, lengths = (np.concatenate(part) for part in zip(*rows, strict=True))

    positions_T = np.arange(len(tokens_T)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    equal = len(lengths) == len(samples)
    return Batch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(positions_T),
        targets_T=torch.from_numpy(targets_T),
        cu_seqlens=cumulative_lengths(lengths, padded=not equal),
        longest=sequence,
        equal=equal,
        tasks_T=_tasks(split, samples, sequence) if split.has_tasks else None,
    )


def _tasks(split: Split, samples: Sequence[int] | np.ndarray, sequence: int) -> Tensor:
    return torch.from_numpy(np.concatenate([split.tasks(int(i) * sequence, (int(i) + 1) * sequence) for i in samples]))


def _read_sample(split: Split, start: int, sequence: int, separate: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, targets, sequence lengths) of the sample that starts at token ``start`` of the stream."""
    stop = start + sequence
    run = split.read(start, stop + 1)
    tokens, targets = run[:-1], run[1:].copy()
    ends = split.document_ends(start, stop) - start if separate else np.empty(0, np.int64)
    targets[ends - 1] = IGNORE
    return tokens, targets, np.diff(ends[ends < sequence], prepend=0, append=sequence)


def cumulative_lengths(lengths: Sequence[int] | np.ndarray, *, padded: bool) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths; ``padded``: with empty sequences to 2^k + 1 entries."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    if padded:
        starts = np.pad(starts, (0, power_of_two(len(lengths)) - len(lengths)), mode="edge")
    return torch.from_numpy(starts.astype(np.int32))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
