"""The training loop: what DESIGN draws, from the corpus to the checkpoint.

shards -> pack -> micro-batches of this data rank
  -> forward -> loss -> backward -> one layout-aware norm -> clip -> AdamW -> schedule             (step.py)
every so often: a line of metrics (log.py); validation; save(weights, moments, cursor)          (session.py)
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch

from colonnade.checkpoint import native
from colonnade.config import RunConfig
from colonnade.model.moe.router import rule
from colonnade.parallel.agree import agree
from colonnade.parallel.axis import world_axis
from colonnade.parallel.launch import Interrupted, launch
from colonnade.parallel.mesh import Ground, choose_device
from colonnade.parallel.pipeline import check_schedule
from colonnade.parallel.watchdog import BACKSTOP, Watchdog
from colonnade.train.feed import Feed
from colonnade.train.graph import check_device
from colonnade.train.log import Log, Summary
from colonnade.train.session import Session
from colonnade.train.start import check_start
from colonnade.train.stop import Stop
from colonnade.train.trackers import OpenTracker, flat, named


def check_settings(run: RunConfig) -> None:
    """Raise :class:`~colonnade.errors.ColonnadeError` for a plan, a schedule or a router that does not fit."""
    run.plan.check(run.model)
    check_schedule(run.plan)
    if run.model.moe is not None:
        rule(run.model.moe)
    if run.evaluated is not None:  # a router that cannot says so now, not at the first validation
        rule(run.evaluated, otherwise="leave --train.eval_active out")


def check_data(run: RunConfig) -> None:
    """Raise :class:`~colonnade.errors.ColonnadeError` for a corpus, a model to begin with, or a checkpoint to go on
    from, that does not fit.
    """
    Feed(run)
    if (checkpoint := native.newest(run.folder)) is not None:
        native.check_model(checkpoint, run.model)
    elif run.train.start:
        check_start(run)


class Trainer:
    """``Trainer(run).fit()`` trains ``run`` to its end, from its newest checkpoint where there is one."""

    def __init__(self, run: RunConfig, trackers: Sequence[OpenTracker] = ()):
        """``trackers`` get the metrics besides JSON Lines and TensorBoard; workers import them, so no lambdas.

        Raises :class:`~colonnade.errors.ColonnadeError` for a plan, a device or a corpus that does not fit, and for a
        tracker whose package is missing.
        """
        check_settings(run)
        device = choose_device(run.plan, run.device)
        if run.train.cuda_graph:
            check_device(torch.device(device))
        check_data(run)
        named(run)
        self.run, self.trackers = run, tuple(trackers)

    def fit(self) -> Summary:
        """Train in as many processes as the plan wants and return rank 0's summary.

        SIGTERM and SIGINT finish the step, save, and return. Raises :class:`~colonnade.errors.ColonnadeError` for a
        checkpoint that does not fit, and for a loss that is not finite.
        """
        try:
            return launch(train, (self.run, self.trackers), self.run.plan, self.run.train.restarts)
        except Interrupted as stop:
            checkpoint = native.newest(self.run.folder)
            if checkpoint is None:  # the signal came before the first step
                raise
            steps = native.read_meta(checkpoint).step
            return Summary(steps, checkpoint, stopped=signal.Signals(stop.signal).name)


def train(run: RunConfig, trackers: Sequence[OpenTracker] = ()) -> Summary:
    """The work of one rank; raises :class:`Interrupted` after a signal, when all is saved, and :class:`PlanError` where
    ranks were started with different settings.
    """
    t = run.train
    timeout = timedelta(seconds=t.timeout_s * BACKSTOP)
    with _deterministic(t.deterministic), Ground.build(run.plan, run.device, timeout) as ground:
        agree(_shared(run), world_axis())
        with (
            Watchdog(t.timeout_s) as watch,
            Session(run, ground, watch) as session,
            Stop(session.world) as stop,
            Log(session, trackers) as log,
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
