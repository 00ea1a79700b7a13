"""Generation on a terminal: ``colonnade generate`` and ``colonnade chat``. Text appears as it is generated."""

import asyncio
import sys
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial

from rich.console import Console

from colonnade.conversation import CONTINUATION_TOKENS, Messages, converse
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ColonnadeError
from colonnade.model_spec import ModelSpec, OpenedOnce, load_checked
from colonnade.parallel.launch import launch, rank_and_world
from colonnade.serve.batch_invariance import batching_note
from colonnade.serve.engine import Engine
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import engine_process
from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.worker import open_context


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
            model, tokenizer, _ = load_checked(spec, OpenedOnce(None), context)
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
            converse(system, tokenizer, *limits, partial(_answer, runner, engine, params, console), console)
        finally:
            runner.run(stack.aclose())


def _answer(
    runner: asyncio.Runner,
    engine: EngineClient,
    params: SamplingParams,
    console: Console,
    messages: Messages,
) -> Messages:
    """Print the reply to ``messages`` and append it; without the last message if it was refused."""
    pieces: list[str] = []
    try:
        runner.run(_print_answer(engine, GenerationRequest(messages=messages, params=params), pieces))
    except KeyboardInterrupt:
        pass  # the reply ends here, and the conversation continues with this part of it
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
