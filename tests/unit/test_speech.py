"""Recognisers: front ends, streams, synthetic speech and mouths, noise, training, resume, command line."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from colonnade.checkpoint.atomic_folder import list_steps
from colonnade.cli import main
from colonnade.config import Plan
from colonnade.config.speech import SPEECH_PRESETS, SpeechConfig
from colonnade.errors import CapacityError, CheckpointError, ConfigError, DataError, Interrupted, PlanError
from colonnade.parallel.axis import SOLO, Axes, Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import WHOLE, local_part, placements
from colonnade.speech import features, fit, mix, mouth
from colonnade.speech.audio import load_audio
from colonnade.speech.data import Recording, read_manifest, word_errors
from colonnade.speech.front_end import Frames
from colonnade.speech.letter_lm import Fusion, LetterModel
from colonnade.speech.listen import FRONT_FRAMES, MAX_WAITING_PICTURES, StreamingRecogniser, listen
from colonnade.speech.model import SpeechModel
from colonnade.speech.pcm import write_audio
from colonnade.train.training_state import RunLock
from tests.worlds import assert_same, run

TINY = SpeechConfig(layers=2, width=16, heads=2, ffn_width=24, joint_width=12, mels=10, memory=1, segment=4, left=6)
SEEING = TINY.replace(picture=16)


def sound(seconds: float, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.1, int(seconds * 16000)))


def talkative(config: SpeechConfig, seed: int = 0) -> SpeechModel:
    """A random model in float64 that emits labels now and then."""
    model = SpeechModel(config, seed, torch.float64).requires_grad_(False).eval()
    model.joint.bias[0] += 2.0
    model.joint.weight *= 6
    return model


@pytest.mark.parametrize("history", [0, 3])
def test_spectra_of_streams_equal_those_of_the_whole(history):
    own, samples = features.Features(TINY.replace(audio_history=history), torch.float64), sound(0.93)
    samples_before = own.before
    whole = own(torch.cat((torch.zeros(samples_before).double(), samples)))
    for cut in (1, 37, 640, 5000):
        stream = features.FrameStream(own)
        runs = [stream.push(piece) for piece in samples.split(cut)]
        assert_same(torch.cat(runs), whole)
        assert len(stream.tail) < samples_before + features.FRAME
    assert whole.shape == (23, (history + 4) * 10)
    assert_same(whole[1:, : history * 10], whole[:-1, 40:])
    assert len(stream.end()) == 1
    assert len(features.FrameStream(own).end()) == 0


def test_a_tone_is_in_its_filter():
    filters = features.mel_filters(40)
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(4000).double() / 16000)
    spectrum = features.log_mel(tone, filters)[1, :40]
    peak = filters[round(1000 / 8000 * 256)].argmax()
    assert int(spectrum.argmax()) == int(peak)


@pytest.mark.parametrize("config", [TINY, SEEING, TINY.replace(memory=0, right=0, left=0)], ids=["m1", "av", "m0"])
def test_streams_give_the_text_of_whole_recordings(config):
    """Streams that join late, hear in parts of their own, see only some pictures, and end at different times."""
    model = talkative(config)
    inputs = [sound(1.7, 1), sound(0.4, 2), sound(2.3, 3), sound(0.02, 4)]
    pictures = [None] * 4
    if config.picture:
        pictures = [torch.rand(n, 16, 16, dtype=torch.float64) for n in (43, 4, 20, 0)]
    expected = [model.recognise(x, p) for x, p in zip(inputs, pictures, strict=True)]
    assert sum(map(len, expected)) > 10, "nothing was said, so nothing is compared"
    listeners = StreamingRecogniser(model, 3)
    texts = dict.fromkeys(range(4), "")
    waiting, open_now = [3, 2, 1, 0], {}
    while waiting or open_now:
        while waiting and len(open_now) < 3:
            i = waiting.pop()
            stream = listeners.open()
            open_now[stream] = [i, 0]
            if pictures[i] is not None:
                listeners.push(stream, inputs[i][:0], pictures[i])
        for stream, (i, place) in list(open_now.items()):
            cut = 1500 + 700 * i
            listeners.push(stream, inputs[i][place : place + cut])
            open_now[stream][1] += cut
            if place + cut >= len(inputs[i]):
                listeners.end(stream)
        while found := listeners.step():
            for stream, text in found.items():
                texts[open_now[stream][0]] += text
        for stream, (i, place) in list(open_now.items()):
            if place >= len(inputs[i]):
                listeners.close(stream)
                del open_now[stream]
    assert [texts[i] for i in range(4)] == expected


def test_the_front_end_computes_frames_of_all_streams_together(monkeypatch):
    """Eight frames per stream, fewer only where they complete a segment; no stream keeps more."""
    model, computed = talkative(SEEING.replace(segment=16)), list[int]()
    front_end = model.front_end.forward

    def counted(frames: Frames) -> torch.Tensor:
        computed.append(len(frames.sound_TA))
        return front_end(frames)

    monkeypatch.setattr(model.front_end, "forward", counted)
    listeners = StreamingRecogniser(model, 2)
    opened = [listeners.open() for _ in range(2)]
    found = dict.fromkeys(opened, "")
    heard = {stream: sound(2.0, stream) for stream in opened}
    pictures = torch.rand(50, 16, 16, dtype=torch.float64)
    for t in range(50):
        for stream in opened:
            listeners.add_picture(stream, t, pictures[t])
            listeners.push(stream, heard[stream][640 * t : 640 * (t + 1)])
        for stream, text in listeners.step().items():
            found[stream] += text
        assert max(own.uncomputed for own in listeners.streams.values()) < FRONT_FRAMES
    # A segment of 16 frames and the 2 after it is complete with frames 18, 34 and 50.
    assert computed == [16, 16, 4, 16, 16, 16, 16]
    for stream in opened:
        listeners.end(stream)
        while rest := listeners.step():
            found |= {i: found[i] + text for i, text in rest.items()}
        assert found[stream] == model.recognise(heard[stream], pictures)
    assert any(found.values())


def test_deltas_come_before_the_end():
    model, samples = talkative(TINY), sound(2.0, 5)
    parts = list(listen(model, samples.split(900)))
    assert "".join(parts) == model.recognise(samples)
    assert len(parts) > 2
    assert list(listen(model, [])) == []


@pytest.mark.parametrize("right", [0, 2])
def test_a_beam_in_streams_gives_the_text_of_whole_recordings(right):
    """Streams that share steps, join a slot that was used, and end in the middle of a segment or at its end."""
    model = talkative(TINY.replace(right=right))
    inputs = [sound(1.7, 1), sound(0.02, 2), sound(0.32, 3), sound(2.3, 4)]
    expected = [model.recognise(x, beam=4) for x in inputs]
    assert sum(map(len, expected)) > 10, "nothing was said, so nothing is compared"
    assert expected != [model.recognise(x) for x in inputs], "greedy search gives the same, so nothing is tested"
    listeners = StreamingRecogniser(model, 2, beam=4)
    for pair in ((0, 1), (2, 3)):
        texts = {listeners.open(): i for i in pair}
        found = dict.fromkeys(texts, "")
        for part in range(0, 40_000, 900):
            for stream, i in texts.items():
                listeners.push(stream, inputs[i][part : part + 900])
            while new := listeners.step():
                for stream, text in new.items():
                    found[stream] += text
        early = dict(found)
        for stream in texts:
            listeners.end(stream)
            listeners.end(stream)  # a second end adds nothing
        while new := listeners.step():
            for stream, text in new.items():
                found[stream] += text
        assert {i: found[stream] for stream, i in texts.items()} == {i: expected[i] for i in pair}
        assert any(early.values()), "no delta came before the end"
        for stream in texts:
            listeners.close(stream)
    assert "".join(listen(model, inputs[0].split(900), beam=4)) == expected[0]
    with pytest.raises(DataError, match="beam is 0"):
        StreamingRecogniser(model, beam=0)


def test_a_language_model_in_streams_gives_the_text_of_whole_recordings():
    model, samples = talkative(TINY), sound(1.9, 7)
    fusion = Fusion((LetterModel(model.config, ["a bad cab", "dab a cab"]),), 3.0)
    plain, text = (model.recognise(samples, beam=4, fusion=own) for own in (None, fusion))
    assert text != plain, "the language model changes nothing, so nothing is compared"
    assert "".join(listen(model, samples.split(900), beam=4, fusion=fusion)) == text
    with pytest.raises(ConfigError, match="greedy search does not use a language model"):
        model.recognise(samples, fusion=fusion)


MANY = TINY.replace(segments=(2, 7), lookaheads=(0, 3))


def test_streams_choose_among_trained_sizes():
    """Streams of all sizes at once give the text of the whole recording with their own sizes."""
    model, samples = talkative(MANY), sound(2.0, 7)
    pairs = [(S, R) for S in (2, 4, 7) for R in (0, 2, 3)]
    assert [(own.segment, own.right) for own in model.all_sizes] == pairs
    listeners = StreamingRecogniser(model, len(pairs))
    streams = {listeners.open(segment, lookahead): (segment, lookahead) for segment, lookahead in pairs}
    texts = dict.fromkeys(streams, "")
    for part in [*samples.split(1500), None]:
        for stream in streams:
            if part is None:
                listeners.end(stream)
            else:
                listeners.push(stream, part)
        while found := listeners.step():
            for stream, text in found.items():
                texts[stream] += text
    expected = {pair: model.recognise(samples, sizes=model.choose_segments(*pair)) for pair in pairs}
    assert {streams[stream]: text for stream, text in texts.items()} == expected
    assert len(set(expected.values())) > 1, "sizes make no difference, so nothing is compared"
    assert "".join(listen(model, samples.split(900), segment=7, lookahead=0)) == expected[7, 0]
    assert "".join(listen(model, samples.split(900), lookahead=3)) == expected[4, 3]
    assert model.recognise(samples) == expected[4, 2]


@pytest.mark.parametrize(("segment", "lookahead"), [(3, None), (None, 1), (0, 0), (7, -1)])
def test_sizes_that_were_not_trained_are_refused(segment, lookahead):
    listeners = StreamingRecogniser(talkative(MANY))
    with pytest.raises(ConfigError, match=r"segments of 2, 4, 7 and lookaheads of 0, 2, 3 frames of 40 ms; use one"):
        listeners.open(segment, lookahead)
    assert listeners.streams == {}
    assert len(listeners.pool.cache.free) == 1


def test_a_training_step_draws_its_sizes():
    model, settings = SpeechModel(MANY), fit.FitSettings()
    drawn = [fit.step_sizes(model, settings, step) for step in range(300)]
    assert drawn == [fit.step_sizes(model, settings, step) for step in range(300)]
    counts = [drawn.count(own) for own in model.all_sizes]
    assert min(counts) > 15
    assert sum(counts) == 300
    only = SpeechModel(TINY)
    assert fit.step_sizes(only, settings, 5) == only.sizes


def test_late_and_lost_pictures():
    """A picture that arrives after its frame is dropped; later ones keep their frames."""
    model, samples = talkative(SEEING), sound(1.6, 6)
    pictures = torch.rand(40, 16, 16, dtype=torch.float64)
    listeners = StreamingRecogniser(model)
    stream = listeners.open()
    listeners.push(stream, samples[: 640 * 10])
    listeners.push(stream, samples[640 * 10 : 640 * 20], pictures[:20])
    listeners.push(stream, samples[640 * 20 :])
    listeners.end(stream)
    x = listeners.pool.waiting[stream]
    mel = model.features(samples)
    seen = (torch.arange(40) >= 10) & (torch.arange(40) < 20)
    stacked = torch.stack([torch.cat((torch.zeros(4, 16, 16).double(), pictures[10:20]))[i : i + 5] for i in range(10)])
    assert_same(x, model.front_end(Frames(mel, None, stacked, seen)))
    assert listeners.step()[stream] is not None
    with pytest.raises(DataError, match="ahead of the sound"):
        listeners.push(stream, samples[:0], pictures[:1].expand(MAX_WAITING_PICTURES + 50, 16, 16))


def test_what_listeners_refuse():
    model = talkative(TINY)
    listeners = StreamingRecogniser(model)
    stream = listeners.open()
    with pytest.raises(CapacityError, match="1 streams"):
        listeners.open()
    with pytest.raises(DataError, match="NaN"):
        listeners.push(stream, torch.full((10,), torch.nan))
    with pytest.raises(DataError, match="one channel"):
        listeners.push(stream, torch.zeros(10, 2))
    with pytest.raises(DataError, match="no pictures"):
        listeners.push(stream, sound(0.1), torch.zeros(1, 16, 16))
    with pytest.raises(DataError, match="not open"):
        listeners.push(5, sound(0.1))
    seeing = StreamingRecogniser(talkative(SEEING))
    stream = seeing.open()
    for samples, picture in ((torch.full((10,), torch.nan), 0.0), (sound(0.1), torch.nan)):
        with pytest.raises(DataError, match="NaN"):
            seeing.push(stream, samples, torch.full((1, 16, 16), picture))
    assert (seeing.streams[stream].made, seeing.streams[stream].received) == (0, 0)
    assert model.recognise(torch.zeros(0)) == ""


def test_mouths_follow_the_phonemes():
    random = np.random.default_rng(0)
    phonemes = [mouth.Phoneme(0.0, "m"), mouth.Phoneme(0.4, "'a:"), mouth.Phoneme(0.8, "m"), mouth.Phoneme(1.2, "_")]
    pictures = mouth.draw_mouths(phonemes, 30, 24, random)
    assert pictures.shape == (30, 24, 24)
    assert pictures.dtype == np.float32
    light = pictures[:, 8:16, 8:16].mean((1, 2))
    assert light[15] < 0.8 * light[5]  # an open mouth is dark inside
    assert len(mouth.draw_mouths([], 3, 24, random)) == 3


def test_mixing_has_the_ratio():
    random = np.random.default_rng(0)
    signal = random.normal(0, 0.3, 8000).astype(np.float32)
    for noise in (mix.white(900, random), mix.pink(8000, random), mix.babble([signal[::-1], signal], 8000, random)):
        added = mix.mix(signal, noise, -5.0) - signal
        assert abs(10 * np.log10(np.mean(signal**2) / np.mean(added**2)) + 5) < 0.01
    assert np.array_equal(mix.mix(signal, np.zeros(5, np.float32), 0.0), signal)
    with pytest.raises(DataError, match="0 samples of noise"):
        mix.mix(signal, signal[:0], 0.0)
    with pytest.raises(DataError, match="babble needs"):
        mix.babble([], 10, random)
    power = np.abs(np.fft.rfft(mix.pink(1 << 16, random))) ** 2
    assert abs(np.log2(power[1000:2000].mean() / power[2000:4000].mean()) - 1) < 0.1


@pytest.mark.parametrize(
    ("a", "b", "errors"), [("a b c", "a b c", 0), ("a b c", "a c", 1), ("a", "b c", 2), ("", "x", 1), ("x y", "", 2)]
)
def test_word_errors(a, b, errors):
    assert word_errors(a, b) == errors


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A folder of twelve sentences, made by the command line."""
    pytest.importorskip("espeakng_loader")
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    folder = tmp_path_factory.mktemp("speech") / "data"
    main(["speech", "data", "--out", str(folder), "--train", "9", "--test", "3"])
    return folder


