"""The engine side of a server: what each process of :func:`colonnade.parallel.launch.launch` runs.

    rank 0      loads, connects to the HTTP process, and loops:  receive messages -> step -> send outputs
    rank > 0    loads and follows rank 0

A thread of rank 0 reads the socket, applies chat templates and tokenises (the tokenizer releases the GIL), so that a
prompt delays neither the event loop nor the running requests. Another thread tokenises large requests, so that they do
not delay the others' prompts. Everything else happens in the main thread. When the
HTTP process exits, the connection closes and the engine stops.
"""

import ctypes
import dataclasses
import gc
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from colonnade.config import Plan, ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError, RequestError
from colonnade.model import Transformer
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.serve.batch_invariance import batching_note
from colonnade.serve.engine import Engine
from colonnade.serve.ipc import Message, decode_message, encode_message, error_to_dict, output_to_list
from colonnade.serve.request import Stats
from colonnade.serve.sampling_params import SamplingParams

Load = Callable[[DistributedContext], tuple[Transformer, Tokenizer]]
"""Loads this rank's share of the model in each engine process; must be picklable (a module's function or a partial)."""

LARGE_TEXT = 1 << 15
"""Requests with more text than this are tokenised in a thread of their own [characters]."""

HEARTBEAT_S = 20.0
"""Interval of an idle engine's heartbeats to its other ranks [s]; collectives time out after minutes."""

STATS_S = 0.1
"""Interval of the statistics while requests only add tokens [s]."""


def run_worker(load: Load, plan: Plan, config: ServeConfig, device: str, address: str) -> None:
    """Run one rank of a server's engine until the HTTP process stops it or exits."""
    with open_context(plan, device) as context:
        engine = Engine(*load(context), config)
        _return_free_memory()
        with _frozen_gc():
            if context.rank:
                engine.follow()
                return
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    with suppress(ConnectionError, FileNotFoundError):  # the HTTP process has exited
                        connection.connect(address)
                        _serve_requests(engine, connection)
                finally:
                    engine.stop()


def _return_free_memory() -> None:
    """Return to the system what loading has freed: glibc keeps it otherwise, 290 MB for SmolLM2 with int4 weights."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextmanager
def _frozen_gc() -> Iterator[None]:
    """Exclude existing objects from garbage collection (`gc.freeze()`): scanning them would stall decoding."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def open_context(plan: Plan, device: str) -> Iterator[DistributedContext]:
    """The distributed context of one serving process."""
    if plan.world == 1:
        yield DistributedContext.solo(choose_device(plan, device))
    else:
        with DistributedContext.build(plan, device) as context:
            yield context


def _serve_requests(engine: Engine, connection: socket.socket) -> None:
    """Run the engine until the HTTP process disconnects or says stop."""
    inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(connection, engine.tokenizer, inbox), daemon=True).start()
    limits: Message = {"context": engine.model.config.context, "cache_tokens": engine.scheduler.pool.tokens}
    limits["longest_token_bytes"] = engine.tokenizer.longest_token_bytes
    limits["note"] = batching_note(engine.model.config)
    connection.sendall(encode_message({"event": "ready", **limits, "stats": dataclasses.asdict(engine.stats)}))
    stats = _StatsTimer()
    while True:
        for message in receive_messages(engine, inbox):
            if isinstance(message, BaseException):
                raise message
            if message["do"] == "stop":
                return
            if refusal := _handle(engine, message):
                connection.sendall(encode_message(refusal))
        outputs = engine.step()
        event: Message = {"event": "outputs", "outputs": [output_to_list(output) for output in outputs]}
        if stats.due(engine.stats, finished=any(output.finish_reason for output in outputs)):
            event["stats"] = dataclasses.asdict(engine.stats)
        if outputs or "stats" in event:
            connection.sendall(encode_message(event))


class _StatsTimer:
    """Decides which messages carry the engine's statistics: they would be most of a message with one token."""

    def __init__(self):
        self._sent_s, self._requests = 0.0, (0, 0)

    def due(self, stats: Stats, *, finished: bool) -> bool:
        """Whether to send them: a request began, waits or ended, or the last time is :data:`STATS_S` ago."""
        now_s, requests = time.monotonic(), (stats.running, stats.waiting)
        if not finished and requests == self._requests and now_s - self._sent_s < STATS_S:
            return False
        self._sent_s, self._requests = now_s, requests
        return True


def receive_messages(engine: Engine, inbox: queue.SimpleQueue) -> list[Message | BaseException]:
    """All messages that have arrived; while the engine is idle, wait for one and send heartbeats."""
    messages: list[Message | BaseException] = []
    while not messages or not inbox.empty():
        try:
            messages.append(inbox.get(block=not engine.busy, timeout=HEARTBEAT_S))
        except queue.Empty:
            if engine.busy:
                break
            engine.heartbeat()
    return messages


