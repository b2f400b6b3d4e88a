"""Sends a job's request through the gateway as if its client had sent it, with the headers for its tenant and priority."""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from runtimes.endpoints import aliases_of
from supervisor.api.jobs import FOR_DAEMON
from supervisor.catalog.keys import Key, Scope
from supervisor.daemon.daemon import Daemon
from supervisor.dialects import dialect_of
from supervisor.dialects.openai import OPENAI
from supervisor.dialects.responses.background import is_answered
from supervisor.engine.ticket import HandedOverError
from supervisor.errors import InvalidRequestError, LlmuxError, UpstreamError
from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.dialect import Dialect, ForDaemonError
from supervisor.gateway.disconnect import EXTENSION, Disconnect, Message, ResponseOverError
from supervisor.gateway.error_response import error_body
from supervisor.gateway.request import Request
from supervisor.host.store.request_buffer import Bytes, Gathered
from supervisor.jobs.inference import Answer, JobInterruptedError
from supervisor.jobs.job import Inference, Line
from supervisor.jobs.job import Response as ResponseJob
from supervisor.server.request_id import STATE_KEY

_FORMS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits", "/v1/images/variations")
FORMS: Final = frozenset(each for path in _FORMS for each in (path, *aliases_of(path)))
"""Paths that take a form: fields with a data URL are sent as files."""
_Decoded = dict[str, Any]


async def send(daemon: Daemon, job: Inference, body: bytes) -> Answer:
    """See `jobs.inference.Send`."""
    kept_as = job.response if isinstance(job, ResponseJob) else None
    if kept_as is not None and await is_answered(daemon, kept_as):
        return Answer(200, "", b"")
    if isinstance(job, Line) and await daemon.batches.is_done(job):
        return Answer(200, "", b"")
    content_type = b"application/json"
    if job.endpoint in FORMS:
        try:
            content_type, body = await asyncio.to_thread(_encode_form, body)
        except LlmuxError as error:
            return Answer(int(error.status), "", b"", _decode_error(error_body(error, OPENAI)))
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
    dialect, buffer = dialect_of(scope), Gathered(daemon.bodies, min(limits.body_mib, limits.jobs_mib) << 20)
    response = _Response(body, buffer, is_kept=kept_as is None)
    del body  # belongs to the gateway from now on, which counts it and may write it to disk
    request = Request(request_id, asyncio.get_running_loop().time(), dialect, response=kept_as)
    job.request_id = request_id.decode()
    if job.owner is not None and daemon.keyring:
        request.key = _valid_key(daemon, job.owner)
        if request.key is None:
            message = "The key that it came with is no longer there, or allows no inference."
            return Answer(401, "", b"", {"message": message, "code": "invalid_api_key"})
    try:
        if not daemon.gateway.routes.serves("POST", job.endpoint, dialect):
            raise InvalidRequestError(f"No configured model serves POST {job.endpoint} any more.")
        await daemon.gateway(scope, response.receive, response.send, request)
    except ForDaemonError:
        return Answer(400, "", b"", {"message": FOR_DAEMON, "code": "invalid_request"})
    except HandedOverError as handed_over:
        raise JobInterruptedError from handed_over
    except (LlmuxError, ResponseOverError) as error:
        return _failed_answer(error, dialect)
    else:
        answer = response.answer()
        if answer.error is None and kept_as is None:  # a stored response is kept in the response store instead
            answer_buffer, buffer = buffer, Gathered()
            return replace(answer, buffer=answer_buffer)
        return replace(answer, body=b"")
    finally:
        buffer.release()
        if request.waiting is not None:  # no relay uses it
            request.waiting.release()


def _failed_answer(error: LlmuxError | ResponseOverError, dialect: Dialect) -> Answer:
    cause = error if isinstance(error, LlmuxError) else error.__cause__
    if not isinstance(cause, LlmuxError):
        cause = UpstreamError(str(error))
    retry_after_s = None if cause.lasts else cause.retry_after_s
    return Answer(int(cause.status), "", b"", _decode_error(error_body(cause, dialect)), retry_after_s)


def _valid_key(daemon: Daemon, key_id: str) -> Key | None:
    """The key with this id, if it is still valid for inference."""
    for key in (*daemon.keyring.keys, daemon.local_key):
        if key is not None and key.id == key_id:
            is_valid = Scope.INFERENCE in key.scopes and (key.expires is None or key.expires > time.time())
            return key if is_valid else None
    return None


class _Response:
    """The gateway's client: collects the response. `buffer` counts the body. Without `is_kept`, only an error's body is kept."""

    def __init__(self, body: bytes, buffer: Gathered, *, is_kept: bool) -> None:
        self._request: bytes | None = body
        self._buffer = buffer
        self._is_kept = is_kept
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._body = bytearray()

    async def receive(self) -> Message:
        body, self._request = self._request, None
        if body is None:
            await asyncio.Event().wait()  # this client never disconnects
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
            return
        if self._is_kept or self._status >= 400:
            piece = message.get("body", b"")
            self._buffer.grow(len(self._body) + len(piece))
            self._body += piece

    def answer(self) -> Answer:
        content_type = self._headers.get(b"content-type", b"").decode("latin-1")
        if self._status < 400:
            return Answer(self._status, content_type, self._body)
        retry_after = self._headers.get(b"retry-after", b"")
        waits = self._status in {429, 503} and retry_after.isdigit()
        return Answer(self._status, content_type, b"", _decode_error(self._body), float(retry_after) if waits else None)


def _decode_error(body: Bytes) -> _Decoded:
    """The error object in the body of an error response."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return {"message": body[:1000].decode("utf-8", "replace")}
    error = found.get("error", found) if isinstance(found, dict) else found
    return error if isinstance(error, dict) else {"message": str(error)}


def _encode_form(body: bytes) -> tuple[bytes, bytes]:
    """The content type and the body of a multipart form for a JSON body. Nulls are left out. Raises InvalidRequestError."""
    boundary = secrets.token_hex(16).encode()
    parts = []
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            data, head = _encode_part(name, each)
            parts.append(b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary, head, data))
    return b"multipart/form-data; boundary=" + boundary, b"".join(parts) + b"--%b--\r\n" % boundary


def _encode_part(name: str, value: object) -> tuple[bytes, bytes]:
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