def test_spoken_sentences(spoken):
    recordings = read_manifest(spoken)
    test, train = read_manifest(spoken, "test"), read_manifest(spoken, "train")
    assert (len(test), len(train), len(recordings)) == (3, 9, 12)
    assert not {one.speaker for one in test} & {one.speaker for one in train}
    assert not {one.text for one in test} & {one.text for one in train}
    for one in recordings:
        assert len(one.text.split()) == 6
        times = [start for start, _ in one.phonemes]
        assert len(times) > 8
        assert times == sorted(times)
        assert len(one.words) == 6
        bounds = [t for word in one.words for t in word]
        assert bounds == sorted(bounds)
        assert times[0] - 0.1 < bounds[0] < bounds[-1] <= times[-1]
    with pytest.raises(DataError, match="exists"):
        fit_data(spoken)


def test_texts_and_voices_do_not_depend_on_the_workers(spoken, tmp_path):
    from colonnade.speech.data import make_data, read_manifest

    made = make_data(tmp_path / "data", 9, 3, workers=2)
    keys = ("audio", "text", "split", "speaker")
    assert made == read_manifest(tmp_path / "data")
    assert [[getattr(one, key) for key in keys] for one in made] == [
        [getattr(one, key) for key in keys] for one in read_manifest(spoken)
    ]
    with pytest.raises(DataError, match="0 workers"):
        make_data(tmp_path / "none", 9, 3, workers=0)


