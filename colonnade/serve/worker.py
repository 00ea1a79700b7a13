"""The engine side of a server: the function that each process of :func:`colonnade.parallel.launch.launch` runs.

    rank 0      loads, connects to the HTTP process, waits for its turn to allocate the cache, and loops:
                    receive messages -> step -> send outputs
    rank > 0    loads and follows rank 0

Threads of rank 0 read the sockets and tokenise (:mod:`colonnade.serve.message_reader`); everything else happens in the
main thread. When the HTTP process exits, the connection closes and the engine stops.
"""

import ctypes
import dataclasses
import gc
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from colonnade.config import Plan, ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError, RequestError
from colonnade.model import Transformer
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.serve.engine import Engine
from colonnade.serve.grammar_check import GrammarChecker
from colonnade.serve.http_connections import RETRY_S, HttpConnection, HttpConnections
from colonnade.serve.ipc import Message, decode_message, encode_message, error_to_dict
from colonnade.serve.message_reader import refusal, sampling_params
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_engine import PoolingEngine
from colonnade.serve.request import Stats
from colonnade.serve.sampling_params import SamplingParams, choice_seed
from colonnade.serve.weight_swap import SWAP_MESSAGES, WeightSwap

Loaded = tuple[Transformer, Tokenizer] | tuple[Transformer, Tokenizer, Transformer | PoolerSpec | None]
"""A model that generates text, perhaps with a draft model, or one with the pooling of its hidden states."""

Load = Callable[[DistributedContext], Loaded]
"""Loads this rank's share of the model in each engine process; must be picklable (a module's function or a partial)."""

HEARTBEAT_S = 20.0
"""Interval of an idle engine's heartbeats to its other ranks [s]; collectives time out after minutes."""

STATS_S = 0.1
"""Interval of the statistics while requests only add tokens [s]."""


def run_worker(load: Load, plan: Plan, config: ServeConfig, device: str, address: str, engines: int = 1) -> None:
    """Run one rank of a server's engine until the HTTP process stops it or exits.

    The free memory is divided among ``engines`` that allocate their caches now or later.
    """
    with open_context(plan, device) as context, socket.socket(socket.AF_UNIX) as connection:
        loaded = load(context)
        if context.rank == 0:
            _wait_for_turn(connection, address)
        engine = build_engine(loaded, config, engines)
        del loaded
        swap = WeightSwap(engine, context)
        _collect_and_return_memory()
        with _frozen_gc():
            if context.rank:
                engine.follow(swap.follow) if isinstance(engine, Engine) else engine.follow()
                return
            try:
                with suppress(ConnectionError):  # the HTTP process has exited
                    _serve_requests(engine, swap, connection)
            finally:
                engine.stop()


def _wait_for_turn(connection: socket.socket, address: str) -> None:
    """Connect, and wait until this engine may allocate its cache; exit if the server stops meanwhile."""
    line = b""
    with suppress(ConnectionError, FileNotFoundError):  # the HTTP process has exited
        connection.connect(address)
        connection.sendall(encode_message({"event": "loaded"}))
        with connection.makefile("rb") as lines:  # nothing but this line is sent before "ready"
            line = lines.readline()
    if not line or decode_message(line)["do"] != "start":
        sys.exit(1)


def build_engine(loaded: Loaded, config: ServeConfig, engines: int = 1) -> Engine | PoolingEngine:
    """The engine for a loaded model."""
    model, tokenizer, more = loaded if len(loaded) == 3 else (*loaded, None)
    if isinstance(more, PoolerSpec):
        return PoolingEngine(model, tokenizer, config, more)
    return Engine(model, tokenizer, config, more, engines=engines)


def _collect_and_return_memory() -> None:
    """Return memory that loading has freed to the system: glibc would keep it, 290 MB for SmolLM2 with int4 weights."""
    gc.collect()  # a cycle may still keep what was read
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextmanager
def _frozen_gc() -> Iterator[None]:
    """Exclude existing objects from garbage collection (`gc.freeze()`): scanning them would stall decoding."""
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


def _serve_requests(engine: Engine | PoolingEngine, swap: WeightSwap, connection: socket.socket) -> None:
    """Run the engine until the HTTP process that started it disconnects or sends stop."""
    ready = {"event": "ready", **engine.limits, "pid": os.getpid(), "stats": dataclasses.asdict(engine.stats)}
    connections = HttpConnections(engine, ready)
    if isinstance(engine, Engine):
        engine.grammars.check = GrammarChecker(engine.grammars).check
    connections.add(connection, is_server=True)
    swap.notify = lambda: connections.inbox.put((None, {"do": "advance_swap"}))
    timer = _StatsTimer()
    while True:
        for sender, message in receive_messages(engine, connections):
            if isinstance(message, BaseException):
                raise message
            if message["do"] in ("stop", "disconnected") and sender and sender.is_server:
                return
            _handle(engine, swap, connections, sender, message)
        outputs = engine.step()
        due = timer.due(engine.stats, finished=any(output.finish_reason for output in outputs))
        connections.send_outputs(outputs, dataclasses.asdict(engine.stats) if due else None)


class _StatsTimer:
    """Decides which messages carry the engine's statistics: they would be most of a message with one token."""

    def __init__(self):
        self._sent_s, self._requests = 0.0, (0, 0)

    def due(self, stats: Stats, *, finished: bool) -> bool:
        """Whether to send them: a request began, waits or ended, or the last time was :data:`STATS_S` ago."""
        now_s, requests = time.monotonic(), (stats.running, stats.waiting)
        if not finished and requests == self._requests and now_s - self._sent_s < STATS_S:
            return False
        self._sent_s, self._requests = now_s, requests
        return True


