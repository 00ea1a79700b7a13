"""Transcripts: segments of speech with their times, written as text, SubRip (SRT), WebVTT or JSON."""

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

from colonnade.speech.token_times import Word

Format = Literal["txt", "srt", "vtt", "json"]


class Segment(NamedTuple):
    """A stretch of speech."""

    start_s: float
    end_s: float
    text: str
    tokens: tuple[int, ...]
    mean_logprob: float
    """Of the tokens of its window."""
    temperature: float = 0.0
    """At which its window was sampled; 0: greedy."""
    compression_ratio: float = 1.0
    """Bytes of its window's text over those that zlib makes of it: high where the text repeats itself."""
    silence: float = 0.0
    """The probability that its window has no speech."""
    words: tuple[Word, ...] = ()
    """Its words with their times, if they were asked for."""


def write_transcript(segments: Sequence[Segment], format: Format) -> str:
    """The text of a transcript: plain lines, SubRip, WebVTT, or JSON with times and log-probabilities."""
    if format == "json":
        rows = [
            {"start": s.start_s, "end": s.end_s, "text": s.text.strip(), "mean_logprob": round(s.mean_logprob, 4)}
            | ({"words": word_rows(s.words)} if s.words else {})
            for s in segments
        ]
        text = " ".join(s.text.strip() for s in segments)
        return json.dumps({"text": text, "segments": rows}, ensure_ascii=False, indent=1) + "\n"
    if format == "txt":
        return "".join(f"{s.text.strip()}\n" for s in segments)
    blocks = ["WEBVTT\n\n"] if format == "vtt" else []
    mark = "." if format == "vtt" else ","
    for number, s in enumerate(segments, 1):
        # An arrow within a text would be read as a line of times.
        text = s.text.strip().replace("-->", "->")
        number_line = f"{number}\n" if format == "srt" else ""
        blocks.append(f"{number_line}{_clock(s.start_s, mark)} --> {_clock(s.end_s, mark)}\n{text}\n\n")
    return "".join(blocks)


def word_rows(words: Sequence[Word]) -> list[dict[str, str | float]]:
    """Words for JSON."""
    return [{"word": w.text, "start": w.start_s, "end": w.end_s, "probability": w.probability} for w in words]


def _clock(seconds: float, mark: str) -> str:
    """``00:01:02,500``."""
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{mark}{ms % 1000:03}"