def fit_data(folder) -> None:
    from colonnade.speech.data import make_data

    make_data(folder, 1, 1)


def test_other_users_of_espeak_do_not_disturb():
    """A library that another module loads, terminates and initialises again has its own state."""
    import ctypes

    loader = pytest.importorskip("espeakng_loader")
    pytest.importorskip("soxr")
    from colonnade.speech.synth import speak

    text = "set red in g three again"
    samples_before = speak(text, "en-029+croak")
    other = ctypes.CDLL(loader.get_library_path())
    start = (2, 0, str(loader.get_data_path()).encode(), 0x8000)  # synchronous, without phoneme events
    data = text.encode()
    synth = (data, ctypes.c_size_t(len(data) + 1), 0, 1, 0, 1, None, None)
    assert other["espeak_Initialize"](*start) > 0
    other["espeak_SetSynthCallback"](None)
    other["espeak_Terminate"]()
    assert other["espeak_Synth"](*synth) != 0, "espeak-ng speaks although it was terminated, so nothing is tested"
    assert other["espeak_Initialize"](*start) > 0
    after = speak(text, "en-029+croak")
    assert [one.name for one in after.phonemes] == [one.name for one in samples_before.phonemes]
    assert abs(len(after.samples) - len(samples_before.samples)) < 0.01 * len(samples_before.samples)
    assert other["espeak_Synth"](*synth) == 0, "speak() has terminated another user's library"
    other["espeak_Terminate"]()


