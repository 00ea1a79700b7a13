"""AdamW whose moments live in host memory and visit the device a bucket at a time.

    bucket i−1 back to the host     |
    bucket i    is updated          |  at the same moment, on three streams, in three staging buffers
    bucket i+1  comes from the host |

m and v are two thirds of what float32 training keeps a weight in (4 of 12 bytes each, or of 14 and 16 with copies in
a lower type), and are needed for one moment of a step only (ZeRO-Offload, arXiv 2101.06840, moves the update to the
CPU as well; here it stays on the device, because a link of 50 GB/s carries the moments of a billion weights in a sixth
of a second, both ways at once, and the update is then the same kernel and the same bits). The copies take the whole
link, and the step waits for them: see the table in docs/howto/precision.md.

Adam's step count, four bytes a weight, stays on the device, where the fused kernel wants it. On a CPU there is nowhere
to move to: the same buckets are updated where they are, so a test there covers all but the copies.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.config import TrainConfig
from colonnade.train.optimizer import MOMENTS, AdamW, torch_fused_adamw

BUCKET_BYTES = 1 << 28
"""Moments that travel together: large enough for the link's full speed; three times this is staging memory. A weight
with larger moments is a bucket of its own."""


@dataclass(frozen=True)
class Bucket:
    """Weights whose moments are neighbours in one piece of pinned host memory."""

    weights: list[Tensor]
    home: Tensor
    """First all of m, then all of v."""

    def moments(self, flat: Tensor) -> list[list[Tensor]]:
        """The (m, v) of each weight as views of ``flat``, laid out as :attr:`home`."""
        sizes = [w.numel() for w in self.weights]
        halves = flat[: self.home.numel()].view(len(MOMENTS), self.home.numel() // len(MOMENTS))
        return [
            [part.view(w.shape) for part, w in zip(half.split(sizes), self.weights, strict=True)] for half in halves
        ]


class OffloadedAdamW(AdamW):
    """As :class:`AdamW`, bit for bit, with ``state`` in host memory."""

    def __init__(self, weights: Mapping[str, Tensor], train: TrainConfig, bucket_bytes: int = BUCKET_BYTES):
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        super().__init__(weights, train)
        self._group_of = {w: group for group in self._adamw.param_groups for w in group["params"]}
        largest = max(bucket.home.numel() for bucket in self._buckets)
        some = self._buckets[0].weights[0]
        self._moves = some.is_cuda
        if self._moves:
            self._stage = [torch.empty(largest, dtype=some.dtype, device=some.device) for _ in range(3)]
            self._in, self._out = torch.cuda.Stream(some.device), torch.cuda.Stream(some.device)
            self._in.wait_stream(torch.cuda.current_stream(some.device))  # whose memory the buffers were before
            self._left = [torch.cuda.Event() for _ in self._stage]

    @property
    def state(self) -> dict[str, Tensor]:
        """``{moment}/{parameter}`` to this rank's shard of it, in host memory (waits until all of it is there)."""
        if self._moves:
            self._out.synchronize()
        return super().state

    def _make_moments(self) -> dict[Tensor, dict[str, Tensor]]:
        made: dict[Tensor, dict[str, Tensor]] = {}
        for weights in self._grouped():
            some, numbers = weights[0], len(MOMENTS) * sum(w.numel() for w in weights)
            bucket = Bucket(weights, torch.zeros(numbers, dtype=some.dtype, pin_memory=some.is_cuda))
            self._buckets.append(bucket)
            made |= {
                w: dict(zip(MOMENTS, moments, strict=True))
                for w, *moments in zip(weights, *bucket.moments(bucket.home), strict=True)
            }
        return made

    def _grouped(self) -> list[list[Tensor]]:
        """The weights in order, cut before the bucket that a weight would overfill."""
        groups: list[list[Tensor]] = []
        filled = 0
        for w in self.weights.values():
            size = len(MOMENTS) * w.numel() * w.element_size()
            if not groups or filled + size > self._bucket_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(w)
            filled += size
        return groups

    def _update(self, scale: Tensor | None, skip: Tensor | None) -> None:
        if not self._moves:
            for bucket in self._buckets:
                self._move(bucket, bucket.home, scale, skip)
            return
        main = torch.cuda.current_stream(self._in.device)
        self._in.wait_stream(self._out)  # what sets out now must have come home after the last step
        self._fetch(0)
        for i, bucket in enumerate(self._buckets):
            staged = self._stage[i % 3]
            main.wait_stream(self._in)
            if i + 1 < len(self._buckets):
                self._fetch(i + 1)
            self._move(bucket, staged, scale, skip)
            self._out.wait_stream(main)
            with torch.cuda.stream(self._out):
                bucket.home.copy_(staged[: bucket.home.numel()], non_blocking=True)
            self._left[i % 3].record(self._out)

    def _fetch(self, i: int) -> None:
        home = self._buckets[i].home
        self._in.wait_event(self._left[i % 3])  # whoever was in this staging buffer has left it
        with torch.cuda.stream(self._in):
            self._stage[i % 3][: home.numel()].copy_(home, non_blocking=True)

    def _move(self, bucket: Bucket, flat: Tensor, scale: Tensor | None, skip: Tensor | None) -> None:
        """AdamW on the weights of a bucket, whose moments are in ``flat``."""
        first, second = bucket.moments(flat)
        for group in self._adamw.param_groups:
            chosen = [i for i, w in enumerate(bucket.weights) if self._group_of[w] is group and w.grad is not None]
            weights = [bucket.weights[i] for i in chosen]
            counts = [self._of(w)["step"] for w in weights]
            torch_fused_adamw(
                group, weights, [first[i] for i in chosen], [second[i] for i in chosen], counts, scale, skip
            )
