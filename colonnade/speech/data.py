"""A folder of spoken sentences: ``manifest.jsonl``, one line a recording, and the recordings.

    {"audio": "train-00000.flac", "text": "bin blue at f two now", "split": "train", "speaker": "en-us+m1",
     "phonemes": [[0.012, "b"], …], "words": [[0.0, 0.249], …]}

``audio`` is relative to the folder. ``phonemes`` (optional) are used to draw mouths; ``words`` (optional), the start
and end of each word [s], are the reference for alignments.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from colonnade.errors import DataError
from colonnade.speech import synth
from colonnade.speech.audio import load_audio
from colonnade.speech.pcm import write_audio
from colonnade.speech.synth import Phoneme

MANIFEST = "manifest.jsonl"


class Recording(BaseModel):
    """One line of a manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    audio: str
    text: str
    split: Literal["train", "test"] = "train"
    speaker: str = ""
    phonemes: tuple[tuple[float, str], ...] = Field(default=())
    words: tuple[tuple[float, float], ...] = Field(default=())

    @property
    def known_phonemes(self) -> list[Phoneme]:
        """In the form that :func:`colonnade.speech.mouth.draw_mouths` takes."""
        return [Phoneme(*each) for each in self.phonemes]


def read_manifest(folder: Path, split: str | None = None) -> list[Recording]:
    """The recordings of ``folder``; raises DataError with the line of the first that is invalid."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder} has no {MANIFEST}; make one with: colonnade speech data --out {folder}")
    recordings: list[Recording] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            recording = Recording.model_validate_json(line)
        except ValidationError as why:
            raise DataError(f"{path}, line {number}: {why.errors()[0]['msg']}; mend or remove the line") from None
        name = Path(recording.audio)
        if name.is_absolute() or ".." in name.parts:
            raise DataError(f"{path}, line {number}: {recording.audio!r} is outside of the folder; move it there")
        recordings.append(recording)
    chosen = [one for one in recordings if split in (None, one.split)]
    if not chosen:
        raise DataError(f"{path} has no recordings{f' of the split {split}' if split else ''}; add some")
    return chosen


def load_samples(folder: Path, recording: Recording) -> np.ndarray:
    """16 kHz samples of a recording."""
    return load_audio(folder / recording.audio).numpy()


def make_data(
    out: Path, train: int, test: int, seed: int = 0, progress: Callable[[int], None] | None = None
) -> list[Recording]:
    """Write ``train`` + ``test`` sentences spoken by espeak-ng; test voices and sentences are not in training."""
    if train < 1 or test < 1:
        raise DataError(f"{train} sentences to train on and {test} to test; use at least 1 of each")
    if (out / MANIFEST).exists():
        raise DataError(f"{out / MANIFEST} exists; choose another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.Generator(np.random.PCG64(seed))
    tested: set[str] = set()
    recordings: list[Recording] = []
    for i in range(test + train):  # test sentences first, so that training can exclude them
        is_test = i < test
        voices = synth.voice_split(is_test)
        text = synth.sentence(random)
        while not is_test and text in tested:
            text = synth.sentence(random)
        tested |= {text} if is_test else set()
        voice = voices[random.integers(len(voices))]
        spoken = synth.speak(text, voice, int(random.integers(140, 200)), int(random.integers(30, 70)))
        before, after = (int(random.integers(800, 4000)) for _ in range(2))
        name = f"test-{i:05}.flac" if is_test else f"train-{i - test:05}.flac"
        write_audio(out / name, np.pad(spoken.samples, (before, after)))
        phonemes = tuple((round(p.start_s + before / 16000, 4), p.name) for p in spoken.phonemes)
        words = tuple((round(a + before / 16000, 4), round(b + before / 16000, 4)) for a, b in spoken.words)
        if len(words) != len(text.split()):  # espeak-ng speaks a few pairs as one word
            words = ()
        split: Literal["train", "test"] = "test" if is_test else "train"
        recordings.append(Recording(audio=name, text=text, split=split, speaker=voice, phonemes=phonemes, words=words))
        if progress is not None:
            progress(i + 1)
    lines = [json.dumps(one.model_dump(), ensure_ascii=False) + "\n" for one in recordings]
    (out / MANIFEST).write_text("".join(lines), encoding="utf-8")
    return recordings


def word_errors(reference: str, hypothesis: str) -> int:
    """The number of word insertions, deletions and substitutions between two texts."""
    a, b = reference.split(), hypothesis.split()
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]