def test_threads_speak_at_the_same_time():
    """The library has one voice and one callback, so calls wait for each other."""
    from concurrent.futures import ThreadPoolExecutor

    pytest.importorskip("espeakng_loader")
    pytest.importorskip("soxr")
    from colonnade.speech.synth import speak

    texts = ["bin blue at f two now", "no", "set red in g three again please soon"] * 8
    with ThreadPoolExecutor(6) as pool:
        spoken = list(pool.map(speak, texts))
    for text, one in zip(texts, spoken, strict=True):
        expected = speak(text)
        assert [each.name for each in one.phonemes] == [each.name for each in expected.phonemes]
        assert abs(len(one.samples) - len(expected.samples)) < 800  # 50 ms; the pause at the end varies


def test_hostile_manifests(tmp_path):
    with pytest.raises(DataError, match=r"no manifest\.jsonl"):
        read_manifest(tmp_path)
    path = tmp_path / "manifest.jsonl"
    good = Recording(audio="a.wav", text="x").model_dump_json()
    for line, problem in (("{", "line 2"), ('{"audio": "a.wav"}', "line 2"), ("\ufffd", "line 2")):
        path.write_text(f"{good}\n{line}\n")
        with pytest.raises(DataError, match=problem):
            read_manifest(tmp_path)
    for times, problem in (
        ('"words": [[NaN, 1]]', "finite number"), ('"words": [[0, 1], [0.5, Infinity]]', "finite number"),
        ('"words": [[-1, 0]]', "greater than or equal to 0"), ('"words": [[0, 1e300]]', "less than or equal to 14400"),
        ('"words": [[0.3, 0.1]]', "ends before it starts"), ('"phonemes": [[NaN, "s"]]', "finite number"),
    ):  # fmt: skip
        path.write_text(f'{good}\n{{"audio": "a.wav", "text": "x", {times}}}\n')
        with pytest.raises(DataError, match=rf"line 2: .*{problem}"):
            read_manifest(tmp_path)
    path.write_text(Recording(audio="../a.wav", text="x").model_dump_json())
    with pytest.raises(DataError, match="outside"):
        read_manifest(tmp_path)
    path.write_text(good)
    with pytest.raises(DataError, match="split test"):
        read_manifest(tmp_path, "test")


