"""Replaces the weights of a running engine by those of another checkpoint, on all ranks or on none.

    rank 0     opens the checkpoint in a thread, and compares its configuration with the model's
    all ranks  read their shards into host memory in threads, while the engine continues
    all ranks  between two steps: agree that each has read its shard, and copy it over the old weights

Then the prefix cache is emptied, and running requests are preempted: they keep their text, and their keys and values
are computed again with the new weights. If any rank fails before the copy, every rank drops what it has read, and the
old weights stay.

Rank 0 announces each stage to the other ranks as it announces work (:mod:`colonnade.serve.model_inputs`).
"""

import logging
import threading
import time
from collections.abc import Callable
from enum import IntEnum

import torch

from colonnade.checkpoint.load_model import OpenedModel
from colonnade.errors import ColonnadeError, RequestError
from colonnade.parallel.axis import Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.rendezvous import broadcast_text
from colonnade.serve.engine import Engine
from colonnade.serve.ipc import Message, error_to_dict
from colonnade.serve.model_inputs import SWAP, broadcast_message
from colonnade.serve.pooling_engine import PoolingEngine
from colonnade.serve.resolve_pooler import resolve_pooler
from colonnade.serve.staged_weights import StagedWeights, check_pooler, check_replacement

LOG = logging.getLogger(__name__)

POLL_S = 0.1
"""Interval at which rank 0 polls the others for having read their shards, once it has [s]."""


SWAP_MESSAGES = ("swap", "advance_swap")
"""Requests of the HTTP process, and reports of a thread."""


class Stage(IntEnum):
    """The progress of a rank's thread."""

    BUSY = 0
    DONE = 1
    FAILED = 2


class WeightSwap:
    """Swaps the weights of ``engine`` on one rank; ``context`` is that of its model.

    ``notify`` is called on rank 0, in any thread, when :meth:`advance` should be called.
    """

    def __init__(self, engine: Engine | PoolingEngine, context: DistributedContext):
        self._engine, self._model, self._context = engine, engine.model, context
        self._axis: Axis = engine.model.axes.token_replicas
        self._job: _Job | None = None
        self.notify: Callable[[], object] = lambda: None

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> Message | None:
        """Handle one of :data:`SWAP_MESSAGES`; returns the reply, if it is available."""
        return self.start(message) if message["do"] == "swap" else self.advance()

    def start(self, message: Message) -> Message | None:
        """Begin the swap that ``message`` requests; returns the refusal if another swap is running."""
        if self._job is not None:
            return _refused(
                message["ids"],
                RequestError(
                    f"the weights of {self._job.path} are already being loaded; try again when that has finished",
                    status=409,
                    code="swap_running",
                ),
            )
        if isinstance(self._engine, PoolingEngine) and self._axis.size > 1:
            what = "an encoder on several ranks cannot swap its weights; restart the server with the new ones"
            return _refused(message["ids"], RequestError(what, param="path"))
        self._job = _Job(message["path"], message["ids"], self.notify)
        self._job.run(self._open)
        return None

    def advance(self) -> Message | None:
        """Continue after a thread has ended; returns the reply at the end. Call it between two steps."""
        job = self._job
        if job is None or job.stage is Stage.BUSY:
            return None
        if job.staged is None:  # opened
            if job.stage is Stage.FAILED:
                return self._end(job)
            assert job.opened is not None
            self._announce(str(job.opened.path))
            self._read(job)
            return None
        self._announce("")
        if not self._try_commit(job):
            threading.Timer(POLL_S, self.notify).start()
            return None
        return self._end(job)

    def _announce(self, path: str) -> None:
        """Tell the other ranks to read ``path`` or, without one, to commit what they have read."""
        if self._axis.size > 1:
            broadcast_message(self._axis, SWAP)
            broadcast_text(path, self._axis)

    def _end(self, job: "_Job") -> Message:
        self._job = None
        if job.error:
            return _refused(job.ids, RequestError(job.error, param="path", code="weights_refused"))
        assert job.opened is not None
        return {
            "event": "answer", "ids": job.ids, "path": str(job.opened.path), "preempted": job.preempted,
            "read_s": job.read_s, "pause_s": job.pause_s,
        }  # fmt: skip

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """On ranks above 0: run the stage that rank 0 announces."""
        if path := broadcast_text("", self._axis):
            self._job = _Job(path)
            self._read(self._job)
            return
        assert self._job is not None
        if self._try_commit(self._job):
            self._job = None

    def _open(self, job: "_Job") -> None:
        job.opened = opened = check_replacement(job.path, self._model, self._engine.tokenizer)
        if isinstance(self._engine, PoolingEngine):
            spec = resolve_pooler(opened.config, opened.path, self._engine.config, job.path, cp=1)
            assert spec is not None, "serve.task decides whether hidden states are pooled"
            check_pooler(opened, self._engine.spec, spec)

    def _read(self, job: "_Job") -> None:
        """Read this rank's shard in a thread."""
        job.staged = staged = StagedWeights(self._model)

        def read(job: "_Job") -> None:
            started_s = time.monotonic()
            if job.opened is None:  # on another host, the files may be others
                self._open(job)
            assert job.opened is not None
            staged.read(job.opened, self._context)
            job.read_s = time.monotonic() - started_s

        job.run(read)

    def _try_commit(self, job: "_Job") -> bool:
        """Copy the weights on all ranks, or drop them on all; False if a rank is still reading."""
        started_s = time.monotonic()
        stages = self._axis.all_gather_int(job.stage)
        if Stage.BUSY in stages:
            return False
        staged, job.staged = job.staged, None
        assert staged is not None
        if Stage.FAILED not in stages:
            job.attempt(lambda _: staged.finish())
            stages = self._axis.all_gather_int(job.stage)
        if Stage.FAILED in stages:
            rank = stages.index(Stage.FAILED)
            reason = _broadcast_from(rank, job.error, self._axis)
            job.error = reason if self._axis.size == 1 else f"rank {rank}: {reason}"
            return True
        if isinstance(self._engine, Engine):
            job.preempted = self._engine.scheduler.restart_all()
        staged.copy()
        job.pause_s = time.monotonic() - started_s
        return True


