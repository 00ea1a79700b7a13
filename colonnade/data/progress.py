"""Telling people how far a corpus is: a record for whoever wants it, a bar on a terminal, a line elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from colonnade.config import count

Stage = Literal["vocabulary", "tokens"]


@dataclass(frozen=True)
class Built:
    """How far a build is."""

    stage: Stage
    """vocabulary: learning the tokenizer. tokens: writing the shards."""
    done_bytes: int
    """Bytes of the sources behind us in this stage."""
    total_bytes: int
    """Bytes of the sources."""
    documents: int = 0
    """Documents written."""
    tokens: int = 0
    """Tokens written."""


Listener = Callable[[Built], None]


@contextmanager
def shown(console: Console | None = None) -> Iterator[Listener]:
    """A listener for :func:`corpus.build` that draws on stderr: a bar on a terminal, else one line a stage."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[count]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {}

        def listen(built: Built) -> None:
            if built.stage not in tasks:
                tasks[built.stage] = bars.add_task(built.stage, total=built.total_bytes, count="")
                if not console.is_terminal:
                    console.print(f"corpus: {built.stage}, {decimal(built.total_bytes)} of text")
            so_far = f"{built.tokens:,} tokens, {count(built.documents, 'document')}" if built.tokens else ""
            bars.update(tasks[built.stage], completed=built.done_bytes, count=so_far)

        yield listen
