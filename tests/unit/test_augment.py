"""Augmentation: rooms, codecs, masks and crops keep lengths, times and loudness; training with them is reproducible."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError
from colonnade.speech import augment, fit
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import MANIFEST, Recording
from colonnade.speech.pcm import write_audio

SEEING = SpeechConfig(layers=1, width=16, heads=2, ffn_width=24, joint_width=12, mels=10, picture=16)


def tone(samples: int = 16000) -> np.ndarray:
    """A sound that begins at a quarter of its length."""
    sound = 0.3 * np.sin(np.arange(samples) / 5) * np.hanning(samples)
    sound[: samples // 4] = 0
    return sound.astype(np.float32)


def test_a_room_keeps_loudness_and_begins_no_earlier():
    sound = tone()
    heard = augment.add_reverberation(sound, np.random.default_rng(0))
    assert heard.shape == sound.shape
    assert np.sum(heard**2) == pytest.approx(np.sum(sound**2), rel=1e-3)
    assert np.abs(heard[:4000]).max() < 1e-5
    assert np.abs(heard - sound).max() > 0.01
    assert not augment.add_reverberation(np.zeros(100, np.float32), np.random.default_rng(0)).any()


@pytest.mark.parametrize("name", augment.CODECS)
def test_codecs_keep_the_sound_where_it_is(name):
    pytest.importorskip("av")
    pytest.importorskip("soxr")
    sound = tone(20001)
    heard = augment.codec(sound, name)
    assert heard.shape == sound.shape
    shifts = range(-60, 61)
    same = [float(np.dot(np.roll(heard, -shift), sound)) for shift in shifts]
    assert abs(list(shifts)[int(np.argmax(same))]) <= 40  # 2.5 ms
    assert max(same) / np.sqrt(np.sum(sound**2) * np.sum(heard**2)) > 0.98
    assert not np.array_equal(heard, sound)
    assert len(augment.codec(sound[:0], name)) == 0
    assert np.abs(augment.codec(5 * sound, name)).max() > 1  # louder than a file can be


def test_an_unknown_codec_is_refused():
    with pytest.raises(DataError, match="use one of pcm_mulaw"):
        augment.codec(tone(), "mp9")


def test_masks_are_short_and_narrow():
    random, sound = np.random.default_rng(1), np.ones(16000, np.float32)
    for _ in range(20):
        masked = augment.mask_sound(sound, random)
        assert (masked == 0).sum() <= 2 * 3200
        spectra = torch.randn(9, 120)
        bands = augment.mask_bands(spectra, 10, random)
        changed = (bands != spectra).view(9, 12, 10)
        assert bool((changed == changed[0, 0]).all()), "the same bands in all spectra"
        assert int(changed[0, 0].sum()) <= 2 * 2
    assert len(augment.mask_sound(sound[:0], random)) == 0
    assert sound.all(), "the recording itself does not change"


def test_pictures_are_cut_alike():
    pictures = torch.arange(3 * 18 * 18.0).view(3, 18, 18)
    cut = augment.crop_pictures(pictures, 16, np.random.default_rng(0))
    assert cut.shape == (3, 16, 16)
    assert len({float(x) for x in (cut[1:] - cut[:-1]).flatten()}) == 1


@pytest.fixture
def corpus(tmp_path):
    """Three recordings with phonemes, and a folder with noise."""
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    pytest.importorskip("av")
    lines = []
    for i in range(3):
        write_audio(tmp_path / f"{i}.wav", tone(8000 + 900 * i))
        one = Recording(
            audio=f"{i}.wav", text="a b", phonemes=((0.1, "a"), (0.3, "b")), words=((0.1, 0.3), (0.3, 0.45))
        )
        lines.append(one.model_dump_json())
    (tmp_path / MANIFEST).write_text("\n".join(lines))
    (tmp_path / "noise").mkdir()
    write_audio(tmp_path / "noise" / "hum.wav", tone(3000))
    return tmp_path


def test_augmented_batches_are_functions_of_the_seed(corpus, monkeypatch):
    settings = fit.FitSettings(batch=3, clean=0, augment=True, noises=corpus / "noise")
    data = Corpus(corpus, SEEING, "train", settings.noises)
    plain = data.train_batch(range(3), np.random.default_rng(0), noise=False)
    for step in range(4):
        first, again = (fit.train_batch(data, settings, step) for _ in range(2))
        assert first.lengths == again.lengths
        assert torch.equal(first.frames.sound_TA, again.frames.sound_TA)
        assert torch.equal(first.letters_P, again.letters_P)
    monkeypatch.setattr("colonnade.speech.corpus.SPEEDS", (1.0,))
    whole = data.train_batch(range(3), np.random.default_rng(3), noise=True, augment=True)
    assert whole.lengths == plain.lengths
    assert torch.equal(whole.letters_P, plain.letters_P), "times do not move"
    assert whole.frames.sound_TA.shape == plain.frames.sound_TA.shape


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speeds_move_sound_pictures_and_times_together(corpus, monkeypatch, speed):
    """A batch of augmented recordings at a speed is one of recordings made at it."""
    monkeypatch.setattr("colonnade.speech.corpus.SPEEDS", (speed,))
    for name in ("augment_sound", "mask_sound"):
        monkeypatch.setattr(f"colonnade.speech.corpus.{name}", lambda samples, _: samples)
    monkeypatch.setattr("colonnade.speech.corpus.mask_bands", lambda bands, *_: bands)
    data = Corpus(corpus, SEEING, "train")
    found = data.train_batch(range(3), np.random.default_rng(1), noise=False, augment=True)
    lines = []
    for i, one in enumerate(data.recordings):
        changed = augment.change_speed(data.samples[i].astype(np.float32) / 32768, speed)
        assert len(changed) == round(len(data.samples[i]) / speed)
        write_audio(corpus / f"fast-{i}.wav", changed)
        words = tuple((start / speed, end / speed) for start, end in one.words)
        phonemes = tuple((start / speed, name) for start, name in one.phonemes)
        update = {"audio": f"fast-{i}.wav", "words": words, "phonemes": phonemes}
        lines.append(one.model_copy(update=update).model_dump_json())
    (corpus / MANIFEST).write_text("\n".join(lines))
    monkeypatch.setattr("colonnade.speech.corpus.SPEEDS", (1.0,))
    made = Corpus(corpus, SEEING, "train").train_batch(range(3), np.random.default_rng(1), noise=False, augment=True)
    assert found.lengths == made.lengths
    assert torch.equal(found.letters_P, made.letters_P)
    assert torch.equal(found.frames.seen_T, made.frames.seen_T)
    assert torch.equal(found.frames.pictures_seen, made.frames.pictures_seen)
    heard = found.frames.heard_T
    difference = (found.frames.sound_TA - made.frames.sound_TA)[heard].abs()
    assert heard.any()
    assert difference.mean() < 0.05, "the files are of 16 bits"


def test_speed_raises_a_tone():
    fast = augment.change_speed(tone(16000), 1.1)
    assert len(fast) == round(16000 / 1.1)
    spectra = [np.abs(np.fft.rfft(x[:14000])) for x in (tone(16000), fast)]
    low, high = (int(x.argmax()) for x in spectra)
    assert high == pytest.approx(1.1 * low, abs=2)
    assert not len(augment.change_speed(tone(0), 1.1))


def test_batches_prepared_ahead_are_those_of_their_steps(corpus, monkeypatch):
    """As for a GPU, whole and in order; augmented without noise from step ``clean`` on."""
    monkeypatch.setattr(fit, "PREFETCH_PROCESSES", 2)
    settings = fit.FitSettings(steps=9, batch=3, clean=4, augment=True, noise=False)
    data = Corpus(corpus, SEEING, "train")
    prepared = fit._batches(data, settings, range(2, 9), gpu=True)
    for step, ((ahead,), plain) in enumerate(
        zip(prepared, fit._batches(data, settings._replace(augment=False), range(2, 9), gpu=True), strict=True), 2
    ):
        batch, own = ahead(), fit.train_batch(data, settings, step, parts=1)
        assert len(batch.lengths) == 3
        assert torch.equal(batch.frames.sound_TA, own.frames.sound_TA)
        assert torch.equal(batch.letters_P, own.letters_P)
        assert torch.equal(batch.frames.sound_TA, plain[0]().frames.sound_TA) == (step < 4)
    next(unfinished := fit._batches(data, settings, range(9), gpu=True))
    unfinished.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_does_not_end_the_workers(corpus, number, monkeypatch):
    """It reaches them too, if it is sent to the process group, and the training process still needs its next batch."""
    monkeypatch.setattr(fit, "PREFETCH_PROCESSES", 2)
    data, settings = Corpus(corpus, SEEING, "train"), fit.FitSettings(steps=9, batch=3)
    others = multiprocessing.active_children()  # of other tests
    prepared = fit._batches(data, settings, range(9), gpu=True)
    next(prepared)
    workers = [each for each in multiprocessing.active_children() if each not in others]
    assert workers
    for worker in workers:
        os.kill(worker.pid, number)
    assert len(list(prepared)) == 8


def test_noise_of_a_folder_has_the_ratio(corpus):
    data = Corpus(corpus, SEEING, "train", corpus / "noise")
    clean = data.noisy(0, None, np.random.default_rng(0))
    added = data.noisy(0, 0.0, np.random.default_rng(0), kind=3) - clean
    assert np.mean(added**2) == pytest.approx(np.mean(clean**2), rel=1e-3)
    (corpus / "empty").mkdir()
    with pytest.raises(DataError, match="has no files"):
        Corpus(corpus, SEEING, "train", corpus / "empty")


def test_times_of_other_words_are_refused(corpus):
    lines = (corpus / MANIFEST).read_text().splitlines()
    wrong = Recording.model_validate_json(lines[0]).model_copy(update={"words": ((0.1, 0.3),)})
    (corpus / MANIFEST).write_text("\n".join([*lines[1:], wrong.model_dump_json()]))
    with pytest.raises(DataError, match=r"0\.wav has 1 times of words and 2 words"):
        Corpus(corpus, SEEING, "train")


def test_training_with_augmentation_runs(corpus, tmp_path):
    settings = fit.FitSettings(steps=3, batch=3, warmup=1, clean=1, augment=True, noises=corpus / "noise")
    losses: list[float] = []
    fit.fit(SEEING, corpus, tmp_path / "run", settings, lambda _, loss: losses.append(loss))
    assert len(losses) == 3
    assert all(np.isfinite(losses))
