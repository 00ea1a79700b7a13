"""Text of streams of sound and pictures while they arrive: every stream's next segment in one pass of the model."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.speech.features import FrameStream, check_samples
from colonnade.speech.front_end import Frames, stack_pictures
from colonnade.speech.model import SpeechModel
from colonnade.speech.search import GreedySearch
from colonnade.speech.streams import StreamPool

MOST_AHEAD = 1500
"""Pictures that may wait for their sound: a minute."""


class Listeners:
    """At most ``streams`` streams at once, in constant memory.

    Greedy labels are final, so each delta is. A picture belongs to the frame of its number; it must arrive before or
    with the samples that complete its frame. A frame without one is recognised by sound alone.
    """

    def __init__(self, model: SpeechModel, streams: int = 1):
        self.model = model
        self.pool = StreamPool(model.encoder, model.sizes, streams)
        self.search = GreedySearch(model.predictor, model.joint.logprobs, streams)
        self.sound: dict[int, FrameStream] = {}
        self.pictures: dict[int, dict[int, Tensor]] = {}
        self.tails: dict[int, Tensor] = {}
        self.counts: dict[int, list[int]] = {}

    @torch.inference_mode()
    def open(self) -> int:
        """A new stream's number; raises CapacityError if all are taken."""
        stream = self.pool.open()
        self.search.reset(stream)
        config, filters = self.model.config, self.model.filters
        self.sound[stream], self.pictures[stream] = FrameStream(filters, config.audio_history), {}
        self.tails[stream] = filters.new_zeros(config.picture_history, config.picture, config.picture)
        self.counts[stream] = [0, 0]  # frames made, pictures received
        return stream

    @torch.inference_mode()
    def push(self, stream: int, samples: Tensor, pictures: Tensor | None = None) -> None:
        """Add samples at 16 kHz, and pictures (t, height, width)."""
        if stream not in self.sound:
            raise DataError(f"stream {stream} is not open")
        check_samples(samples)  # nothing is taken of a call that fails
        size = self.model.config.picture
        if pictures is not None:
            if not size or pictures.shape[1:] != (size, size):
                need = f"(t, {size}, {size})" if size else "none: this recogniser has no pictures"
                raise DataError(f"pictures of shape {tuple(pictures.shape)}; use {need}")
            if not bool(torch.isfinite(pictures).all()):
                raise DataError("pictures with NaN or infinity; check the camera")
            made, received = self.counts[stream]
            if received + len(pictures) - made > MOST_AHEAD:
                raise DataError(f"pictures are more than {MOST_AHEAD} frames ahead of the sound; send them in step")
            numbered = enumerate(pictures, received)
            self.pictures[stream].update((number, each) for number, each in numbered if number >= made)
            self.counts[stream][1] += len(pictures)
        self._frames(stream, self.sound[stream].push(samples))

    @torch.inference_mode()
    def end(self, stream: int) -> None:
        """No more will come; :meth:`step` returns the rest."""
        if stream not in self.sound:
            raise DataError(f"stream {stream} is not open")
        self._frames(stream, self.sound[stream].end())
        self.pool.end(stream)

    def close(self, stream: int) -> None:
        """Give up a stream; what waits is dropped."""
        self.pool.close(stream)
        for own in (self.sound, self.pictures, self.tails, self.counts):
            del own[stream]

    @torch.inference_mode()
    def step(self) -> dict[int, str]:
        """Run one segment of every stream that has one; the new text of each, which may be empty."""
        encoded = self.pool.step()
        if not encoded:
            return {}
        none = self.model.filters.new_empty(0, self.model.config.joint_width)
        frames = [self.model.out(encoded[r]) if r in encoded else none for r in range(self.pool.cache.streams)]
        found = self.search.push(frames)
        return {stream: self.model.config.text([label for _, label in found[stream]]) for stream in encoded}

    def _frames(self, stream: int, mel_TA: Tensor) -> None:
        """Give the pool the frames of these spectra, each with its picture if that has arrived."""
        if not len(mel_TA):
            return
        start = self.counts[stream][0]
        own = [self.pictures[stream].pop(start + i, None) for i in range(len(mel_TA))]
        self.counts[stream][0] += len(mel_TA)
        pictures = seen_T = None
        if self.model.config.picture:
            tail = self.tails[stream]
            pictures = torch.cat((tail, *(tail.new_zeros(1, *tail.shape[1:]) if x is None else x[None] for x in own)))
            self.tails[stream] = pictures[len(own) :].clone()
            seen_T = torch.tensor([x is not None for x in own])
            pictures = stack_pictures(pictures, len(tail))[seen_T] if bool(seen_T.any()) else None
        self.pool.push(stream, self.model.front_end(Frames(mel_TA, None, pictures, seen_T)))


def listen(model: SpeechModel, chunks: Iterable[Tensor]) -> Iterator[str]:
    """The text of one stream of samples at 16 kHz, in parts, as early as the model has them."""
    listeners = Listeners(model)
    stream = listeners.open()
    for samples in chunks:
        listeners.push(stream, samples)
        while found := listeners.step():
            if found[stream]:
                yield found[stream]
    listeners.end(stream)
    while found := listeners.step():
        if found[stream]:
            yield found[stream]
