"""Responses in the background: a job of the daemon generates them while no client waits, and its result becomes the response.

After a restart the daemon sends the request again; then all events after the first two are new.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
from starlette.responses import JSONResponse, Response

from supervisor.daemon.daemon import Daemon
from supervisor.dialects.responses.decode import CreateResponse, storage_fields_of, unsupported
from supervisor.dialects.responses.encode import ResponseTemplate
from supervisor.dialects.responses.stored_conversation import FINAL, event, event_log_of
from supervisor.dialects.responses.stored_response import (
    is_running,
    prepend_conversation,
    previous_response,
    response_of,
)
from supervisor.dialects.responses.types import Json
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import Bytes
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.event_stream import KEEPALIVE_S, EventStream
from supervisor.host.store.response_store import PIECE, Part, StoredResponse
from supervisor.host.store.store import NotSavedError
from supervisor.jobs import job as jobs
from supervisor.jobs.inference import Answer
from supervisor.jobs.job import KEPT_HEADERS, owner_of

ENDPOINT: Final = "/v1/responses"
_encode: Final = msgspec.json.Encoder().encode
_CREATE: Final = CreateResponse()
_FAILED: Final = "server_error"
_FRAME: Final = b"\n\n"
_FIRST_LINE: Final = 64  # bytes of an event: enough for the name of every final event


async def begin(daemon: Daemon, scope: Scope, raw: Bytes) -> Response:
    """Start the job. Raises LlmuxError if the request would surely fail."""
    store, body = daemon.responses, await JsonBody.open(raw)
    if not store.is_on:
        raise unsupported("background")
    storage, (owner, is_admin) = storage_fields_of(body.fields), owner_of(scope["state"])
    if storage.store is False:
        message = "A response in the background is kept until somebody gets it: leave store out, or set it to true."
        raise InvalidRequestError(message, param="store")
    if body.name is not None:
        daemon.catalog.resolve(body.name)
    body = body.changed(dict.fromkeys(("background", "store", "previous_response_id")))
    if (previous := storage.previous_response_id) is not None:
        body = await prepend_conversation(
            body, previous, await previous_response(store, previous, owner, is_admin=is_admin)
        )
    data = await body.whole()
    if not daemon.gateway.routes.is_served_by(body.name, "POST", ENDPOINT):
        _CREATE.request(dict(body.fields))  # raises the precise error
    template = ResponseTemplate.of(body.fields)
    begun = template.response("queued") | {"background": True, "store": True, "previous_response_id": previous}
    items = Part(await body.field("input") or b"null")
    kept = StoredResponse(owner, Part(_encode(begun)), items, "queued", is_background=True, is_streamed=body.stream)
    name = template.id
    writing = store.keep(name, kept, replaces=True)
    if writing is None:
        raise InvalidRequestError(
            "The request is larger than all that may be kept (limits.responses_mib).", param="input"
        )
    headers = {
        key.decode(): value.decode("latin-1")
        for key, value in scope["headers"]
        if key.decode("latin-1") in KEPT_HEADERS
    }
    try:
        await writing
        await daemon.inference.add(ENDPOINT, body.name, headers, data, owner, partial(jobs.Response, response=name))
    except BaseException as error:
        await store.remove(name)
        if isinstance(error, OSError):
            raise NotSavedError(f"The response can't be kept: {error.strerror or error}") from error
        raise
    if body.stream:
        event_log_of(store.logs, name, begun)
        return stream(daemon, name, kept, -1)
    return JSONResponse(begun)


async def is_answered(daemon: Daemon, name: str) -> bool:
    """Whether the stored response is over. Then its job has nothing left to do: the daemon died before it removed the job."""
    kept = await daemon.responses.find(name, None, is_admin=True)
    return kept is not None and not is_running(kept)


async def end(daemon: Daemon, job: jobs.Response, _answer: Answer | None) -> None:
    """Store how a job ended, unless its response has the end already. Returns when it is on disk; see `KeepEnd`.

    Raises NotSavedError.
    """
    name, store = job.response, daemon.responses
    kept = await store.find(name, job.owner, is_admin=True)
    log = store.logs.get(name)
    if kept is not None and is_running(kept):
        response = await response_of(kept)
        if kept.is_streamed:  # perhaps no client reads it since a restart
            log = event_log_of(store.logs, name, response)
        if job.state == "cancelled":
            response["status"] = "cancelled"
        else:
            response |= {"status": "failed", "error": _error_of(job, None if log is None else log.events[-1])}
        if log is not None:
            # Remove a final event that couldn't be stored: no client got it.
            log.cut(next((number for number, each in enumerate(log.events) if _is_last(each)), len(log.events)))
            # Also for a cancelled response: OpenAI's API has the status `cancelled`, but no event of that name (its SDKs'
            # `ResponseStreamEvent`), and doesn't define how such a stream ends. Microsoft's server of the same API
            # (azure-ai-agentserver-responses, `_TERMINAL_TYPE_STATUS`) sends this event, with the status and without an error.
            log.add(event("response.failed", len(log.events), response=response))
        over = replace(kept, response=Part(_encode(response)), status=str(response["status"]))
        writing = store.keep(name, over, replaces=True)
        try:
            if writing is not None:  # None: it never fits; then `current` reports that its job is gone
                await writing
        except OSError as error:
            raise NotSavedError(f"How {name} ended can't be kept: {error.strerror or error}") from error
    if log is not None:
        store.logs.pop(name, None)
        log.notify()


def _error_of(job: jobs.Response, last: bytes | None) -> Json:
    """The error of a failed response: from its job, else from the last event of its stream."""
    error = job.error
    if error is None and last is not None and last.startswith(b"event: error\n"):
        error = msgspec.json.decode(last.partition(b"data: ")[2])
    error = error or {}
    return {"code": error.get("code") or _FAILED, "message": error.get("message") or "The answer can't be kept."}


async def current(daemon: Daemon, name: str, kept: StoredResponse) -> Json:
    """The current state of the response."""
    response = await response_of(kept)
    if not is_running(kept):
        return response
    job = daemon.inference.generating(name)
    if job is None:  # it has just ended, or its job was lost
        again = await daemon.responses.find(name, kept.owner, is_admin=True)
        response = response if again is None else await response_of(again)
        if again is None or is_running(again):
            response |= {"status": "failed", "error": {"code": _FAILED, "message": "Its job is gone."}}
    elif job.state == "running":
        response["status"] = "in_progress"
    return response


def stream(daemon: Daemon, name: str, kept: StoredResponse, after: int) -> Response:
    """A stream of the events after number `after`."""
    return EventStream(_events_after(daemon, name, kept, after), nullcontext())


async def _events_after(daemon: Daemon, name: str, kept: StoredResponse, after: int) -> AsyncGenerator[bytes, None]:
    """The events after number `after`, as they come, until the end, or until the daemon stops or hands over."""
    store, at = daemon.responses, after + 1
    begun = await response_of(kept) if is_running(kept) else None
    while True:
        is_coming = daemon.inference.generating(name) is not None
        log = store.logs.get(name) if begun is None or not is_coming else event_log_of(store.logs, name, begun)
        if log is None:
            async for piece in _skip_events(at, await store.events(name)):
                yield piece
            return
        for sent in log.events[at:]:
            if is_coming and _is_last(sent):
                break
            for start in range(0, len(sent), PIECE):
                yield sent[start : start + PIECE]
            at += 1
        if not is_coming or daemon.inference.is_paused:
            return
        if (at >= len(log.events) or _is_last(log.events[at])) and not await log.changed(KEEPALIVE_S):
            yield b""


def _is_last(event: bytes) -> bool:
    """Whether the response ends with this event. Clients get it only once the response is on disk and can't be generated again."""
    return event[:_FIRST_LINE].partition(b"\n")[0].removeprefix(b"event: ").decode("latin-1") in FINAL


async def _skip_events(count: int, events: Part) -> AsyncIterator[bytes]:
    """The stored events without the first `count`, in pieces."""
    text = b""
    async for piece in events.pieces():
        text, at = text + piece, 0
        while count and (end := text.find(_FRAME, at)) >= 0:
            at, count = end + len(_FRAME), count - 1
        if count:
            text = text[max(at, len(text) - 1) :]  # perhaps half a separator
        else:
            if at < len(text):
                yield text[at:]
            text = b""
