"""The engine: requests in, text out, one forward pass per step.

    work    = schedule()        which tokens of which requests        scheduler.py, page_pool.py
    tokens  = run(work)         the model, and a token per request    model_runner.py, cuda_graph_runner.py, sampler.py
    outputs = commit(tokens)    text, stop strings, finished ones     text_stream.py

With ``async_scheduling`` the next step is launched before the host reads the last one's tokens, so that a GPU never
waits for the host: outputs come one step later, and a request that ends with an end token has run one step too many.
On several ranks, rank 0 does all three and broadcasts each :class:`Work` before running it; the other ranks
:meth:`~Engine.follow` and run the same forward pass on their shards of the model and vocabulary (tp) and of the cache
(tp: heads, cp: pages). An engine is not thread-safe.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from colonnade.config import ServeConfig
from colonnade.config.expert_overrides import check_generates
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, RequestError
from colonnade.model import Transformer
from colonnade.serve.adapters import EngineAdapters
from colonnade.serve.batch_invariance import batching_note, make_batch_invariant
from colonnade.serve.beam_search import BeamSearch, candidates
from colonnade.serve.cuda_graph_runner import CudaGraphRunner
from colonnade.serve.draft_model import DraftModel
from colonnade.serve.draft_runner import build_draft_model
from colonnade.serve.grammar import GrammarCompiler
from colonnade.serve.logits_processor import LogitsProcessor
from colonnade.serve.memory_estimate import scratch_pages
from colonnade.serve.model_inputs import IDLE, STOP, SWAP, broadcast_message, broadcast_work, receive_work
from colonnade.serve.model_runner import HostScore, ModelRunner, SampledTokens, build_caches, check_model
from colonnade.serve.page_pool import PagePool
from colonnade.serve.prompts import (
    Prompt,
    check_no_beams,
    check_no_languages,
    check_params,
    check_params_list,
    check_prompts,
    encode_text,
    encoder_input,
    limit_tokens,
    token_ids,
)
from colonnade.serve.request import (
    Alternative,
    Completion,
    FinishReason,
    Output,
    Request,
    Stats,
    Timing,
    TokenLogprob,
    failure,
)
from colonnade.serve.resolve_config import EngineTraits, check_graph_capture, check_plan, resolve_config
from colonnade.serve.sampler import NOT_FINITE
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.scheduler import Scheduler
from colonnade.serve.speculation import NgramSpeculator
from colonnade.serve.text_stream import TextStream
from colonnade.serve.tool_calls import ToolNotation
from colonnade.serve.wait_estimate import WaitEstimate
from colonnade.serve.work import Work

if TYPE_CHECKING:
    from colonnade.serve.look import EngineLook


@dataclass(slots=True)
class _Generation:
    """A request with its text and its times."""

    request: Request
    text: TextStream
    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float = 0.0
    prompt_scores: list[HostScore] = field(default_factory=list)
    """Of the prompt's tokens but the first."""
    echoed: int = 0
    """Characters of the prompt's text, if it is echoed."""

    def timing(self, now_s: float) -> Timing:
        """The times of a request that ends now."""
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        return Timing(admitted_s - self.arrived_s, self.first_token_s - admitted_s, now_s - self.first_token_s)


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
        """``draft`` is the model that ``config.draft`` names; only rank 0 has it. The memory that is free is divided
        among ``engines``.
        """
        self.model, self.tokenizer = model, tokenizer
        check_generates(model.config)
        check_plan(model)
        traits, config = EngineTraits.of(model), config or ServeConfig()
        check_graph_capture(config, traits)
        self.config = resolve_config(config, traits)
        check_model(model, self.config)
        if (self.config.draft_model is None) == (draft is not None) and model.axes.token_replicas.rank == 0:
            given = "no" if draft is None else "a"
            raise ConfigError(f"serve.draft is {self.config.draft}, and the engine was given {given} draft model")
        self.adapters = EngineAdapters(model, self.config)
        """Those that requests may name."""
        self.version = 0
        """How often :meth:`refresh` has replaced the weights."""
        self.cache, draft_cache = build_caches(model, self.config, draft, engines)
        invariant = make_batch_invariant(model) if self.config.batch_invariant else None
        graphs, ranks = None, model.axes.cp.size
        pages = (self.cache.pages - scratch_pages(model.axes, self.config)) * ranks
        page_bytes = None
        if self.config.pages is None:
            page_bytes = self.cache.bytes // self.cache.pages
            page_bytes += 0 if draft_cache is None else ranks * (draft_cache.bytes // draft_cache.pages)
        if self.config.graph_capture:
            context = min(model.config.context, pages * self.cache.page_tokens)
            share = self.config.cascade_attention and not invariant
            graphs = CudaGraphRunner(
                model, self.cache, self.config.max_requests, context, share=share, kernels=invariant
            )
        pool = PagePool(pages, self.cache.page_tokens, ranks, page_bytes=page_bytes)
        speculator = NgramSpeculator(self.config.draft_tokens) if self.config.draft == "ngram" else None
        self._draft_model: DraftModel | None = None
        if draft is not None and draft_cache is not None:
            speculator = self._draft_model = build_draft_model(draft, draft_cache, model, pool, self.config)
        self.scheduler = Scheduler(
            pool,
            max_requests=self.config.max_requests,
            token_budget=self.config.budget,
            max_waiting=self.config.max_waiting,
            prefix_cache=self.config.prefix_cache,
            speculator=speculator,
        )
        self._runner = ModelRunner(model, self.cache, graphs, share=self.config.cascade_attention, invariant=invariant,
                                   adapters=self.adapters.choice if self.adapters.names else None)  # fmt: skip
        self.grammars = GrammarCompiler(tokenizer, model.config.vocab_size)
        """Used by :meth:`add`; another thread may compile a request's grammar before."""
        self._in_flight: tuple[Work, SampledTokens] | None = None
        self._stats = Stats(pages=pages)
        self._wait_estimate = WaitEstimate()
        self._live: dict[str, _Generation] = {}
        self._queues: dict[str, deque[Output]] = {}
        """Outputs for the readers of :meth:`stream` and :meth:`generate`."""
        self._undelivered: list[Output] = []
        """Outputs of other requests, which the next :meth:`step` returns."""
        self.look: EngineLook | None = None
        """Answers the viewer's questions; made at the first one."""

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
        ``resume``, the output ids that another engine has delivered, goes on after them as after a preemption, also if
        the queue is full; its seed must be that of ``params``. ``adapter`` is one of ``config.adapters``.

        Outputs gained while a stream was read, or :meth:`generate` ran, are returned by the next step. Raises
        :class:`RequestError` (empty, over the context, queue full) and :class:`CapacityError` (larger than the cache).
        """
        params, context, vocab_size = check_params(params), self.model.config.context, self.model.config.vocab_size
        source, encoder = (), self.model.config.encoder
        ids = encode_text(prompt, self.tokenizer, encoder) if isinstance(prompt, str) else prompt
        ids = token_ids(ids, vocab_size, "the prompt", "one text, or list of token ids (generate takes several)")
        if encoder is not None:
            source, ids = encoder_input(ids, params, encoder, self.tokenizer)
        else:
            check_no_languages(params)
            check_no_beams(params)
        search = None if params.beams == 1 else self._new_search(params, tuple(resume or ()))
        wanted = params.structured_outputs
        matcher = None if wanted is None else self.grammars.matcher(wanted)
        request = Request(
            id=request_id or uuid.uuid4().hex,
            prompt=ids,
            params=params,
            seed=uuid.uuid4().int >> 65 if params.seed is None else params.seed,
            limit_tokens=limit_tokens(ids, params, context=context, vocab_size=vocab_size, pool=self.scheduler.pool),
            processor=LogitsProcessor.of(ids, params, self.tokenizer, matcher),
            client=client,
            source=source,
            priority=priority,
            adapter=self.adapters.number(adapter),
            resume=None if resume is None else () if search else tuple(resume),
            search=search,
        )
        if request.id in self._live:
            raise RequestError(f"request {request.id!r} is running already; choose another id", param="request_id")
        now_s = time.monotonic()
        if displaced := self.scheduler.add(request, now_s):
            self._deliver([self._failed_output(self._live[displaced.id], "displaced", now_s)])
        text = TextStream(self.tokenizer.detokenizer(params.skip_special_tokens), params.stop)
        live = self._live[request.id] = _Generation(request, text, arrived_s=now_s)
        if request.resume:
            self._replay(live)
        return request.id

    def _new_search(self, params: SamplingParams, delivered: tuple[int, ...]) -> BeamSearch:
        """The beam search of a request of which another engine has delivered the tokens ``delivered``."""
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.tokenizer.eos_ids)}
        if (needed := candidates(params.beams, len(ends))) > (size := self.model.config.vocab_size):
            raise RequestError(
                f"{params.beams} beams need {needed} tokens to choose from, and the vocabulary has {size}; "
                f"use at most {size * params.beams // needed}",
                param="beams",
            )
        return BeamSearch(params.beams, params.length_penalty, frozenset(ends), delivered=delivered)

    def _failed_output(self, live: _Generation, reason: FinishReason, now_s: float) -> Output:
        """End a request that has generated nothing here, for a ``reason`` that is a failure."""
        self._finish(live, reason)
        timing = Timing(now_s - live.arrived_s, 0.0, 0.0)
        return Output(live.request.id, "", None, reason, live.request.input_tokens, 0, timing)

    def _replay(self, live: _Generation) -> None:
        """Bring the text, the penalties and the grammar of a resumed request to the state after its last token."""
        request, params = live.request, live.request.params
        if params.echo:
            live.echoed = len(self._prompt_text(request.prompt)[0])
        for count, token in enumerate(request.resume or (), 1):
            if request.processor is not None:
                request.processor.accept(token)
            live.text.push(token, may_stop=count >= params.min_tokens)

    def step(self) -> list[Output]:
        """Run one forward pass over as many requests as fit; returns all outputs of requests from :meth:`add`."""
        self._step_and_deliver()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _step(self) -> list[Output]:
        """Run one forward pass; returns its outputs, with ``async_scheduling`` those of the pass before."""
        if not self.scheduler.busy:
            return []
        work = self.scheduler.schedule(time.monotonic())
        ready = (work, self._run(work)) if work.slices else None
        if self.config.async_scheduling:
            ready, self._in_flight = self._in_flight, ready
        outputs = self._commit(*ready) if ready else []
        if not self.scheduler.busy:
            self._in_flight = None  # only finished requests are in it
        return outputs

    def refresh(self, write: Callable[[Transformer], object]) -> int:
        """Give the model new weights, which ``write`` copies into its parameters in place; returns their version.

        Recorded steps and CUDA graphs keep their addresses. The prefix cache is emptied, because its keys are those of
        the old weights, and running requests start again. Every later output carries the new version.
        """
        assert self._in_flight is None, "a step that is in flight would mix old and new weights"
        self.scheduler.restart_all()
        self.cache.allocate()
        write(self.model)
        self.version += 1
        return self.version

    def release_cache(self) -> None:
        """Free the memory of this rank's key/value cache until the next :meth:`refresh`; no request may be running.

        Recorded steps and CUDA graphs contain its addresses; they are dropped, and recorded again when needed.
        """
        assert not self.busy, "running requests have keys in the cache"
        self.scheduler.pool.forget_cached()
        self._runner.forget_recorded()
        self.cache.release()

    def cancel(self, request_id: str) -> bool:
        """Drop a request, its pages and its undelivered outputs; False if it is not (or no longer) running."""
        self._undelivered = [output for output in self._undelivered if output.id != request_id]
        if live := request_id in self._live:
            self._finish(self._live[request_id], "cancelled")
        return live

    def expected_wait_s(self, client: str, priority: int, count: int = 1) -> float:
        """How long the last of ``count`` new requests would wait, about; 0 if a request could start now."""
        if not self.scheduler.waiting and len(self.scheduler.running) + count <= self.config.max_requests:
            return 0.0
        admissions = self.scheduler.waiting.count_before(client, priority, count) + 1
        return self._wait_estimate.expected_s(time.monotonic(), admissions)

    @property
    def busy(self) -> bool:
        """True while :meth:`step` has something to do."""
        return self.scheduler.busy or bool(self._undelivered)

    @property
    def limits(self) -> dict[str, Any]:
        """What the HTTP process must know about the model and the cache."""
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
        stats, scheduler = self._stats, self.scheduler
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        stats.pages_used, stats.preemptions = scheduler.pool.used, scheduler.preemptions
        stats.drafts, stats.draft_tokens = scheduler.drafts, scheduler.draft_tokens
        stats.accepted_draft_tokens = scheduler.accepted_draft_tokens
        stats.prefix_queries, stats.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
        if (graphs := self._runner.graphs) is not None:
            stats.shared_keys, stats.spared_keys = graphs.shared_keys, graphs.spared_keys
        return stats

    def _run(self, work: Work) -> SampledTokens:
        now_s = time.monotonic()
        new = [live for request in work.requests if (live := self._live[request.id]).admitted_s is None]
        for live in new:
            live.admitted_s = now_s
        self._wait_estimate.observe(now_s, len(new), len(self.scheduler.waiting))
        broadcast_work(self.model.axes.token_replicas, work)
        return self._runner(work)

    def _commit(self, work: Work, sampled: SampledTokens) -> list[Output]:
        tokens, now_s = sampled.tolist(), time.monotonic()
        if self._draft_model is not None:
            self._draft_model.observe_pass(work, sampled.launched_s)
        self._stats.steps += 1
        scores, prompt = iter(sampled.scores()), iter(sampled.prompt())
        for request, piece in zip(work.requests, work.slices, strict=True):
            rows = [next(prompt) for target in piece.targets if target >= 0] if piece.targets else []
            if rows and (live := self._live.get(request.id)) is not None and live.request is request:
                live.prompt_scores += rows
        scored = [next(scores) if args.logprobs >= 0 else None for args in work.sample_args]
        grown = self.scheduler.commit(work, tokens)  # one by one: a token that ends a request drops those after it
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
        self, live: _Generation, beam: Request, token: int, score: HostScore, now_s: float
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
            return [self._failed_output(live, "diverged", now_s)]
        root.ids, outputs = list(root.prompt), list[Output]()
        for number, best in enumerate(search.best):
            root.ids.append(best)
            if number < len(search.delivered):
                live.text.push(best, may_stop=False)
            else:
                outputs.append(self._advance(live, best, None, now_s))
        return outputs

    def _advance(self, live: _Generation, token: int, score: HostScore | None, now_s: float) -> Output:
        """The output for one new token: the text that it completes, and whether the request ends."""
        request, params = live.request, live.request.params
        echo, prompt_logprobs, prompt_ids = "", None, None
        generated = request.generated
        if live.first_token_s == 0.0:
            live.first_token_s = now_s
        if generated == 1:
            self._stats.prompt_tokens += request.input_tokens
            echo, prompt_logprobs = self._prompt_outputs(live)
            prompt_ids = (request.source or request.prompt) if params.return_prompt_ids else None
            if params.max_tokens == 0:  # the token was sampled only because a pass ends with one
                return self._prompt_only(live, echo, prompt_logprobs, now_s, failed=token == NOT_FINITE)
        self._stats.generation_tokens += 1
        logprobs = None
        if score is not None and token != NOT_FINITE:
            logprobs = self._token_logprob(token, score, params.logprobs or 0, live.echoed + live.text.characters)

        matcher = None
        if request.processor is not None and token != NOT_FINITE:
            request.processor.accept(token)
            matcher = request.processor.matcher
        is_end = token in params.stop_token_ids or (token in self.tokenizer.eos_ids and not params.ignore_eos)
        may_stop = generated >= params.min_tokens
        text = "" if is_end or token == NOT_FINITE else live.text.push(token, may_stop=may_stop)
        reason: FinishReason | None = None
        if token == NOT_FINITE:
            reason = "error"
        elif matcher is not None and matcher.error:
            reason = "grammar_error"
        elif is_end or live.text.stopped or (matcher is not None and matcher.finished):
            reason = "stop"
        elif generated == request.limit_tokens:
            reason = "length"
        timing = None
        if reason:
            text += live.text.finish()
            reason = "stop" if live.text.stopped else reason
            self._finish(live, reason)
            timing = live.timing(now_s)
        return Output(
            request.id, echo + text, token, reason, request.input_tokens, generated, timing, logprobs,
            prompt_logprobs, request.cached_tokens or 0, prompt_ids, self.version,
        )  # fmt: skip

    def _prompt_only(
        self,
        live: _Generation,
        text: str,
        logprobs: tuple[TokenLogprob, ...] | None,
        now_s: float,
        *,
        failed: bool,
    ) -> Output:
        """The only output of a request that generates no token."""
        reason: FinishReason = "error" if failed else "length"
        self._finish(live, reason)
        request = live.request
        return Output(
            request.id, text, None, reason, request.input_tokens, 0, live.timing(now_s), None, logprobs,
            request.cached_tokens or 0,
            (request.source or request.prompt) if request.params.return_prompt_ids else None, self.version,
        )  # fmt: skip

    def _prompt_outputs(self, live: _Generation) -> tuple[str, tuple[TokenLogprob, ...] | None]:
        """The prompt's text, if it is echoed, and its tokens' log-probabilities, if they are wanted."""
        prompt, params = live.request.prompt, live.request.params
        text, offsets = self._prompt_text(prompt) if params.echo else ("", [0] * len(prompt))
        live.echoed = len(text)
        if params.prompt_logprobs is None:
            return text, None
        first = TokenLogprob(prompt[0], self.tokenizer.token_bytes(prompt[0]), None, 0, ())
        rows = zip(prompt[1:], live.prompt_scores, offsets[1:], strict=True)
        rest = [self._token_logprob(token, score, params.prompt_logprobs, offset) for token, score, offset in rows]
        live.prompt_scores = []
        return text, (first, *rest)

    def _prompt_text(self, prompt: Sequence[int]) -> tuple[str, list[int]]:
        """The text of a prompt, and the number of its characters before each token."""
        text, offsets, detokenizer = "", list[int](), self.tokenizer.detokenizer()
        for token in prompt:
            offsets.append(len(text))
            text += detokenizer.push(token)
        return text + detokenizer.flush(), offsets

    def _token_logprob(self, token: int, score: HostScore, count: int, offset: int) -> TokenLogprob:
        data = self.tokenizer.token_bytes
        top = zip(score.top_ids[:count], score.top_logp[:count], strict=True)
        alternatives = tuple(Alternative(other, data(other), logprob) for other, logprob in top)
        return TokenLogprob(token, data(token), score.logp, offset, alternatives)

    def _finish(self, live: _Generation, reason: str) -> None:
        self.scheduler.finish(live.request)
        del self._live[live.request.id]
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    # -- blocking calls --------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Generator[Output]:
        """Iterate over the outputs of one request; leaving the loop early cancels it. Streams may be interleaved."""
        key = self.add(prompt, params, adapter=adapter)  # not in the generator, so that a bad request fails at once
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
        while (message := receive_work(self.model.axes.token_replicas))[0] != STOP:
            if message[0] == SWAP:
                swap()
            elif message[1] is not None:
                self._runner(message[1])

    def heartbeat(self) -> None:
        """On rank 0, while idle: keep the other ranks' pending collective from timing out."""
        broadcast_message(self.model.axes.token_replicas, IDLE)

    def stop(self) -> None:
        """On rank 0, at the end: make the other ranks leave :meth:`follow`."""
        broadcast_message(self.model.axes.token_replicas, STOP)
