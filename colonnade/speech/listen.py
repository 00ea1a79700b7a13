"""Recognises streams of audio and pictures as they arrive, with all streams' next segments in one pass of the model."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError
from colonnade.speech.face import FaceTracker, face_detector
from colonnade.speech.features import RATE, AnyFeatures, FrameStream, check_samples
from colonnade.speech.front_end import Frames, join_frames, stack_pictures
from colonnade.speech.letter_lm import Fusion
from colonnade.speech.model import SpeechModel
from colonnade.speech.streams import StreamPool
from colonnade.speech.video import HOLD_FRAMES, PictureClock, film_pictures, scaled

MAX_WAITING_PICTURES = 1500
"""Maximum number of pictures that may wait for their audio: a minute."""
MAX_WAITING_FRAMES = 3
"""Maximum number of audio frames that wait for a picture, if the stream has pictures."""
MISSING_FRAMES = 25
"""Frames without a picture after which audio no longer waits."""
FRONT_FRAMES = 8
"""Frames of a stream that the front end computes at once, fewer only when they complete a segment: one by one they cost
up to four times as much.
"""


class _Stream:
    """The state of one stream between calls."""

    def __init__(self, config: SpeechConfig, features: AnyFeatures):
        self.sound = FrameStream(features)
        self.waiting_TA = self.sound.tail.new_zeros(0, features.width)
        """Frames that wait for their pictures."""
        self.pictures: dict[int, Tensor] = {}
        self.held: dict[int, Tensor] = {}
        """Reused pictures of frames that may still get their own."""
        self.tail = self.sound.tail.new_zeros(config.picture_history, config.picture, config.picture)
        self.made = self.received = 0
        """Frames whose pictures are settled; pictures received in order."""
        self.settled: list[Frames] = []
        """Those that the front end has not computed."""
        self.newest = -MISSING_FRAMES
        """The last frame that has a picture."""
        self.begun = False
        """Whether text has been returned."""

    @property
    def uncomputed(self) -> int:
        """The number of settled frames that the front end has not computed."""
        return sum(len(frames.sound_TA) for frames in self.settled)

    def ready(self, ended: bool) -> int:
        """The number of waiting frames that are ready."""
        total = self.made + len(self.waiting_TA)
        if ended or total - self.newest > MISSING_FRAMES:
            return len(self.waiting_TA)
        return max(0, min(total, max(self.newest + 1, total - MAX_WAITING_FRAMES)) - self.made)


class StreamingRecogniser:
    """At most ``streams`` streams at once, in constant memory; greedy, or with ``beam`` hypotheses per stream;
    ``fusion`` adds a language model to their scores.

    Deltas are final: greedy labels immediately, those of a beam when all hypotheses agree, and the rest at the end. A
    picture belongs to the frame with its number. Once a stream has pictures, audio waits up to MAX_WAITING_FRAMES
    frames for them; a frame whose picture arrives later or never is recognised from audio alone.
    """

    def __init__(self, model: SpeechModel, streams: int = 1, beam: int | None = None, fusion: Fusion | None = None):
        self.model = model
        self.pool = StreamPool(model.encoder, model.largest_sizes, streams)
        self.search = model.search(streams, beam, fusion)
        self.streams: dict[int, _Stream] = {}
        self.unfinished: set[int] = set()
        """Streams that have ended and have not been given the last labels of their search."""

    @torch.inference_mode()
    def open(self, segment: int | None = None, lookahead: int | None = None) -> int:
        """A new stream's number; raises CapacityError if all are taken.

        ``segment`` and ``lookahead`` are its S and R in frames of 40 ms, of those that were trained; streams of
        different sizes share steps. Raises ConfigError for others.
        """
        stream = self.pool.open(self.model.choose_segments(segment, lookahead))
        self.search.reset(stream)
        self.streams[stream] = _Stream(self.model.config, self.model.sound)
        return stream

    @torch.inference_mode()
    def push(self, stream: int, samples: Tensor, pictures: Tensor | None = None) -> None:
        """Add samples at 16 kHz, and the next pictures (t, height, width), one per frame."""
        own = self._stream(stream)
        check_samples(samples)  # a failing call must not change the state
        if pictures is not None:
            self._check_pictures(own, own.received + len(pictures) - 1, pictures)
            for number, each in enumerate(pictures, own.received):
                self._add_picture(own, number, each)
            own.received += len(pictures)
        self._frames(stream, own.sound.push(samples))

    @torch.inference_mode()
    def add_picture(self, stream: int, frame: int, picture: Tensor, hold: int = 0) -> None:
        """Add the picture of a frame, (height, width); it is reused for the ``hold`` next frames if they have none."""
        own = self._stream(stream)
        self._check_pictures(own, frame, picture[None])
        self._add_picture(own, frame, picture)
        for i in range(frame + 1, frame + 1 + hold):
            if i >= own.made:
                own.held[i] = picture

    @torch.inference_mode()
    def end(self, stream: int) -> None:
        """Marks the end of the stream; :meth:`step` returns the rest."""
        self._frames(stream, self._stream(stream).sound.end(), ended=True)
        self._compute_frames([stream])
        if stream not in self.pool.ended:
            self.unfinished.add(stream)
        self.pool.end(stream)

    def close(self, stream: int) -> None:
        """Close a stream and drop its waiting input."""
        self.pool.close(stream)
        self.unfinished.discard(stream)
        del self.streams[stream]

    @torch.inference_mode()
    def step(self) -> dict[int, str]:
        """Run one segment of every stream that has a complete one; returns the new text of each, which may be empty."""
        self._compute_frames([stream for stream in self.streams if self._is_due(stream)])
        encoded, found = self.pool.step(), dict[int, list[int]]()
        if encoded:
            none = self.model.out.weight.new_empty(0, self.model.config.joint_width)
            frames = [self.model.out(encoded[r]) if r in encoded else none for r in range(self.pool.cache.streams)]
            deltas = self.search.deltas(frames)
            found = {stream: deltas[stream] for stream in encoded}
        for stream in [stream for stream in self.unfinished if not len(self.pool.waiting[stream])]:
            self.unfinished.remove(stream)
            if rest := self.search.finish(stream):
                found[stream] = [*found.get(stream, ()), *rest]
        return {stream: self._text(self.streams[stream], labels) for stream, labels in found.items()}

    def _text(self, own: _Stream, labels: list[int]) -> str:
        """The text of labels, without the space before a stream's first piece."""
        text = self.model.config.text(labels)
        if self.model.config.pieces and not own.begun:
            text = text.removeprefix(" ")
        own.begun = own.begun or bool(text)
        return text

    def _stream(self, stream: int) -> _Stream:
        if stream not in self.streams:
            raise DataError(f"stream {stream} is not open")
        return self.streams[stream]

    def _check_pictures(self, own: _Stream, last: int, pictures: Tensor) -> None:
        """Raise DataError unless these are pictures of this recogniser, the last one of frame ``last``."""
        size = self.model.config.picture
        if not size or pictures.shape[1:] != (size, size):
            need = f"(t, {size}, {size})" if size else "none: this recogniser has no pictures"
            raise DataError(f"pictures of shape {tuple(pictures.shape)}; use {need}")
        if not bool(torch.isfinite(pictures).all()):
            raise DataError("pictures with NaN or infinity; check the camera")
        if last - own.made >= MAX_WAITING_PICTURES:
            raise DataError(
                f"pictures are more than {MAX_WAITING_PICTURES} frames ahead of the sound; send both at the same pace"
            )

    def _add_picture(self, own: _Stream, frame: int, picture: Tensor) -> None:
        if frame >= own.made:
            own.pictures[frame] = picture
            own.newest = max(own.newest, frame)

    def _frames(self, stream: int, sound_TA: Tensor, ended: bool = False) -> None:
        """Settle ready frames, each with its picture if that has arrived."""
        own, config = self.streams[stream], self.model.config
        own.waiting_TA = torch.cat((own.waiting_TA, sound_TA)) if len(own.waiting_TA) else sound_TA
        count = own.ready(ended) if config.picture else len(own.waiting_TA)
        if not count:
            return
        sound_TA, own.waiting_TA = own.waiting_TA[:count], own.waiting_TA[count:].clone()
        pictures = seen_T = None
        if config.picture:
            numbers, blank = range(own.made, own.made + count), own.tail.new_zeros(config.picture, config.picture)
            found = [own.pictures.pop(i, own.held.get(i)) for i in numbers]
            own.held = {i: x for i, x in own.held.items() if i >= own.made + count}
            pictures = torch.cat((own.tail, torch.stack([blank if x is None else x.to(blank) for x in found])))
            own.tail = pictures[count:].clone()
            seen_T = torch.tensor([x is not None for x in found])
            pictures = stack_pictures(pictures, config.picture_history)[seen_T] if bool(seen_T.any()) else None
        own.made += count
        own.settled.append(Frames(sound_TA, None, pictures, seen_T))

    def _is_due(self, stream: int) -> bool:
        """Whether the front end should compute a stream's settled frames now."""
        count, sizes = self.streams[stream].uncomputed, self.pool.cache.sizes_of[stream]
        completes = count > 0 and len(self.pool.waiting[stream]) + count >= sizes.segment + sizes.right
        return count >= FRONT_FRAMES or completes

    def _compute_frames(self, streams: list[int]) -> None:
        """Pass the settled frames of these streams through the front end, as one batch, to the encoder."""
        counts = [self.streams[stream].uncomputed for stream in streams]
        if not sum(counts):
            return
        x_TD = self.model.front_end(join_frames([x for stream in streams for x in self.streams[stream].settled]))
        for stream, own_TD in zip(streams, x_TD.split(counts), strict=True):
            self.streams[stream].settled.clear()
            self.pool.push(stream, own_TD)


