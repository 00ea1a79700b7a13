"""Prometheus metrics under vLLM's names with the prefix ``colonnade:``, or with ``vllm:`` for vLLM's dashboards.

Counters and gauges are the engine's, read at each scrape; latencies are measured here, as clients see them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from colonnade.serve.api.process_metrics import FrontProcesses
from colonnade.serve.request import Output, Stats
from colonnade.serve.served_models import ServedModels

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
"""Buckets of the latency histograms [s]."""

LATENCIES = {
    "time_to_first_token_seconds": "From the request to its first token.",
    "inter_token_latency_seconds": "From one token to the next.",
    "e2e_request_latency_seconds": "From the request to its last token.",
    "request_queue_time_seconds": "From arrival at the engine to the first step that ran any of its tokens.",
    "request_prefill_time_seconds": "From that step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
}


LENGTH_BUCKETS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
"""Buckets of the histograms of lengths [tokens]."""

LENGTHS = {
    "request_prompt_tokens": "Tokens of the prompt.",
    "request_generation_tokens": "Tokens generated.",
    "request_max_num_generation_tokens": "Tokens of the longest of a request's completions.",
}


class SpanCounts(Protocol):
    """A span exporter (:mod:`colonnade.serve.api.tracing`), which calls these with numbers of spans."""

    sent: Callable[[float], None]
    failed: Callable[[float], None]


class Metrics:
    """The metrics of one server; the names of ``models`` are a label.

    With ``folder``, which prometheus_client must use too (its multiprocess mode), they are those of all fronts.
    """

    def __init__(self, models: ServedModels, prefix: str = "colonnade", folder: str | None = None):
        self._registry, self._prefix = CollectorRegistry(), prefix
        self._shown = self._registry
        """The registry that a scrape returns."""
        if folder is not None:
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown, folder)
            self._shown.register(FrontProcesses(folder))
        else:
            ProcessCollector(registry=self._registry)
        self._shown.register(_EngineStats(models, prefix))
        names = [(name, text, LATENCY_BUCKETS_S) for name, text in LATENCIES.items()]
        names += [(name, text, LENGTH_BUCKETS) for name, text in LENGTHS.items()]
        self._histograms = {
            name: Histogram(f"{prefix}:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
            for name, text, buckets in names
        }
        self._observers = {
            model: {name: histogram.labels(model) for name, histogram in self._histograms.items()}
            for model in models.names
        }
        self._prefix = prefix
        self._shadow: Counter | None = None
        self._requests = Counter(
            f"{prefix}:http_requests", "Responses by route and status.", ["route", "status"], registry=self._registry
        )

    def watch_exporter(self, exporter: SpanCounts) -> None:
        """Export the numbers of spans that were sent to a collector, and that could not be."""
        exporter.sent, exporter.failed = (
            Gauge(
                f"{self._prefix}:trace_spans_{name}", f"Spans {name}.", registry=self._registry, multiprocess_mode="sum"
            ).inc
            for name in ("sent", "failed")
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._shown)

    def start_timer(self, model: str) -> "RequestTimer":
        """A timer for a request for ``model`` that has just arrived."""
        return RequestTimer(self._observers[model])

    def count_shadow(self, result: str) -> None:
        """Count a request for the shadow: "compared", "unanswered" or "dropped"."""
        if self._shadow is None:
            self._shadow = Counter(
                f"{self._prefix}:shadow_requests", "Requests for the shadow.", ["result"], registry=self._registry
            )
        self._shadow.labels(result).inc()

    def count_request(self, route: str, status: int) -> None:
        """Count a response; ``route`` is the pattern of its path, empty if there is none."""
        self._requests.labels(route, str(status)).inc()


class RequestTimer:
    """Measures the latencies of one HTTP request; ``histograms`` by name take them [s], and lengths [tokens]."""

    def __init__(self, histograms: Mapping[str, Histogram]):
        self._histograms, self._start_s = histograms, time.monotonic()
        self._last_s: dict[int, float] = {}
        self._longest = 0

    def observe_output(self, index: int, output: Output) -> None:
        """Record that an output of completion ``index`` has arrived."""
        now_s, observe = time.monotonic(), self._observe
        if index in self._last_s:
            observe("inter_token_latency_seconds", now_s - self._last_s[index])
        else:
            observe("time_to_first_token_seconds", now_s - self._start_s)
        self._last_s[index] = now_s
        if output.timing:
            observe("e2e_request_latency_seconds", now_s - self._start_s)
            observe("request_queue_time_seconds", output.timing.queue_s)
            observe("request_prefill_time_seconds", output.timing.prefill_s)
            observe("request_decode_time_seconds", output.timing.decode_s)
            observe("request_prompt_tokens", output.prompt_tokens)
            observe("request_generation_tokens", output.generated_tokens)
            self._longest = max(self._longest, output.generated_tokens)

    def observe_longest(self) -> None:
        """Record that all completions of a request have ended."""
        self._observe("request_max_num_generation_tokens", self._longest)

    def observe_end(self) -> None:
        """Record that a request without generated tokens has ended."""
        self._observe("e2e_request_latency_seconds", time.monotonic() - self._start_s)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class _EngineStats(Collector):
    """The engines' counters, as of their last messages."""

    def __init__(self, models: ServedModels, prefix: str):
        self._models, self._prefix = models, prefix

    def collect(self) -> Iterator[Metric]:
        rss = GaugeMetricFamily(
            f"{self._prefix}:engine_resident_memory_bytes", "RSS of the engine process.", labels=["model_name"]
        )
        for name, engine in self._models.all:
            if rss_bytes := engine.resident_bytes():
                rss.add_metric([name], rss_bytes)
        if rss.samples:
            yield rss
        stats = {name: engine.stats for name, engine in self._models.all}
        for families, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, (value, text) in families.items():
                family = kind(f"{self._prefix}:{name}", text, labels=["model_name"])
                for model, each in stats.items():
                    family.add_metric([model], value(each))
                yield family
        up = GaugeMetricFamily(
            f"{self._prefix}:replica_up", "1 if the replica takes requests.", labels=["model_name", "replica"]
        )
        for name, engine in self._models.all:
            for number, is_up in engine.replicas.items():
                up.add_metric([name, str(number)], is_up)
        if up.samples:
            yield up
        ended = CounterMetricFamily(
            f"{self._prefix}:request_success",
            "Requests that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for model, each in stats.items():
            for reason, count in each.finished.items():
                ended.add_metric([model, reason], count)
        yield ended


_GAUGES: dict[str, tuple[Callable[[Stats], float], str]] = {
    "num_requests_running": (attrgetter("running"), "Requests with cache pages."),
    "num_requests_waiting": (attrgetter("waiting"), "Requests in the queue."),
    "kv_cache_usage_perc": (attrgetter("cache_usage"), "Share of the cache pages in use, 0 to 1."),
}

_COUNTERS: dict[str, tuple[Callable[[Stats], float], str]] = {
    "num_preemptions": (attrgetter("preemptions"), "Requests preempted because no page was free."),
    "prefix_cache_queries": (attrgetter("prefix_queries"), "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": (attrgetter("prefix_hits"), "Tokens found there, and not computed again."),
    "shared_keys_read": (attrgetter("shared_keys"), "Keys of a layer read once for several requests, step by step."),
    "shared_keys_spared": (attrgetter("spared_keys"), "Key reads by other requests that this saved."),
    "spec_decode_num_drafts": (attrgetter("drafts"), "Times that tokens were drafted for a request."),
    "spec_decode_num_draft_tokens": (attrgetter("draft_tokens"), "Tokens drafted."),
    "spec_decode_num_accepted_tokens": (attrgetter("accepted_draft_tokens"), "Drafted tokens that were generated."),
    "prompt_tokens": (attrgetter("prompt_tokens"), "Tokens of prompts run."),
    "generation_tokens": (attrgetter("generation_tokens"), "Tokens generated."),
}
