"""What the person in front of the terminal sees: a live bar with the newest numbers, or plain lines in a log.

Rank 0 shows; the other ranks hold a screen that shows nothing.
"""

import math
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from colonnade.config import format_bytes
from colonnade.train.metrics import Row
from colonnade.train.mfu import Throughput

NUMBERS = (("loss", ".4f"), ("grad_norm", ".2f"))


class ProgressDisplay:
    """Used as a context: the live part is up inside, and taken down whatever happens."""

    def __init__(self, total_steps: int, *, shown: bool, console: Console | None = None):
        self.console = console or Console(quiet=not shown, highlight=False)
        self.total_steps = total_steps
        self._state = Text()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task("", total=total_steps)
        self._live: Live | None = None
        if shown and self.console.is_terminal:
            self._live = Live(Group(self._bar, self._state), console=self.console, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def advance(self, steps: int) -> None:
        """The bar moves; a plain log stays quiet until there are numbers."""
        self._bar.update(self._task, completed=steps)

    def metrics(self, steps: int, row: Row, speed: Throughput | None) -> None:
        """The newest numbers."""
        # What is missing was not finite: a step that float16 skipped.
        loss, norm = (f"{row[name]:{form}}" if name in row else "-" for name, form in NUMBERS)
        state = f"loss {loss}  norm {norm}  lr {row['lr']:.2e}"
        if "loss_scale" in row:
            state += f"  scale 2^{math.log2(row['loss_scale']):.0f}  skipped {row['skipped']:.0f}"
        if speed is not None:
            state += f"  {speed}"
        if "memory_peak_bytes" in row:
            state += f"  peak {format_bytes(int(row['memory_peak_bytes']))}"
        if self._live is not None and steps < self.total_steps:
            self._state.plain = state
        else:
            self.line(f"step {steps:>{len(str(self.total_steps))}}/{self.total_steps}  {state}")