class _Job:
    """One swap on one rank."""

    def __init__(self, path: str, ids: list[str] | None = None, notify: Callable[[], object] = lambda: None):
        self.path, self.ids, self._notify = path, ids or [], notify
        self.opened: OpenedModel | None = None
        self.staged: StagedWeights | None = None
        self.stage, self.error = Stage.BUSY, ""
        self.read_s = self.pause_s = 0.0
        self.preempted = 0

    def run(self, work: Callable[["_Job"], None]) -> None:
        """Run ``work`` in a thread."""
        self.stage = Stage.BUSY

        def target() -> None:
            self.attempt(work)
            self._notify()

        threading.Thread(target=target, name="read-weights", daemon=True).start()

    def attempt(self, work: Callable[["_Job"], None]) -> None:
        """Run ``work``; an exception becomes :attr:`error`, since the old weights still serve."""
        try:
            work(self)
        except ColonnadeError as error:
            self.error = error.message
        except OSError as error:
            self.error = f"{self.path} cannot be read: {error.strerror or error}; check the path and its permissions"
        except Exception as error:  # no file content may stop the engine
            LOG.exception("reading %s failed", self.path)
            self.error = f"{self.path} cannot be read ({type(error).__name__}: {error})"
        self.error = " ".join(self.error.split())
        self.stage = Stage.FAILED if self.error else Stage.DONE


def _refused(ids: list[str], error: RequestError) -> Message:
    return {"event": "refused", "ids": ids, "error": error_to_dict(error)}


def _broadcast_from(rank: int, text: str, axis: Axis) -> str:
    """``text`` of ``rank`` on all ranks."""
    encoded = text.encode(errors="replace")
    length = axis.all_gather_int(len(encoded))[rank]
    values = torch.frombuffer(bytearray(encoded if axis.rank == rank else bytes(length)), dtype=torch.uint8)
    return bytes(axis.broadcast_(values, src=rank).tolist()).decode(errors="replace")
