"""The engine: requests in, text out, one forward pass a step.

    work    = schedule()        which tokens of which requests        scheduler.py, pages.py
    tokens  = run(work)         the model, and one token a request    batch.py, sampler.py
    outputs = commit(tokens)    text, stop strings, what has ended    text.py

A GPU is given the next step before the tokens of the last one are looked at, so that it never waits for the host:
outputs come one step later, and a request that ends by what it said has run once for nothing. Over several ranks
rank 0 does all three and broadcasts each :class:`Work` before it runs it; the other ranks :meth:`~Engine.follow`,
running the same forward on their shares of the model and of the vocabulary (tp), and of the cache (tp its heads, cp its
pages). An engine belongs to one thread.
"""

import time
import uuid
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from colonnade.config import ServeConfig
from colonnade.config.experts import check_generates
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import RequestError
from colonnade.model import Transformer
from colonnade.serve import work_broadcast
from colonnade.serve.batch_invariance import prepare
from colonnade.serve.cuda_graph_runner import CudaGraphRunner
from colonnade.serve.engine_limits import build_cache, check_model, check_plan, limit_tokens
from colonnade.serve.memory_estimate import spare_pages
from colonnade.serve.model_inputs import Drawn, Runner
from colonnade.serve.output import Completion, FinishReason, Output, Stats, Timing, not_finite
from colonnade.serve.page_pool import PagePool
from colonnade.serve.prompts import Prompt, checked, checked_each, several, token_ids
from colonnade.serve.request import Request
from colonnade.serve.resolve_config import Site, check_steps, resolve_config
from colonnade.serve.sampler import NOT_FINITE
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.scheduler import Scheduler, Work
from colonnade.serve.text_stream import TextStream


@dataclass(slots=True)
class _Live:
    """What the engine keeps of a request beside the scheduler's part."""

    request: Request
    text: TextStream
    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float = 0.0


