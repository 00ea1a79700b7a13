"""Speech of humans and of synthesisers to train :mod:`speech_human` on, and what of it is held out.

Recordings of the prompts of a telephone exchange, of the lines of a game (:mod:`harness.game_speech`), and of further
folders in the layouts of LJ Speech (``metadata.csv``, ``wavs/``) and of Kaldi (``text``, ``wav.scp``); texts that
espeak-ng and flite speak. Names of files that belong to the prompts begin with :data:`PROMPT`.
"""

import gzip
import itertools
import json
import os
import re
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from colonnade.data.readers import sotu_documents
from colonnade.errors import DataError
from colonnade.speech import synth
from colonnade.speech.audio import load_audio
from colonnade.speech.data import MANIFEST
from colonnade.speech.pcm import RATE, require, write_audio
from harness import game_speech
from speech_peers import LEAST_WORDS, g722, normal

HELD_OUT, CHOOSING, LEAST_S, MOST_S = 100, 30, 0.4, 12.0
COPIES = 12
"""Of a prompt in an epoch; each copy has a speed of its own."""
READINGS = 4
"""Times that the text of a prompt is spoken."""
MAX_WORDS = 14
FLITE_VOICES = ("slt", "rms", "awb", "kal16")
RECORDED, TEXTS = "recordings.jsonl", "texts.json"
PROMPT = "prompt-"
SILENT = 0.01
"""Largest sample of a prompt without speech; there are ten, such as "two seconds of silence"."""
MP3 = {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "CONSTANT", "compression_level": 0.9}
"""How soundfile writes 24 kbit/s."""


def speeches(count: int, random: np.random.Generator) -> list[str]:
    """Sentences of speeches without digits, of 4 to MOST_WORDS words."""
    whole = " ".join(text for _, text in sotu_documents()[-40:])
    lines = [line for line in re.split(r"[.?!]\s+", whole) if not re.search(r"[\d*#$%]", line)]
    found = [text for text in map(normal, lines) if 4 <= len(text.split()) <= MAX_WORDS]
    return [found[i] for i in random.permutation(len(found))[:count]]


def read_prompts(source: Path) -> list[tuple[str, Path]]:
    """(text, file) of all prompts, with those in folders (digits, letters, dictation)."""
    lists = [path for path in source.rglob("core-sounds-en.txt*") if path.is_file()]
    if not lists:
        raise DataError(f"{source} lacks core-sounds-en.txt; unpack both packages there")
    data = lists[0].read_bytes()
    whole = (gzip.decompress(data) if lists[0].suffix == ".gz" else data).decode()
    parts = [line.partition(": ") for line in whole.splitlines() if not line.startswith(";")]
    files = {path.as_posix().removesuffix(".g722"): path for path in source.rglob("*.g722")}
    by_name = {name: files[key] for name, _, _ in parts for key in files if name and key.endswith(f"/{name}")}
    found = [(normal(text), by_name[name]) for name, _, text in parts if name in by_name and "[" not in text]
    return [(text, path) for text, path in found if text]


class PromptSplits(NamedTuple):
    """(text, file) of the prompts to train on, to choose a weight with, and to test; no text is in two of them."""

    train: list[tuple[str, Path]]
    choosing: list[tuple[str, Path]]
    test: list[tuple[str, Path]]


def split_prompts(source: Path, seed: int) -> PromptSplits:
    """The prompts; the test is that of earlier records."""
    chosen = read_prompts(source)
    long = [one for one in chosen if len(one[0].split()) >= LEAST_WORDS]
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(long))
    tests = [long[i] for i in order[:HELD_OUT]]
    tested = {text for text, _ in tests}
    others = [long[i] for i in order[HELD_OUT:] if long[i][0] not in tested][:CHOOSING]
    held = tested | {text for text, _ in others}
    return PromptSplits([one for one in chosen if one[0] not in held], others, tests)


def load_prompts(prompts: list[tuple[str, Path]]) -> list[tuple[str, np.ndarray]]:
    """(text, samples) of the prompts that are not silent."""
    read = ((text, g722(path)) for text, path in prompts)
    return [(text, samples) for text, samples in read if np.abs(samples).max() > SILENT]


def game_lines(game: Path | None, held: set[str]) -> list[tuple[str, game_speech.Line]]:
    """(text, line) of the game, without digits and without held-out texts."""
    lines = game_speech.lines(game) if game is not None else []
    found = [(normal(line.text), line) for line in lines if not any(letter.isdigit() for letter in line.text)]
    return [(text, line) for text, line in found if text and text not in held]


def recombine_sentences(texts: list[str], held: set[str], count: int, random: np.random.Generator) -> list[str]:
    """Sentences whose pairs of words, with start and end, are all in ``texts``; none of ``held``."""
    following: dict[str, list[str]] = {}
    for text in texts:
        words = ["", *text.split(), ""]
        for word, after in itertools.pairwise(words):
            following.setdefault(word, []).append(after)
    found: list[str] = []
    while len(found) < count:
        words = [""]
        while len(words) == 1 or words[-1]:
            after = following[words[-1]]
            words.append(after[random.integers(len(after))])
        if 4 <= len(words) - 2 <= MAX_WORDS and (text := " ".join(words[1:-1])) not in held:
            found.append(text)
    return found


