"""The (frame, labels so far) cells of a batch of transducer lattices, in one padded grid (B, U, T).

U is the largest number of labels plus one, T the largest number of frames. A cell's index in the flat grid is
(b·U + u)·T + t; the recursions scan along t, so its values are adjacent in memory.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.kernels.device import upload


class Cells(NamedTuple):
    """Lengths of the utterances, on the host and on the device, and their labels."""

    frames: list[int]
    labels: list[int]
    """Labels of each utterance; its prefixes are one more."""
    table: Tensor
    """The five tensors below one after another, int64."""
    frames_B: Tensor
    labels_B: Tensor
    frame_start_B: Tensor
    """Index of an utterance's first frame among all frames."""
    prefix_start_B: Tensor
    next_BU: Tensor
    """The next label after u labels, −1 after the last one."""

    @staticmethod
    def of(
        frames: Sequence[int], labels: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str
    ) -> "Cells":
        """The cells of utterances; raises DataError for what has no alignment."""
        if len(frames) != len(labels):
            raise DataError(f"{len(frames)} lengths but {len(labels)} label sequences; pass one per utterance")
        for b, (n, own) in enumerate(zip(frames, labels, strict=True)):
            if n < 1:
                raise DataError(f"utterance {b} has {n} frames; a transducer needs at least 1")
            if own and not 0 <= min(own) <= max(own) < vocab_size:
                raise DataError(f"utterance {b} has a label outside 0..{vocab_size - 1}")
        B, counts = len(frames), [len(own) for own in labels]
        U = max(counts, default=0) + 1
        starts = list(accumulate(frames, initial=0))[:B]
        prefix_starts = list(accumulate((n + 1 for n in counts), initial=0))[:B]
        padded = chain.from_iterable((*own, *[-1] * (U - len(own))) for own in labels)
        values = [*frames, *counts, *starts, *prefix_starts, *padded]
        table = upload(values, torch.int64, device)
        frames_B, labels_B, frame_start_B, prefix_start_B = table[: 4 * B].view(4, B)
        next_BU = table[4 * B :].view(B, U)
        return Cells(list(frames), counts, table, frames_B, labels_B, frame_start_B, prefix_start_B, next_BU)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, U, T) of the grid."""
        return len(self.frames), max(self.labels, default=0) + 1, max(self.frames, default=0)

    @property
    def count(self) -> int:
        """M, the cells inside of the utterances."""
        return sum(n * (u + 1) for n, u in zip(self.frames, self.labels, strict=True))

    def cell_indices(self) -> Tensor:
        """(M,) indices into the flat grid of the cells inside, ascending; does not synchronise with the device."""
        (B, U, T), M, device = self.shape, self.count, self.frames_B.device
        if M == B * U * T:
            return torch.arange(M, device=device)
        prefixes_B, R = self.labels_B + 1, sum(self.labels) + B
        b_R = torch.arange(B, device=device).repeat_interleave(prefixes_B, output_size=R)
        row_R = b_R * U + torch.arange(R, device=device) - self.prefix_start_B[b_R]
        frames_R = self.frames_B[b_R]
        first_R = row_R * T - (frames_R.cumsum(0) - frames_R)
        return first_R.repeat_interleave(frames_R, output_size=M) + torch.arange(M, device=device)
