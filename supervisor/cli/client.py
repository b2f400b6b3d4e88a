"""Asking a running daemon: plain blocking HTTP from the standard library, which is there at once.

Never through a proxy: a daemon on this machine must not be asked through one, nor its key be shown to one.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from supervisor.cli.exit_codes import UnreachableError
from supervisor.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    LlmuxError,
    NotFoundError,
)

Json = dict[str, object]

COMPLETION_S: Final = 0.3
_ERRORS: Final[dict[int, type[LlmuxError]]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: ForbiddenError,
    404: NotFoundError,
}


@dataclass(frozen=True, slots=True)
class ServerSent:
    """One server-sent event."""

    kind: str
    id: str | None
    data: str


def quoted(name: str) -> str:
    """A model's name as a piece of a URL."""
    return quote(name, safe="")


def get(url: str, key: str | None, path: str, *, timeout_s: float | None = 10.0) -> Json:
    """GET a JSON object. Raises UnreachableError, or what the daemon says in its own words."""
    return _json(url, _read(url, key, "GET", path, None, timeout_s))


def post(url: str, key: str | None, path: str, body: Json | None = None) -> Json:
    """POST, and wait as long as it takes: loading is somebody's wish and may take minutes."""
    return _json(url, _read(url, key, "POST", path, body, None))


def text(url: str, key: str | None, path: str) -> str:
    """GET something that is no JSON."""
    return _read(url, key, "GET", path, None, 10.0).decode("utf-8", "replace")


def events(
    url: str, key: str | None, path: str, *, method: str = "GET", body: Json | None = None
) -> Generator[ServerSent, None, None]:
    """Server-sent events as they come, until the daemon ends them. Closing the iterator hangs up."""
    connection = _connect(url, None)
    with closing(connection):
        response = _ask(connection, url, key, method, path, body)
        yield from _events(url, response)


def names(url: str, key: str | None, *, public: bool) -> list[str]:
    """Names of models, for completion: quickly, or none."""
    path, field = ("/v1/models", "id") if public else ("/v1/admin/models", "name")
    try:
        answer = _json(url, _read(url, key, "GET", path, None, COMPLETION_S))
    except LlmuxError:
        return []
    return [str(entry.get(field)) for entry in rows(answer)]


def rows(answer: Json, field: str = "data") -> list[Json]:
    """The list in an answer."""
    found = answer.get(field)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def part(answer: Json, field: str) -> Json:
    """The object in an answer; empty where there is none."""
    found = answer.get(field)
    return found if isinstance(found, dict) else {}


def error_of(told: Json, status: int, path: str) -> LlmuxError:
    """The daemon's error to a request of `path`, as ours, with what to do next."""
    message = str(told.get("message", f"HTTP {status}"))
    if status in {401, 403}:
        scope = "admin" if path.startswith("/v1/admin") else "inference"
        message += f" Pass one with --key or $LLMUX_API_KEY; make one: llmux keys add NAME --scope {scope}"
    elif told.get("code") == "model_not_found":
        message += " See them: llmux ps"
    detail = told.get("detail")
    return _ERRORS.get(status, LlmuxError)(
        message, detail=tuple(str(line) for line in detail) if isinstance(detail, list) else ()
    )


def _connect(url: str, timeout_s: float | None) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequestError(f"{url} is no URL ({error}).") from error
    if parts.scheme not in {"http", "https"} or not host:
        raise InvalidRequestError(f"{url} is no URL of a daemon, such as http://127.0.0.1:8081.")
    kind = http.client.HTTPConnection if parts.scheme == "http" else http.client.HTTPSConnection
    return kind(host, port, timeout=timeout_s)


def _ask(
    connection: http.client.HTTPConnection, url: str, key: str | None, method: str, path: str, body: Json | None
) -> http.client.HTTPResponse:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["content-type"] = "application/json"
    content = json.dumps(body).encode() if body is not None else None
    try:
        connection.request(method, urlsplit(url).path.rstrip("/") + path, content, headers)
        response = connection.getresponse()
        if response.status < 400:
            return response
        answer = _json(url, response.read())
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from error
    except UnicodeError as error:  # in a key that is none, or in the host
        raise InvalidRequestError(f"The address or the key has characters that can't be sent ({error}).") from error
    raise error_of(part(answer, "error"), response.status, path)


def _read(url: str, key: str | None, method: str, path: str, body: Json | None, timeout_s: float | None) -> bytes:
    connection = _connect(url, timeout_s)
    with closing(connection):
        response = _ask(connection, url, key, method, path, body)
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(url, error) from error


def _events(url: str, response: http.client.HTTPResponse) -> Generator[ServerSent, None, None]:
    kind, identity, data = "message", None, list[str]()
    try:
        for raw in response:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if data:
                    yield ServerSent(kind, identity, "\n".join(data))
                kind, data = "message", []
            elif field == "event":
                kind = value
            elif field == "id":
                identity = value
            elif field == "data":
                data.append(value)
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"The daemon at {url} hung up ({error or type(error).__name__}).") from error


def _unreachable(url: str, error: Exception) -> UnreachableError:
    why = str(error) or type(error).__name__
    return UnreachableError(f"No daemon answers at {url} ({why}). Start one with: llmux serve")


def _json(url: str, content: bytes) -> Json:
    try:
        answer = json.loads(content)
    except ValueError as error:
        raise UnreachableError(f"What answers at {url} is not llmux.") from error
    if not isinstance(answer, dict):
        raise UnreachableError(f"What answers at {url} is not llmux.")
    return answer
