"""`/v1/jobs`: inference requests whose clients don't wait; see `daemon.jobs`.

A job's request goes through the gateway as if its client had sent it, with the headers that say who asks and how urgently.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, BinaryIO, Final, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from runtimes.endpoints import aliases_of
from supervisor.catalog.keys import Key, Scope
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.job import KEPT_HEADERS, Answer, Job, JobInterruptedError, State, owner_of
from supervisor.dialects import dialect_of
from supervisor.dialects.openai import OPENAI, OpenAI
from supervisor.dialects.responses.background import is_answered
from supervisor.engine.leaving import HandedOverError
from supervisor.errors import InvalidRequestError, LlmuxError, UpstreamError
from supervisor.gateway.body.body import read_body
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.body.parameters import number
from supervisor.gateway.dialect import Dialect, ForDaemonError
from supervisor.gateway.disconnect import EXTENSION, Disconnect, Message, ResponseOverError
from supervisor.gateway.error_response import error_body
from supervisor.gateway.filters.event_stream import KEEPALIVE_S, EventStream
from supervisor.gateway.request import Request as GatewayRequest
from supervisor.http.request_id import STATE_KEY
from supervisor.io.held_body import Bytes, Gathered, HeldBody

_FORMS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations")
FORMS: Final = frozenset(each for path in _FORMS for each in (path, *aliases_of(path)))
"""What takes a form: fields that hold a data URL are sent as files."""
LOOK_S: Final = 1.0
PIECE: Final = 1 << 20
"""Bytes of a result that are in memory at once."""
_FOR_DAEMON: Final = "This request asks something of llmux itself, which is no job."
_FIELDS: Final = frozenset({"endpoint", "body"})
_NOT_OFFERED: Final = "identity"  # workloads of the program whose jobs these are modelled on
_Decoded = dict[str, Any]


def routes(daemon: Daemon) -> list[Route]:
    """Create, list, look at, watch, cancel and remove jobs, and get their results."""

    async def create(request: Request) -> Response:
        headers = {name: value for name in KEPT_HEADERS if (value := request.headers.get(name)) is not None}
        owner, _ = owner_of(request.scope["state"])
        held = HeldBody(daemon.bodies)
        try:
            endpoint, model, body = await _asked(daemon, request, held)
            job = await daemon.jobs.add(endpoint, model, headers, body, owner)
        finally:
            held.release()
        return JSONResponse(_view(daemon, job), 202, {"location": f"/v1/jobs/{job.id}"})

    async def listing(request: Request) -> Response:
        await daemon.jobs.expire()
        most, state = number(request, "limit", 100, 1000), request.query_params.get("status")
        if state is not None and state not in get_args(State):
            raise InvalidRequestError(f"status is one of {', '.join(get_args(State))}.", param="status")
        owner, is_admin = owner_of(request.scope["state"])
        found = [job for job in daemon.jobs.listing(owner, is_admin=is_admin) if state in {None, job.state}]
        return JSONResponse(
            {"object": "list", "data": [_view(daemon, job) for job in found[:most]], "has_more": len(found) > most}
        )

    async def one(request: Request) -> Response:
        job = await _found(daemon, request)
        await _look(daemon, job)
        return JSONResponse(_view(daemon, job))

    async def result(request: Request) -> Response:
        job = await _found(daemon, request)
        if job.state != "completed":
            raise InvalidRequestError(f"{job.id} is {job.state}: it has no result.", code="job_not_completed")
        file = await daemon.jobs.result(job)
        size = str(os.fstat(file.fileno()).st_size)
        return StreamingResponse(pieces_of(file), job.status or 200, {"content-length": size}, job.content_type)

    async def events(request: Request) -> Response:
        return EventStream(_events(daemon, await _found(daemon, request)), nullcontext())

    async def cancel(request: Request) -> Response:
        job = await _found(daemon, request)
        await daemon.jobs.cancel(job)
        return JSONResponse(_view(daemon, job))

    async def remove(request: Request) -> Response:
        job = await _found(daemon, request)
        await daemon.jobs.remove(job)
        return JSONResponse({"id": job.id, "object": "job", "deleted": True})

    return [
        Route("/v1/jobs", create, methods=["POST"]),
        Route("/v1/jobs", listing, methods=["GET"]),
        Route("/v1/jobs/{id}", one, methods=["GET"]),
        Route("/v1/jobs/{id}", remove, methods=["DELETE"]),
        Route("/v1/jobs/{id}/result", result, methods=["GET"]),
        Route("/v1/jobs/{id}/events", events, methods=["GET"]),
        Route("/v1/jobs/{id}/cancel", cancel, methods=["POST"]),
    ]


# ----------------------------------------------------------------------------------------------------------- what is asked


async def _asked(daemon: Daemon, request: Request, held: HeldBody) -> tuple[str, str | None, bytes]:
    """Endpoint, model and body. Raises LlmuxError."""
    limit = daemon.catalog.limits.body_mib * 1024 * 1024
    opened = await JsonBody.open(await read_body(request.scope, request.receive, limit, held))
    if unknown := sorted(opened.fields.keys() - _FIELDS):
        raise InvalidRequestError(f"{unknown[0][:100]}: unknown; there is endpoint and body.", param=unknown[0][:100])
    raw = await opened.field("endpoint")
    try:
        endpoint = msgspec.json.decode(raw or b"null")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        endpoint = None
    if not isinstance(endpoint, str):
        raise InvalidRequestError(
            'The body must be {"endpoint": "/v1/chat/completions", "body": {…}}, with the path of an endpoint.',
            param="endpoint",
        )
    dialect = dialect_of({"method": "POST", "path": endpoint, "headers": request.scope["headers"]})
    if not daemon.gateway.routes.serves("POST", endpoint, dialect):
        if _NOT_OFFERED in endpoint:
            raise InvalidRequestError("Identity workloads are not offered.", code="job_not_offered", param="endpoint")
        raise InvalidRequestError(f"No configured model serves POST {endpoint[:200]}.", param="endpoint")
    raw = await opened.field("body")
    if raw is None or raw[:1] != b"{":
        raise InvalidRequestError('"body" must be the JSON object that the endpoint takes.', param="body")
    model, body = await _checked(daemon, dialect, endpoint, raw)
    return endpoint, model, bytes(body)


async def check_line(daemon: Daemon, endpoint: str, body: Bytes) -> tuple[str | None, Bytes]:
    """See `daemon.batches.Check`."""
    dialect = dialect_of({"method": "POST", "path": endpoint, "headers": []})
    return await _checked(daemon, dialect, endpoint, body)


async def _checked(daemon: Daemon, dialect: OpenAI, endpoint: str, body: Bytes) -> tuple[str | None, Bytes]:
    """The model and the body of a request that is sent later. Raises LlmuxError."""
    opened = await JsonBody.open(body)
    if opened.stream:
        raise InvalidRequestError("The result comes in one piece: leave stream out.", param="body.stream")
    if dialect.daemon_scope(endpoint, opened.fields) is not None:
        raise InvalidRequestError(_FOR_DAEMON, param="body")
    if opened.name is not None:
        daemon.catalog.resolve(dialect.model_name(opened.name, lambda one: daemon.catalog.route(one) is not None))
    if dialect.streams_unasked(endpoint):
        body = await opened.changed({"stream": b"false"}).whole()
    return opened.name, body


async def pieces_of(file: BinaryIO) -> AsyncIterator[bytes]:
    """Its content, as its client reads; then it is closed."""
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece


async def _found(daemon: Daemon, request: Request) -> Job:
    await daemon.jobs.expire()
    owner, is_admin = owner_of(request.scope["state"])
    return daemon.jobs.find(request.path_params["id"], owner, is_admin=is_admin)


# ---------------------------------------------------------------------------------------------------------------- answers


def _view(daemon: Daemon, job: Job) -> dict[str, Any]:
    keep_s = daemon.catalog.limits.jobs_keep_s
    return {
        "id": job.id,
        "object": "job",
        "status": job.state,
        "endpoint": job.endpoint,
        "model": job.model,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "expires_at": None if job.ended_at is None else round(job.ended_at + keep_s, 3),
        "tries": job.tries,
        "ahead": daemon.jobs.ahead(job) if job.state == "queued" else 0,
        "progress": _progress(daemon, job) if job.state == "running" else None,
        "result": f"/v1/jobs/{job.id}/result" if job.result_bytes is not None else None,
        "result_bytes": job.result_bytes,
        "content_type": job.content_type or None,
        "error": job.error,
    }


def _progress(daemon: Daemon, job: Job) -> dict[str, Any] | None:
    """Where its request stands now; None between two tries."""
    found = daemon.requests.find(job.request_id)
    if not isinstance(found, GatewayRequest):
        return None
    model = None if found.attempt.model is None else daemon.engine.model(found.attempt.model)
    return {
        "request_id": job.request_id,
        "state": "queued" if found.attempt.ticket is None else "running",
        "model_state": None if model is None else model.state.value,
        "eta_s": None if model is None else model.eta_s,
        "bytes": found.attempt.outcome.bytes_sent,
        "step": None if found.attempt.step is None else found.attempt.step.step,
        "steps": None if found.attempt.step is None else found.attempt.step.steps,
    }


async def _look(daemon: Daemon, job: Job) -> None:
    """Let its progress be told as it is now."""
    if isinstance(found := daemon.requests.find(job.request_id), GatewayRequest):
        await daemon.steps.look([found])


async def _events(daemon: Daemon, job: Job) -> AsyncGenerator[bytes, None]:
    """Each change of it, the last one when it is over. A daemon that ends or hands over cuts it short."""
    told, told_at = None, 0.0
    while True:
        await _look(daemon, job)
        view = _view(daemon, job)
        if view != told or time.monotonic() - told_at > KEEPALIVE_S:
            yield b"" if view == told else b"event: job\ndata: " + msgspec.json.encode(view) + b"\n\n"
            told, told_at = view, time.monotonic()
        if job.is_over or daemon.jobs.is_paused:
            return
        await daemon.jobs.changed(LOOK_S)


# ---------------------------------------------------------------------------------------------------------- its request


async def send(daemon: Daemon, job: Job, body: bytes) -> Answer:
    """See `daemon.jobs.Send`."""
    if job.response is not None and await is_answered(daemon, job.response):
        return Answer(200, "", b"")
    if job.line is not None and await daemon.batches.is_done(job.line):
        return Answer(200, "", b"")
    content_type = b"application/json"
    if job.endpoint in FORMS:
        try:
            content_type, body = await asyncio.to_thread(_as_form, body)
        except LlmuxError as error:
            return Answer(int(error.status), "", b"", _error(error_body(error, OPENAI)))
    headers = [(name.encode(), value.encode("latin-1")) for name, value in job.headers.items()]
    headers += [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    disconnect = Disconnect(lambda: None)
    disconnect.task = asyncio.current_task()
    request_id = b"req_" + secrets.token_hex(12).encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": job.endpoint,
        "query_string": b"",
        "headers": headers,
        "extensions": {EXTENSION: disconnect},
        "state": {STATE_KEY: request_id},
    }
    limits = daemon.catalog.limits
    dialect, held = dialect_of(scope), Gathered(daemon.bodies, min(limits.body_mib, limits.jobs_mib) << 20)
    response = _Response(body, held, is_kept=job.response is None)
    del body  # the gateway's from now on: it counts it, and may write it to disk
    request = GatewayRequest(request_id, asyncio.get_running_loop().time(), dialect, response=job.response)
    job.request_id = request_id.decode()
    if job.owner is not None and daemon.keyring:
        request.key = _key(daemon, job.owner)
        if request.key is None:
            message = "The key that it came with is no longer there, or allows no inference."
            return Answer(401, "", b"", {"message": message, "code": "invalid_api_key"})
    try:
        if not daemon.gateway.routes.serves("POST", job.endpoint, dialect):
            raise InvalidRequestError(f"No configured model serves POST {job.endpoint} any more.")
        await daemon.gateway(scope, response.receive, response.send, request)
    except ForDaemonError:
        return Answer(400, "", b"", {"message": _FOR_DAEMON, "code": "invalid_request"})
    except HandedOverError as handed_over:
        raise JobInterruptedError from handed_over
    except (LlmuxError, ResponseOverError) as error:
        return _failed(error, dialect)
    else:
        answer = response.answer()
        if answer.error is None and job.response is None:  # which is kept where it is looked for
            taken, held = held, Gathered()
            return replace(answer, held=taken)
        return replace(answer, body=b"")
    finally:
        held.release()
        if request.waiting is not None:  # nobody else sends it
            request.waiting.release()


def _failed(error: LlmuxError | ResponseOverError, dialect: Dialect) -> Answer:
    why = error if isinstance(error, LlmuxError) else error.__cause__  # what broke the answer off
    if not isinstance(why, LlmuxError):
        why = UpstreamError(str(error))
    retry_after_s = None if why.lasts else why.retry_after_s
    return Answer(int(why.status), "", b"", _error(error_body(why, dialect)), retry_after_s)


def _key(daemon: Daemon, key_id: str) -> Key | None:
    """The key of this id, if it still opens what the job asks for."""
    for key in (*daemon.keyring.keys, daemon.local_key):
        if key is not None and key.id == key_id:
            is_open = Scope.INFERENCE in key.scopes and (key.expires is None or key.expires > time.time())
            return key if is_open else None
    return None


class _Response:
    """Takes what the gateway sends, of which `held` counts the body. Of an answer that isn't kept here only an error is."""

    def __init__(self, body: bytes, held: Gathered, *, is_kept: bool) -> None:
        self._request: bytes | None = body
        self._held = held
        self._is_kept = is_kept
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._body = bytearray()

    async def receive(self) -> Message:
        body, self._request = self._request, None
        if body is None:
            await asyncio.Event().wait()  # this client never leaves
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
            return
        if self._is_kept or self._status >= 400:
            piece = message.get("body", b"")
            self._held.grow(len(self._body) + len(piece))
            self._body += piece

    def answer(self) -> Answer:
        content_type = self._headers.get(b"content-type", b"").decode("latin-1")
        if self._status < 400:
            return Answer(self._status, content_type, self._body)
        retry_after = self._headers.get(b"retry-after", b"")
        waits = self._status in {429, 503} and retry_after.isdigit()
        return Answer(self._status, content_type, b"", _error(self._body), float(retry_after) if waits else None)


