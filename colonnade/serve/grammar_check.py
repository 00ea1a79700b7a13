"""Compiles a client's grammar first in a separate process, which can be killed if it takes too long.

    engine (a thread) ── {"wanted"} ──> check process: compile ──> {"error"}, or nothing within MAX_CHECK_S: killed
                 └ compiles it too, once it is known to end

llguidance's limits do not bound all of a compilation, and a thread cannot be stopped: 38 KB of JSON schema with 900
different multipleOf compiled for over a minute after its request had been refused, and took 10 MB more every second. It
holds the GIL for at most 0.1 s, so a grammar that is known to terminate can be compiled while steps run.
"""

import dataclasses
import json
import resource
import select
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from colonnade.errors import RequestError
from colonnade.serve.grammar import (
    GrammarCompiler,
    Vocabulary,
    compile_grammar,
    in_large_stack,
    invalid_grammar,
    read_vocabulary,
)
from colonnade.serve.structured_outputs import StructuredOutputs

MAX_CHECK_S = 2.0
"""Time limit of a compilation [s]."""

MAX_CHECK_BYTES = 2 << 30
"""Memory that the process may use; the vocabulary and a stack need about 0.5 GB of its addresses."""

START_S = 60.0
"""Time to start the process and to read the vocabulary [s]."""


class GrammarChecker:
    """The process that compiles first, started when it is needed; may be used by several threads."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        """Held while a grammar is compiled: they are compiled one after another."""

    def check(self, wanted: StructuredOutputs) -> None:
        """Raise :class:`RequestError` for a grammar that is invalid, or takes too much time or memory."""
        with self._lock:
            process = self._process = self._process or self._start()
            _send(process, dataclasses.asdict(wanted))
            try:
                answer = _receive(process, MAX_CHECK_S)
            except (TimeoutError, EOFError) as failure:
                self._stop()
                died = isinstance(failure, EOFError)
                what = f"over {MAX_CHECK_BYTES >> 30} GiB of memory" if died else f"over {MAX_CHECK_S:g} s"
                raise invalid_grammar(wanted, "compiled", f"it takes {what}; simplify it") from None
        if "error" in answer:
            raise RequestError(answer["error"], param="structured_outputs", code="invalid_grammar")

    def close(self) -> None:
        """Stop the process."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __name__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        it = self._compiler.vocabulary
        tokens = [token.decode("latin-1") for token in it.tokens]
        _send(process, {"tokens": tokens, "special": it.special_token_ids, "eos": it.eos_ids, "bos": it.bos_token_id})
        _receive(process, START_S)
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):  # at the end of the block its pipes are closed
                self._process.__exit__(None, None, None)
            self._process = None


def _send(process: subprocess.Popen[bytes], message: Any) -> None:
    assert process.stdin
    with suppress(BrokenPipeError):  # it has died: there will be no reply
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _receive(process: subprocess.Popen[bytes], most_s: float) -> dict[str, Any]:
    """The reply; raises TimeoutError if there is none in time, and EOFError if the process has died."""
    assert process.stdout
    if not select.select([process.stdout], [], [], most_s)[0]:
        raise TimeoutError(f"no answer within {most_s:g} s")
    line = process.stdout.readline()
    if not line:
        raise EOFError("the process that checks grammars has died")
    return json.loads(line)


def main() -> None:
    """The process: read the vocabulary, then compile one grammar after another."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_CHECK_BYTES, MAX_CHECK_BYTES))
    first = json.loads(sys.stdin.buffer.readline())
    tokens = [token.encode("latin-1") for token in first["tokens"]]
    byte_ids = {token: i for i, token in enumerate(tokens) if len(token) == 1}

    def encode(text: bytes) -> list[int]:
        """Ids of the bytes: the exact tokens of forced text do not matter here."""
        return [byte_ids[bytes([byte])] for byte in text if bytes([byte]) in byte_ids]

    vocabulary = read_vocabulary(Vocabulary(tokens, first["special"], first["eos"], first["bos"], encode))
    _answer({})
    for line in sys.stdin.buffer:
        wanted = StructuredOutputs(**json.loads(line))
        try:
            in_large_stack(lambda wanted=wanted: compile_grammar(wanted, vocabulary)).result()
        except RequestError as error:
            _answer({"error": error.message})
        else:
            _answer({})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
