"""OpenTelemetry spans of requests, sent to a collector by OTLP over HTTP (extra ``trace``).

    POST /v1/completions       the child of the client's ``traceparent``, if it sends one
      queue, prefill, decode   for each completion that has ended

A request's spans are made when it has ended. A thread sends them; a collector that is slow, refuses or is down does not
delay requests: at most :data:`MAX_QUEUED` spans are kept, further ones are dropped, and failures are counted.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from colonnade.errors import ConfigError
from colonnade.serve.api.request_record import RequestRecord

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(f"--serve.trace needs the package '{error.name}'; run: pip install 'colonnade[trace]'") from None

MAX_QUEUED = 2048
"""Spans that wait to be sent."""

SEND_S = 2.0
"""Time to send a batch of spans, and to send the last ones when the server stops [s]."""

SEND_EVERY_S = 1.0
"""Interval at which spans are sent [s]."""


class Tracer:
    """Makes and sends the spans of a server; ``endpoint`` is the collector's URL for traces."""

    def __init__(self, endpoint: str):
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failures are counted, not logged
        self.exporter = _CountingExporter(OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S))
        self._provider = TracerProvider(resource=Resource.create({"service.name": "colonnade"}), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(self.exporter, max_queue_size=MAX_QUEUED, schedule_delay_millis=1e3 * SEND_EVERY_S)
        )
        self._tracer = self._provider.get_tracer("colonnade.serve")

    def record(self, scope: Scope, record: RequestRecord, route: str, status: int, start_ns: int, end_ns: int) -> None:
        """Make the spans of a request that has ended; times are nanoseconds since the epoch."""
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        root = self._tracer.start_span(
            f"{scope['method']} {route}".strip(),
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=start_ns,
            attributes={
                "http.request.method": scope["method"],
                "http.route": route,
                "http.response.status_code": status,
                "colonnade.request_id": record.id,
                "gen_ai.request.model": record.model or "",
                "gen_ai.usage.input_tokens": sum(record.prompt_tokens.values()),
                "gen_ai.usage.output_tokens": sum(record.generated_tokens.values()),
                "gen_ai.response.finish_reasons": list(record.finish_reasons.values()),
            },
        )
        if status >= 500:
            root.set_status(StatusCode.ERROR)
        inside = set_span_in_context(root)
        for ended_ns, timing in zip(record.ended_ns, record.timings, strict=True):
            at_ns = ended_ns - round(1e9 * (timing.queue_s + timing.prefill_s + timing.decode_s))
            for name in ("queue", "prefill", "decode"):
                span = self._tracer.start_span(name, context=inside, start_time=at_ns)
                at_ns += round(1e9 * getattr(timing, f"{name}_s"))
                span.end(at_ns)
        root.end(end_ns)

    def close(self) -> None:
        """Send the last spans, for at most :data:`SEND_S`."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(SEND_S)


class _CountingExporter(SpanExporter):
    """Counts the spans that ``exporter`` has sent, and those that it could not send."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self.sent: Callable[[float], None] = lambda _number: None
        self.failed: Callable[[float], None] = lambda _number: None
        """Called with numbers of spans."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``; called by the processor's thread."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent(len(spans))
        else:
            self.failed(len(spans))
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        self._exporter.shutdown()
