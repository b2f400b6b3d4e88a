"""Spans of requests for OpenTelemetry, the extra `otel`: the request, its wait, its model's load, and the worker's answer.

Spans are made once a request has ended, from its record, and a thread of OpenTelemetry exports them. OpenTelemetry's own
variables set the target and more (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, `OTEL_BSP_…`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import structlog

from supervisor.core.admission.waiting import WaitKind
from supervisor.errors import ConfigError
from supervisor.gateway.identity.trace_context import TraceContext
from supervisor.gateway.request import Request

FLUSH_S: Final = 3.0
_NAME: Final = "OTEL_SERVICE_NAME"

log = structlog.get_logger("llmux.traces")

Span = tuple[str, str, str | None, float, float]
"""Name, id, its parent's id, and loop times of begin and end."""


class _FirstWarning(logging.Handler):
    """Copies OpenTelemetry's first warning into llmux's log. A missing collector would repeat it forever."""

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler. Runs in OpenTelemetry's thread."""
        self.setLevel(logging.CRITICAL)
        log.warning("traces.not_sent", reason=record.getMessage())


class Tracing:
    """Exports spans until it is closed. Times of requests are loop times; `epoch` is their zero, in Unix seconds."""

    def __init__(self, epoch: float) -> None:
        """Raises ConfigError if OpenTelemetry isn't installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # an extra
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            remedy = "OpenTelemetry isn't installed; pip install 'llmux-supervisor[otel]'"
            raise ConfigError((f"server.traces: {remedy}",)) from error
        theirs = logging.getLogger("opentelemetry")
        theirs.handlers, theirs.propagate = [_FirstWarning()], False
        self._epoch = epoch
        self._resource = Resource.create({} if _NAME in os.environ else {"service.name": "llmux"})
        self._processor = BatchSpanProcessor(OTLPSpanExporter())

    def observe(self, ended: Sequence[Request]) -> None:
        """Export the spans of finished requests. See `InFlight.listeners`."""
        for request in ended:
            self._export(request)

    def _export(self, request: Request) -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan  # noqa: PLC0415
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags  # noqa: PLC0415

        trace = request.trace
        if trace is None or not trace.is_sampled:
            return
        outcome = request.attempt.outcome
        failed = outcome.error or request.failure
        for name, span_id, parent_id, begin, end in spans(request, trace):
            is_request, is_forward = parent_id == trace.parent_id, name == "forward"
            first_at = outcome.first_byte_at if is_forward else None
            self._processor.on_end(
                ReadableSpan(
                    name,
                    SpanContext(int(trace.trace_id, 16), int(span_id, 16), False, TraceFlags(1)),
                    None
                    if parent_id is None
                    else SpanContext(int(trace.trace_id, 16), int(parent_id, 16), is_request, TraceFlags(1)),
                    self._resource,
                    _attributes(request) if is_request else {},
                    () if first_at is None else (Event("first_token", timestamp=self._ns(first_at)),),
                    kind=SpanKind.SERVER if is_request else SpanKind.CLIENT if is_forward else SpanKind.INTERNAL,
                    status=Status(StatusCode.ERROR, failed) if failed and is_request else Status(),
                    start_time=self._ns(begin),
                    end_time=self._ns(end),
                )
            )

    async def close(self) -> None:
        """Send the remaining spans, for a short time at most."""
        loop, is_sent = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._processor.force_flush(int(FLUSH_S * 1000))
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(is_sent.set)

        threading.Thread(target=flush, daemon=True).start()  # a thread of an executor would keep the process alive
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await is_sent.wait()

    def _ns(self, at: float) -> int:
        return int((at + self._epoch) * 1e9)


def spans(request: Request, trace: TraceContext) -> Iterator[Span]:
    """The spans of a finished request; the request's own span comes first."""
    own = secrets.token_hex(8)
    yield "request", own, trace.parent_id, request.arrived_at, request.ended_at
    ticket = request.attempt.ticket
    for wait in request.waits:
        queue, at = secrets.token_hex(8), wait.since
        yield "queue", queue, own, at, request.ended_at if wait.until is None else wait.until
        for awaited, seconds in wait.parts(request.ended_at):
            if awaited.kind is WaitKind.LOAD:
                yield "load", secrets.token_hex(8), queue, at, at + seconds
            at += seconds
    if ticket is not None:
        yield "forward", request.span_id, own, ticket.admitted, request.ended_at


def _attributes(request: Request) -> Mapping[str, str | int]:
    """The attributes of the request's span, by OpenTelemetry's conventions for HTTP and for generative AI."""
    outcome, usage = request.attempt.outcome, request.usage
    found = {
        "url.path": request.path,
        "http.response.status_code": outcome.status or request.failed_status or None,
        "error.type": outcome.error or request.failure,
        "gen_ai.request.model": request.name,
        "gen_ai.response.model": request.attempt.model,
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "llmux.request_id": request.request_id.decode("latin-1"),
        "llmux.tenant": request.demand.tenant or None,
    }
    return {name: value for name, value in found.items() if value is not None}
