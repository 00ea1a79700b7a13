"""Speech for tests, in the default voice of espeak-ng."""

from pathlib import Path

from colonnade.speech.pcm import write_audio
from colonnade.speech.synth import speak


def save_speech(text: str, path: Path) -> Path:
    """Write spoken ``text`` as a sound file."""
    write_audio(path, speak(text, speed=140).samples)
    return path
