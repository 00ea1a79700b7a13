"""A pool of streams that join and leave at any time; each step runs one segment of every stream that has a complete
one.

A segment runs when its S frames and the R after it have arrived, or its stream has ended. The encoder's output equals
that of the whole sequence, however the frames were cut and whichever streams share the step.
"""

import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.model.conformer import ConformerEncoder
from colonnade.model.segment_encoder import SegmentEncoder
from colonnade.model.segments import Segments


class StreamPool:
    """At most ``streams`` streams through one encoder, in constant memory; ``sizes`` has the largest S, L and R."""

    def __init__(self, encoder: SegmentEncoder | ConformerEncoder, sizes: Segments, streams: int):
        self.encoder, self.cache = encoder, encoder.cache(sizes, streams)
        self.waiting: dict[int, Tensor] = {}
        self.ended: set[int] = set()

    def open(self, sizes: Segments | None = None) -> int:
        """A new stream's number, with its own S, L and R if given; raises CapacityError if the pool is full."""
        stream = self.cache.open(sizes)
        weight = next(self.encoder.parameters())
        self.waiting[stream] = weight.new_zeros(0, self.encoder.config.width)
        return stream

    def push(self, stream: int, x_TD: Tensor) -> None:
        """Add frames to a stream; call :meth:`step` until it returns nothing, so that they do not accumulate."""
        self._check(stream)
        if stream in self.ended:
            raise DataError(f"stream {stream} has ended; open another")
        if x_TD.ndim != 2 or x_TD.shape[1] != self.encoder.config.width:
            raise DataError(f"frames of shape {tuple(x_TD.shape)}; use (T, {self.encoder.config.width})")
        if not bool(torch.isfinite(x_TD).all()):
            raise DataError("frames with NaN or infinity; check the features")
        self.waiting[stream] = torch.cat((self.waiting[stream], x_TD.detach().to(self.waiting[stream])))

    def end(self, stream: int) -> None:
        """Ends the stream: the last frames run without the missing right context."""
        self._check(stream)
        self.ended.add(stream)

    def close(self, stream: int) -> None:
        """Free the stream's slots and drop its waiting frames."""
        self._check(stream)
        del self.waiting[stream]
        self.ended.discard(stream)
        self.cache.close(stream)

    @torch.inference_mode()
    def step(self) -> dict[int, Tensor]:
        """Run one segment of every stream that has a complete one; returns the encoded frames of each."""
        parts: list[tuple[int, int, int]] = []
        for stream, x_TD in self.waiting.items():
            T, sizes = len(x_TD), self.cache.sizes_of[stream]
            S, R = sizes.segment, sizes.right
            if T >= S + R or (T and stream in self.ended):
                parts.append((stream, min(S, T), min(R, max(0, T - S))))
        if not parts:
            return {}
        frames = [self.waiting[stream][:n] for stream, n, _ in parts]
        copies = [self.waiting[stream][n : n + r] for stream, n, r in parts]
        step = self.cache.step(parts)
        y_TD = self.encoder(torch.cat((*frames, *copies)), step)
        self.cache.commit(step)
        for stream, n, _ in parts:
            self.waiting[stream] = self.waiting[stream][n:].clone()
        outputs = y_TD.split([n for _, n, _ in parts])
        return {stream: y_TD for (stream, _, _), y_TD in zip(parts, outputs, strict=True)}

    def _check(self, stream: int) -> None:
        if stream not in self.waiting:
            raise DataError(f"stream {stream} is not open")
