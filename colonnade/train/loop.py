"""The training loop, from corpus to checkpoint.

shards -> pack -> micro-batches of this data rank                                        (data_feed.py)
  -> forward -> loss -> backward                                                         (train_step.py)
  -> global gradient norm -> clip -> AdamW -> learning-rate schedule                     (optimizer_step.py)
every N steps: log metrics (run_log.py); validate; save(weights, moments, data cursor)   (training_state.py)
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from colonnade.checkpoint import native
from colonnade.config import RunConfig
from colonnade.data import TokenData, Tokenizer, write_tokens
from colonnade.errors import ConfigError, PlanError
from colonnade.model.moe.router import find_router
from colonnade.parallel.axis import Axis, world_axis
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.parallel.launch import STOP_SIGNALS, Interrupted, launch, launched
from colonnade.parallel.pipeline import check_schedule
from colonnade.parallel.rendezvous import check_same_settings
from colonnade.parallel.watchdog import COLLECTIVE_TIMEOUT_FACTOR, Watchdog
from colonnade.train.cuda_graph import check_device
from colonnade.train.data_feed import CorpusFeed, MakeFeed, VaryingFeed, check_data_unchanged
from colonnade.train.distill import check_same_objective, check_teacher
from colonnade.train.initial_weights import check_start, frozen_names
from colonnade.train.memory_advice import check_memory
from colonnade.train.run_log import RunLog, Summary, print_line
from colonnade.train.trackers import OpenTracker, flattened, service_trackers
from colonnade.train.training_state import RunLock, TrainingState


def check_settings(run: RunConfig) -> None:
    """Raise :class:`~colonnade.errors.ColonnadeError` for an invalid plan, pipeline schedule or router."""
    run.plan.check(run.model)
    check_schedule(run.plan)
    if run.model.moe is not None:
        find_router(run.model.moe)
    if run.eval_moe is not None:  # refuse it now, not at the first validation
        find_router(run.eval_moe, otherwise="remove --train.eval_active")


def check_data(run: RunConfig, feed: MakeFeed = CorpusFeed) -> None:
    """Check the data, ``train.pretrained_checkpoint``, the checkpoint to resume from, ``train.freeze`` and the teacher
    against the run.

    Raises :class:`~colonnade.errors.ColonnadeError` for the first that does not match.
    """
    data = feed(run, 0, 1)
    if run.train.freeze:
        frozen_names(run.model, run.train.freeze)
    check_teacher(run, data.corpus)
    if (checkpoint := native.newest(run.folder)) is not None:
        native.check_model(checkpoint, run.model)
        meta = native.read_meta(checkpoint)
        if meta.run is not None and "seen" in meta.cursor:  # otherwise loading refuses it
            check_data_unchanged(data, run.data, meta.cursor, str(checkpoint))
            check_same_objective(checkpoint, meta.run.distill, run.distill)
    elif run.train.pretrained_checkpoint:
        check_start(run, data.corpus)


class Trainer:
    """Trains a run to its end, resuming from its newest checkpoint: ``Trainer(run).fit()``."""

    def __init__(
        self,
        run: RunConfig,
        trackers: Sequence[OpenTracker] = (),
        feed: MakeFeed = CorpusFeed,
        *,
        data: TokenData | None = None,
        validation: TokenData | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
    ):
        """``trackers`` receive the metrics in addition to JSON Lines and TensorBoard; ``feed`` opens the data. Worker
        processes import both, so neither may be a lambda.

        ``data`` replaces ``run.data.path``: an iterable of token lists, or a map-style or iterable PyTorch dataset. It
        is read once and stored as a corpus in ``runs/NAME/tokens``, as is ``validation``. Checkpoints include
        ``tokenizer``. From data without a length, only as many tokens are read as the run's steps need.

        Raises :class:`~colonnade.errors.ColonnadeError` for an invalid plan, device or data set, and for a tracker
        whose package is not installed.
        """
        check_settings(run)
        run = VaryingFeed.with_compile_default(run, feed)
        if data is not None:
            run = _with_tokens(run, data, validation, tokenizer)
        elif validation is not None or tokenizer is not None:
            raise ConfigError("validation and tokenizer require data; pass data too, or remove them")
        device = choose_device(run.plan, run.device)
        if run.train.cuda_graph:
            check_device(torch.device(device))
        check_data(run, feed)
        check_memory(run, device)
        service_trackers(run)
        self.run, self.trackers, self.feed = run, tuple(trackers), feed

    def fit(self) -> Summary:
        """Train in as many processes as the plan needs and return rank 0's summary.

        After SIGTERM or SIGINT the run finishes its step, saves, and returns. Raises
        :class:`~colonnade.errors.ColonnadeError` for an incompatible checkpoint and for a loss that is not finite.
        """
        try:
            return launch(train, (self.run, self.trackers, self.feed), self.run.plan, self.run.train.restarts)
        except Interrupted as interrupted:
            checkpoint = native.newest(self.run.folder)
            if checkpoint is None:  # the signal arrived before the first step
                raise
            steps = native.read_meta(checkpoint).step
            return Summary(steps, checkpoint, stopped=signal.Signals(interrupted.signal).name)


def _with_tokens(
    run: RunConfig, data: TokenData, validation: TokenData | None, tokenizer: Tokenizer | str | Path | None
) -> RunConfig:
    """``run`` with the tokens of ``data`` written as its corpus."""
    if launched():
        raise PlanError(
            "every process started by torchrun would read the data; write it once beforehand with "
            "colonnade.data.write_tokens(data, FOLDER), and set data.path to FOLDER"
        )
    t, folder = run.train, run.folder / "tokens"
    write_tokens(
        data,
        folder,
        vocab_size=run.model.vocab_size,
        tokenizer=tokenizer,
        validation=validation,
        most_tokens=t.steps * t.batch * run.data.sequence + 1,
        keep=native.newest(run.folder) is not None,
    )
    return run.replace(data=run.data.replace(path=folder))


def train(run: RunConfig, trackers: Sequence[OpenTracker] = (), feed: MakeFeed = CorpusFeed) -> Summary:
    """Train on one rank, inside a process group.

    Raises :class:`Interrupted` after a signal, once everything is saved, and :class:`PlanError` if ranks were started
    with different settings.
    """
    t = run.train
    timeout = timedelta(seconds=t.timeout_s * COLLECTIVE_TIMEOUT_FACTOR)
    with _deterministic(t.deterministic), DistributedContext.build(run.plan, run.device, timeout) as context:
        check_same_settings(_shared_settings(run), world_axis())
        announce = partial(print_line, shown=context.rank == 0)
        with (
            RunLock(run.folder, world_axis()) as lock,
            Watchdog(t.timeout_s) as watchdog,
            TrainingState(run, context, watchdog, lock, feed, announce) as training,
            StopSignal(training.world) as stop,
            RunLog(training, trackers) as log,
        ):
            eval_every = training.feed.eval_every
            interrupted = None
            while training.steps_taken < t.steps and interrupted is None:
                log.record(training.step())
                log.check_save()
                interrupted, silent = stop.poll(silent=log.silent)
                done = training.steps_taken == t.steps
                if interrupted or done or silent or log.due(t.log_every, eval_every, t.save_every):
                    log.report()
                if interrupted or done or log.due(t.save_every):
                    log.save()  # before validation: after a signal the scheduler may kill the process soon
                if eval_every and not interrupted and (done or log.due(eval_every)):
                    log.validate()
            summary = log.summary()
        if interrupted is not None:
            raise interrupted
        return summary


class StopSignal:
    """Context manager: SIGTERM and SIGINT are recorded, and end the run after the same step on all ranks.

    Ctrl-C reaches every process of a terminal's group, a scheduler's SIGTERM perhaps only one, and never at the same
    point of a step. So a handler only records the signal, and after each step the ranks take the maximum of what they
    recorded. This reduction runs over gloo on the CPU, so it does not wait for the GPU.
    """

    def __init__(self, world: Axis):
        self.world = world
        self._signal = 0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python runs signal handlers in the main thread only, and only that thread may set them.
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if not self._signal and self.world.rank == 0:
            os.write(2, b"stopping after this step, then saving\n")  # print is not safe in a signal handler
        self._signal = number

    def received(self) -> Interrupted | None:
        """The exception to raise after saving, the same on all ranks, if any rank received a signal."""
        return self.poll()[0]

    def poll(self, *, silent: bool = False) -> tuple[Interrupted | None, bool]:
        """The result of :meth:`received`, and whether any rank is ``silent``, in one reduction."""
        number, any_silent = self.world.max_(torch.tensor([self._signal, silent])).tolist()
        return Interrupted(number) if number else None, bool(any_silent)


def _shared_settings(run: RunConfig) -> dict[str, str]:
    """The settings that all ranks must share; paths and devices may differ by machine."""
    per_machine = ("runs", "device", "data.path", "train.pretrained_checkpoint", "distill.teacher", "distill.cache")
    return {name: value for name, value in flattened(run.model_dump(mode="json")).items() if name not in per_machine}


@contextmanager
def _deterministic(enabled: bool) -> Iterator[None]:
    """Allow only deterministic algorithms inside."""
    if not enabled or torch.are_deterministic_algorithms_enabled():  # setting it imports torch.compile: a second
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
