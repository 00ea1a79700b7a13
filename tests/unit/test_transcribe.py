"""Rules for times, formats of transcripts, and audio files, also hostile ones."""

import io
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from colonnade.cli import main
from colonnade.errors import DataError
from colonnade.speech.audio import load_audio
from colonnade.speech.transcript import Segment, write_transcript
from colonnade.speech.whisper_tokens import WhisperTokens, mask_forbidden

# Text is 0–9, the end 10, special tokens 11–13, times from 14 on.
V = WhisperTokens(10, 11, 13, 12, 14, 100, (), (3, 11, 12, 13), (0, 10))


def allowed(ids: list[int], logits: torch.Tensor | None = None) -> set[int]:
    logits_V = torch.zeros(114) if logits is None else logits
    if logits is None:
        logits_V[:14] = 9.0  # times together must not outweigh the text
    return set((mask_forbidden(logits_V, ids, V) > -torch.inf).nonzero().flatten().tolist())


def test_times_come_in_pairs_and_in_order() -> None:
    text = {0, 1, 2, 4, 5, 6, 7, 8, 9, 10}
    assert allowed([]) == set(range(14, 65))  # at most 1 s
    assert allowed([14]) == text  # after a start comes text
    assert allowed([14, 1]) == text | set(range(15, 114))  # an end is later than its start
    assert allowed([14, 1, 34]) == {10} | set(range(34, 114))  # after an end its pair, or nothing
    assert allowed([14, 1, 34, 34]) == text
    assert allowed([14, 1, 34, 34, 2]) == text | set(range(35, 114))
    likely = torch.zeros(114)
    likely[14:] = 1.0
    assert allowed([14, 1], likely) == set(range(15, 114))


def test_formats() -> None:
    segments = [Segment(0, 1.5, " One --> two.", (1,), -0.25), Segment(3661.04, 3662, " Drei.", (2,), -0.5)]
    assert write_transcript(segments, "txt") == "One --> two.\nDrei.\n"
    assert write_transcript(segments, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne -> two.\n\n2\n01:01:01,040 --> 01:01:02,000\nDrei.\n\n"
    )
    assert write_transcript(segments, "vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne -> two.\n\n")
    rows = json.loads(write_transcript(segments, "json"))
    assert rows["text"] == "One --> two. Drei."
    assert rows["segments"][1] == {"start": 3661.04, "end": 3662, "text": "Drei.", "mean_logprob": -0.5}


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".ogg"])
def test_files_are_resampled_and_mixed(tmp_path: Path, suffix: str) -> None:
    rate = 44_100
    wave = np.sin(2 * np.pi * 440 * np.arange(rate) / rate) * 0.5
    soundfile.write(tmp_path / f"a{suffix}", np.stack([wave, 0.5 * wave], 1), rate)
    samples = load_audio(tmp_path / f"a{suffix}")
    assert len(samples) == 16_000
    expected = 0.75 * 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)
    assert (samples - expected)[1000:-1000].abs().max() < 0.02


@pytest.mark.parametrize(
    ("contents", "message"),
    [(None, "does not exist"), (b"", "cannot be read as audio"), (b"RIFF" + bytes(50), "read as audio|no samples"),
     (b"plain text, no sound" * 20, "cannot be read as audio|has no sound")],
)  # fmt: skip
def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: bytes | None, message: str) -> None:
    if contents is not None:
        (tmp_path / "a.wav").write_bytes(contents)
    with pytest.raises(DataError, match=message):
        load_audio(tmp_path / "a.wav")
    with pytest.raises(SystemExit):
        main(["speech", "transcribe", str(tmp_path / "a.wav")])
    assert "DataError" in capsys.readouterr().err


def flac(seconds: int, rate: int = 16_000, channels: int = 1, said: int | None = None) -> bytes:
    """Silence, which FLAC makes very small; its header says ``said`` frames."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros((seconds * rate, channels), np.int16), rate, format="FLAC")
    data = bytearray(file.getvalue())
    if said is not None:  # the last 36 of these 64 bits
        data[18:26] = (int.from_bytes(data[18:26], "big") >> 36 << 36 | said).to_bytes(8, "big")
    return bytes(data)


@pytest.mark.parametrize("said", [None, 0, 16_000])
def test_a_small_file_of_hours_is_refused(tmp_path: Path, said: int | None) -> None:
    """Samples are counted as they are decoded, whatever the header says; libsndfile stops where the header does."""
    (tmp_path / "a.flac").write_bytes(data := flac(100, said=said))
    assert len(data) < 100 * 16_000 / 300
    if said == 16_000:
        assert len(load_audio(tmp_path / "a.flac", longest_s=50)) == 16_000
        return
    with pytest.raises(DataError, match=r"a.flac is \d+ s long or more, and the limit is 50 s; cut it"):
        load_audio(tmp_path / "a.flac", longest_s=50)
    assert len(load_audio(tmp_path / "a.flac", longest_s=100)) == 1_600_000


def test_many_channels_are_refused_with_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(flac(2, 48_000, 8))
    with pytest.raises(DataError, match=r"has 768,000 samples or more in 8 channels, at most 288,000 are read"):
        load_audio(tmp_path / "a.flac", longest_s=3)


def test_memory_is_that_of_the_result(tmp_path: Path) -> None:
    """An hour at 48 kHz in two channels is 1.4 GB of float32, and 230 MB at 16 kHz; of that, a twelfth."""
    (tmp_path / "a.flac").write_bytes(flac(300, 48_000, 2))
    tracemalloc.start()
    samples = load_audio(tmp_path / "a.flac")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == 300 * 16_000
    assert peak < 1.5 * 4 * len(samples) + (8 << 20), "all of it at 48 kHz would be 115 MB"


def test_empty_and_not_finite(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(0), 16_000)
    with pytest.raises(DataError, match="has no samples"):
        load_audio(tmp_path / "a.wav")
    soundfile.write(tmp_path / "b.wav", np.array([0.0, np.nan]), 16_000, subtype="FLOAT")
    with pytest.raises(DataError, match="not finite"):
        load_audio(tmp_path / "b.wav")
