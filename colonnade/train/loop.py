"""The training loop: what DESIGN draws, from the corpus to the checkpoint.

shards -> pack -> micro-batches of this data rank
  -> forward -> loss -> backward -> one layout-aware norm -> clip -> AdamW -> schedule             (step.py)
every so often: a line of metrics (log.py); validation; save(weights, moments, cursor)          (session.py)
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from colonnade.checkpoint import native
from colonnade.config import RunConfig
from colonnade.data import TokenData, Tokenizer, write_tokens
from colonnade.errors import ConfigError, PlanError
from colonnade.model.moe.router import rule
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.parallel.launch import Interrupted, launch, launched
from colonnade.parallel.pipeline import check_schedule
from colonnade.parallel.rendezvous import check_same_settings
from colonnade.parallel.watchdog import COLLECTIVE_TIMEOUT_FACTOR, Watchdog
from colonnade.train.cuda_graph import check_device
from colonnade.train.data_feed import CorpusFeed, MakeFeed
from colonnade.train.initial_weights import check_start, frozen_names
from colonnade.train.memory_advice import check_memory
from colonnade.train.run_lock import RunLock
from colonnade.train.run_log import RunLog, Summary
from colonnade.train.session import Session
from colonnade.train.stop_signal import StopSignal
from colonnade.train.trackers import OpenTracker, flat, named


def check_settings(run: RunConfig) -> None:
    """Raise :class:`~colonnade.errors.ColonnadeError` for a plan, a schedule or a router that does not fit."""
    run.plan.check(run.model)
    check_schedule(run.plan)
    if run.model.moe is not None:
        rule(run.model.moe)
    if run.evaluated is not None:  # a router that cannot says so now, not at the first validation
        rule(run.evaluated, otherwise="leave --train.eval_active out")


def check_data(run: RunConfig, feed: MakeFeed = CorpusFeed) -> None:
    """Raise :class:`~colonnade.errors.ColonnadeError` for data, a model to begin with, a checkpoint to go on from,
    or names to freeze, that do not fit.
    """
    data = feed(run, 0, 1)
    if run.train.freeze:
        frozen_names(run.model, run.train.freeze)
    if (checkpoint := native.newest(run.folder)) is not None:
        native.check_model(checkpoint, run.model)
    elif run.train.start:
        check_start(run, data.corpus)


class Trainer:
    """``Trainer(run).fit()`` trains ``run`` to its end, from its newest checkpoint where there is one."""

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
        """``trackers`` get the metrics besides JSON Lines and TensorBoard, and ``feed`` opens the data; workers import
        both, so no lambdas.

        ``data`` are token lists to train on in the place of ``run.data.path``: an iterable of them, or a map-style or
        iterable PyTorch dataset, read once and kept as a corpus in ``runs/NAME/tokens``; ``validation`` likewise, and
        ``tokenizer`` is what checkpoints keep. Of data without a length as much is read as the run's steps need.

        Raises :class:`~colonnade.errors.ColonnadeError` for a plan, a device or data that do not fit, and for a
        tracker whose package is missing.
        """
        check_settings(run)
        if data is not None:
            run = _with_tokens(run, data, validation, tokenizer)
        elif validation is not None or tokenizer is not None:
            raise ConfigError("validation and tokenizer go with data; give data too, or leave them out")
        device = choose_device(run.plan, run.device)
        if run.train.cuda_graph:
            check_device(torch.device(device))
        check_data(run, feed)
        check_memory(run, device)
        named(run)
        self.run, self.trackers, self.feed = run, tuple(trackers), feed

    def fit(self) -> Summary:
        """Train in as many processes as the plan wants and return rank 0's summary.

        SIGTERM and SIGINT finish the step, save, and return. Raises :class:`~colonnade.errors.ColonnadeError` for a
        checkpoint that does not fit, and for a loss that is not finite.
        """
        try:
            return launch(train, (self.run, self.trackers, self.feed), self.run.plan, self.run.train.restarts)
        except Interrupted as stop:
            checkpoint = native.newest(self.run.folder)
            if checkpoint is None:  # the signal came before the first step
                raise
            steps = native.read_meta(checkpoint).step
            return Summary(steps, checkpoint, stopped=signal.Signals(stop.signal).name)


def _with_tokens(
    run: RunConfig, data: TokenData, validation: TokenData | None, tokenizer: Tokenizer | str | Path | None
) -> RunConfig:
    """``run`` on a corpus of its own with the tokens of ``data``."""
    if launched():
        raise PlanError(
            "each of the processes that torchrun started would read the data; write it once before, with "
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
    return run.but(data=run.data.but(path=folder))


def train(run: RunConfig, trackers: Sequence[OpenTracker] = (), feed: MakeFeed = CorpusFeed) -> Summary:
    """The work of one rank; raises :class:`Interrupted` after a signal, when all is saved, and :class:`PlanError` where
    ranks were started with different settings.
    """
    t = run.train
    timeout = timedelta(seconds=t.timeout_s * COLLECTIVE_TIMEOUT_FACTOR)
    with _deterministic(t.deterministic), DistributedContext.build(run.plan, run.device, timeout) as context:
        check_same_settings(_shared(run), world_axis())
        with (
            RunLock(run.folder, world_axis()) as lock,
            Watchdog(t.timeout_s) as watch,
            Session(run, context, watch, lock, feed) as session,
            StopSignal(session.world) as stop,
            RunLog(session, trackers) as log,
        ):
            eval_every = session.feed.eval_every
            stopped = None
            while session.taken < t.steps and stopped is None:
                log.note(session.step())
                log.settle()
                stopped = stop.asked()
                done = session.taken == t.steps
                if stopped or done or log.due(t.log_every, eval_every, t.save_every):
                    log.report()
                if stopped or done or log.due(t.save_every):
                    log.save()  # first what must not be lost: whoever sent the signal may not wait for long
                if eval_every and not stopped and (done or log.due(eval_every)):
                    log.validate()
            summary = log.summary()
        if stopped is not None:
            raise stopped
        return summary


def _shared(run: RunConfig) -> dict[str, str]:
    """What must be the same on all ranks; where files are is each machine's own affair."""
    own = ("runs", "device", "data.path", "train.start")
    return {name: value for name, value in flat(run.model_dump(mode="json")).items() if name not in own}


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Only algorithms that give the same bits each time, for as long as the run lasts."""
    if not wanted or torch.are_deterministic_algorithms_enabled():  # to set it imports torch.compile, a second
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
