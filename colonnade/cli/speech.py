"""The verb ``speech``: a table of subcommands."""

from collections.abc import Callable

from colonnade.cli.recognisers import align, data, demo, listen, serve, train
from colonnade.cli.transcribe import transcribe

SPEECH: dict[str, Callable[..., None]] = {
    "demo": demo, "transcribe": transcribe, "listen": listen, "serve": serve, "align": align, "data": data,
    "train": train,
}  # fmt: skip
"""The subcommands of ``colonnade speech``."""


def speech() -> None:
    """Recognise speech: transcription with Whisper, and small streaming recognisers.

    colonnade speech --help lists its subcommands.
    """