def receive_messages(
    engine: Engine | PoolingEngine, connections: HttpConnections
) -> list[tuple[HttpConnection | None, Message | BaseException]]:
    """All messages that have arrived; while the engine is idle, wait for one and send heartbeats."""
    messages: list[tuple[HttpConnection | None, Message | BaseException]] = []
    beat_s = time.monotonic()
    while not messages or not connections.inbox.empty():
        wait_s = RETRY_S if connections.has_unsent else HEARTBEAT_S
        try:
            messages.append(connections.inbox.get(block=not engine.busy, timeout=wait_s))
        except queue.Empty:
            if engine.busy:
                break
            connections.flush()
            if time.monotonic() - beat_s >= HEARTBEAT_S:
                engine.heartbeat()
                beat_s = time.monotonic()
    return messages


def _handle(
    engine: Engine | PoolingEngine,
    swap: WeightSwap,
    connections: HttpConnections,
    sender: HttpConnection | None,
    message: Message,
) -> None:
    """Handle ``message``, and send a reply if there is one now."""
    if message["do"] == "connect":
        connections.connect(message["address"])
    elif message["do"] in ("cancel", "disconnected"):
        assert sender is not None, "only the weight swap sends itself messages"
        ids = message["ids"] if message["do"] == "cancel" else connections.end(sender)
        for key in ids:
            engine.cancel(key)
        connections.forget(ids)
    elif sender is None or not sender.closed:
        if sender:
            connections.begin(sender, _live_ids(message))
        reply = swap.handle(message) if message["do"] in SWAP_MESSAGES else _reply(engine, message)
        if reply:
            connections.reply(reply)


def _live_ids(message: Message) -> list[str]:
    """Ids of ``message`` that will get a reply: not those of completions that ended before it was resumed."""
    if message["do"] == "answer":
        return message["event"]["ids"]
    resume = message.get("resume") or [()] * len(message["ids"])
    return [key for key, tokens in zip(message["ids"], resume, strict=True) if tokens is not None]


def _look(engine: Engine | PoolingEngine, message: Message) -> Message:
    """The response to a query from the viewer, which supports models that generate text."""
    if not isinstance(engine, Engine):
        error = RequestError("the viewer shows served models that generate text; use colonnade look MODEL for this one")
        return {"event": "refused", "ids": message["ids"], "error": error_to_dict(error)}
    if engine.look is None:
        from colonnade.serve.look import EngineLook

        engine.look = EngineLook(engine, message["model"])
    return engine.look.reply(message)


def _reply(engine: Engine | PoolingEngine, message: Message) -> Message | None:
    """Handle ``message``; returns the reply to send: the refusal of a submission, or a response."""
    if message["do"] == "answer":
        return message["event"]
    if message["do"] == "reset_cache":
        if isinstance(engine, Engine):  # a pooling engine has no cache
            engine.scheduler.pool.reset_prefix_cache()
        return {"event": "answer", "ids": message["ids"]}
    if message["do"] == "look":
        return _look(engine, message)
    if "refusal" in message:
        return message["refusal"]
    try:
        if isinstance(engine, PoolingEngine):
            options = message["pooling"]
            engine.add(message["ids"], message["tokens"], fields=options["fields"], dimensions=options["dimensions"])
            return None
        resume = message["resume"]
        if not resume:
            _check_queue(engine, message["client"], len(message["ids"]))
            _check_wait(engine, message)
        params, n = sampling_params(message["params"]), message["n"]
        for i, key in enumerate(message["ids"]):
            if resume and resume[i] is None:
                continue
            engine.add(
                message["tokens"][i // n], _choice_params(params, i % n), request_id=key, client=message["client"],
                priority=message["priority"], resume=resume[i] if resume else None, adapter=message["adapter"],
            )  # fmt: skip
    except ColonnadeError as error:
        for key in message["ids"]:  # none of them has run yet
            engine.cancel(key)
        return refusal(message, error)
    return None


def _choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    if params.seed is None or choice == 0:
        return params
    return dataclasses.replace(params, seed=choice_seed(params.seed, choice))


def _check_queue(engine: Engine, client: str, count: int) -> None:
    """Raise :class:`RequestError` (429) if the queue has no room for all of ``count`` prompts of ``client``."""
    waiting, most = len(engine.scheduler.waiting), engine.config.max_waiting
    if count > 1 and not engine.scheduler.waiting.has_room(client, count, most):  # for one, the scheduler raises
        fewer = f", or with at most {most - waiting:,} prompts" if waiting < most else ""
        raise RequestError(
            f"the queue has no room for {count:,} prompts: {waiting:,} requests are already waiting, of {most:,}; "
            f"try again later{fewer}",
            status=429,
            code="queue_full",
            operator_hint="raise --serve.max_waiting for a longer queue",
        )


def _check_wait(engine: Engine, message: Message) -> None:
    """Raise :class:`RequestError` (429) for a request that would probably not start within its ``timeout_s``."""
    if (timeout_s := message["timeout_s"]) is None:
        return
    wait_s = engine.expected_wait_s(message["client"], message["priority"], len(message["ids"]))
    if wait_s > timeout_s:
        raise RequestError(
            f"the request would wait about {wait_s:.2g} s before it starts, longer than its timeout_s of "
            f"{timeout_s:g} s; try again later, or raise it",
            param="timeout_s",
            status=429,
            code="timeout_expected",
            retry_after_s=wait_s - timeout_s,
        )
