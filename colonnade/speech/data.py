"""A folder of spoken sentences: ``manifest.jsonl``, one line per recording, and the recordings.

    {"audio": "train-00000.flac", "text": "bin blue at f two now", "split": "train", "speaker": "en-us+m1",
     "phonemes": [[0.012, "b"], …], "words": [[0.0, 0.249], …]}

``audio`` is relative to the folder. ``phonemes`` (optional) are used to draw mouths; ``words`` (optional), the start
and end of each word [s], are the reference for alignments.

A folder without a manifest may have LRS3's layout (Afouras et al., arXiv 1809.00496): videos and their transcripts, in
one folder per speaker; ``pretrain`` and ``trainval`` are for training:

    trainval/SPEAKER/00001.mp4
    trainval/SPEAKER/00001.txt      Text:  HELLO THERE
                                    Conf:  4

                                    WORD START END ASDSCORE
                                    HELLO 0.12 0.40 6.1
                                    THERE 0.40 0.71 5.8
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from colonnade.errors import DataError
from colonnade.speech import synth
from colonnade.speech.audio import MAX_LENGTH_S, load_audio
from colonnade.speech.pcm import write_audio
from colonnade.speech.synth import Phoneme

MANIFEST = "manifest.jsonl"
LRS3_SPLITS: dict[str, Literal["train", "test"]] = {"pretrain": "train", "trainval": "train", "test": "test"}

Seconds = Annotated[float, Field(ge=0, le=MAX_LENGTH_S, allow_inf_nan=False)]
"""A time in a recording."""


class Recording(BaseModel):
    """One line of a manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    audio: str
    text: str
    split: Literal["train", "test"] = "train"
    speaker: str = ""
    phonemes: tuple[tuple[Seconds, str], ...] = Field(default=())
    words: tuple[tuple[Seconds, Seconds], ...] = Field(default=())

    @field_validator("words")
    @classmethod
    def _check_words(cls, words: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        for start, end in words:
            if start > end:
                times = {"start": start, "end": end}
                raise PydanticCustomError("order", "a word from {start} s to {end} s ends before it starts", times)
        return words

    @property
    def known_phonemes(self) -> list[Phoneme]:
        """In the form that :func:`colonnade.speech.mouth.draw_mouths` takes."""
        return [Phoneme(*each) for each in self.phonemes]


def read_manifest(folder: Path, split: str | None = None) -> list[Recording]:
    """The recordings of ``folder``; raises DataError with the line of the first that is invalid.

    Without a manifest, the folder may have LRS3's layout.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if any((folder / name).is_dir() for name in LRS3_SPLITS):
            return _chosen(folder, read_lrs3(folder), split)
        raise DataError(
            f"{folder} has no {MANIFEST}, and no {', '.join(LRS3_SPLITS)} of LRS3; make one with: colonnade speech "
            f"data --out {folder}"
        )
    recordings: list[Recording] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            recording = Recording.model_validate_json(line)
        except ValidationError as why:
            raise DataError(f"{path}, line {number}: {why.errors()[0]['msg']}; fix or remove the line") from None
        name = Path(recording.audio)
        if name.is_absolute() or ".." in name.parts:
            raise DataError(f"{path}, line {number}: {recording.audio!r} is outside the folder; move it there")
        recordings.append(recording)
    return _chosen(path, recordings, split)


def _chosen(path: Path, recordings: list[Recording], split: str | None) -> list[Recording]:
    chosen = [one for one in recordings if split in (None, one.split)]
    if not chosen:
        raise DataError(f"{path} has no recordings{f' of the split {split}' if split else ''}; add some")
    return chosen


def read_lrs3(folder: Path) -> list[Recording]:
    """The videos of a folder in LRS3's layout, with their transcripts in lower case, ordered by name.

    Word times are those of the transcript's table, if it has one row for each word. Raises DataError, naming the file,
    for a video without a transcript, or one that cannot be read.
    """
    recordings: list[Recording] = []
    for name, split in LRS3_SPLITS.items():
        for film in sorted((folder / name).glob("*/*.mp4")):
            text, words = _read_lrs3_text(film.with_suffix(".txt"))
            audio = film.relative_to(folder).as_posix()
            recordings.append(Recording(audio=audio, text=text, split=split, speaker=film.parent.name, words=words))
    return recordings


def _read_lrs3_text(path: Path) -> tuple[str, tuple[tuple[float, float], ...]]:
    """The text and the word times of one file."""
    if not path.is_file():
        raise DataError(f"{path} does not exist, but its video does; restore it or remove the video")
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    texts = [line.removeprefix("Text:").split() for line in lines if line.startswith("Text:")]
    if len(texts) != 1 or not texts[0]:
        raise DataError(
            f"{path} has {len(texts)} lines that begin with Text:, or an empty one; use exactly one with words"
        )
    words: list[tuple[float, float]] = []
    header = next((i for i, line in enumerate(lines) if line.split()[:3] == ["WORD", "START", "END"]), len(lines))
    for number, line in enumerate(lines[header + 1 :], header + 2):
        if not line:
            break
        try:
            _, start, end = line.split()[:3]
            bounds = float(start), float(end)
        except ValueError:
            raise DataError(f"{path}, line {number}: {line[:60]!r} has no word, start and end; fix it") from None
        if not 0 <= bounds[0] <= bounds[1] <= MAX_LENGTH_S:
            raise DataError(f"{path}, line {number}: a word from {bounds[0]} s to {bounds[1]} s; fix the times")
        words.append(bounds)
    return " ".join(texts[0]).lower(), tuple(words) if len(words) == len(texts[0]) else ()


def load_samples(folder: Path, recording: Recording) -> np.ndarray:
    """16 kHz samples of a recording."""
    return load_audio(folder / recording.audio).numpy()


class _Sentence(NamedTuple):
    """The voice and settings of a sentence of :func:`make_data`."""

    name: str
    text: str
    voice: str
    speed: int
    pitch: int
    padding: tuple[int, int]
    """Samples of silence before and after."""


def make_data(
    out: Path, train: int, test: int, seed: int = 0, progress: Callable[[int], None] | None = None, workers: int = 1
) -> list[Recording]:
    """Write ``train`` + ``test`` sentences spoken by espeak-ng; test voices and sentences are not in training.

    Texts and voices do not depend on ``workers``, the number of processes. Samples do, by milliseconds: espeak-ng keeps
    state from one sentence to the next.
    """
    if train < 1 or test < 1:
        raise DataError(f"{train} training sentences and {test} test sentences; use at least 1 of each")
    if workers < 1:
        raise DataError(f"{workers} workers; use at least 1")
    if (out / MANIFEST).exists():
        raise DataError(f"{out / MANIFEST} exists; choose another folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    sentences = _sentences(train, test, np.random.Generator(np.random.PCG64(seed)))
    recordings: list[Recording] = []
    with ExitStack() as stack:
        run: Callable[..., Iterator[Recording]] = map
        if workers > 1:
            pool = ProcessPoolExecutor(workers, get_context("forkserver"))
            run = partial(stack.enter_context(pool).map, chunksize=16)
        for recording in run(partial(_speak, out), sentences):
            recordings.append(recording)
            if progress is not None:
                progress(len(recordings))
    lines = [json.dumps(one.model_dump(), ensure_ascii=False) + "\n" for one in recordings]
    (out / MANIFEST).write_text("".join(lines), encoding="utf-8")
    return recordings


def _sentences(train: int, test: int, random: np.random.Generator) -> list[_Sentence]:
    tested: set[str] = set()
    sentences: list[_Sentence] = []
    for i in range(test + train):  # test sentences first, so that training can exclude them
        is_test = i < test
        voices = synth.voice_split(is_test)
        text = synth.sentence(random)
        while not is_test and text in tested:
            text = synth.sentence(random)
        tested |= {text} if is_test else set()
        voice = voices[random.integers(len(voices))]
        speed, pitch = int(random.integers(140, 200)), int(random.integers(30, 70))
        before, after = (int(random.integers(800, 4000)) for _ in range(2))
        name = f"test-{i:05}.flac" if is_test else f"train-{i - test:05}.flac"
        sentences.append(_Sentence(name, text, voice, speed, pitch, (before, after)))
    return sentences


def _speak(out: Path, one: _Sentence) -> Recording:
    """Write one sentence to ``out``."""
    spoken, before = synth.speak(one.text, one.voice, one.speed, one.pitch), one.padding[0]
    write_audio(out / one.name, np.pad(spoken.samples, one.padding))
    phonemes = tuple((round(p.start_s + before / 16000, 4), p.name) for p in spoken.phonemes)
    words = tuple((round(a + before / 16000, 4), round(b + before / 16000, 4)) for a, b in spoken.words)
    if len(words) != len(one.text.split()):  # espeak-ng speaks a few pairs as one word
        words = ()
    split: Literal["train", "test"] = "test" if one.name.startswith("test") else "train"
    return Recording(audio=one.name, text=one.text, split=split, speaker=one.voice, phonemes=phonemes, words=words)


def word_errors(reference: str, hypothesis: str) -> int:
    """The number of word insertions, deletions and substitutions between two texts."""
    a, b = reference.split(), hypothesis.split()
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]
