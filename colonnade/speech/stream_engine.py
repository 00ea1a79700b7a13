"""Runs all clients' streams in one thread: each pass computes one segment of every stream that has a complete one.

Calls come from an event loop. A call is answered when its stream has nothing left to compute, so backpressure slows
down a client that sends faster than its audio is processed, and the memory of a stream is bounded by one call.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.errors import ColonnadeError, WorkerError
from colonnade.model.segments import Segments
from colonnade.speech.listen import StreamingRecogniser
from colonnade.speech.model import SpeechModel
from colonnade.speech.video import HOLD_FRAMES


class _Call(NamedTuple):
    """A call from the event loop; ``run`` returns the stream whose text the call waits for, or the result."""

    run: Callable[[], int | None]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[str]"
    waits: bool

    def answer(self, value: str | BaseException) -> None:
        """Passes the result to the event loop."""

        def give() -> None:
            if self.future.done():
                return
            if isinstance(value, BaseException):
                self.future.set_exception(value)
            else:
                self.future.set_result(value)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(give)


class StreamEngine:
    """At most ``streams`` streams through one recogniser; ``sizes`` are those of a stream that chooses none.

    ``beam`` is the number of hypotheses of each stream; None: greedy search.
    """

    def __init__(self, model: SpeechModel, streams: int, sizes: Segments | None = None, beam: int | None = None):
        self.sizes = sizes or model.sizes
        self.listeners, self.streams = StreamingRecogniser(model, streams, beam), streams
        self.busy_s = 0.0
        """Time spent computing."""
        self.failure: BaseException | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._waiting: dict[int, tuple[_Call, list[str]]] = {}
        self._thread = threading.Thread(target=self._run, name="speech", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread; waiting calls fail."""
        self._calls.put(None)
        self._thread.join()

    async def open(self, sizes: Segments | None = None) -> int:
        """A new stream's number; raises CapacityError if all are taken."""
        sizes = sizes or self.sizes
        run = partial(self.listeners.open, sizes.segment, sizes.right)
        asked = asyncio.ensure_future(self._ask(run, waits=False))
        try:
            return int(await asyncio.shield(asked))
        except asyncio.CancelledError:  # the caller will not close it
            asked.add_done_callback(lambda done: done.exception() or self.close(int(done.result())))
            raise

    async def push(self, stream: int, samples: Tensor) -> str:
        """Add samples at 16 kHz; returns the text that they complete."""

        def run() -> int:
            self.listeners.push(stream, samples)
            return stream

        return await self._ask(run)

    async def add_picture(self, stream: int, frame: int, picture: Tensor) -> None:
        """Add the picture of a frame."""

        def run() -> None:
            self.listeners.add_picture(stream, frame, picture, HOLD_FRAMES)

        await self._ask(run, waits=False)

    async def end(self, stream: int) -> str:
        """Ends the stream and returns the rest of the text; close the stream afterwards."""

        def run() -> int:
            self.listeners.end(stream)
            return stream

        return await self._ask(run)

    def close(self, stream: int) -> None:
        """Close a stream, even if its call has been cancelled."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            self._waiting.pop(stream, None)
            self.listeners.close(stream)

        self._calls.put(_Call(run, loop, loop.create_future(), False))

    async def _ask(self, run: Callable[[], int | None], waits: bool = True) -> str:
        if self.failure is not None:
            raise WorkerError(f"the recogniser has failed: {self.failure}; restart the server")
        loop = asyncio.get_running_loop()
        call = _Call(run, loop, loop.create_future(), waits)
        self._calls.put(call)
        return await call.future

    def _run(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # a thread's own setting
        try:
            while self._take():
                start_s = time.monotonic()
                self._step()
                self.busy_s += time.monotonic() - start_s
        except BaseException as error:  # a bug: all waiting calls get the error
            self.failure = error
            raise
        finally:
            self.failure = self.failure or RuntimeError("the server has stopped")
            for call, _ in self._waiting.values():
                call.answer(WorkerError(f"the recogniser has stopped: {self.failure}; restart the server"))
            while not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call.answer(WorkerError(f"the recogniser has stopped: {self.failure}; restart the server"))

    def _take(self) -> bool:
        """Run pending calls; waits for one if there is nothing to compute. Returns False to stop."""
        first = True
        while (first and not self._waiting) or not self._calls.empty():
            first = False
            if (call := self._calls.get()) is None:
                return False
            try:
                result = call.run()
            except ColonnadeError as error:
                call.answer(error)
                continue
            except BaseException as error:
                call.answer(WorkerError(f"the recogniser has failed: {error}; restart the server"))
                raise
            if call.waits and result is not None:
                self._waiting[result] = call, []
            else:
                call.answer("" if result is None else str(result))
        return True

    def _step(self) -> None:
        """Run a segment of every stream that has a complete one; answer the calls of streams that have none left."""
        found = self.listeners.step()
        for stream, text in found.items():
            if stream in self._waiting:
                self._waiting[stream][1].append(text)
        for stream in [stream for stream in self._waiting if stream not in found]:
            call, texts = self._waiting.pop(stream)
            call.answer("".join(texts))
