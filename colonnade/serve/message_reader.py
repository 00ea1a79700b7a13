"""Reads the HTTP process's messages in the engine process: applies chat templates, tokenises, compiles grammars.

A thread does this while the model's steps run (the tokenizer releases the GIL), so that a prompt delays neither the
event loop nor the running requests. A second thread takes submissions with much text or a grammar, so that they do not
delay the others' prompts.
"""

import logging
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from colonnade.errors import ColonnadeError, RequestError
from colonnade.serve import pooling_request
from colonnade.serve.engine import Engine
from colonnade.serve.ipc import Message, decode_message, error_to_dict
from colonnade.serve.pooling_engine import PoolingEngine
from colonnade.serve.prompts import encode_text
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.structured_outputs import StructuredOutputs
from colonnade.serve.tokenize_messages import MESSAGES, answer_message, work_size

LOG = logging.getLogger("colonnade.serve.engine")

Put = Callable[[Message | BaseException], object]
"""Puts a message, or a bug of this thread, into the engine's inbox."""

LARGE_TEXT = 1 << 15
"""Requests with more text than this are tokenised in a separate thread [characters]."""


def refusal(message: Message, error: ColonnadeError) -> Message:
    """The event that refuses ``message``, with the name of the parameter that the client has sent."""
    details = error_to_dict(error)
    if message["messages"] is not None and details["param"] == "prompt":
        details["param"] = "messages"
    if message.get("template", {}).get("tools") and details["param"] == "structured_outputs":
        details["param"] = "tools"
        details["message"] = details["message"].replace("structured_outputs.grammar", "the grammar of these tools")
    return {"event": "refused", "ids": message["ids"], "error": details}


def sampling_params(values: Message) -> SamplingParams:
    """The sampling parameters of a submission: in JSON, the keys of ``logit_bias`` are strings."""
    changed: Message = {"logit_bias": {int(token): bias for token, bias in values["logit_bias"].items()}}
    if values["structured_outputs"] is not None:
        changed["structured_outputs"] = StructuredOutputs(**values["structured_outputs"])
    return SamplingParams(**{**values, **changed})


def read_messages(connection: socket.socket, engine: Engine | PoolingEngine, put: Put) -> None:
    """In a thread: ``put`` messages, with prompts as token ids, into the inbox; "disconnected" at the end."""
    large = _LargeRequests(engine, put)
    try:
        with suppress(OSError), connection.makefile("rb") as lines:  # OSError: the HTTP process was killed
            for line in lines:
                message = decode_message(line)
                if _is_slow(message):
                    large.add(message)
                elif message["do"] != "cancel" or not large.cancel(message["ids"]):
                    put(prepare(message, engine))
        put({"do": "disconnected"})
    except BaseException as bug:  # noqa: BLE001 - raised again by the main thread, which would otherwise wait forever
        put(bug)


class _LargeRequests:
    """Tokenises submissions, and compiles their grammars, in a thread in order of arrival; drops cancelled ones."""

    def __init__(self, engine: Engine | PoolingEngine, put: Put):
        self._engine, self._put = engine, put
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
                message = prepare(message, self._engine, partial(self._wanted, ids))
                with self._lock:
                    if self._wanted(ids):
                        self._pending.difference_update(ids)
                        self._put(message)
        except BaseException as bug:  # noqa: BLE001 - raised again by the main thread
            self._put(bug)


def _is_slow(message: Message) -> bool:
    """Whether the submission has much text, tools, or a grammar, which takes milliseconds to compile."""
    if "params" in message and (message["params"]["structured_outputs"] or message["template"].get("tools")):
        return True
    return _text_size(message) > LARGE_TEXT


def _text_size(message: Message) -> int:
    """Characters of text that must be tokenised, or ids to decode."""
    if message["do"] in MESSAGES:
        return work_size(message)
    if message["do"] != "submit":
        return 0
    if "pooling" in message:
        return pooling_request.text_size(message)
    if message["messages"] is not None:
        return sum(len(each["content"]) for each in message["messages"])
    return sum(len(prompt) for prompt in message["prompts"] if isinstance(prompt, str))


def prepare(message: Message, engine: Engine | PoolingEngine, wanted: Callable[[], bool] = lambda: True) -> Message:
    """Add the prompts' ``tokens`` to a submission, or a ``refusal``; stops early once ``wanted`` is False.

    Compiles its grammar, which the engine keeps. A request to tokenise or decode becomes its reply.
    """
    if message["do"] in MESSAGES:
        return {"do": "answer", "event": answer_message(message, engine.tokenizer)}
    if message["do"] != "submit":
        return message
    try:
        if isinstance(engine, Engine) and (wanted_form := sampling_params(message["params"]).structured_outputs):
            engine.grammars.matcher(wanted_form)
        return {**message, "tokens": _prompt_ids(message, engine, wanted)}
    except ColonnadeError as error:
        return {**message, "refusal": refusal(message, error)}
    except Exception as bug:  # of one request: the others continue
        LOG.exception("a request could not be prepared")
        error = RequestError(f"internal error ({type(bug).__name__})", status=500, code="server_error")
        return {**message, "refusal": refusal(message, error)}


def _prompt_ids(message: Message, engine: Engine | PoolingEngine, wanted: Callable[[], bool]) -> list[Any]:
    tokenizer = engine.tokenizer
    if "pooling" in message:
        return pooling_request.tokenize(message, tokenizer, wanted)
    if message["messages"] is None:
        prompts = (prompt for prompt in message["prompts"] if wanted())
        encoder, special = engine.model.config.encoder, message["special"]
        encode = partial(encode_text, tokenizer=tokenizer, encoder=encoder, special=special)
        return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; send a prompt to /v1/completions", param="messages")
    return [tokenizer.encode_chat(message["messages"], **message["template"])]