def listen(
    model: SpeechModel,
    chunks: Iterable[Tensor],
    segment: int | None = None,
    lookahead: int | None = None,
    beam: int | None = None,
    fusion: Fusion | None = None,
) -> Iterator[str]:
    """Yields the text of one stream of samples at 16 kHz, in parts, as soon as the model produces them.

    ``segment`` and ``lookahead`` are as in :meth:`StreamingRecogniser.open`, ``beam`` and ``fusion`` as in
    :class:`StreamingRecogniser`.
    """
    listeners = StreamingRecogniser(model, beam=beam, fusion=fusion)
    stream = listeners.open(segment, lookahead)
    for samples in chunks:
        listeners.push(stream, samples)
        yield from _texts(listeners, stream)
    listeners.end(stream)
    yield from _texts(listeners, stream)


def listen_film(
    model: SpeechModel,
    film: Path,
    chunks: Iterable[Tensor],
    crop: str,
    segment: int | None = None,
    lookahead: int | None = None,
    beam: int | None = None,
) -> Iterator[str]:
    """As :func:`listen`, for the sound of a video in ``chunks`` and its pictures.

    ``crop``: "mouth" or "face" finds the face and cuts out this part (:mod:`colonnade.speech.face`), "none" takes the
    whole picture, scaled to the recogniser's size.
    """
    size = model.config.picture
    if not size:
        raise DataError("this recogniser has no pictures; remove the crop, or use one that was trained with mouths")
    tracker = None if crop == "none" else FaceTracker(face_detector(), size, crop)
    listeners, clock, samples_s = StreamingRecogniser(model, beam=beam), PictureClock(), 0.0
    stream = listeners.open(segment, lookahead)
    pictures = film_pictures(film)
    following = next(pictures, None)
    for samples in chunks:
        samples_s += len(samples) / RATE
        while following is not None and following[0] < samples_s:  # pictures come before their sound
            time_s, picture = following
            seen = scaled(picture, size) if tracker is None else tracker.crop(picture)
            if seen is not None and clock.frame(time_s) >= 0:
                listeners.add_picture(stream, clock.frame(time_s), seen, HOLD_FRAMES)
            following = next(pictures, None)
        listeners.push(stream, samples)
        yield from _texts(listeners, stream)
    listeners.end(stream)
    yield from _texts(listeners, stream)


def _texts(listeners: StreamingRecogniser, stream: int) -> Iterator[str]:
    """The text of all segments that are complete."""
    while found := listeners.step():
        if found[stream]:
            yield found[stream]
