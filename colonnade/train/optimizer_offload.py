"""AdamW with its moments in host memory, copied to the device and back one bucket at a time.

    bucket i−1 is copied to the host      |
    bucket i   is updated                 |  concurrently, on three streams, in three staging buffers
    bucket i+1 is copied to the device    |

m and v are two thirds of the memory per weight in float32 training (8 of 12 bytes; of 14 and 16 with copies in a lower
type), and each step needs them only once. (ZeRO-Offload, arXiv 2101.06840, also moves the update to the CPU. Here it
stays on the device: a link of 50 GB/s carries the moments of a billion weights in a sixth of a second, both ways at
once, and the update is the same kernel with bitwise equal results.) The copies saturate the link, and the step waits
for them: see the table in docs/howto/precision.md.

Adam's step count, four bytes a weight, stays on the device, where the fused kernel needs it. On a CPU the same buckets
are updated in place, so a test there covers everything but the copies.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.config import TrainConfig
from colonnade.train.optimizer import MOMENTS, AdamW, torch_fused_adamw

BUCKET_BYTES = 1 << 28
"""Moments copied together: large enough for the link's full speed; staging memory is three times this. A weight with
larger moments is a bucket of its own."""


@dataclass(frozen=True)
class Bucket:
    """Weights whose moments are contiguous in pinned host memory."""

    weights: list[Tensor]
    host: Tensor
    """First all of m, then all of v."""

    def moments(self, flat: Tensor) -> list[list[Tensor]]:
        """[m, v], each a list of views of ``flat``, one per weight; ``flat`` is laid out as :attr:`host`."""
        sizes = [w.numel() for w in self.weights]
        halves = flat[: self.host.numel()].view(len(MOMENTS), self.host.numel() // len(MOMENTS))
        return [
            [part.view(w.shape) for part, w in zip(half.split(sizes), self.weights, strict=True)] for half in halves
        ]


class OffloadedAdamW(AdamW):
    """:class:`AdamW` with ``state`` in host memory; bitwise equal."""

    def __init__(self, weights: Mapping[str, Tensor], train: TrainConfig, bucket_bytes: int = BUCKET_BYTES):
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        super().__init__(weights, train)
        self._group_of = {w: group for group in self._adamw.param_groups for w in group["params"]}
        largest = max(bucket.host.numel() for bucket in self._buckets)
        sample = self._buckets[0].weights[0]
        self._on_gpu = sample.is_cuda
        if self._on_gpu:
            self._staging = [torch.empty(largest, dtype=sample.dtype, device=sample.device) for _ in range(3)]
            self._h2d, self._d2h = torch.cuda.Stream(sample.device), torch.cuda.Stream(sample.device)
            # The caching allocator may have taken the buffers from memory that the current stream still uses.
            self._h2d.wait_stream(torch.cuda.current_stream(sample.device))
            self._copied_out = [torch.cuda.Event() for _ in self._staging]

    @property
    def state(self) -> dict[str, Tensor]:
        """``{moment}/{parameter}`` -> this rank's shard in host memory (waits for the copies)."""
        if self._on_gpu:
            self._d2h.synchronize()
        return super().state

    def _make_moments(self) -> dict[Tensor, dict[str, Tensor]]:
        """Zeros for each weight, in buckets of host memory."""
        all_moments: dict[Tensor, dict[str, Tensor]] = {}
        for weights in self._group_into_buckets():
            sample, elements = weights[0], len(MOMENTS) * sum(w.numel() for w in weights)
            bucket = Bucket(weights, torch.zeros(elements, dtype=sample.dtype, pin_memory=sample.is_cuda))
            self._buckets.append(bucket)
            all_moments |= {
                w: dict(zip(MOMENTS, moments, strict=True))
                for w, *moments in zip(weights, *bucket.moments(bucket.host), strict=True)
            }
        return all_moments

    def _group_into_buckets(self) -> list[list[Tensor]]:
        """The weights in order, a new bucket whenever the next one would exceed its size."""
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
        if not self._on_gpu:
            for bucket in self._buckets:
                self._update_bucket(bucket, bucket.host, scale, skip)
            return
        compute = torch.cuda.current_stream(self._h2d.device)
        self._h2d.wait_stream(self._d2h)  # the last step's moments must be in host memory
        self._prefetch(0)
        for i, bucket in enumerate(self._buckets):
            staged = self._staging[i % 3]
            compute.wait_stream(self._h2d)
            if i + 1 < len(self._buckets):
                self._prefetch(i + 1)
            self._update_bucket(bucket, staged, scale, skip)
            self._d2h.wait_stream(compute)
            with torch.cuda.stream(self._d2h):
                bucket.host.copy_(staged[: bucket.host.numel()], non_blocking=True)
            self._copied_out[i % 3].record(self._d2h)

    def _prefetch(self, i: int) -> None:
        """Copy bucket ``i`` to its staging buffer, once that buffer's previous bucket is back on the host."""
        host = self._buckets[i].host
        self._h2d.wait_event(self._copied_out[i % 3])
        with torch.cuda.stream(self._h2d):
            self._staging[i % 3][: host.numel()].copy_(host, non_blocking=True)

    def _update_bucket(self, bucket: Bucket, flat: Tensor, scale: Tensor | None, skip: Tensor | None) -> None:
        """AdamW on the weights of a bucket, whose moments are in ``flat``."""
        exp_avgs, exp_avg_sqs = bucket.moments(flat)
        for group in self._adamw.param_groups:
            index = [i for i, w in enumerate(bucket.weights) if self._group_of[w] is group and w.grad is not None]
            weights = [bucket.weights[i] for i in index]
            steps = [self._state_of(w)["step"] for w in weights]
            torch_fused_adamw(
                group, weights, [exp_avgs[i] for i in index], [exp_avg_sqs[i] for i in index], steps, scale, skip
            )