def test_times_and_names_that_recordings_do_not_have(tmp_path):
    """Words that are too short for a target, or after the end of a truncated file; a line separator in a text."""
    write_audio(tmp_path / "a.wav", np.zeros(8000, np.float32))
    lines = [
        Recording(audio="a.wav", text="so it", words=((0.0, 0.3), (0.3, 0.3))),
        Recording(audio="a.wav", text="so it", words=((0.1, 0.2), (60.0, 61.0)), speaker="a\u2028b"),
    ]
    (tmp_path / "manifest.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in lines), "utf-8")
    short, cut = fit.Corpus(tmp_path, TINY, "train").letters
    assert sorted(set(short.tolist())) == sorted({0, *TINY.labels("so ")})
    assert sorted(set(cut.tolist())) == sorted({0, *TINY.labels("so ")})
    with pytest.raises(DataError, match="File name too long"):
        load_audio(tmp_path / f"{'x' * 300}.wav")


def test_language_models_that_do_not_apply():
    model, texts = SpeechModel(TINY), ["so it is"]
    one = LetterModel(TINY, texts)
    fusion = Fusion((one, one), 0.0, (0.25, 0.75), 0.0)
    samples = torch.randn(8000, generator=torch.Generator().manual_seed(0))
    assert model.recognise(samples, beam=4, fusion=fusion) == model.recognise(samples, beam=4)
    for wrong in (
        fusion._replace(shares=(2.0, -1.0)), fusion._replace(shares=(1.0,)), fusion._replace(shares=(0.2, 0.2)),
        fusion._replace(shares=(float("nan"), 1.0)), Fusion(()), fusion._replace(weight=float("nan")),
        fusion._replace(weight=-1.0), fusion._replace(bonus=float("inf")),
        Fusion((LetterModel(TINY.replace(letters=TINY.letters[::-1]), texts),)),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            model.recognise(samples, beam=4, fusion=wrong)


def lrs3(folder, split: str, name: str, text: str, seconds: float = 0.5) -> None:
    """A film of LRS3's layout: sound and black pictures in MP4."""
    import av

    path = folder / split / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(text)
    with av.open(str(path.with_suffix(".mp4")), "w") as container:
        video = container.add_stream("mpeg4", rate=25)
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        audio = container.add_stream("aac", rate=16000)
        for _ in range(round(seconds * 25)):
            container.mux(video.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")))
        wave = 0.1 * np.sin(np.arange(round(seconds * 16000), dtype=np.float32) / 20)[None]
        frame = av.AudioFrame.from_ndarray(wave, "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(audio.encode(frame))
        for stream in (video, audio):
            container.mux(stream.encode())


TIMED = "Text:  IT'S SO\nConf:  4\n\nWORD START END ASDSCORE\nIT'S 0.08 0.20 6.1\nSO 0.20 0.40 5.8\n"


def test_the_layout_of_lrs3(tmp_path):
    pytest.importorskip("av")
    lrs3(tmp_path, "pretrain", "ann/00001", TIMED)
    lrs3(tmp_path, "trainval", "bob/00007", "Text:  HELLO THERE\nConf:  2\nRef:  x\n\nFRAME X Y W H\n000 0 0 0 0\n")
    lrs3(tmp_path, "test", "eve/00002", "Text:  SO\nConf:  5\n\nWORD START END ASDSCORE\nIT 0.0 0.1 1\nIS 0.1 0.2 1\n")
    recordings = read_manifest(tmp_path)
    assert [(one.audio, one.text, one.split, one.speaker, one.words) for one in recordings] == [
        ("pretrain/ann/00001.mp4", "it's so", "train", "ann", ((0.08, 0.2), (0.2, 0.4))),
        ("trainval/bob/00007.mp4", "hello there", "train", "bob", ()),
        ("test/eve/00002.mp4", "so", "test", "eve", ()),
    ]
    assert [one.text for one in read_manifest(tmp_path, "test")] == ["so"]
    checkpoint = fit.fit(TINY, tmp_path, tmp_path / "run", SETTINGS._replace(steps=1, batch=2, noise=False))
    assert SpeechModel.load(checkpoint).config == TINY
    corpus = fit.Corpus(tmp_path, TINY, "train")
    assert len(corpus.samples[0]) == pytest.approx(8000, abs=2048)  # AAC adds up to two frames
    assert int((corpus.letters[1] >= 0).sum()) == 0  # no word times
    assert int((corpus.letters[0] > 0).sum()) > 20
    with pytest.raises(DataError, match="mouths are drawn from phonemes"):
        fit.Corpus(tmp_path, SEEING, "train")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "00001.txt does not exist, but its video does"),
        ("Conf: 4\n", "0 lines that begin with Text:"),
        ("Text:\n", "an empty one"),
        ("Text: A\nText: B\n", "2 lines that begin with Text:"),
        ("Text: A\n\nWORD START END\nA zero one\n", "line 4: 'A zero one' has no word"),
        ("Text: A\n\nWORD START END\nA 0.1\n", "line 4: 'A 0.1' has no word"),
        ("Text: A\n\nWORD START END\nA 0.3 0.1\n", r"line 4: a word from 0\.3 s to 0\.1 s"),
        ("Text: A\n\nWORD START END\nA nan 1\n", "line 4: a word from nan s"),
    ],
)
def test_hostile_texts_of_lrs3(tmp_path, text, problem):
    film = tmp_path / "pretrain" / "ann" / "00001.mp4"
    film.parent.mkdir(parents=True)
    film.write_bytes(b"")
    if text is not None:
        film.with_suffix(".txt").write_text(text)
    with pytest.raises(DataError, match=problem):
        read_manifest(tmp_path)


def test_folders_without_films_and_letters_that_are_unknown(tmp_path):
    (tmp_path / "trainval").mkdir()
    with pytest.raises(DataError, match="no recordings; add some"):
        read_manifest(tmp_path)
    film = tmp_path / "trainval" / "ann" / "00001.mp4"
    film.parent.mkdir()
    film.write_bytes(b"no film")
    film.with_suffix(".txt").write_text("Text: IN 1990\n")
    with pytest.raises(DataError, match="'in 1990' has '0' and '1' and '9', and the recogniser's letters are"):
        fit.Corpus(tmp_path, TINY, "train")


SETTINGS = fit.FitSettings(steps=6, batch=3, warmup=2, save_every=3, clean=2)


def test_training_resumes_bit_for_bit(spoken, tmp_path):
    losses: list[float] = []
    whole = fit.fit(SEEING, spoken, tmp_path / "whole", SETTINGS, lambda _, loss: losses.append(loss))

    class Stop(Exception):
        pass

    def stop(step: int, _: float) -> None:
        if step == 4:
            raise Stop

    with pytest.raises(Stop):
        fit.fit(SEEING, spoken, tmp_path / "parts", SETTINGS, stop)
    resumed: list[float] = []
    parts = fit.fit(SEEING, spoken, tmp_path / "parts", SETTINGS, lambda _, loss: resumed.append(loss))
    assert resumed == losses[3:]
    rows = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == list(enumerate(losses, 1))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    with pytest.raises(CheckpointError, match="a different recogniser"):
        fit.fit(TINY, spoken, tmp_path / "parts", SETTINGS)
    with pytest.raises(ConfigError, match="above 0"):
        fit.fit(TINY, spoken, tmp_path / "none", SETTINGS._replace(batch=0))


def test_training_begins_with_another_recogniser(tmp_path):
    """Weights are copied where all shapes agree, whatever the segments; otherwise nothing begins."""
    SpeechModel(TINY, 3).save(tmp_path / "step-1")
    model = SpeechModel(TINY.replace(segment=5, segments=(2,)), 0)
    samples_before = {name: x.clone() for name, x in model.state_dict().items()}
    fit._start_from(model, tmp_path / "step-1")
    given = SpeechModel.load(tmp_path / "step-1").state_dict()
    assert all(torch.equal(x, given[name]) for name, x in model.state_dict().items())
    assert any(not torch.equal(x, samples_before[name]) for name, x in model.state_dict().items())
    for change in ({"width": 32}, {"letters": " abcdefghijklmnopqrstuvwxyz'"}, {"layers": 3}):
        with pytest.raises(ConfigError, match="other shapes or labels"):
            fit._start_from(SpeechModel(TINY.replace(**change)), tmp_path / "step-1")


def test_a_signal_ends_training_with_a_checkpoint(spoken, tmp_path):
    def stop(step: int, _: float) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        fit.fit(TINY, spoken, tmp_path / "run", SETTINGS, stop)
    assert [step for step, _ in list_steps(tmp_path / "run")] == [2]
    with RunLock(tmp_path / "run", SOLO), pytest.raises(CheckpointError, match="use"):
        fit.fit(TINY, spoken, tmp_path / "run", SETTINGS)


def test_an_epoch_has_each_recording_once():
    settings = fit.FitSettings(batch=4)
    places = [i for step in range(5) for i in fit.batch_indices(10, settings, step)]
    assert sorted(places[:10]) == list(range(10)) == sorted(places[10:])
    assert places[:10] != places[10:]


@pytest.mark.slow
def test_training_learns_sentences(spoken, tmp_path):
    """Nine clean sentences, most of the way to by heart."""
    settings = fit.FitSettings(steps=100, batch=9, lr=4e-3, warmup=10, save_every=500, noise=False)
    config = TINY.replace(width=48, heads=4, ffn_width=96, joint_width=64, mels=40, right=2)
    losses: list[float] = []
    fit.fit(config, spoken, tmp_path / "run", settings, lambda _, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


@pytest.mark.slow
def test_command_line(spoken, tmp_path, capsys):
    model = SpeechModel(TINY, 3)
    model.save(tmp_path / "step-1")
    one = read_manifest(spoken, "test")[0]
    main(["speech", "listen", str(tmp_path / "step-1"), str(spoken / one.audio)])
    heard = capsys.readouterr().out.rstrip("\n")
    assert heard == SpeechModel.load(tmp_path / "step-1").recognise(load_audio(spoken / one.audio))
    main(["speech", "listen", str(tmp_path / "step-1"), str(spoken / one.audio), "--segment", "4", "--lookahead", "2"])
    assert capsys.readouterr().out.rstrip("\n") == heard
    main(["speech", "listen", str(tmp_path / "step-1"), str(spoken / one.audio), "--beam", "3"])
    samples = load_audio(spoken / one.audio)
    beamed = SpeechModel.load(tmp_path / "step-1").recognise(samples, beam=3)
    assert capsys.readouterr().out.rstrip("\n") == beamed.rstrip("\n")
    main(["speech", "align", str(tmp_path / "step-1"), str(spoken / one.audio), one.text])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[3] for row in rows] == one.text.split()
    times = [float(x) for row in rows for x in row[:2]]
    assert times == sorted(times)
    for words, problem in (
        (["align", str(tmp_path / "step-1"), str(spoken / one.audio), "Ünknown"], "letters are"),
        (["align", str(tmp_path / "step-1"), str(spoken / one.audio), "long" * 200], "frames cannot hold"),
        (["listen", str(tmp_path / "nothing"), str(spoken / one.audio)], "does not exist"),
        (["listen", str(tmp_path / "step-1"), str(tmp_path / "none.wav")], "none.wav"),
        (["listen", str(tmp_path / "step-1"), str(spoken / one.audio), "--chunk_ms", "0"], "1 to 60,000"),
        (
            ["listen", str(tmp_path / "step-1"), str(spoken / one.audio), "--segment", "8"],
            "segments of 4 and lookaheads",
        ),
        (["listen", str(tmp_path / "step-1"), str(spoken / one.audio), "--beam", "0"], "beam is 0; use at least 1"),
        (["serve", str(tmp_path / "step-1"), "--beam", "-1"], "beam is -1; use at least 1"),
        (["serve", str(tmp_path / "step-1"), "--lookahead", "1"], "segments of 4 and lookaheads of 2"),
        (["train", "--data", str(spoken), "--run", str(tmp_path / "r"), "--segments", "0"], "segments"),
        (["train", "--data", str(tmp_path), "--run", str(tmp_path / "r")], "no manifest"),
    ):
        with pytest.raises(SystemExit):
            main(["speech", *words])
        assert problem in " ".join(capsys.readouterr().err.split())


def test_training_without_recordings_to_test_on(spoken, tmp_path, capsys, monkeypatch):
    """The checkpoint is there; what is wrong with test recordings shows before the training."""
    from colonnade.config import speech

    monkeypatch.setitem(speech.SPEECH_PRESETS, "speech-tiny", TINY)
    shutil.copytree(spoken, tmp_path / "data")
    manifest = tmp_path / "data" / "manifest.jsonl"
    words = ["speech", "train", "--data", str(tmp_path / "data"), "--batch", "2", "--steps", "1", "--run"]
    manifest.write_text(manifest.read_text().replace(read_manifest(spoken, "test")[0].text, "IN 1990"))
    with pytest.raises(SystemExit):
        main([*words, str(tmp_path / "refused")])
    assert "the recogniser's letters are" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "refused").exists()
    train = [one.model_dump_json() for one in read_manifest(spoken, "train")]
    manifest.write_text("\n".join(train))
    main([*words, str(tmp_path / "run")])
    printed = " ".join(capsys.readouterr().err.split())
    assert "no recordings of the split test" in printed
    assert printed.endswith("step-1")


