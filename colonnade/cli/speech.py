"""The verb ``speech``: a table of subcommands."""

from collections.abc import Callable

from colonnade.cli.recognisers import align, data, listen, train

SPEECH: dict[str, Callable[..., None]] = {"data": data, "train": train, "listen": listen, "align": align}
"""The subcommands of ``colonnade speech``."""
