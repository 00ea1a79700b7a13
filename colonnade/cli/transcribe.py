"""``colonnade speech transcribe``."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import Model, console
from colonnade.errors import ConfigError, DataError


def transcribe(
    file: Annotated[Positional[Path], arg(metavar="FILE")],
    model: Model = "whisper-tiny.en",
    language: str = "en",
    format: Literal["txt", "srt", "vtt", "json"] = "txt",
    words: bool = False,
    out: Path | None = None,
) -> None:
    """Transcribe a recording with Whisper.

    Args:
        file: An audio file, or a video with audio.
        model: A Whisper model: whisper-tiny.en (a package), a folder in Hugging Face's or CTranslate2's format, or a
            hub id.
        language: The spoken language, as a code (en, de, …).
        format: txt, subtitles (srt, vtt), or json with times and log-probabilities.
        words: Add the times of each word, in json.
        out: File to write; by default the transcript is printed.
    """
    from colonnade import api
    from colonnade.speech.audio import load_audio
    from colonnade.speech.transcribe import Transcriber
    from colonnade.speech.transcript import write_transcript

    if words and format != "json":
        raise ConfigError(f"--words needs --format json, not {format}")
    samples = load_audio(file)
    transcriber = Transcriber(api.load(model, device="cpu"), language, words=words)
    text = write_transcript(list(transcriber.transcribe(samples)), format)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, "utf-8")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}; choose another file") from None
    console.print(f"{out}: {len(text.splitlines()):,} lines", soft_wrap=True)
