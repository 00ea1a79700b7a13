"""Spans arrive at a real collector; a collector that is gone costs a counter."""

import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from tests.serve.serving import server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans, self.arrived = [], threading.Condition()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        data = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        with self.server.arrived:
            for resource in data.resource_spans:
                self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.server.arrived.notify_all()
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as it:
        thread = threading.Thread(target=it.serve_forever)
        thread.start()
        yield it
        it.shutdown()
        thread.join()


@pytest.mark.slow
def test_spans_are_sent_and_a_dead_collector_delays_nothing(collector: Collector):
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with server(trace=url) as running:
        body = {"prompt": "a secret", "max_tokens": 4, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}

        def ask() -> httpx.Response:
            return httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=120)

        assert ask().status_code == httpx.get(f"{running.url}/health").status_code == 200
        with collector.arrived:
            assert collector.arrived.wait_for(lambda: len(collector.spans) == 4, timeout=120)
        spans = {span.name: span for span in collector.spans}
        root = spans["POST /v1/completions"]
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
        attributes = {each.key: each.value for each in root.attributes}
        assert attributes["colonnade.request_id"].string_value == "mine"
        assert attributes["gen_ai.usage.output_tokens"].int_value == 4
        assert "secret" not in str(collector.spans)
        steps = [spans[name] for name in ("queue", "prefill", "decode")]
        assert {span.parent_span_id for span in steps} == {root.span_id}
        times = [time for span in steps for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
        assert times == sorted(times) and times[0] < times[-1] <= root.end_time_unix_nano

        collector.shutdown()
        collector.server_close()
        assert [ask().status_code for _ in range(20)] == [200] * 20
        while "colonnade:trace_spans_failed 0.0" in (text := httpx.get(f"{running.url}/metrics").text):
            threading.Event().wait(0.05)
        assert "colonnade:trace_spans_sent 4.0" in text
        assert running.stop(signal.SIGTERM) == (0, "stopping\n", "")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "colonnade.serve.api.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--serve.trace needs the package .*; run: pip install 'colonnade\[trace\]'"):
        importlib.import_module("colonnade.serve.api.tracing")


def test_a_bad_url_is_refused():
    with pytest.raises(ConfigError, match="trace"):
        ServeConfig(trace="localhost:4318")
