"""Recordings in memory, mixed with noise and cut into batches."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError
from colonnade.speech.audio import load_audio
from colonnade.speech.augment import BORDER, SPEEDS, augment_sound, change_speed, crop_pictures, mask_bands, mask_sound
from colonnade.speech.data import Recording, load_samples, read_manifest
from colonnade.speech.features import features_of
from colonnade.speech.front_end import Frames, stack_pictures
from colonnade.speech.mix import SNRS, babble, mix, pink, white
from colonnade.speech.mouth import draw_mouths
from colonnade.speech.word_times import UNKNOWN, delayed_parts, letter_targets

DROP_SOUND, DROP_PICTURES = 0.15, 0.45
"""Shares of the recordings that train on pictures alone, and on audio alone."""
BABBLE_VOICES = 100
"""Number of recordings from which babble is mixed."""
BABBLE_SHARE = 0.6
"""Share of the noisy recordings that get babble; the others get white or pink noise."""


class Batch(NamedTuple):
    """Concatenated recordings."""

    frames: Frames
    lengths: list[int]
    labels: list[list[int]]
    letters_P: Tensor
    """Letter targets (:mod:`colonnade.speech.word_times`)."""

    def to(self, device: torch.device) -> "Batch":
        """The batch on ``device``."""
        sound_TA, *others = self.frames
        moved = (None if x is None else x.to(device, non_blocking=True) for x in others)
        frames = Frames(sound_TA.to(device, non_blocking=True), *moved)
        return self._replace(frames=frames, letters_P=self.letters_P.to(device, non_blocking=True))


class Example(NamedTuple):
    """One recording; a modality that is dropped is None."""

    i: int
    samples: np.ndarray | None
    pictures: Tensor | None
    speed: float = 1.0


def _load_int16(folder: Path, recording: Recording) -> np.ndarray:
    """16-bit samples of a recording."""
    return (load_samples(folder, recording) * 32767).round().clip(-32768, 32767).astype(np.int16)


def _labels(folder: Path, recording: Recording, config: SpeechConfig) -> list[int]:
    try:
        return config.labels(recording.text)
    except DataError as why:
        raise DataError(f"the text of {folder / recording.audio}: {why}") from None


class Corpus:
    """The recordings of one split."""

    def __init__(self, folder: Path, config: SpeechConfig, split: str, noises: Path | None = None):
        self.config, self.recordings = config, read_manifest(folder, split)
        self.noises = [load_audio(path).numpy() for path in sorted(noises.iterdir())] if noises else []
        if noises and not self.noises:
            raise DataError(f"{noises} has no files; put recordings of noise there")
        self.features = features_of(config)
        self.labels = [_labels(folder, one, config) for one in self.recordings]
        self.letters: list[Tensor] = []
        self.samples: list[np.ndarray] = []
        pool = ThreadPoolExecutor()
        try:
            loaded = pool.map(partial(_load_int16, folder), self.recordings)
            for one, labels, samples in zip(self.recordings, self.labels, loaded, strict=True):
                if not len(samples) or not labels:
                    raise DataError(f"{one.audio} has {len(samples)} samples and text {one.text!r}; remove it")
                self.samples.append(samples)
                self.letters.append(self._letters(one, labels, self.frames(len(self.letters))))
        finally:  # after an error the others are not read
            pool.shutdown(cancel_futures=True)
        if config.picture and not all(one.phonemes for one in self.recordings):
            raise DataError(f"{folder}: mouths are drawn from phonemes, but some recordings have none; use speech-tiny")

    def frames(self, i: int, speed: float = 1.0) -> int:
        """Frames of recording ``i``."""
        return self.features.frames(round(len(self.samples[i]) / speed))

    def noisy(self, i: int, snr: float | None, random: np.random.Generator, kind: int = 0) -> np.ndarray:
        """Recording ``i`` with noise at ``snr`` dB; ``kind``: 0 babble of other recordings, 1 white, 2 pink, 3 from a
        file.
        """
        return self._mixed(i, self.samples[i].astype(np.float32) / 32768, snr, random, kind)

    def _mixed(self, i: int, own: np.ndarray, snr: float | None, random: np.random.Generator, kind: int) -> np.ndarray:
        if snr is None:
            return own
        if kind == 3:
            noise = self.noises[random.integers(len(self.noises))]
            return mix(own, np.roll(noise, -random.integers(len(noise))), snr)
        if kind:
            return mix(own, (white, pink)[kind - 1](len(own), random), snr)
        others = self.samples[: BABBLE_VOICES + 1]
        others = [x for j, x in enumerate(others) if j != i] or others
        return mix(own, babble(others[:BABBLE_VOICES], len(own), random), snr)

    def mouths(self, i: int, random: np.random.Generator, size: int | None = None, speed: float = 1.0) -> Tensor:
        """Drawn pictures of recording ``i``."""
        size = size or self.config.picture
        phonemes = [each._replace(start_s=each.start_s / speed) for each in self.recordings[i].known_phonemes]
        return torch.from_numpy(draw_mouths(phonemes, self.frames(i, speed), size, random))

    def train_batch(
        self,
        chosen: Sequence[int],
        random: np.random.Generator,
        noise: bool,
        augment: bool = False,
        rooms: bool = True,
    ) -> Batch:
        """Recordings with random noise, some without audio or without pictures; ``augment`` adds speeds, masks and
        crops, with ``rooms`` also rooms and codecs.
        """
        examples: list[Example] = []
        size, kinds = self.config.picture, 4 if self.noises else 3
        for i in chosen:
            snr = SNRS[random.integers(len(SNRS))] if noise else None
            kind = 0 if random.random() < BABBLE_SHARE else int(random.integers(1, kinds))
            drop = random.random() if size else 1.0
            speed = SPEEDS[random.integers(len(SPEEDS))] if augment else 1.0
            samples = pictures = None
            if drop >= DROP_SOUND:
                own = change_speed(self.samples[i].astype(np.float32) / 32768, speed)
                own = augment_sound(own, random) if augment and rooms else own
                samples = self._mixed(i, own, snr, random, kind)
                samples = mask_sound(samples, random) if augment else samples
            if size and not DROP_SOUND <= drop < DROP_SOUND + DROP_PICTURES:
                pictures = self.mouths(i, random, round(BORDER * size) if augment else size, speed)
                pictures = crop_pictures(pictures, size, random) if augment else pictures
            examples.append(Example(i, samples, pictures, speed))
        batch = self.batch(examples)
        if not augment or self.features.samples:
            return batch
        parts = batch.frames.sound_TA.split(batch.lengths)
        width = self.features.spectra
        sound_TA = torch.cat(
            [torch.cat((mask_bands(x[:, :width], self.config.mels, random), x[:, width:]), 1) for x in parts]
        )
        return batch._replace(frames=batch.frames._replace(sound_TA=sound_TA))

    def test_batch(self, chosen: Sequence[int], snr: float | None, pictures: bool, seed: int) -> Batch:
        """Recordings in babble; noise and pictures are functions of the seed and the recording."""
        examples: list[Example] = []
        for i in chosen:
            random = np.random.Generator(np.random.PCG64([seed, i]))
            drawn = self.mouths(i, random) if pictures else None
            examples.append(Example(i, self.noisy(i, snr, random), drawn))
        return self.batch(examples)

    def batch(self, examples: Sequence[Example]) -> Batch:
        """The frames of these recordings."""
        own, video = self.features, self.config.picture_history
        sounds, stacks = [], []
        heard, seen = [], []
        lengths = [self.frames(one.i, one.speed) for one in examples]
        for (_, samples, pictures, _), T in zip(examples, lengths, strict=True):
            if samples is None:
                sounds.append(torch.zeros(T, self.features.width))
            else:
                padded = np.zeros(max(own.before + T * own.frame, own.start + len(samples)), np.float32)
                padded[own.start : own.start + len(samples)] = samples
                sounds.append(own(torch.from_numpy(padded[: own.before + T * own.frame]), 0, len(samples)))
            if pictures is not None:
                padded = torch.cat((pictures.new_zeros(video, *pictures.shape[1:]), pictures))
                stacks.append(stack_pictures(padded, video))
            heard += [samples is not None] * T
            seen += [pictures is not None] * T
        pictures_seen = torch.cat(stacks) if stacks else None
        none = torch.zeros(0, self.features.width)
        frames = Frames(torch.cat([none, *sounds]), torch.tensor(heard), pictures_seen, torch.tensor(seen))
        indices = [example.i for example in examples]
        letters_P = torch.cat([
            self.letters[i] if speed == 1 else self._letters(self.recordings[i], self.labels[i], T, speed)
            for (i, _, _, speed), T in zip(examples, lengths, strict=True)
        ])  # fmt: skip
        return Batch(frames, lengths, [self.labels[i] for i in indices], letters_P)

    def _letters(self, one: Recording, labels: Sequence[int], frames: int, speed: float = 1.0) -> Tensor:
        """Letter targets of a recording; all UNKNOWN if it has no word times."""
        if not one.words or self.config.pieces or " " not in self.config.letters:
            return torch.full((self.config.parts * frames,), UNKNOWN)
        if len(one.words) != len(one.text.split(" ")):
            raise DataError(
                f"{one.audio} has {len(one.words)} times of words and {len(one.text.split(' '))} words; provide one "
                "per word"
            )
        space, delay = self.config.letters.index(" ") + 1, delayed_parts(self.config)
        words = [(start / speed, end / speed) for start, end in one.words]
        return letter_targets(labels, space, words, frames, self.config.parts, delay)