def _error(body: Bytes) -> _Decoded:
    """An error as an endpoint's clients get it, without what is around it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"message": body[:1000].decode("utf-8", "replace")}
    error = found.get("error", found) if isinstance(found, dict) else found
    return error if isinstance(error, dict) else {"message": str(error)}


def _as_form(body: bytes) -> tuple[bytes, bytes]:
    """A JSON body as a multipart form, and its content type. A null is left out. Raises InvalidRequestError."""
    boundary = secrets.token_hex(16).encode()
    parts = []
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            data, head = _part(name, each)
            parts.append(b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary, head, data))
    return b"multipart/form-data; boundary=" + boundary, b"".join(parts) + b"--%b--\r\n" % boundary


def _part(name: str, value: object) -> tuple[bytes, bytes]:
    quoted = name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A").encode()
    head = b'name="%b"' % quoted
    if isinstance(value, str) and value.startswith("data:"):
        about, comma, text = value[5:].partition(",")
        if comma and about.endswith(";base64"):
            try:
                data = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError) as error:
                message = f"The data: URL of {name[:100]} is not valid base64."
                raise InvalidRequestError(message, param=name[:100]) from error
            kind = about.removesuffix(";base64").split(";")[0] or "application/octet-stream"
            extension = "".join(c for c in kind.rpartition("/")[2] if c.isalnum()) or "bin"
            file = b'; filename="file.%b"\r\nContent-Type: %b' % (extension.encode(), kind.encode("ascii", "replace"))
            return data, head + file
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text.encode(), head
