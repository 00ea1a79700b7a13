"""The run's diary: meter, trackers and screen behind a few calls, so that the loop can be read as a loop.

Every rank keeps one (reading the meter is collective); only rank 0's tracks and shows anything.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from colonnade.checkpoint.atomic_folder import FULL
from colonnade.config import TrainConfig
from colonnade.errors import CapacityError
from colonnade.train.metrics import Diverged, Meter, Row, rates
from colonnade.train.mfu import Throughput
from colonnade.train.profiler import BEFORE, Breakdown, Profile
from colonnade.train.progress_display import ProgressDisplay
from colonnade.train.session import Session
from colonnade.train.trackers import ROUTING, JsonLines, OpenTracker, TensorBoard, Tracker, draw, named
from colonnade.train.train_step import Outcome


@dataclass(frozen=True)
class Summary:
    """How a run ended, or where it stands."""

    steps: int
    """Optimizer steps taken in all, those before a resume included."""
    checkpoint: Path
    """The newest checkpoint."""
    picture: Path | None = None
    """The loss curve."""
    loss: float | None = None
    """Training loss of the last step; None when no step was left to take, and for a run that a signal ended."""
    validation_loss: float | None = None
    """The newest one of this session."""
    speed: Throughput | None = None
    """Of the newest interval; validation and saving are not counted."""
    stopped: str | None = None
    """The signal that ended the run early, such as SIGTERM."""


class RunLog:
    """Used as a context around the steps of ``session``."""

    def __init__(self, session: Session, trackers: Sequence[OpenTracker] = ()):
        self.session, self.run = session, session.run
        self.first = session.context.rank == 0
        self.meter = Meter(session.run, session.context, self._bad, session.feed.sample_tokens)
        self.screen = ProgressDisplay(session.run.train.steps, shown=self.first)
        self.row: Row = {}
        self.validation_loss: float | None = None
        self.speed: Throughput | None = None
        self._open_trackers = (JsonLines, TensorBoard, *named(session.run), *trackers)
        self.profile = Profile(session.run, session.context)
        self._trackers: list[Tracker] = []
        self._routing: JsonLines | None = None
        self._first_step = True
        self._open = ExitStack()

    def __enter__(self) -> Self:
        folder, taken = self.run.folder, self.session.taken
        if self.first:
            folder.mkdir(parents=True, exist_ok=True)
            for open_tracker in self._open_trackers:
                self._trackers.append(open_tracker(folder, taken))
                self._open.callback(self._trackers[-1].close)
            if self.run.model.moe is not None:
                self._routing = JsonLines(folder, taken, ROUTING)
                self._open.callback(self._routing.close)
        self._introduce()
        self._open.enter_context(self.screen)
        self._open.callback(self.profile.close)
        self.meter.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def due(self, *intervals: int) -> bool:
        """Whether the steps taken are a multiple of one of ``intervals`` (0 is never due)."""
        return any(every and self.session.taken % every == 0 for every in intervals)

    def note(self, outcome: Outcome) -> None:
        """A step was taken; nothing waits for its numbers."""
        self.meter.note(self.session.taken, outcome)
        self.screen.advance(self.session.taken)
        if self._first_step:  # it also allocates and compiles, and is no measure of the others
            self.meter.pause()
            self.meter.restart()
            self._first_step = False
        if (found := self.profile.after_step()) is not None:
            self._profiled(found)

    def _profiled(self, found: Breakdown) -> None:
        """Where the time of the traced steps went; they were slower than others, and are no measure of them."""
        self._track(self.session.taken, found.row)
        self.screen.line(f"{found}\n  {self.profile.path}")
        self.meter.pause()
        self.meter.restart()

    def report(self) -> None:
        """Read what was noted since the last report, track it, show the newest.

        Raises :class:`Diverged` with the last good checkpoint: nothing is saved before it was looked at.
        """
        with self._aside():
            rows = self.meter.read()
            for decision in self.session.decided:
                self.screen.line(decision)
            self.session.decided.clear()
            if rows and self._routing is not None:
                self._loads(rows[-1][0], self._routing)
            self.speed = self.meter.speed() or self.speed
            for taken, row in rows:
                newest = taken == self.session.taken and self.speed is not None
                self._track(taken, row | (rates(self.speed) if newest and self.speed else {}))
                self.row = row if "loss" in row else self.row
            if self.row:
                self.screen.metrics(self.session.taken, self.row, self.speed)

    def _loads(self, taken: int, routing: JsonLines) -> None:
        """The load of each expert, where it is more than a number."""
        found = self.meter.routing
        routing.record(taken, {str(layer): it for layer, it in found.items()})
        for tracker in self._trackers:
            if isinstance(tracker, TensorBoard):
                tracker.loads(taken, {layer: it["load"] for layer, it in found.items()})

    def _bad(self, taken: int, diagnosis: str) -> None:
        """A step that moved nothing: counted as skipped, or :class:`Diverged` when the run may skip no more."""
        it, allowed = self.session, self.run.train.skip_bad_batches
        samples = _listed(it.samples_of(taken))
        if it.skipped < allowed:
            it.skipped += 1
            self.screen.line(f"{diagnosis}; skipped samples {samples} ({it.skipped} of at most {allowed} bad batches)")
            self._track(taken, {"skipped": it.skipped})
            return
        self.settle(wait=True)  # it was taken before, so it is good
        good = it.checkpoint
        before = f"; {it.skipped} bad batches were skipped before" if it.skipped else ""
        where = f"the last good checkpoint is {good}" if good else "no checkpoint was written yet"
        raise Diverged(f"{diagnosis}{before}; {where}; lower --train.lr or look at samples {samples} of the corpus")

    def validate(self) -> None:
        """Measure and note the validation loss."""
        with self._aside():
            self.validation_loss = self.session.validate().item()
            self._track(self.session.taken, {"validation_loss": self.validation_loss})
            self.screen.line(f"validation loss {self.validation_loss:.4f} after {self.session.taken} steps")

    def save(self) -> None:
        """Begin to write a checkpoint, when the one before it is written."""
        with self._aside():
            self.settle(wait=True)
            self._saved(self.session.save())

    def settle(self, *, wait: bool = False) -> None:
        """Say so when a checkpoint has been written; raises what went wrong with it."""
        self._saved(self.session.settle(wait=wait))

    def _saved(self, folder: Path | None) -> None:
        if folder is not None:
            self.screen.line(f"saved {folder}")

    def summary(self) -> Summary:
        """Draw the loss curve and say how it went, when all is saved."""
        self.settle(wait=True)
        checkpoint = self.session.checkpoint
        assert checkpoint is not None, "the last step saves"
        title = f"{self.run.name}: {self.run.model.size}"
        picture = draw(self.run.folder, title) if self.first else None
        if picture:
            self.screen.line(f"loss curve {picture}")
        return Summary(self.session.taken, checkpoint, picture, self.row.get("loss"), self.validation_loss, self.speed)

    def _introduce(self) -> None:
        it, run = self.session, self.run
        tokens = round(run.train.batch * it.feed.sample_tokens)
        self.screen.line(
            f"{run.name}: {run.model.size}, {run.plan} on {it.context.device.type}, "
            f"{computing(run.train)}, {tokens} tokens a step, {run.train.steps} steps"
        )
        choices = {"float8": run.train.float8, "recompute": run.train.recompute, "offload": run.train.offload}
        said = [f"{name} {value}" for name, value in choices.items() if value not in ("none", "budget")]
        if said := said + ["cuda_graph"] * run.train.cuda_graph:
            self.screen.line(", ".join(said))
        if it.recomputed is not None:
            self.screen.line(it.recomputed)
        if it.checkpoint is not None:
            self.screen.line(f"resumed {it.checkpoint}" + (f" with {', '.join(it.changes)}" if it.changes else ""))
        if run.train.profile and run.train.steps - it.taken < (needs := BEFORE + run.train.profile):
            self.screen.line(f"no profile: it takes {needs} steps, and {run.train.steps - it.taken} are left")
        if it.taken >= run.train.steps:
            self.screen.line(f"already at step {it.taken} of {run.train.steps}; raise --train.steps to go on")
        if it.feed.why_off:
            self.screen.line(f"validation is off: {it.feed.why_off}")

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Time spent inside is not training."""
        self.meter.pause()
        try:
            yield
        finally:
            self.meter.resume()

    def _track(self, taken: int, row: Row) -> None:
        try:
            for tracker in self._trackers:
                tracker.record(taken, row)
        except OSError as why:
            if why.errno not in FULL:
                raise
            raise CapacityError(
                f"the disk is full: step {taken} could not be noted in {self.run.folder}; free some space; the same "
                "command goes on from the newest checkpoint"
            ) from why


def computing(train: TrainConfig) -> str:
    """``"bfloat16 with float32 masters, compiled, fused AdamW"``: how a run with ``train``, resolved, computes."""
    masters = " with float32 masters" if train.dtype in ("bfloat16", "float16") else ""
    compiled = ", compiled" if train.compile else ""
    return f"{train.dtype}{masters}{compiled}" + (", fused AdamW" if train.fused_adamw else "")


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(str(number) for number in numbers[:most]) + more
