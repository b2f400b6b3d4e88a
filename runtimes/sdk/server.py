"""One worker as an HTTP server: health that means "the model answers", metrics, authentication, errors, clean shutdown.

The port is open at once, and `/health` answers 503 until the model has loaded and answered a trial request. If loading
fails, the program exits with 1 and the reason is on stderr. SIGTERM ends running requests within `GRACE_S`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import gc
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtimes.sdk import parameters
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.worker_pool import WorkerPool

KEY_VARIABLE = "LLMUX_WORKER_KEY"
GRACE_S = 5
DISCONNECT_POLL_S = 0.05
PUBLIC = frozenset({"/health"})

T = TypeVar("T")
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class Settings:
    """The supervisor's decisions, and the runtime's own `options`."""

    model: str  # the name that answers carry
    host: str
    port: int
    parallel: int  # requests the model works on at once
    queue: int  # requests that may wait for that
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Parse the program's argument. Raises KeyError for a missing setting."""
        values = json.loads(text)
        common = {name: values.pop(name) for name in ("model", "host", "port", "parallel", "queue")}
        return cls(**common, options=values)


class Meters:
    """The metrics of `/metrics`. Workers register their own in `registry`."""

    def __init__(self, pool: WorkerPool) -> None:
        self.registry = CollectorRegistry()
        keys: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("llmux_worker_requests", "Requests answered.", ["path", "status"], **keys)
        self.seconds = Histogram("llmux_worker_request_seconds", "From request to end of answer.", ["path"], **keys)
        self.tokens_in = Counter("llmux_worker_prompt_tokens", "Tokens of prompts.", **keys)
        self.tokens_out = Counter("llmux_worker_generated_tokens", "Tokens generated.", **keys)
        Gauge("llmux_worker_running", "Requests the model works on.", **keys).set_function(lambda: pool.running)
        Gauge("llmux_worker_waiting", "Requests that wait for a turn.", **keys).set_function(lambda: pool.waiting)


class Worker(abc.ABC):
    """A model and its endpoints. `pool` and `meters` exist before `load` is called. The worker is `ready` after `load`."""

    ready = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = WorkerPool(settings.parallel, settings.queue)
        self.meters = Meters(self.pool)

    @abc.abstractmethod
    def load(self) -> None:
        """Load the model, and answer one trial request. Runs in a thread, and blocks. Any exception ends the program."""

    @abc.abstractmethod
    def routes(self) -> Mapping[str, Endpoint]:
        """Endpoint by `METHOD /path`."""

    def close(self) -> None:  # noqa: B027  # few workers override it
        """End the processes that `load` started. Called even if `load` failed."""


def serve(make: Callable[[Settings], Worker]) -> None:
    """Run the program. Never returns."""
    gc.freeze()  # the modules
    gc.enable()
    settings = Settings.parse(sys.argv[1])
    key = os.environ.pop(KEY_VARIABLE, "")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        worker, code = runner.run(_run_server(make, settings, key))
    worker.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit can crash in threads of the model's libraries


async def _run_server(make: Callable[[Settings], Worker], settings: Settings, key: str) -> tuple[Worker, int]:
    worker = make(settings)
    failed = False
    config = uvicorn.Config(
        application(worker, key),
        host=settings.host,
        port=settings.port,
        http="httptools",
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)

    def load() -> None:
        nonlocal failed
        began = time.monotonic()
        try:
            worker.load()
        except BaseException:  # noqa: BLE001  # the supervisor reads any error in the log
            traceback.print_exc()
            print(f"{settings.model}: exiting, the model could not be loaded", file=sys.stderr, flush=True)
            failed = True
            server.should_exit = True
        else:
            worker.ready = True
            print(f"{settings.model}: serving after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    server.on_started = threading.Thread(target=load, name="load", daemon=True).start
    try:
        await server.serve()
    except SystemExit:  # uvicorn raises it after it has logged the reason
        print(f"couldn't bind HTTP server socket, hostname: {settings.host}, port: {settings.port}", file=sys.stderr)
        return worker, 1
    return worker, 1 if failed or not server.started else 0


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which would end the process by the signal instead of with our exit code."""

    on_started: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Loading begins once the port is open: beside the imports for loading, opening it would take seconds longer."""
        await super().startup(sockets)
        self.on_started()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def application(worker: Worker, key: str) -> ASGIApp:
    """The worker's ASGI application."""

    async def health(_request: Request) -> Response:
        if worker.ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "loading"}, 503)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(worker.meters.registry), media_type="text/plain; version=0.0.4")

    async def models(_request: Request) -> Response:
        model = {"id": worker.settings.model, "object": "model", "created": 0, "owned_by": "llmux"}
        return JSONResponse({"object": "list", "data": [model]})

    routes = [Route("/health", health), Route("/metrics", metrics), Route("/v1/models", models)]
    for name, endpoint in worker.routes().items():
        method, _, path = name.partition(" ")
        routes.append(Route(path, _cancel_on_disconnect(endpoint), methods=[method]))
    app = Starlette(
        routes=routes,
        exception_handlers={
            WorkerError: _worker_error,
            HTTPException: _http_error,
            ClientDisconnect: _disconnect_response,
            Exception: _unexpected_error,
        },
    )
    return _Middleware(app, worker, key)


