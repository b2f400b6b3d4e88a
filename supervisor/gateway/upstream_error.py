"""Converts a worker's error response to the shape of the client's dialect.

Workers send errors as plain text, as `{"error": "text"}`, as FastAPI's `{"detail": …}`, or in OpenAI's shape. OpenAI's
clients can show only the last to their users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

from supervisor.errors import LlmuxError
from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.dialect import Dialect
from supervisor.gateway.error_response import error_body
from supervisor.gateway.filters.translation import SAME_NAMES
from supervisor.host.upstream.upstream import Headers

_TEXT_LIMIT: Final = 1000
# The messages of llama.cpp for prompts and for inputs of embeddings, of vLLM and OpenAI, and of Anthropic.
_TOO_LONG: Final = re.compile(
    r"available context size|too large to process|maximum (context|model) length|prompt is too long"
)
_OVERFLOW: Final = "context_length_exceeded"
_CLIENTS_FAULT: Final = re.compile(
    rb'"message"\s*:\s*"((?:Failed to parse (?:messages|tools|tool call arguments)|\'messages\' is required'
    rb'|(?:image|audio|video) input is not supported|Unknown reasoning format|input \(\d+ tokens\) is too large to process)(?:[^"\\]|\\u[0-9a-f]{4}|\\[^u]){0,1000})'
)
"""llama.cpp's messages of a status 500 for a mistake of the client. They may end with the whole request."""
_CROWDED: Final = "context_full"
_RESTATED: Final = (
    (
        501,
        b"nfill is not supported",
        400,
        "This model does not support insert: it knows no tokens for what is to be filled in. Leave suffix out.",
        "suffix",
        "unsupported_parameter",
    ),
    (500, b"vector::_M_range_check", 400, "This model has no token with that number.", "tokens", "invalid_request"),
    (
        500,
        b"Context size has been exceeded",
        503,
        "The requests that this model answers at once filled the context that they share (n_ctx). Try again in a moment.",
        None,
        _CROWDED,
    ),
)
"""llama.cpp's status and message → the right status, message, field and code."""
_QUOTED_REQUEST: Final = re.compile(rb"; (?:tools|messages) = ")
_TYPES: Final = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


class Refusal(NamedTuple):
    """A worker's error answer: the client gets it unchanged, or in the client's dialect."""

    headers: Headers
    content_type: bytes
    data: bytes
    restated_body: bytes  # `data`, but with a client error where llama.cpp reports a server error: see `restated`


class WorkerAnswerError(LlmuxError):
    """A worker answered with an error."""

    def __init__(self, status: int, message: str, *, kind: str, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)
        try:
            self.status = HTTPStatus(status)
        except ValueError:  # a number of its own making
            self.status = HTTPStatus.BAD_GATEWAY
        self.type = kind
        self.refusal: Refusal | None = None  # the whole answer, if it may pass unchanged


def restated(status: int, data: bytes) -> tuple[int, bytes]:
    """An error response's status and body, replaced where llama.cpp answers a client's mistake with a 500."""
    for worker_status, words, meant, message, param, code in _RESTATED:
        if status == worker_status and words in data:
            kind = "invalid_request_error" if meant == HTTPStatus.BAD_REQUEST else "server_error"
            named = {"message": message, "type": kind, "param": param, "code": code}
            return meant, msgspec.json.encode({"error": named})
    found = _CLIENTS_FAULT.search(data, 0, 4096) if status == 500 else None
    if found is None:
        return status, data
    quoted = _QUOTED_REQUEST.split(found[1], 1)[0].decode("utf-8", "ignore").encode()  # it may end within a character
    fault = _OVERFLOW.encode() if _TOO_LONG.search(quoted.decode("latin-1")) else b"invalid_request"
    fields = b'"type":"invalid_request_error","param":null,"code":"%b"' % fault
    return 400, b'{"error":{"message":"%b",%b}}' % (quoted, fields)


def is_overflow(error: LlmuxError) -> bool:
    """Does the worker's error mean that the request is too long for its context, so that a larger model may answer it?"""
    return error.status in (400, 413, 422) and (error.code == _OVERFLOW or bool(_TOO_LONG.search(error.message)))


def is_crowded(error: LlmuxError) -> bool:
    """Does the worker's error mean that the context shared by its requests is full, so that this request may run alone?"""
    return error.code == _CROWDED


def error_answer(
    status: int, content_type: bytes, data: bytes, dialect: Dialect, names: Mapping[str, str] = SAME_NAMES
) -> bytes:
    """The error response `data` in the shape of `dialect`; `data` itself if nothing must change.

    `names`: of a translated request, see `AnswerTranslation.names`.

    The fields of an error `{"error": {"message": text, …}}` are kept, and fields that are missing or no text are filled in:
    llama.cpp leaves out `param`, repeats the status as `code`, and adds fields of its own.
    """
    document = _decode(data)
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return error_body(upstream_error(status, content_type, data), dialect)
    kind, code = _default_type_and_code(status, error["message"])
    defaults = {"type": kind, "param": None, "code": code}
    filled = {key: value for key, value in defaults.items() if not isinstance(error.get(key, 0), str | None)}
    if isinstance(param := error.get("param"), str) and param in names:
        filled["param"] = names[param]
    if not dialect.has_openai_errors:
        return dialect.error(error | filled, status)
    return msgspec.json.encode(document | {"error": error | filled}) if filled else data


def upstream_error(status: int, content_type: bytes, data: bytes) -> WorkerAnswerError:
    """The error in a response with `status` and the (possibly cut off) body `data`.

    A status below 400 means that the worker sent something other than the requested event stream.
    """
    if status < 400:
        return WorkerAnswerError(
            502, "The worker did not answer with a stream.", kind="server_error", code="upstream_error"
        )
    param: str | None = None
    document = _decode(data)
    message = _message_in(document)
    kind, code = _default_type_and_code(status, message)
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        kind = _text_or_empty(error.get("type")) or kind
        code = _text_or_empty(error.get("code")) or code
        param = _text_or_empty(error.get("param")) or None
    elif not message and b"html" not in content_type:
        message = data[:_TEXT_LIMIT].decode("utf-8", "replace").strip()
    return WorkerAnswerError(
        status, message or f"The worker answered with status {status}.", kind=kind, code=code, param=param
    )


def _default_type_and_code(status: int, message: str) -> tuple[str, str]:
    """`type` and `code` for an error without them."""
    if status in (400, 413, 422, 500) and _TOO_LONG.search(message):
        return ("invalid_request_error", _OVERFLOW)
    common = ("invalid_request_error", "invalid_request") if status < 500 else ("server_error", "upstream_error")
    return _TYPES.get(status, common)


def _decode(data: bytes) -> object:
    try:
        document: object = msgspec.json.decode(data)
    except UNREADABLE:
        return None
    return document


def _message_in(document: object) -> str:
    if isinstance(document, str):
        return document[:_TEXT_LIMIT]
    if isinstance(document, list):  # FastAPI's list of validation errors
        return "; ".join(filter(None, map(_message_in, document)))[:_TEXT_LIMIT]
    if not isinstance(document, dict):
        return ""
    text = _text_or_empty(document.get("message")) or _text_or_empty(document.get("msg"))
    if text:
        place = document.get("loc")
        return f"{'.'.join(map(str, place))}: {text}" if isinstance(place, list) else text
    for key in ("error", "detail"):
        if text := _message_in(document.get(key)):
            return text
    return ""


def _text_or_empty(value: object) -> str:
    return value[:_TEXT_LIMIT] if isinstance(value, str) else ""
