"""What the person in front of the terminal sees: a live line with a bar on a terminal, plain lines elsewhere.

Rank 0 shows; the other ranks hold a screen that shows nothing.
"""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from colonnade.train.chips import Throughput
from colonnade.train.metrics import Row


class Screen:
    """Used as a context: the live line is up inside, and taken down whatever happens."""

    def __init__(self, total_steps: int, *, shown: bool, console: Console | None = None):
        self.console = console or Console(quiet=not shown, highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        if shown and self.console.is_terminal:
            self._live = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
                transient=True,
            )
            self._task = self._live.add_task("", total=total_steps, state="")
        self.total_steps = total_steps

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def advance(self, steps: int) -> None:
        """The bar moves; a plain log stays quiet until there are numbers."""
        if self._live is not None:
            self._live.update(self._task, completed=steps)

    def metrics(self, steps: int, row: Row, speed: Throughput | None) -> None:
        """The newest numbers."""
        state = f"loss {row['loss']:.4f}  norm {row['grad_norm']:.2f}  lr {row['lr']:.2e}"
        if speed is not None:
            state += f"  {speed}"
        if self._live is not None:
            self._live.update(self._task, completed=steps, state=state)
        else:
            self.line(f"step {steps:>{len(str(self.total_steps))}}/{self.total_steps}  {state}")