class Engine:
    """Generates with ``model``; the cache takes what ``config`` allows, in the model's dtype and on its device.

    Weights may change, but must stay where they lie in memory: recorded steps read them there.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: ServeConfig | None = None):
        self.model, self.tokenizer = model, tokenizer
        check_generates(model.config)
        check_plan(model)
        site, config = Site.of(model), config or ServeConfig()
        check_steps(config, site)
        self.config = resolve_config(config, site)
        check_model(model, self.config)
        self.cache = build_cache(model, self.config)
        invariant = prepare(model) if self.config.batch_invariant else None
        fixed, ranks = None, model.axes.cp.size
        pages = (self.cache.pages - spare_pages(model.axes, self.config)) * ranks
        if self.config.fixed_steps:
            context = min(model.config.context, pages * self.cache.page_tokens)
            share = self.config.shared_reading and not invariant
            fixed = CudaGraphRunner(
                model, self.cache, self.config.max_requests, context, share=share, kernels=invariant
            )
        self.scheduler = Scheduler(
            PagePool(pages, self.cache.page_tokens, ranks, counted=self.config.pages is not None),
            max_requests=self.config.max_requests,
            token_budget=self.config.budget,
            max_waiting=self.config.max_waiting,
            prefix_cache=self.config.prefix_cache,
        )
        self._runner = Runner(model, self.cache, fixed, share=self.config.shared_reading, invariant=invariant)
        self._flying: tuple[Work, Drawn] | None = None
        self._stats = Stats(pages=pages)
        self._live: dict[str, _Live] = {}
        self._mail: dict[str, deque[Output]] = {}
        """Outputs that a stream, or generate, waits for."""
        self._left: list[Output] = []
        """Those of other requests, that the next step gives."""

    # -- the loop --------------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None) -> str:
        """Queue a request and return its id; the steps that follow give its outputs, also those that it gained while
        a stream was read, or :meth:`generate` ran.

        Raises :class:`RequestError` (empty, over the context, queue full) and :class:`CapacityError` (would not fit
        into the cache even alone).
        """
        params, context, vocab_size = checked(params), self.model.config.context, self.model.config.vocab_size
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = token_ids(ids, vocab_size, "the prompt", "one text, or list of token ids (generate takes several)")
        request = Request(
            id=request_id or uuid.uuid4().hex,
            prompt=ids,
            params=params,
            seed=uuid.uuid4().int >> 65 if params.seed is None else params.seed,
            limit_tokens=limit_tokens(ids, params, context=context, vocab_size=vocab_size, pool=self.scheduler.pool),
        )
        if request.id in self._live:
            raise RequestError(f"request {request.id!r} is running already; choose another id", param="request_id")
        self.scheduler.add(request)
        text = TextStream(self.tokenizer.detokenizer(), params.stop)
        self._live[request.id] = _Live(request, text, arrived_s=time.monotonic())
        return request.id

    def step(self) -> list[Output]:
        """One forward pass over as many requests as fit; what those of :meth:`add` gained by it, or earlier."""
        self._pump()
        left, self._left = self._left, []
        return left

    def _step(self) -> list[Output]:
        """What each request gained by a forward pass, or by the one before."""
        if not self.scheduler.busy:
            return []
        work = self.scheduler.schedule()
        ready = (work, self._run(work)) if work.slices else None
        if self.config.run_ahead:
            ready, self._flying = self._flying, ready
        outputs = self._commit(*ready) if ready else []
        if not self.scheduler.busy:
            self._flying = None  # of requests that have ended
        return outputs

    def cancel(self, request_id: str) -> bool:
        """Drop a request, give its pages back, and give nothing more of it; False when it is not alive (any more)."""
        self._left = [output for output in self._left if output.id != request_id]
        if alive := request_id in self._live:
            self._end(self._live[request_id], "cancelled")
        return alive

    @property
    def busy(self) -> bool:
        """True while :meth:`step` has something to do."""
        return self.scheduler.busy or bool(self._left)

    @property
    def stats(self) -> Stats:
        """Counters, and the state after the last call."""
        stats, scheduler = self._stats, self.scheduler
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        stats.pages_used, stats.preemptions = scheduler.pool.used, scheduler.preemptions
        stats.prefix_queries, stats.prefix_hits = scheduler.looked_up, scheduler.found
        if (fixed := self._runner.fixed) is not None:
            stats.shared_keys, stats.spared_keys = fixed.shared_keys, fixed.spared_keys
        return stats

    def _run(self, work: Work) -> Drawn:
        now_s = time.monotonic()
        for live in (self._live[request.id] for request in work.requests):
            live.admitted_s = now_s if live.admitted_s is None else live.admitted_s
        work_broadcast.send(self.model.axes.token_replicas, work_broadcast.RUN, work)
        return self._runner(work)

    def _commit(self, work: Work, drawn: Drawn) -> list[Output]:
        tokens, now_s = drawn.tolist(), time.monotonic()
        self._stats.steps += 1
        return [self._advance(self._live[r.id], token, now_s) for r, token in self.scheduler.commit(work, tokens)]

    def _advance(self, live: _Live, token: int, now_s: float) -> Output:
        """The output of one new token: the text it completes, and whether the request ends with it."""
        request, params = live.request, live.request.params
        if request.generated == 1:
            live.first_token_s = now_s
            self._stats.prompt_tokens += len(request.prompt)
        self._stats.generation_tokens += 1

        ends = token in params.stop_token_ids or (token in self.tokenizer.eos_ids and not params.ignore_eos)
        text = "" if ends or token == NOT_FINITE else live.text.push(token)
        reason: FinishReason | None = None
        if token == NOT_FINITE:
            reason = "error"
        elif ends or live.text.stopped:
            reason = "stop"
        elif request.generated == request.limit_tokens:
            reason = "length"
        timing = None
        if reason:
            text += live.text.finish()
            reason = "stop" if live.text.stopped else reason
            self._end(live, reason)
            admitted_s = now_s if live.admitted_s is None else live.admitted_s
            timing = Timing(admitted_s - live.arrived_s, live.first_token_s - admitted_s, now_s - live.first_token_s)
        return Output(request.id, text, token, reason, len(request.prompt), request.generated, timing)

    def _end(self, live: _Live, reason: str) -> None:
        self.scheduler.finish(live.request)
        del self._live[live.request.id]
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    # -- for people ------------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Output]:
        """The output of one request, piece by piece; leaving the loop early cancels it. Streams may be interleaved."""
        key = self.add(prompt, params)  # here and not in the generator, so that a bad request fails at once
        self._mail[key] = deque()
        reader = self._deliver(key)
        next(reader)  # so that one which is never read lets go of its request, too
        return reader

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """All of the list ``prompts`` batched together, in their order; ``params`` for all of them, or one for each."""
        prompts = several(prompts)
        each = checked_each(params, len(prompts))
        todo, mine = deque(zip(prompts, each, strict=True)), list[str]()
        try:
            while todo or any(key in self._live for key in mine):
                while todo and not self.scheduler.full:
                    mine.append(self.add(*todo.popleft()))
                    self._mail[mine[-1]] = deque()
                self._pump()
            return [Completion.of(self._mail[key]) for key in mine]
        finally:
            for key in mine:
                self._forget(key)

    def _deliver(self, key: str) -> Generator[Any]:
        """The outputs of one request, after a None."""
        mail = self._mail[key]
        try:
            yield None
            while True:
                while not mail:
                    if key not in self._live:
                        return  # cancelled by its reader
                    self._pump()
                output = mail.popleft()
                if output.finish_reason == "error":
                    raise not_finite()
                yield output
                if output.finish_reason:
                    return
        finally:
            self._forget(key)

    def _pump(self) -> None:
        """One step, its outputs into the mail of those who wait for them, or left for the next :meth:`step`."""
        for output in self._step():
            self._mail.get(output.id, self._left).append(output)

    def _forget(self, key: str) -> None:
        self._mail.pop(key, None)
        self.cancel(key)

    # -- several ranks ---------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """On ranks above 0: run the work that rank 0 broadcasts, until it stops."""
        while (message := work_broadcast.receive(self.model.axes.token_replicas))[0] != work_broadcast.STOP:
            if message[1] is not None:
                self._runner(message[1])

    def beat(self) -> None:
        """On rank 0, while idle: a sign of life, because a collective that waits too long gives up."""
        work_broadcast.send(self.model.axes.token_replicas, work_broadcast.IDLE)

    def stop(self) -> None:
        """On rank 0, at the end: the other ranks leave :meth:`follow`."""
        work_broadcast.send(self.model.axes.token_replicas, work_broadcast.STOP)
