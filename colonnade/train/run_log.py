"""Log of a run: metrics, trackers and the terminal display behind a few calls, so that the loop stays short.

Every rank has a log, because reading the metrics is collective; only rank 0's tracks and displays anything.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from colonnade.checkpoint.atomic_folder import DISK_FULL_ERRNOS
from colonnade.config import TrainConfig, format_bytes
from colonnade.errors import CapacityError
from colonnade.train.metrics import Diverged, Meter, Row, Throughput, throughput_row
from colonnade.train.profiler import WARMUP_STEPS, StepProfiler
from colonnade.train.trackers import (
    ROUTING,
    JsonLines,
    OpenTracker,
    TensorBoard,
    Tracker,
    draw_loss_curve,
    service_trackers,
)
from colonnade.train.train_step import StepMetrics
from colonnade.train.training_state import TrainingState

DISPLAYED = (("loss", ".4f"), ("grad_norm", ".2f"))
SILENCE_S = 20.0
"""A line of metrics is due after a step if there was none for this time [s]."""


def print_line(text: str, *, shown: bool) -> None:
    """Print a line, if ``shown``, before there is a :class:`ProgressDisplay`."""
    Console(quiet=not shown, highlight=False).print(text, markup=False, soft_wrap=True)


class ProgressDisplay:
    """Context manager: a live progress bar with the newest metrics, or plain lines where there is no terminal."""

    def __init__(self, total_steps: int, *, shown: bool, console: Console | None = None):
        self.console = console or Console(quiet=not shown, highlight=False)
        self.total_steps = total_steps
        self.shown_s = time.monotonic()
        """Time of the newest line or metrics."""
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
        """Print a permanent line."""
        self.shown_s = time.monotonic()
        self.console.print(text, markup=False, soft_wrap=True)

    def advance(self, steps: int) -> None:
        """Move the progress bar; prints nothing without a terminal."""
        self._bar.update(self._task, completed=steps)

    def metrics(self, steps: int, row: Row, speed: Throughput | None) -> None:
        """Show the newest metrics."""
        # A missing value was not finite: a step skipped in float16.
        loss, norm = (f"{row[name]:{form}}" if name in row else "-" for name, form in DISPLAYED)
        state = f"loss {loss}  norm {norm}  lr {row['lr']:.2e}"
        if "reward" in row:
            state = f"reward {row['reward']:.4f}  {state}"
        if "loss_scale" in row:
            state += f"  scale 2^{math.log2(row['loss_scale']):.0f}  skipped {row['skipped']:.0f}"
        if speed is not None:
            state += f"  {speed}"
        if "memory_peak_bytes" in row:
            state += f"  peak {format_bytes(int(row['memory_peak_bytes']))}"
        self.shown_s = time.monotonic()
        if self._live is not None and steps < self.total_steps:
            self._state.plain = state
        else:
            self.line(f"step {steps:>{len(str(self.total_steps))}}/{self.total_steps}  {state}")


@dataclass(frozen=True)
class Summary:
    """The final state of a run."""

    steps: int
    """Optimizer steps taken in all, those before a resume included."""
    checkpoint: Path
    """The newest checkpoint."""
    picture: Path | None = None
    """The loss curve."""
    loss: float | None = None
    """Training loss of the last step; None when no step was left to take, and for a run that a signal ended."""
    validation_loss: float | None = None
    """The newest one of this process."""
    speed: Throughput | None = None
    """Of the newest interval, without validation and saving."""
    stopped: str | None = None
    """The signal that ended the run early, such as SIGTERM."""


class RunLog:
    """Context manager around the steps of ``training``."""

    def __init__(self, training: TrainingState, trackers: Sequence[OpenTracker] = ()):
        self.training, self.run = training, training.run
        self.is_rank0 = training.context.rank == 0
        self.meter = Meter(training.run, training.context, self._on_bad_step, training.feed.sample_tokens)
        self.display = ProgressDisplay(training.run.train.steps, shown=self.is_rank0)
        self.row: Row = {}
        self.validation_loss: float | None = None
        self.speed: Throughput | None = None
        self._open_trackers = (JsonLines, TensorBoard, *service_trackers(training.run), *trackers)
        self.profiler = StepProfiler(training.run, training.context)
        self._trackers: list[Tracker] = []
        self._routing: JsonLines | None = None
        self._first_step = True
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        folder, steps = self.run.folder, self.training.steps_taken
        if self.is_rank0:
            folder.mkdir(parents=True, exist_ok=True)
            for open_tracker in self._open_trackers:
                self._trackers.append(open_tracker(folder, steps))
                self._stack.callback(self._trackers[-1].close)
            if self.run.model.moe is not None:
                self._routing = JsonLines(folder, steps, ROUTING)
                self._stack.callback(self._routing.close)
        self._print_header()
        self._stack.enter_context(self.display)
        self._stack.callback(self.profiler.close)
        self.meter.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def due(self, *intervals: int) -> bool:
        """Whether the steps taken are a multiple of one of ``intervals`` (0 is never due)."""
        return any(every and self.training.steps_taken % every == 0 for every in intervals)

    @property
    def silent(self) -> bool:
        """Whether rank 0 has shown nothing for :data:`SILENCE_S`."""
        return self.is_rank0 and time.monotonic() - self.display.shown_s > SILENCE_S

    def record(self, metrics: StepMetrics) -> None:
        """Keep the metrics of a step; does not synchronise with the device."""
        self.meter.add(self.training.steps_taken, metrics)
        for message in self.training.take_messages():
            self.display.line(message)
        self.display.advance(self.training.steps_taken)
        if self._first_step:  # it also allocates and compiles, so its time is not representative
            self.meter.pause()
            self.meter.restart()
            self._first_step = False
        if (breakdown := self.profiler.after_step()) is not None:
            self._track(self.training.steps_taken, breakdown.row)
            self.display.line(f"{breakdown}\n  {self.profiler.path}")
            self.meter.pause()
            self.meter.restart()  # traced steps are slower

    def report(self) -> None:
        """Read and track the metrics since the last report; show the newest.

        Raises :class:`Diverged`, naming the last good checkpoint, so that no diverged state is saved.
        """
        with self._clock_paused():
            rows = self.meter.read()
            for change in self.training.spread_changes:
                self.display.line(change)
            self.training.spread_changes.clear()
            if rows and self._routing is not None:
                self._track_loads(rows[-1][0], self._routing)
            self.speed = self.meter.speed() or self.speed
            for steps, row in rows:
                newest = steps == self.training.steps_taken
                self._track(steps, row | (throughput_row(self.speed) if newest and self.speed is not None else {}))
                self.row = row if "loss" in row else self.row
            if self.row:
                self.display.metrics(self.training.steps_taken, self.row, self.speed)

    def _track_loads(self, steps: int, routing: JsonLines) -> None:
        """Track the load of each expert in ``routing.jsonl`` and as TensorBoard histograms."""
        table = self.meter.routing
        routing.record(steps, {str(layer): stats for layer, stats in table.items()})
        for tracker in self._trackers:
            if isinstance(tracker, TensorBoard):
                tracker.loads(steps, {layer: stats["load"] for layer, stats in table.items()})

    def _on_bad_step(self, steps: int, diagnosis: str) -> None:
        """Count a non-finite step as skipped; raise :class:`Diverged` when the run may skip no more."""
        training, allowed = self.training, self.run.train.skip_bad_batches
        samples = _shortened(training.samples_of(steps))
        if training.skipped < allowed:
            training.skipped += 1
            self.display.line(
                f"{diagnosis}; skipped samples {samples} ({training.skipped} of at most {allowed} bad batches)"
            )
            self._track(steps, {"skipped": training.skipped})
            return
        self.check_save(wait=True)  # a save that is running is of an earlier, good step
        good = training.checkpoint
        before = f"; {training.skipped} bad batches were skipped before" if training.skipped else ""
        where = f"the last good checkpoint is {good}" if good else "no checkpoint has been written yet"
        raise Diverged(f"{diagnosis}{before}; {where}; lower --train.lr or check samples {samples} of the corpus")

    def validate(self) -> None:
        """Measure and track the validation loss."""
        with self._clock_paused():
            self.validation_loss = self.training.validate().item()
            self._track(self.training.steps_taken, {"validation_loss": self.validation_loss})
            self.display.line(f"validation loss {self.validation_loss:.4f} after {self.training.steps_taken} steps")

    def save(self) -> None:
        """Start writing a checkpoint, after finishing the previous one."""
        with self._clock_paused():
            self.check_save(wait=True)
            self._print_saved(self.training.save())

    def check_save(self, *, wait: bool = False) -> None:
        """Report a checkpoint that has been written since the last call; raises the error of a failed save."""
        self._print_saved(self.training.finish_save(wait=wait))

    def _print_saved(self, folder: Path | None) -> None:
        if folder is not None:
            self.display.line(f"saved {folder}")

    def summary(self) -> Summary:
        """Finish the last save, draw the loss curve, and summarise the run."""
        self.check_save(wait=True)
        checkpoint = self.training.checkpoint
        assert checkpoint is not None, "the last step saves"
        title = f"{self.run.name}: {self.run.model.size}"
        picture = draw_loss_curve(self.run.folder, title) if self.is_rank0 else None
        if picture:
            self.display.line(f"loss curve {picture}")
        steps = self.training.steps_taken
        return Summary(steps, checkpoint, picture, self.row.get("loss"), self.validation_loss, self.speed)

    def _print_header(self) -> None:
        training, run, line = self.training, self.run, self.display.line
        steps, total = training.steps_taken, run.train.steps
        tokens = round(run.train.batch * training.feed.sample_tokens)
        line(
            f"{run.name}: {run.model.size}, {run.plan} on {training.context.device.type}, "
            f"{precision_summary(run.train)}, {tokens} tokens per step, {total} steps"
        )
        choices = {"float8": run.train.float8, "recompute": run.train.recompute, "offload": run.train.offload}
        options = [f"{name} {value}" for name, value in choices.items() if value not in ("none", "budget")]
        if options := options + ["cuda_graph"] * run.train.cuda_graph:
            line(", ".join(options))
        if training.recompute_summary is not None:
            line(training.recompute_summary)
        if training.checkpoint is not None:
            line(
                f"resumed {training.checkpoint}" + (f" with {', '.join(training.changes)}" if training.changes else "")
            )
        if run.train.profile and total - steps < (needs := WARMUP_STEPS + run.train.profile):
            line(f"no profile: it needs {needs} steps, and {total - steps} are left")
        if steps >= total:
            line(f"already at step {steps} of {total}; raise --train.steps to continue")
        if training.feed.no_validation_reason:
            line(f"validation is off: {training.feed.no_validation_reason}")

    @contextmanager
    def _clock_paused(self) -> Iterator[None]:
        """Exclude the time spent inside from the training time."""
        self.meter.pause()
        try:
            yield
        finally:
            self.meter.resume()

    def _track(self, steps: int, row: Row) -> None:
        try:
            for tracker in self._trackers:
                tracker.record(steps, row)
        except OSError as why:
            if why.errno not in DISK_FULL_ERRNOS:
                raise
            raise CapacityError(
                f"the disk is full: the metrics of step {steps} could not be written to {self.run.folder}; free some "
                "space; the same command resumes from the newest checkpoint"
            ) from why


def precision_summary(train: TrainConfig) -> str:
    """``"bfloat16 with float32 masters, compiled, fused AdamW"`` for a resolved ``train``."""
    masters = " with float32 masters" if train.dtype in ("bfloat16", "float16") else ""
    compiled = ", compiled" if train.compile else ""
    return f"{train.dtype}{masters}{compiled}" + (", fused AdamW" if train.fused_adamw else "")


def _shortened(numbers: Sequence[int], most: int = 8) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(str(number) for number in numbers[:most]) + more