@pytest.mark.slow
def test_train_on_the_command_line(spoken, tmp_path, capsys, monkeypatch):
    from colonnade.config import speech

    monkeypatch.setitem(speech.SPEECH_PRESETS, "speech-tiny-av", SEEING)
    words = ["speech", "train", "--data", str(spoken), "--run", str(tmp_path / "run"), "--batch", "2"]
    main([*words, "--preset", "speech-tiny-av", "--steps", "2"])
    printed = " ".join(capsys.readouterr().err.split())
    assert "step 0: loss" in printed
    assert "word errors, sound and drawn mouths: clean" in printed
    assert printed.endswith("step-2")
    assert SpeechModel.load(tmp_path / "run" / "step-2").config == SEEING
    main([*words, "--preset", "speech-tiny-av", "--steps", "2"])  # complete: nothing is trained again
    assert "step 0" not in capsys.readouterr().err
    words[5] = str(tmp_path / "many")
    main([*words, "--preset", "speech-tiny-av", "--steps", "1", "--segments", "2", "8", "--lookaheads", "0"])
    config = SpeechModel.load(tmp_path / "many" / "step-1").config
    assert (config.trained_segments, config.trained_lookaheads) == ([2, 4, 8], [0, 2])


def test_the_demo_trains_measures_and_streams(tmp_path, capsys, monkeypatch):
    pytest.importorskip("espeakng_loader")
    from colonnade.config import speech

    monkeypatch.setitem(speech.SPEECH_PRESETS, "speech-tiny-av", SEEING)
    words = ["speech", "demo", "--folder", str(tmp_path), "--sentences", "4", "--tests", "2", "--steps", "2"]
    for _ in range(2):  # the second one continues, and has nothing left to train
        main(words)
        printed = capsys.readouterr().out
        assert "step-2" in printed
        assert printed.count("spoken: ") == printed.count("heard:") == 2
        assert "sound and drawn mouths" in printed
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_damaged_checkpoints(tmp_path):
    folder = tmp_path / "step-1"
    SpeechModel(TINY).save(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9])
    with pytest.raises(CheckpointError):
        SpeechModel.load(folder)
    weights.write_bytes(b"\xff" * 16 + whole[16:])
    with pytest.raises(CheckpointError, match="cannot be read"):
        SpeechModel.load(folder)
    weights.write_bytes(whole)
    values = json.loads((folder / "speech.json").read_text())
    values["config"]["width"] = 20
    text = json.dumps(values, indent=1) + "\n"
    (folder / "speech.json").write_text(text)
    with pytest.raises(CheckpointError, match="do not match"):
        SpeechModel.load(folder)


