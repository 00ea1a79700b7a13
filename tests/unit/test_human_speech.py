"""benchmarks/harness/human_speech.py on made folders: what is read, and that nothing held out is."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

import speech_human
from colonnade.config.speech import SPEECH_PRESETS
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import MANIFEST
from colonnade.speech.pcm import write_audio
from harness import human_speech

pytest.importorskip("soundfile")


def recording(path: Path, seconds: float = 0.5) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_audio(path, 0.1 * np.sin(np.arange(round(16000 * seconds)) / 5).astype(np.float32))


def test_lj_speech_and_kaldi_layouts_are_read(tmp_path):
    lj, kaldi = tmp_path / "a" / "LJSpeech-1.1", tmp_path / "b"
    for name in ("LJ1", "LJ2", "LJ3"):
        recording(lj / "wavs" / f"{name}.wav")
    rows = ["LJ1|Dr. Who?|Doctor Who?", "LJ2|In 1842|In 1842", "LJ3|Held out|Held out", "LJ4|No file|No file"]
    (lj / "metadata.csv").write_text("\n".join(rows))
    recording(kaldi / "WAVE" / "1.WAV")
    (kaldi / "train").mkdir()
    (kaldi / "train" / "wav.scp").write_text("x\tWAVE/1.WAV\n")
    (kaldi / "train" / "text").write_text("x\tWE CALL IT BEAR\n")
    held = {"held out"}
    found = [(text, path.name) for text, path in human_speech.other_recordings(tmp_path / "a", held)]
    assert found == [("doctor who", "LJ1.wav")]
    assert human_speech.other_recordings(kaldi, held) == [("we call it bear", kaldi / "WAVE" / "1.WAV")]


def test_no_text_is_in_two_parts_of_the_prompts(tmp_path):
    texts = [f"please press {a} {b}" for a, b in itertools.product(("one", "two", "three"), range(60))]
    texts += [*texts[:40], "yes"]  # some twice
    for i in range(len(texts)):
        (tmp_path / f"p{i}.g722").touch()
    (tmp_path / "core-sounds-en.txt").write_text("\n".join(f"p{i}: {text}" for i, text in enumerate(texts)))
    train, choosing, test = ({text for text, _ in part} for part in human_speech.split_prompts(tmp_path, 0))
    assert not train & test and not train & choosing and not test & choosing
    assert "yes" in train
    assert len(human_speech.split_prompts(tmp_path, 0).test) == human_speech.HELD_OUT


def test_recombined_sentences_have_known_pairs_only(tmp_path):
    texts = ["press one to hear it again", "press two to hear it now", "please hold to hear it again"]
    pairs = {pair for text in texts for pair in itertools.pairwise(["", *text.split(), ""])}
    held = {"press two to hear it again"}
    found = human_speech.recombine_sentences(texts, held, 20, np.random.default_rng(0))
    assert len(found) == 20 and not held & set(found)
    assert all(pair in pairs for text in found for pair in itertools.pairwise(["", *text.split(), ""]))


def test_long_recordings_are_left_out(tmp_path):
    recording(tmp_path / "a.wav", 1.0)
    recording(tmp_path / "b.wav", human_speech.MOST_S + 1)
    assert human_speech._shrink((tmp_path / "a.wav", tmp_path / "a.mp3")) == 1.0
    assert human_speech._shrink((tmp_path / "b.wav", tmp_path / "b.mp3")) == 0.0
    assert (tmp_path / "a.mp3").stat().st_size < 8000
    assert not (tmp_path / "b.mp3").exists()


def test_an_item_ends_after_quiet_and_whatever_follows():
    loud = 0.1 * np.sin(np.arange(16000 * 4) / 5).astype(np.float32)
    quiet = np.zeros(16000 // 4, np.float32)
    x = np.concatenate([loud[: 16000 * 2], quiet, loud, quiet, loud[:8000]])
    whole = speech_human.items(x, 0.2)
    assert np.array_equal(np.concatenate(whole), x)
    assert [len(part) for part in whole] == [16000 * 6 + 4000 + 3200, 800 + 8000]  # no cut before LEAST_ITEM_S
    assert speech_human.items(x[: 16000 * 6 + 4000 + 3300], 0.2)[0].size == whole[0].size
    assert [len(part) for part in speech_human.items(x, math.inf)] == [len(x)]


def test_silent_prompts_are_left_out(monkeypatch):
    monkeypatch.setattr(human_speech, "g722", lambda path: np.full(100, float(path.name), np.float32))
    found = human_speech.load_prompts([("two seconds of silence", Path("0.001")), ("please hold", Path("0.5"))])
    assert [text for text, _ in found] == ["please hold"]


def test_the_second_part_reads_prompts_only(tmp_path):
    names = [f"{human_speech.PROMPT}0001.wav", "game-A.wav", f"{human_speech.PROMPT}spoken-00000.wav"]
    for name in names:
        recording(tmp_path / name)
    lines = [json.dumps({"audio": name, "text": f"text {'abc'[i]}"}) for i, name in enumerate(names)]
    (tmp_path / MANIFEST).write_text("\n".join(lines))
    corpus = Corpus(tmp_path, SPEECH_PRESETS["speech-tiny"], "train")
    part = speech_human._of_prompts(corpus)
    assert [one.audio for one in part.recordings] == [names[0], names[2]]
    assert [len(part.samples), len(part.labels), len(part.letters), len(corpus.samples)] == [2, 2, 2, 3]
