"""The engine's side of a server: what runs in each process that :func:`colonnade.parallel.launch.launch` starts.

    rank 0      loads, connects to the HTTP process, and loops:  arrivals -> step -> outputs
    rank > 0    loads and follows

A thread of rank 0 reads the line, applies chat templates and tokenises (the tokenizer releases the interpreter's lock),
so that neither the event loop nor the running requests wait for a long prompt. Everything else is the engine's own
thread. When the HTTP process goes away the line ends, and so does the engine.
"""

import dataclasses
import gc
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from colonnade.config import Plan, ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError, RequestError
from colonnade.model import Transformer
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.serve.engine import Engine
from colonnade.serve.ipc import Message, error_message, from_line, plain_output, to_line
from colonnade.serve.sampling_params import SamplingParams

Load = Callable[[DistributedContext], tuple[Transformer, Tokenizer]]
"""Called in each engine process with the ground it stands on; must be picklable (a module's function or a partial)."""

BEAT_S = 20.0
"""An idle engine's sign of life to its other ranks [s]; collectives give up after minutes."""


def work(load: Load, plan: Plan, config: ServeConfig, device: str, address: str) -> None:
    """One rank of a server's engine, until the HTTP process stops it or goes away."""
    with standing(plan, device) as context:
        engine = Engine(*load(context), config)
        with _settled():
            if context.rank:
                engine.follow()
                return
            with socket.socket(socket.AF_UNIX) as line:
                try:
                    with suppress(ConnectionError, FileNotFoundError):  # the HTTP process is gone: nobody to tell
                        line.connect(address)
                        _lead(engine, line)
                finally:
                    engine.stop()


@contextmanager
def _settled() -> Iterator[None]:
    """What is there by now stays until the end: were it looked at whenever Python collects its garbage, everybody's
    tokens would wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def standing(plan: Plan, device: str) -> Iterator[DistributedContext]:
    """The ground of a process that serves."""
    if plan.world == 1:
        yield DistributedContext.solo(choose_device(plan, device))
    else:
        with DistributedContext.build(plan, device) as context:
            yield context


def _lead(engine: Engine, line: socket.socket) -> None:
    """Serve the line until it ends or says stop."""
    inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, engine.tokenizer, inbox), daemon=True).start()
    limits = {"context": engine.model.config.context, "cache_tokens": engine.scheduler.pool.tokens}
    line.sendall(to_line({"event": "ready", **limits, "stats": dataclasses.asdict(engine.stats)}))
    while True:
        for message in arrivals(engine, inbox):
            if isinstance(message, BaseException):
                raise message
            if message["do"] == "stop":
                return
            if refusal := _handle(engine, message):
                line.sendall(to_line(refusal))
        outputs = [plain_output(output) for output in engine.step()]
        line.sendall(to_line({"event": "outputs", "outputs": outputs, "stats": dataclasses.asdict(engine.stats)}))


def arrivals(engine: Engine, inbox: queue.SimpleQueue) -> list[Message | BaseException]:
    """All that has arrived; an idle engine waits for something, beating."""
    messages: list[Message | BaseException] = []
    while not messages or not inbox.empty():
        try:
            messages.append(inbox.get(block=not engine.busy, timeout=BEAT_S))
        except queue.Empty:
            if engine.busy:
                break
            engine.beat()
    return messages


def _handle(engine: Engine, message: Message) -> Message | None:
    """Add all the requests of a message, or cancel them; the message that refuses them, if they must be."""
    if message["do"] == "cancel":
        for key in message["ids"]:
            engine.cancel(key)
        return None
    if "refusal" in message:
        return message["refusal"]
    try:
        _check_room(engine, len(message["ids"]))
        params = SamplingParams(**message["params"])
        for key, tokens in zip(message["ids"], message["tokens"], strict=True):
            engine.add(tokens, params, request_id=key)
    except ColonnadeError as error:
        for key in message["ids"]:  # nothing has run yet
            engine.cancel(key)
        return _refusal(message, error)
    return None


def _check_room(engine: Engine, count: int) -> None:
    """Raise :class:`RequestError` (429) when ``count`` requests do not all have a place in the queue."""
    waiting, most = len(engine.scheduler.waiting), engine.config.max_waiting
    if waiting + count > most and count > 1:  # of one the scheduler says so itself
        raise RequestError(
            f"there are {count} prompts, and {waiting} requests wait already of {most} that --serve.max_waiting "
            "allows; try again later, or with fewer",
            status=429,
            code="queue_full",
        )


def _refusal(message: Message, error: ColonnadeError) -> Message:
    """``error`` as an event; what is wrong with a chat's prompt is wrong with its messages."""
    told = error_message(error)
    if message["messages"] is not None and told["param"] == "prompt":
        told["param"] = "messages"
    return {"event": "refused", "ids": message["ids"], "error": told}


def _read(line: socket.socket, tokenizer: Tokenizer, inbox: queue.SimpleQueue) -> None:
    """In a thread: lines into the inbox, prompts already as token ids; at the end of the line, a stop."""
    try:
        with line.makefile("rb") as lines:
            for text in lines:
                inbox.put(_prepare(from_line(text), tokenizer))
        inbox.put({"do": "stop"})
    except OSError:  # the HTTP process was killed
        inbox.put({"do": "stop"})
    except BaseException as bug:  # noqa: BLE001 - raised again by the engine's thread, which would else wait for ever
        inbox.put(bug)


def _prepare(message: Message, tokenizer: Tokenizer) -> Message:
    """A submission with its prompts' ``tokens``, or with the ``refusal`` that answers it."""
    if message["do"] != "submit":
        return message
    try:
        return {**message, "tokens": _tokens(message, tokenizer)}
    except ColonnadeError as error:
        return {**message, "refusal": _refusal(message, error)}


def _tokens(message: Message, tokenizer: Tokenizer) -> list[list[int]]:
    if message["messages"] is None:
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in message["prompts"]]
    if tokenizer.chat_template is None:
        raise RequestError(
            "this model has no chat template; send a prompt to /v1/completions, or use colonnade generate",
            param="messages",
        )
    return [tokenizer.encode_chat(message["messages"])]
