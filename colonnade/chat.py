"""Generation on a terminal: ``colonnade generate`` and ``colonnade chat``. Text appears as it is generated."""

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from colonnade.config import did_you_mean
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ColonnadeError, RequestError
from colonnade.model_spec import ModelSpec, load_checked
from colonnade.parallel.launch import launch, rank_and_world
from colonnade.serve.batch_invariance import batching_note
from colonnade.serve.engine import Engine
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import engine_process
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.package import Package
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.worker import open_context

CONTINUATION_TOKENS = 256
"""Default max_tokens of ``generate``, since a continuation need not end by itself."""

Messages = list[Mapping[str, str]]
"""The messages of a conversation."""

COMMANDS = {
    "/help": "lists the commands",
    "/reset": "starts a new conversation",
    "/quit": "ends the chat (as do /exit and Ctrl-D)",
}
"""Lines that are commands of the chat, not messages."""
HELP = "\n".join([*(f"{name:8}{what}" for name, what in COMMANDS.items()), "Ctrl-C  stops an answer"])


def _print_note(note: str) -> None:
    """Print ``note`` on stderr, unless it is empty or this is not the first process."""
    if note and rank_and_world()[0] == 0:
        print(note, file=sys.stderr, flush=True)


def generate(spec: ModelSpec, prompt: str, params: SamplingParams) -> None:
    """Print the continuation of ``prompt``."""
    _print_note(batching_note(spec.open_generative().config))
    launch(_generate, (spec, prompt, params), spec.plan)


def _generate(spec: ModelSpec, prompt: str, params: SamplingParams) -> None:
    rank, _ = rank_and_world()
    status = Console(stderr=True, highlight=False).status("loading the model")
    with open_context(spec.plan, spec.device) as context:
        with nullcontext() if rank else status:
            model, tokenizer, _ = load_checked(spec, context)
            engine = Engine(model, tokenizer, spec.serve)
        if context.rank:
            engine.follow()
            return
        if params.max_tokens is None:
            most = min(engine.model.config.context, engine.scheduler.pool.max_request_tokens)
            left = most - len(engine.tokenizer.encode(prompt))
            params = replace(params, max_tokens=max(1, min(CONTINUATION_TOKENS, left)))
        try:
            for output in engine.stream(prompt, params):
                print(output.text, end="", flush=True)
            print()
        finally:
            engine.stop()


def chat(spec: ModelSpec, system: str | None, params: SamplingParams) -> None:
    """Chat until /quit or the end of the input.

    The model runs in engine processes, as for a server, so that every plan works. Raises :class:`CheckpointError` for a
    model without a chat template.
    """
    opened = spec.open_generative()
    tokenizer = Tokenizer.from_model(opened.tokenizer_source)
    if tokenizer is None or tokenizer.chat_template is None:
        raise CheckpointError(
            f"{spec.model} has no chat template, so it cannot chat; continue a text instead: "
            f"colonnade generate {spec.model} PROMPT"
        )
    _print_note(batching_note(opened.config))
    console = Console(stderr=True, highlight=False)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        with console.status("loading the model"):
            process = engine_process(spec.open_loader, spec.plan, spec.serve, spec.device, asyncio.Event())
            engine = runner.run(stack.enter_async_context(process))
        try:
            limits = engine.max_request_tokens, params.max_tokens
            _converse(system, tokenizer, *limits, partial(_answer, runner, engine, params, console), console)
        finally:
            runner.run(stack.aclose())


def generate_from_package(folder: Path, prompt: str, params: SamplingParams, *, trust: bool) -> None:
    """Print the continuation of ``prompt`` by an exported package; raises what :class:`Package` raises."""
    package = Package(folder, trust=trust)
    if params.max_tokens is None and package.tokenizer is not None:
        left = package.info.context - len(package.tokenizer.encode(prompt))
        params = replace(params, max_tokens=max(1, min(CONTINUATION_TOKENS, left)))
    for text, _ in package.stream(prompt, params):
        print(text, end="", flush=True)
    print()


