"""The engine without text: requests scheduled, forward passes launched, on one rank or several.

    work    = schedule()        which tokens of which requests        scheduler.py, page_pool.py
    sampled = run(work)         the model, and a token per request    model_runner.py, cuda_graph_runner.py, sampler.py

With ``async_scheduling`` the next pass is launched before the host reads the last one's tokens. Rank 0 schedules, and
broadcasts each :class:`Work` before running it; the other ranks :meth:`~EngineCore.follow` and run the same pass on
their shards of the model and vocabulary (tp) and of the cache (tp: heads, cp: pages).
"""

import time
from collections.abc import Callable, Iterator

from colonnade.config import ServeConfig
from colonnade.config.expert_overrides import check_generates
from colonnade.errors import ConfigError
from colonnade.model import Transformer
from colonnade.serve.adapters import EngineAdapters
from colonnade.serve.draft_model import DraftModel
from colonnade.serve.draft_runner import build_draft_model
from colonnade.serve.model_inputs import IDLE, STOP, SWAP, broadcast_message, broadcast_work, receive_work
from colonnade.serve.model_runner import SampledTokens, build_caches, build_page_pool, build_runner, check_model
from colonnade.serve.request import Request, Stats
from colonnade.serve.resolve_config import EngineTraits, check_graph_capture, check_plan, resolve_config
from colonnade.serve.scheduler import Scheduler
from colonnade.serve.speculation import NgramSpeculator
from colonnade.serve.wait_estimate import WaitEstimate
from colonnade.serve.work import Work


class EngineCore:
    """The scheduler, the KV cache and the model runner of one rank; ``config`` is resolved here."""

    def __init__(
        self,
        model: Transformer,
        config: ServeConfig | None = None,
        draft: Transformer | None = None,
        *,
        engines: int = 1,
    ):
        """``draft`` is the model that ``config.draft`` names; only rank 0 has it. The free memory is divided among
        ``engines``.
        """
        self.model = model
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
        self.cache, draft_cache = build_caches(model, self.config, draft, engines)
        pool = build_page_pool(self.cache, draft_cache, model, self.config)
        choice = self.adapters.choice if self.adapters.names else None
        self.runner = build_runner(model, self.cache, self.config, pool.tokens, choice)
        speculator = NgramSpeculator(self.config.draft_tokens) if self.config.draft == "ngram" else None
        self.draft_model: DraftModel | None = None
        if draft is not None and draft_cache is not None:
            speculator = self.draft_model = build_draft_model(draft, draft_cache, model, pool, self.config)
        self.scheduler = Scheduler(
            pool,
            max_requests=self.config.max_requests,
            token_budget=self.config.budget,
            max_waiting=self.config.max_waiting,
            prefix_cache=self.config.prefix_cache,
            speculator=speculator,
        )
        self._in_flight: tuple[Work, SampledTokens] | None = None
        self._wait_estimate = WaitEstimate()

    def launch(self) -> tuple[Work, SampledTokens] | None:
        """Schedule a pass and launch it; returns the one to commit, with ``async_scheduling`` the one before."""
        work = self.scheduler.schedule(time.monotonic())
        ready = (work, self._run(work)) if work.slices else None
        if self.config.async_scheduling:
            ready, self._in_flight = self._in_flight, ready
        return ready

    def _run(self, work: Work) -> SampledTokens:
        now_s = time.monotonic()
        new = [request for request in work.requests if request.admitted_s is None]
        for request in new:
            request.admitted_s = now_s
        self._wait_estimate.observe(now_s, len(new), len(self.scheduler.waiting))
        broadcast_work(self.model.axes.token_replicas, work)
        return self.runner(work)

    def commit(self, work: Work, sampled: SampledTokens) -> Iterator[tuple[Request, int, int]]:
        """Wait for the tokens of ``work`` and commit them: (request, token, index of the sample), one by one.

        A token that ends a request drops those after it, if the caller finishes the request immediately.
        """
        tokens = sampled.tolist()
        if self.draft_model is not None:
            self.draft_model.observe_pass(work, sampled.launched_s)
        return self.scheduler.commit(work, tokens)

    def drop_finished(self) -> None:
        """Drop the pass in flight if no request is left: it contains only finished ones."""
        if not self.scheduler.busy:
            self._in_flight = None

    def update_weights(self, write: Callable[[Transformer], object]) -> None:
        """Give the model new weights: see :meth:`colonnade.serve.engine.Engine.update_weights`."""
        assert self._in_flight is None, "a step that is in flight would mix old and new weights"
        self.scheduler.restart_all()
        self.cache.allocate()
        if self.runner.graphs is not None:
            self.runner.graphs.clear_plans()
        write(self.model)

    def release_cache(self) -> None:
        """Free the memory of the cache: see :meth:`colonnade.serve.engine.Engine.release_cache`."""
        self.scheduler.pool.reset_prefix_cache()
        self.runner.clear_recorded_steps()
        self.cache.release()

    def expected_wait_s(self, client: str, priority: int, count: int = 1) -> float:
        """Approximately how long the last of ``count`` new requests would wait; 0 if a request could start now."""
        if not self.scheduler.waiting and len(self.scheduler.running) + count <= self.config.max_requests:
            return 0.0
        admissions = self.scheduler.waiting.count_before(client, priority, count) + 1
        return self._wait_estimate.expected_s(time.monotonic(), admissions)

    def count(self, stats: Stats) -> None:
        """Update the counters of ``stats`` that belong to the scheduler, the pool and the graphs."""
        scheduler = self.scheduler
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        stats.pages_used, stats.preemptions = scheduler.pool.used, scheduler.preemptions
        stats.drafts, stats.draft_tokens = scheduler.drafts, scheduler.draft_tokens
        stats.accepted_draft_tokens = scheduler.accepted_draft_tokens
        stats.prefix_queries, stats.prefix_hits = scheduler.kv_cache.prefix_queries, scheduler.kv_cache.prefix_hits
        if (graphs := self.runner.graphs) is not None:
            stats.shared_keys, stats.spared_keys = graphs.shared_keys, graphs.spared_keys

    # -- several ranks ---------------------------------------------------------------------------------------------

    def follow(self, swap: Callable[[], object] = lambda: None) -> None:
        """On ranks above 0: run the work that rank 0 broadcasts, and the stages of a ``swap``, until it stops."""
        while (message := receive_work(self.model.axes.token_replicas))[0] != STOP:
            if message[0] == SWAP:
                swap()
            elif message[1] is not None:
                self.runner(message[1])

    def heartbeat(self) -> None:
        """On rank 0, while idle: keep the other ranks' pending collective from timing out."""
        broadcast_message(self.model.axes.token_replicas, IDLE)

    def stop(self) -> None:
        """On rank 0, at the end: make the other ranks leave :meth:`follow`."""
        broadcast_message(self.model.axes.token_replicas, STOP)
