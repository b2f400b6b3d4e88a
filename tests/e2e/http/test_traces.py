"""Requests by trace: the client's `traceparent`, and spans for OpenTelemetry."""

from __future__ import annotations

import gzip
import http.server
import json
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.daemon import Daemon, fake, running, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def of(self, trace_id):
        return {span.name: span for span in list(self.spans) if span.trace_id.hex() == trace_id}


class _Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
        found = ExportTraceServiceRequest.FromString(data)
        self.server.spans += [s for r in found.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture(scope="module")
def collector():
    with Collector() as found:
        yield found
        found.shutdown()


def configured(folder, port, **server):
    config = {"models": {"m": fake(endpoints=["/v1/chat/completions", "/echo"])}, "server": server}
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    return Daemon(folder, config, env)


@pytest.fixture(scope="module")
def site(tmp_path_factory, collector):
    daemon = configured(tmp_path_factory.mktemp("traces"), collector.server_address[1], traces=True)
    try:
        yield daemon.start()
    finally:
        daemon.stop()


def seen(site, headers):
    """The `traceparent` that the worker got."""
    told = site.post("/echo", json={"model": "m"}, headers=headers)
    return {name.lower(): value for name, value in json.loads(told.headers["x-echo-headers"])}.get("traceparent")


class TestSpans:
    """The request, its wait, the model's load, and what the worker did."""

    def test_a_request_that_loads_its_model(self, site, collector):
        told = site.post("/v1/chat/completions", json={"model": "m", "stream": True, "messages": []}, headers=SENT)
        assert told.status_code == 200
        found = wait_until(lambda: len(spans := collector.of(TRACE)) == 4 and spans)
        request, queue, load, forward = (found[name] for name in ("request", "queue", "load", "forward"))
        assert request.parent_span_id.hex() == PARENT
        assert queue.parent_span_id == forward.parent_span_id == request.span_id
        assert load.parent_span_id == queue.span_id
        assert request.start_time_unix_nano <= queue.start_time_unix_nano <= load.start_time_unix_nano
        assert load.end_time_unix_nano <= queue.end_time_unix_nano <= forward.end_time_unix_nano
        assert forward.end_time_unix_nano == request.end_time_unix_nano
        (first,) = forward.events
        assert first.name == "first_token"
        assert forward.start_time_unix_nano <= first.time_unix_nano <= forward.end_time_unix_nano
        said = {each.key: each.value.string_value or each.value.int_value for each in request.attributes}
        assert said["gen_ai.request.model"] == "m"
        assert said["http.response.status_code"] == 200
        assert said["llmux.request_id"] == told.headers["x-request-id"]

    def test_the_worker_goes_on_with_it(self, site, collector):
        trace = "a" * 32
        version, got, span, flags = seen(site, {"traceparent": f"00-{trace}-{PARENT}-01"}).split("-")
        assert (version, got, flags) == ("00", trace, "01")
        assert wait_until(lambda: collector.of(trace).get("forward")).span_id.hex() == span

    @pytest.mark.parametrize("value", ["", "nonsense", f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01"])
    def test_what_is_no_trace(self, site, collector, value):
        trace = seen(site, {"traceparent": value}).split("-")[1]
        request = wait_until(lambda: collector.of(trace).get("request"))
        assert request.parent_span_id == b""

    def test_one_that_is_not_sampled(self, site, collector):
        trace = "b" * 32
        assert seen(site, {"traceparent": f"00-{trace}-{PARENT}-00"}).endswith("-00")
        later = "c" * 32
        seen(site, {"traceparent": f"00-{later}-{PARENT}-01"})
        wait_until(lambda: collector.of(later))
        assert not collector.of(trace)

    def test_a_failure(self, site, collector):
        trace = "d" * 32
        headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
        assert site.post("/v1/chat/completions", json={"model": "none"}, headers=headers).status_code == 404
        found = wait_until(lambda: collector.of(trace).get("request"))
        assert (found.status.code, found.status.message) == (2, "model_not_found")

    def test_what_is_left_is_sent_at_the_end(self, tmp_path, collector):
        daemon = configured(tmp_path, collector.server_address[1], traces=True).start()
        trace = "e" * 32
        seen(daemon, {"traceparent": f"00-{trace}-{PARENT}-01"})
        daemon.stop()
        assert collector.of(trace)


class TestOff:
    """Without spans the header passes as it came, and is in the log."""

    def test_it_passes(self, tmp_path):
        with running(tmp_path, {"models": {"m": fake(endpoints=["/echo"])}}) as daemon:
            assert seen(daemon, SENT) == SENT["traceparent"]
            seen(daemon, {})
            wait_until(lambda: len(daemon.events("request.finished")) == 2)
            first, second = daemon.events("request.finished")
            assert (first["trace_id"], "trace_id" in second) == (TRACE, False)


def test_a_collector_that_is_away(tmp_path):
    daemon = configured(tmp_path, 9, traces=True).start()
    try:
        assert daemon.chat("m").status_code == daemon.chat("m").status_code == 200
        wait_until(lambda: daemon.events("traces.not_sent"))
    finally:
        daemon.stop()
    (told,) = daemon.events("traces.not_sent")
    assert "refused" in told["reason"]
    assert "Traceback" not in daemon.log_text()