def _handle(engine: Engine, message: Message) -> Message | None:
    """Add or cancel the requests of ``message``; returns the refusal to send if they cannot be added."""
    if message["do"] == "cancel":
        for key in message["ids"]:
            engine.cancel(key)
        return None
    if "refusal" in message:
        return message["refusal"]
    try:
        _check_queue(engine, len(message["ids"]))
        params = SamplingParams(**message["params"])
        for key, tokens in zip(message["ids"], message["tokens"], strict=True):
            engine.add(tokens, params, request_id=key)
    except ColonnadeError as error:
        for key in message["ids"]:  # none of them has run yet
            engine.cancel(key)
        return _refusal(message, error)
    return None


def _check_queue(engine: Engine, count: int) -> None:
    """Raise :class:`RequestError` (429) if the queue has no room for all of ``count`` prompts."""
    waiting, most = len(engine.scheduler.waiting), engine.config.max_waiting
    if waiting + count > most and count > 1:  # for one, the scheduler raises
        raise RequestError(
            f"the queue has no room for {count} prompts: {waiting} requests wait already, of {most} that "
            "--serve.max_waiting allows; try again later, or with fewer prompts",
            status=429,
            code="queue_full",
        )


def _refusal(message: Message, error: ColonnadeError) -> Message:
    """The event that refuses ``message``; a chat's ``prompt`` is called ``messages``, as the client knows it."""
    details = error_to_dict(error)
    if message["messages"] is not None and details["param"] == "prompt":
        details["param"] = "messages"
    return {"event": "refused", "ids": message["ids"], "error": details}


def _read_messages(connection: socket.socket, tokenizer: Tokenizer, inbox: queue.SimpleQueue) -> None:
    """In a thread: put messages, with prompts as token ids, into the inbox; a stop at the end of the connection."""
    large = _LargeRequests(tokenizer, inbox)
    try:
        with suppress(OSError), connection.makefile("rb") as lines:  # OSError: the HTTP process was killed
            for line in lines:
                message = decode_message(line)
                if message["do"] == "submit" and _text_size(message) > LARGE_TEXT:
                    large.add(message)
                elif message["do"] != "cancel" or not large.cancel(message["ids"]):
                    inbox.put(_tokenize(message, tokenizer))
        inbox.put({"do": "stop"})
    except BaseException as bug:  # noqa: BLE001 - raised again by the main thread, which would otherwise wait for ever
        inbox.put(bug)


class _LargeRequests:
    """Tokenises submissions in a thread, in order of arrival, and drops those that are cancelled meanwhile."""

    def __init__(self, tokenizer: Tokenizer, inbox: queue.SimpleQueue):
        self._tokenizer, self._inbox = tokenizer, inbox
        self._todo: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._pending: set[str] = set()
        """Ids of the submissions that have not reached the inbox."""
        self._lock = threading.Lock()
        """Held while a submission leaves ``_pending`` for the inbox: a cancellation comes before or after both."""
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, message: Message) -> None:
        """Tokenise ``message`` later, then put it into the inbox."""
        with self._lock:
            self._pending.update(message["ids"])
        self._todo.put(message)

    def cancel(self, ids: list[str]) -> bool:
        """Drop the submission with these ids; False if none of them is pending."""
        with self._lock:
            found = self._wanted(ids)
            self._pending.difference_update(ids)
        return found

    def _wanted(self, ids: list[str]) -> bool:
        return not self._pending.isdisjoint(ids)

    def _run(self) -> None:
        try:
            while True:
                message = self._todo.get()
                ids = message["ids"]
                message = _tokenize(message, self._tokenizer, partial(self._wanted, ids))
                with self._lock:
                    if self._wanted(ids):
                        self._pending.difference_update(ids)
                        self._inbox.put(message)
        except BaseException as bug:  # noqa: BLE001 - raised again by the main thread
            self._inbox.put(bug)


def _text_size(message: Message) -> int:
    """Characters of text that must be tokenised."""
    if message["messages"] is not None:
        return sum(len(each["content"]) for each in message["messages"])
    return sum(len(prompt) for prompt in message["prompts"] if isinstance(prompt, str))


def _tokenize(message: Message, tokenizer: Tokenizer, wanted: Callable[[], bool] = lambda: True) -> Message:
    """Add the prompts' ``tokens`` to a submission, or a ``refusal``; stops early once ``wanted`` is False."""
    if message["do"] != "submit":
        return message
    try:
        return {**message, "tokens": _prompt_ids(message, tokenizer, wanted)}
    except ColonnadeError as error:
        return {**message, "refusal": _refusal(message, error)}


def _prompt_ids(message: Message, tokenizer: Tokenizer, wanted: Callable[[], bool]) -> list[list[int]]:
    if message["messages"] is None:
        prompts = (prompt for prompt in message["prompts"] if wanted())
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if tokenizer.chat_template is None:
        raise RequestError(
            "this model has no chat template; send a prompt to /v1/completions, or use colonnade generate",
            param="messages",
        )
    return [tokenizer.encode_chat(message["messages"])]
