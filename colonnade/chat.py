"""Talking with a model on a terminal: one continuation, or a chat. The text appears as it is generated."""

import asyncio
import functools
import re
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, replace

from rich.console import Console

from colonnade import api
from colonnade.checkpoint.open_model import OpenedModel
from colonnade.config import AS_TRAINED, Device, ExpertsConfig, ModelConfig, Plan, ServeConfig, nearest
from colonnade.config.experts import check_generates, check_task
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ColonnadeError
from colonnade.model import Transformer
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch, rank_and_world
from colonnade.serve.batch_invariance import check_ranks
from colonnade.serve.engine import Engine
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.engine_process import engine_process
from colonnade.serve.ipc import Ask
from colonnade.serve.memory_advice import check_room
from colonnade.serve.memory_estimate import Asked
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.worker import Load, standing

CONTINUATION_TOKENS = 256
"""Of a text that need not come to an end by itself."""

COMMANDS = {
    "/help": "lists these",
    "/reset": "starts a new conversation",
    "/quit": "ends (as do /exit and Ctrl-D)",
}
"""What a line of a chat may be, beside a message."""
HELP = "\n".join([*(f"{name:8}{what}" for name, what in COMMANDS.items()), "Ctrl-C  stops an answer"])


@dataclass(frozen=True)
class Where:
    """Which model, laid out how, on what."""

    model: str
    plan: Plan
    serve: ServeConfig
    device: Device
    dtype: api.DType
    experts: ExpertsConfig = AS_TRAINED

    def loading(self, found: OpenedModel) -> Load:
        """What an engine process calls for its share of the model that :meth:`writer` opened."""
        return functools.partial(_load, replace(self, model=str(found.place)))

    def writer(self) -> OpenedModel:
        """What :meth:`find` opens, which must be a model that writes; raises :class:`ConfigError` for another."""
        found = self.find()
        check_generates(found.config, self.model)
        return found

    def find(self) -> OpenedModel:
        """The model, opened; that it can be laid out and served so, and what its experts are told, checked."""
        found = api.find(self.model, self.plan, self.experts, self.serve.weights, self.serve.weight_group)
        check_task(found.config, found.tasks)
        self.serve.check(found.config)
        if self.serve.batch_invariant:
            check_ranks(tp=self.plan.tp, cp=self.plan.cp)
        return found

    def open(self) -> api.Model:
        """Load it, on every rank of its plan."""
        return self.load_on(None)

    def load_on(self, context: DistributedContext | None) -> api.Model:
        """Load it, on a ground that stands already."""
        return api.load(
            self.model, plan=self.plan, dtype=self.dtype, device=self.device, context=context, experts=self.experts,
            weights=self.serve.weights, weight_group=self.serve.weight_group,
        )  # fmt: skip


def company(config: ModelConfig) -> str:
    """What is to be said of experts who count tokens, as a server's step has those of several requests."""
    moe = config.moe
    if moe is not None and moe.router.kind == "expert_choice":
        return "note: the router expert_choice chose among whole texts in training, and sees a token at a time here"
    if moe is not None and moe.capacity:
        return (
            f"note: experts with a capacity (factor {moe.capacity:g}) have no place for all tokens of a step, whoever "
            "asked for them; --experts.capacity off gives each one"
        )
    return ""


def _say(note: str) -> None:
    """To the user, where there is anything, by the first of several processes."""
    if note and rank_and_world()[0] == 0:
        print(note, file=sys.stderr, flush=True)


def _load(where: Where, context: DistributedContext) -> tuple[Transformer, Tokenizer]:
    """Called in each engine process; too little memory shows before anything is read."""
    dtype = api.dtype_on(context.device, where.dtype)
    config, plan = where.find().config, where.plan
    ranks = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "sh": plan.sh}
    check_room(Asked(config, where.serve, dtype, context.device, **ranks, resident=where.experts.resident))
    model = where.load_on(context)
    return model.transformer, model.tokenizer


def generate(where: Where, prompt: str, params: SamplingParams) -> None:
    """Print the continuation of ``prompt``."""
    _say(company(where.writer().config))
    launch(_generate, (where, prompt, params), where.plan)


def _generate(where: Where, prompt: str, params: SamplingParams) -> None:
    rank, _ = rank_and_world()
    status = Console(stderr=True, highlight=False).status("loading the model")
    with standing(where.plan, where.device) as context:
        with nullcontext() if rank else status:
            engine = Engine(*_load(where, context), where.serve)
        if context.rank:
            engine.follow()
            return
        if params.max_tokens is None:
            room = engine.model.config.context - len(engine.tokenizer.encode(prompt))
            params = replace(params, max_tokens=max(1, min(CONTINUATION_TOKENS, room)))
        try:
            for output in engine.stream(prompt, params):
                print(output.text, end="", flush=True)
            print()
        finally:
            engine.stop()


def chat(where: Where, system: str | None, params: SamplingParams) -> None:
    """Chat until /quit or the end of the input.

    The model runs where a server's would, in engine processes of its own, so that any plan can be talked to. Raises
    :class:`CheckpointError` for a model without a chat template.
    """
    found = where.writer()
    tokenizer = Tokenizer.beside(found.words)
    if tokenizer is None or tokenizer.chat_template is None:
        raise CheckpointError(
            f"{where.model} has no chat template, so that it cannot chat; continue a text: "
            f"colonnade generate {where.model} PROMPT"
        )
    _say(company(found.config))
    console = Console(stderr=True, highlight=False)
    opening: list[Mapping[str, str]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        with console.status("loading the model"):
            process = engine_process(where.loading(found), where.plan, where.serve, where.device, asyncio.Event())
            engine = runner.run(stack.enter_async_context(process))
        try:
            console.print("[dim]/help lists the commands; Ctrl-D ends, Ctrl-C stops an answer[/dim]")
            while (said := _read()) not in (None, "/quit", "/exit"):
                if said == "/reset":
                    messages = list(opening)
                elif said == "/help":
                    console.print(HELP, markup=False)
                elif re.fullmatch(r"/\w+", said):
                    console.print(f"there is no command {said}{nearest(said, list(COMMANDS))}", markup=False)
                elif said:
                    messages = _turn(runner, engine, messages, said, params, console)
        finally:
            runner.run(stack.aclose())


def _read() -> str | None:
    """A line of the user's, or None at the end of the input; on a terminal with line editing and history."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Python may be built without it: then lines are plain
            import readline  # noqa: F401 - input() uses it once it is imported
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _turn(
    runner: asyncio.Runner,
    engine: EngineClient,
    messages: list[Mapping[str, str]],
    said: str,
    params: SamplingParams,
    console: Console,
) -> list[Mapping[str, str]]:
    """The conversation with one more question and its answer; unchanged when it was refused."""
    asked, pieces = [*messages, {"role": "user", "content": said}], list[str]()
    try:
        runner.run(_answer(engine, Ask(messages=asked, params=params), pieces))
    except KeyboardInterrupt:
        pass  # the answer ends here, and what came of it counts
    except ColonnadeError as error:
        if engine.failure:
            raise
        console.print(f"[red]{error}[/red]")
        return messages
    print(flush=True)
    return [*asked, {"role": "assistant", "content": "".join(pieces)}]


async def _answer(engine: EngineClient, ask: Ask, pieces: list[str]) -> None:
    async for _, output in engine.run(ask):
        pieces.append(output.text)
        print(output.text, end="", flush=True)