def _recogniser_on_ranks(world: int, folder: str) -> None:
    """A saved recogniser over tp gives the loss, gradients, streams and texts of one process."""
    path = Path(folder)
    with DistributedContext.build(Plan(tp=world)) as context:
        model = SpeechModel.load(path, context.axes, torch.float64)
        whole = SpeechModel.load(path, dtype=torch.float64)
        again = SpeechModel(model.config, 5, torch.float64, context.axes)
        seeded = SpeechModel(model.config, 5, torch.float64)
        x, labels = model.frames(model.features(sound(1.2, 3))).detach(), [[1, 2, 2, 28], [7]]
        lengths = [len(x) - 11, 11]
        for own, reference in ((model, whole), (again, seeded)):
            found, expected = own.loss(x, lengths, labels), reference.loss(x, lengths, labels)
            found.backward()
            expected.backward()
            assert_same(found, expected)
            layout, theirs = placements(own), dict(reference.named_parameters())
            for name, p in own.named_parameters():
                theirs_grad = theirs[name].grad
                assert (p.grad is None) == (theirs_grad is None), name
                if theirs_grad is not None:
                    assert_same(p.grad, local_part(theirs_grad, layout.get(name, WHOLE), context.axes))
        for own in (model, whole):
            own.requires_grad_(False)
        samples = sound(2.0, 5)
        for beam in (None, 3):
            text = whole.recognise(samples, beam=beam)
            assert len(text) > 5, "nothing was said, so nothing is compared"
            assert model.recognise(samples, beam=beam) == text
            assert "".join(listen(model, samples.split(900), beam=beam)) == text
        if world > 1:
            with pytest.raises(PlanError, match=f"over tp={world} cannot be saved"):
                model.save(path / "other")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_saved_recogniser_over_tp(world, tmp_path):
    config = TINY.replace(width=24, heads=6, right=2)
    model = talkative(config)
    model.to(torch.float32).save(tmp_path / "step-1")
    run(world, _recogniser_on_ranks, world, str(tmp_path / "step-1"))