class _Middleware:
    """Authentication, readiness, metrics of each request, and the header for parameters without effect."""

    def __init__(self, app: ASGIApp, worker: Worker, key: str) -> None:
        self._app, self._worker = app, worker
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        refusal: WorkerError | None = None
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            refusal = WorkerError("This worker answers its supervisor only.", code="invalid_api_key", status=401)
        elif not self._worker.ready and scope["path"] != "/metrics":
            refusal = WorkerError("The model is still loading.", code="model_loading", status=503, retry_after_s=1)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        began, status, ended = time.monotonic(), 0, False
        ignored = parameters.begin()

        async def counted(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                if ignored:
                    named = (parameters.HEADER, parameters.header(ignored))
                    message = {**message, "headers": [*message["headers"], named]}
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not ended:
                raise
            traceback.print_exc()  # the response is complete; raised further, it would close the connection under the next request
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self._worker.meters.requests.labels(path, str(status or 499)).inc()
            self._worker.meters.seconds.labels(path).observe(time.monotonic() - began)


def _cancel_on_disconnect(endpoint: Endpoint) -> Endpoint:
    """An endpoint that is cancelled when its client disconnects before the response begins.

    The connection is polled only after the body has been read: polling may consume one of its messages.
    """

    async def cancellable(request: Request) -> Response:
        task = asyncio.ensure_future(endpoint(request))
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=DISCONNECT_POLL_S)
                if not task.done() and request._stream_consumed and await request.is_disconnected():  # noqa: SLF001  # starlette has no public way to tell
                    raise ClientDisconnect
            return task.result()
        finally:
            task.cancel()

    return cancellable


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment line of a stream, which clients skip. It shows that the work goes on."""

    text: str  # without line breaks


def events(items: AsyncIterator[object], *, are_named: bool = False) -> StreamingResponse:
    """Server-sent events: each item as JSON, `[DONE]` at the end; an error ends the stream with an error event.

    `are_named`: each item is an object whose `type` is also the event's name. A `Comment` is no event.
    """

    def head(item: object) -> bytes:
        return b"event: %s\n" % str(item["type"]).encode() if are_named and isinstance(item, dict) else b""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for item in items:
                if isinstance(item, Comment):
                    yield b": %s\n\n" % item.text.encode()
                    continue
                data = json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode()
                yield b"%sdata: %s\n\n" % (head(item), data)
        except WorkerError as error:
            yield b"data: " + json.dumps(error.body()).encode() + b"\n\n"
            return
        except Exception:  # noqa: BLE001  # the response has begun: the client gets the error in the stream
            traceback.print_exc()
            yield b"data: " + json.dumps(_internal_error().body()).encode() + b"\n\n"
            return
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def wait_first_item(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Waits for the first item, then returns all items. A failure before the first can still become an error response."""
    nothing = object()
    first = await anext(items, nothing)

    async def all_items() -> AsyncIterator[T]:
        if first is not nothing:
            yield cast("T", first)
            async for item in items:
                yield item

    return all_items()


async def _worker_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, WorkerError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return WorkerError(message, code="not_found", status=error.status_code).response()


async def _disconnect_response(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected_error(_request: Request, _error: Exception) -> Response:
    return _internal_error().response()


def _internal_error() -> WorkerError:
    return WorkerError("The worker failed on this request; its log says why.", code="worker_failed", status=500)