def other_recordings(folder: Path, held: set[str]) -> list[tuple[str, Path]]:
    """(text, file) of all recordings in ``folder`` without digits and held-out texts."""
    found: list[tuple[str, Path]] = []
    for table in sorted(folder.rglob("metadata.csv")):
        rows = [line.split("|") for line in table.read_text(encoding="utf-8").splitlines()]
        found += [(row[-1], table.parent / "wavs" / f"{row[0]}.wav") for row in rows]
    for table in sorted(folder.rglob("wav.scp")):
        files = dict(line.split(maxsplit=1) for line in table.read_text(encoding="utf-8").splitlines())
        texts = (line.partition("\t") for line in (table.parent / "text").read_text(encoding="utf-8").splitlines())
        found += [(text, folder / files[name]) for name, _, text in texts]
    plain = [(normal(text), path) for text, path in found if path.is_file() and not re.search(r"[\d*#$%]", text)]
    return [(text, path) for text, path in plain if text and text not in held]


def _shrink(job: tuple[Path, Path]) -> float:
    """Write a recording as MP3, if its length is right; its seconds, or 0."""
    source, target = job
    samples = load_audio(source).numpy()
    if not LEAST_S <= len(samples) / RATE <= MOST_S:
        return 0.0
    require("soundfile").write(target, samples, RATE, **MP3)
    return len(samples) / RATE


def collect(folder: Path, source: Path, game: Path | None, others: list[Path], spoken: int, seed: int) -> None:
    """Write the recordings of humans to train on, and the texts to speak."""
    random = np.random.Generator(np.random.PCG64(seed))
    train, choosing, test = split_prompts(source, seed)
    folder.mkdir(parents=True)
    lines: list[dict[str, object]] = []
    minutes = {"prompts": 0.0, "game": 0.0, "others": 0.0}
    for i, (text, samples) in enumerate(load_prompts(train)):
        if LEAST_S <= (seconds := len(samples) / RATE) <= MOST_S:
            minutes["prompts"] += seconds / 60
            write_audio(folder / f"{PROMPT}{i:04}.flac", samples)
            lines += COPIES * [{"audio": f"{PROMPT}{i:04}.flac", "text": text}]
    held = {text for text, _ in choosing + test}
    own = game_lines(game, held)
    for text, line in own:
        path = folder / f"game-{line.name}.mp3"
        path.write_bytes(line.mp3)
        if LEAST_S <= (seconds := len(load_audio(path)) / RATE) <= MOST_S:
            minutes["game"] += seconds / 60
            lines.append({"audio": path.name, "text": text})
        else:
            path.unlink()
    further = [one for each in others for one in other_recordings(each, held)]
    jobs = [(path, folder / f"other-{i:05}.mp3") for i, (_, path) in enumerate(further)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (text, _), (_, path), seconds in zip(further, jobs, pool.map(_shrink, jobs, chunksize=50), strict=True):
            if seconds:
                minutes["others"] += seconds / 60
                lines.append({"audio": path.name, "text": text})
    print({name: round(value, 1) for name, value in minutes.items()}, "minutes of humans", flush=True)
    long = [text for text, _ in train if len(text.split()) >= 2]
    texts = {
        PROMPT: [*READINGS * long, *recombine_sentences(long, held, spoken, random)],
        "": [*(text for text, _ in own), *speeches(spoken, random)],
    }
    (folder / TEXTS).write_text(json.dumps(texts), encoding="utf-8")
    (folder / RECORDED).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make(folder: Path, flite: Path | None, seed: int) -> None:
    """Speak the texts, every second one with flite, if it is there; write the manifest."""
    random = np.random.Generator(np.random.PCG64(seed))
    groups: dict[str, list[str]] = json.loads((folder / TEXTS).read_text(encoding="utf-8"))
    named = ((f"{kind}spoken-{i:05}.wav", text) for kind, texts in groups.items() for i, text in enumerate(texts))
    jobs = [
        _Job(folder / name, text, float(random.random()), int(random.integers(1 << 16)), flite if i % 2 else None)
        for i, (name, text) in enumerate(named)
    ]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        said = [json.dumps(line) + "\n" for line in pool.map(_speak, jobs, chunksize=20) if line]
    print(len(said), "sentences spoken", flush=True)
    human = (folder / RECORDED).read_text(encoding="utf-8")
    (folder / MANIFEST).write_text(human + "".join(said), encoding="utf-8")


class _Job(NamedTuple):
    """A sentence to speak with flite, or with espeak-ng; speed and pitch, 0 to 1, and voice are drawn."""

    path: Path
    text: str
    speed: float
    voice: int
    flite: Path | None


def _speak(job: _Job) -> dict[str, object] | None:
    """The manifest's line of a spoken sentence; None if it is too long, or its words are not those of the text."""
    if job.flite is not None:
        _speak_flite(job.flite, job)
        samples, words = load_audio(job.path).numpy(), []
    else:
        voice, speed = synth.VOICES[job.voice % len(synth.VOICES)], 140 + round(60 * job.speed)
        said = synth.speak(job.text, voice, speed, 30 + job.voice // 61 % 40)
        samples, words = said.samples, [(round(a, 4), round(b, 4)) for a, b in said.words]
        if len(words) != len(job.text.split()):
            return None
        write_audio(job.path, samples)
    if not LEAST_S <= len(samples) / 16000 <= MOST_S:
        return None
    return {"audio": job.path.name, "text": job.text, "words": words}


def _speak_flite(folder: Path, job: _Job) -> None:
    (libraries,) = (path.parent for path in folder.rglob("libflite.so.1"))
    voice = FLITE_VOICES[job.voice % len(FLITE_VOICES)]
    command = [
        *(str(folder / "usr/bin/flite"), "-voice", voice, "-t", job.text, "-o", str(job.path)),
        *("--setf", f"duration_stretch={0.8 + 0.4 * job.speed:.3f}"),
    ]
    subprocess.run(command, check=True, env={**os.environ, "LD_LIBRARY_PATH": str(libraries)}, timeout=60)