def test_verbs_of_language_models_name_those_of_recognisers(tmp_path, capsys):
    SpeechModel(TINY).save(tmp_path / "run" / "step-1")
    for place in ("run", "run/step-1"):
        for words in (["convert", str(tmp_path / place), str(tmp_path / "out")], ["eval", str(tmp_path / place)]):
            with pytest.raises(SystemExit):
                main(words)
            printed = " ".join(capsys.readouterr().err.split())
            assert "is a speech recogniser" in printed
            assert "colonnade speech listen, serve or align" in printed
    assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError, match="2 heads cannot be divided over tp=3"):
        SpeechModel(TINY, axes=Axes(tp=Axis("tp", 3, 0)))


def test_presets_and_what_configs_refuse():
    sizes = {
        name: sum(p.numel() for p in SpeechModel(SPEECH_PRESETS[name]).parameters())
        for name in ("speech-tiny", "speech-tiny-av")
    }
    assert sizes["speech-tiny"] < sizes["speech-tiny-av"] < 1_600_000
    with pytest.raises(ConfigError, match="3 heads"):
        SpeechConfig(heads=3)
    with pytest.raises(ConfigError, match="twice"):
        SpeechConfig(letters="aa")
    with pytest.raises(ConfigError, match="at least 16"):
        SpeechConfig(picture=4)
    with pytest.raises(DataError, match="'Z'"):
        SpeechConfig().labels("Zoo")
    assert SpeechConfig().text(SpeechConfig().labels("it's so")) == "it's so"


def test_recordings_that_cannot_be_read(tmp_path):
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    pytest.importorskip("av")
    from colonnade.speech.audio import load_audio
    from colonnade.speech.pcm import resample, write_audio

    write_audio(tmp_path / "good.wav", np.sin(np.arange(4000) / 20))
    assert len(load_audio(tmp_path / "good.wav")) == 4000
    write_audio(tmp_path / "empty.wav", np.zeros(0))
    with pytest.raises(DataError, match="no samples"):
        load_audio(tmp_path / "empty.wav")
    (tmp_path / "noise.mp4").write_bytes(b"\x00\x01" * 500)
    with pytest.raises(DataError, match=r"noise\.mp4"):
        load_audio(tmp_path / "noise.mp4")
    with pytest.raises(DataError, match="rate of 3 Hz"):
        resample(np.zeros(5, np.float32), 3)
    assert abs(len(resample(np.zeros(4410, np.float32), 44100)) - 1600) < 3
