"""The engine: requests in, text out, one forward pass per step.

    request = process(prompt)   ids, limits, grammar                  input_processor.py, prompts.py
    work    = launch()          schedule, and run one forward pass    engine_core.py, scheduler.py, model_runner.py
    outputs = commit(work)      text, stop strings, finished ones     output_processor.py, text_stream.py

With ``async_scheduling`` the next step is launched before the host reads the last one's tokens, so that a GPU never
waits for the host: outputs come one step later, and a request that ends with an end token has run one step too many.
On several ranks, rank 0 does all three, and the others :meth:`~Engine.follow` its passes. An engine is not thread-safe.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from colonnade.config import ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import RequestError
from colonnade.model import Transformer
from colonnade.serve.batch_invariance import batching_note
from colonnade.serve.engine_core import EngineCore
from colonnade.serve.grammar import GrammarCompiler
from colonnade.serve.input_processor import InputProcessor
from colonnade.serve.model_runner import HostScore, SampledTokens
from colonnade.serve.output_processor import Generation, OutputProcessor, failed_output
from colonnade.serve.prompts import Prompt, check_params_list, check_prompts
from colonnade.serve.request import Completion, FinishReason, Output, Request, Stats, failure
from colonnade.serve.sample_args import NOT_FINITE
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.tool_calls import ToolNotation
from colonnade.serve.work import Work

if TYPE_CHECKING:
    from colonnade.serve.look import EngineLook


class Engine:
    """Generates text with ``model``; ``config`` limits the KV cache, which has the model's dtype and device.

    The cache takes its share of the free memory if ``engines``, with this one, are going to allocate theirs there.

    Weights may be changed in place only: CUDA graphs read them at fixed addresses.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: ServeConfig | None = None,
        draft: Transformer | None = None,
        *,
        engines: int = 1,
    ):
        """``draft`` is the model that ``config.draft`` names; only rank 0 has it. The free memory is divided among
        ``engines``.
        """
        self.model, self.tokenizer = model, tokenizer
        self.core = EngineCore(model, config, draft, engines=engines)
        self.config, self.cache, self.scheduler = self.core.config, self.core.cache, self.core.scheduler
        self.version = 0
        """How often :meth:`update_weights` has replaced the weights."""
        self.grammars = GrammarCompiler(tokenizer, model.config.vocab_size)
        """Used by :meth:`add`; another thread may compile a request's grammar before."""
        pool = self.scheduler.pool
        self._inputs = InputProcessor(model.config, tokenizer, self.grammars, self.core.adapters, pool)
        self._outputs = OutputProcessor(tokenizer)
        self._stats = Stats(pages=pool.pages)
        self._live: dict[str, Generation] = {}
        self._queues: dict[str, deque[Output]] = {}
        """Outputs for the readers of :meth:`stream` and :meth:`generate`."""
        self._undelivered: list[Output] = []
        """Outputs of other requests, which the next :meth:`step` returns."""
        self.look: EngineLook | None = None
        """Handles the viewer's queries; created at the first one."""

    # -- the loop --------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        client: str = "",
        priority: int = 0,
        resume: Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> str:
        """Queue a request and return its id; :meth:`step` returns its outputs.

        Requests with a lower ``priority`` start first, and the ``client``s of equal ones in turn. A request with
        ``resume``, the output ids that another engine has delivered, continues after them as after a preemption, even
        if the queue is full; its seed must be that of ``params``. ``adapter`` is one of ``config.adapters``.

        Outputs gained while a stream was read, or :meth:`generate` ran, are returned by the next step. Raises
        :class:`RequestError` (empty, over the context, queue full) and :class:`CapacityError` (larger than the cache).
        """
        request = self._inputs.request(
            prompt, params, request_id=request_id, client=client, priority=priority, resume=resume, adapter=adapter
        )
        if request.id in self._live:
            raise RequestError(f"request {request.id!r} is already running; choose another id", param="request_id")
        now_s = time.monotonic()
        if displaced := self.scheduler.add(request, now_s):
            self._deliver([self._fail(self._live[displaced.id], "displaced", now_s)])
        self._live[request.id] = self._outputs.start(request, now_s)
        return request.id

    def step(self) -> list[Output]:
        """Run one forward pass over as many requests as fit; returns all outputs of requests from :meth:`add`."""
        self._step_and_deliver()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _step(self) -> list[Output]:
        """Run one forward pass; returns its outputs, with ``async_scheduling`` those of the pass before."""
        if not self.scheduler.busy:
            return []
        ready = self.core.launch()
        outputs = self._commit(*ready) if ready else []
        self.core.drop_finished()
        return outputs

    def update_weights(self, write: Callable[[Transformer], object]) -> int:
        """Give the model new weights, which ``write`` copies into its parameters in place; returns their version.

        Recorded steps and CUDA graphs keep their addresses. The prefix cache is emptied, because its keys are those of
        the old weights, and running requests restart. Every later output carries the new version.
        """
        self.core.update_weights(write)
        self.version += 1
        return self.version

    def release_cache(self) -> None:
        """Free the memory of this rank's key/value cache until the next :meth:`update_weights`; no request may be
        running.

        Recorded steps and CUDA graphs contain its addresses; they are dropped, and recorded again when needed.
        """
        assert not self.busy, "running requests have keys in the cache"
        self.core.release_cache()

    def cancel(self, request_id: str) -> bool:
        """Drop a request, its pages and its undelivered outputs; False if it is not (or no longer) running."""
        self._undelivered = [output for output in self._undelivered if output.id != request_id]
        if live := request_id in self._live:
            self._finish(self._live[request_id], "cancelled")
        return live

    def expected_wait_s(self, client: str, priority: int, count: int = 1) -> float:
        """Approximately how long the last of ``count`` new requests would wait; 0 if a request could start now."""
        return self.core.expected_wait_s(client, priority, count)

    @property
    def busy(self) -> bool:
        """True while :meth:`step` has something to do."""
        return self.scheduler.busy or bool(self._undelivered)

    @property
    def limits(self) -> dict[str, Any]:
        """The properties of the model and the cache that the HTTP process needs."""
        return {
            # The source and the target of an encoder–decoder have a context each; add() checks both.
            "context": self.model.config.context + (encoder.context if (encoder := self.model.config.encoder) else 0),
            "cache_tokens": self.scheduler.pool.max_request_tokens,
            "longest_token_bytes": self.tokenizer.longest_token_bytes,
            "tools": ToolNotation.of(self.tokenizer, self.config.tool_format).to_dict(),
            "note": batching_note(self.model.config),
            "capabilities": ["completions", *(["chat"] if self.tokenizer.chat_template else [])],
        }

    @property
    def stats(self) -> Stats:
        """Counters, and the state after the last call."""
        self.core.count(self._stats)
        return self._stats

    def _commit(self, work: Work, sampled: SampledTokens) -> list[Output]:
        grown, now_s = self.core.commit(work, sampled), time.monotonic()
        self._stats.steps += 1
        scores, prompt = iter(sampled.scores()), iter(sampled.prompt())
        for request, piece in zip(work.requests, work.slices, strict=True):
            rows = [next(prompt) for target in piece.targets if target >= 0] if piece.targets else []
            if rows and (live := self._live.get(request.id)) is not None and live.request is request:
                live.prompt_scores += rows
        scored = [next(scores) if args.logprobs >= 0 else None for args in work.sample_args]
        outputs: list[Output] = []
        for request, token, i in grown:
            live, score = self._live[request.id], scored[i]
            if request.search is None:
                outputs.append(self._advance(live, token, score, now_s))
            else:
                assert score is not None, "every beam is scored"
                outputs += self._advance_search(live, request, token, score, now_s)
        return outputs

    def _advance_search(
        self, live: Generation, beam: Request, token: int, score: HostScore, now_s: float
    ) -> list[Output]:
        """The outputs for one new token of a beam: none before the end of the search, then the whole text."""
        root, search = live.request, beam.search
        assert search is not None
        if token == NOT_FINITE:
            root.ids = [*root.prompt, token]
            return [self._advance(live, token, None, now_s)]
        top = list(zip(score.top_ids, score.top_logp, strict=True))
        if not search.observe(beam, top[: search.candidates]):
            return []
        if following := search.advance(root.limit_tokens):
            self.scheduler.continue_search(search, following)
            return []
        if search.diverged:
            return [self._fail(live, "diverged", now_s)]
        root.ids, outputs = list(root.prompt), list[Output]()
        for number, best in enumerate(search.best):
            root.ids.append(best)
            if number < len(search.delivered):
                live.text.push(best, may_stop=False)
            else:
                outputs.append(self._advance(live, best, None, now_s))
        return outputs

    def _advance(self, live: Generation, token: int, score: HostScore | None, now_s: float) -> Output:
        """The output for one new token, counted; ends the request if it is the last one."""
        output = self._outputs.advance(live, token, score, now_s, self.version)
        if output.generated_tokens <= 1:
            self._stats.prompt_tokens += output.prompt_tokens
        self._stats.generation_tokens += output.token is not None
        if output.finish_reason:
            self._finish(live, output.finish_reason)
        return output

    def _fail(self, live: Generation, reason: FinishReason, now_s: float) -> Output:
        """End a request that has generated nothing here, for a ``reason`` that is a failure."""
        self._finish(live, reason)
        return failed_output(live, reason, now_s)

    def _finish(self, live: Generation, reason: str) -> None:
        self.scheduler.finish(live.request)
        del self._live[live.request.id]
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    # -- blocking calls --------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Generator[Output]:
        """Iterate over the outputs of one request; leaving the loop early cancels it. Streams may be interleaved."""
        key = self.add(prompt, params, adapter=adapter)  # not in the generator, so that a bad request fails immediately
        self._queues[key] = deque()
        reader = self._read_outputs(key)
        next(reader)  # start it, so that its request is cancelled even if it is never read
        return reader

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Complete all ``prompts`` in one batch; ``params`` are for all, or a list with one for each."""
        prompts = check_prompts(prompts)
        todo = deque(zip(prompts, check_params_list(params, len(prompts)), strict=True))
        keys: list[str] = []
        try:
            while todo or any(key in self._live for key in keys):
                while todo and not self.scheduler.full:
                    keys.append(self.add(*todo.popleft(), adapter=adapter))
                    self._queues[keys[-1]] = deque()
                self._step_and_deliver()
            return [Completion.of(self._queues[key]) for key in keys]
        finally:
            for key in keys:
                self._drop(key)

    def _read_outputs(self, key: str) -> Generator[Any]:
        """The outputs of one request, after a None."""
        queue = self._queues[key]
        try:
            yield None
            while True:
                while not queue:
                    if key not in self._live:
                        return  # the caller has cancelled it
                    self._step_and_deliver()
                output = queue.popleft()
                if error := failure(output.finish_reason):
                    raise error
                yield output
                if output.finish_reason:
                    return
        finally:
            self._drop(key)

    def _step_and_deliver(self) -> None:
        """Run one step and put its outputs into the queues of their readers."""
        self._deliver(self._step())

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._queues.get(output.id, self._undelivered).append(output)

    def _drop(self, key: str) -> None:
        self._queues.pop(key, None)
        self.cancel(key)

    # -- several ranks ---------------------------------------------------------------------------------------------

    def follow(self, swap: Callable[[], object] = lambda: None) -> None:
        """On ranks above 0: run the work that rank 0 broadcasts, and the stages of a ``swap``, until it stops."""
        self.core.follow(swap)

    def heartbeat(self) -> None:
        """On rank 0, while idle: keep the other ranks' pending collective from timing out."""
        self.core.heartbeat()

    def stop(self) -> None:
        """On rank 0, at the end: make the other ranks leave :meth:`follow`."""
        self.core.stop()