def chat_with_package(folder: Path, system: str | None, params: SamplingParams, *, trust: bool) -> None:
    """Chat with an exported package, as :func:`chat` does with a model."""
    package, console = Package(folder, trust=trust), Console(stderr=True, highlight=False)
    tokenizer = package.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise CheckpointError(
            f"{folder} has no chat template, so it cannot chat; continue a text instead: "
            f"colonnade generate {folder} PROMPT --trust"
        )

    def answer(messages: Messages) -> Messages:
        pieces: list[str] = []
        try:
            for text, _ in package.stream(tokenizer.encode_chat([dict(each) for each in messages]), params):
                pieces.append(text)
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            pass  # the answer ends here, and the conversation goes on with this part of it
        except RequestError as error:
            console.print(f"[red]{error}[/red]")
            return messages[:-1]
        print(flush=True)
        return [*messages, {"role": "assistant", "content": "".join(pieces)}]

    _converse(system, tokenizer, package.info.context, params.max_tokens, answer, console)


def _converse(
    system: str | None,
    tokenizer: Tokenizer,
    max_request_tokens: int,
    max_tokens: int | None,
    answer: Callable[[Messages], Messages],
    console: Console,
) -> None:
    """Read lines until /quit or the end of the input; ``answer`` prints the answer to messages and appends it."""
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    console.print("[dim]/help lists the commands; Ctrl-D ends, Ctrl-C stops an answer[/dim]")
    while (line := _read_line()) not in (None, "/quit", "/exit"):
        if line == "/reset":
            messages = list(opening)
        elif line == "/help":
            console.print(HELP, markup=False)
        elif re.fullmatch(r"/\w+", line):
            console.print(f"there is no command {line}{did_you_mean(line, list(COMMANDS))}", markup=False)
        elif line:
            asked: Messages = [*messages, {"role": "user", "content": line}]
            fitting = drop_turns(asked, tokenizer, max_request_tokens, max_tokens)
            if len(fitting) < len(asked):
                console.print("[dim]the context or the KV cache is full: the oldest turns are left out[/dim]")
            messages = answer(fitting)


def drop_turns(
    messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer, max_request_tokens: int, answer_tokens: int | None
) -> Messages:
    """The conversation without its oldest turns, so that prompt and answer have at most ``max_request_tokens``.

    A question leaves together with its answer; a system message and the last question stay. Without a limit the answer
    gets an eighth of the tokens.
    """
    opening = [message for message in messages[:1] if message["role"] == "system"]
    turns, room = list(messages[len(opening) :]), max_request_tokens - (answer_tokens or max_request_tokens // 8)
    while len(turns) > 1 and len(tokenizer.encode_chat([dict(each) for each in (*opening, *turns)])) > room:
        turns = turns[next((i for i in range(1, len(turns)) if turns[i]["role"] == "user"), 1) :]
    return [*opening, *turns]


def _read_line() -> str | None:
    """A line of input, or None at its end; on a terminal with line editing and history."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Python may be built without it: then there is no line editing
            import readline  # noqa: F401 - input() uses it once it is imported
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(
    runner: asyncio.Runner,
    engine: EngineClient,
    params: SamplingParams,
    console: Console,
    messages: Messages,
) -> Messages:
    """Print the answer to ``messages`` and append it; without the last message if it was refused."""
    pieces: list[str] = []
    try:
        runner.run(_print_answer(engine, GenerationRequest(messages=messages, params=params), pieces))
    except KeyboardInterrupt:
        pass  # the answer ends here, and the conversation goes on with this part of it
    except ColonnadeError as error:
        if engine.failure:
            raise
        console.print(f"[red]{error}[/red]")
        return messages[:-1]
    print(flush=True)
    return [*messages, {"role": "assistant", "content": "".join(pieces)}]


async def _print_answer(engine: EngineClient, request: GenerationRequest, pieces: list[str]) -> None:
    async for _, output in engine.run(request):
        pieces.append(output.text)
        print(output.text, end="", flush=True)
