"""The client of a running daemon: plain blocking HTTP from the standard library, imported with the first request.

The client never uses a proxy: requests to a daemon on this machine, and their key, must not pass through one.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from supervisor.cli.exit_codes import UnreachableError
from supervisor.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    LeaseUnavailableError,
    LlmuxError,
    NotFoundError,
)
from supervisor.host.store import local_access

if TYPE_CHECKING:
    from http.client import HTTPResponse

Json = dict[str, object]
T = TypeVar("T")
Query = Mapping[str, str | int | bool | None]
"""Query parameters by name; None: not given."""

DEFAULT_URL: Final = "http://127.0.0.1:8081"
TASK: Final = "task:"  # equals the catalog's constant, which commands must not import
COMPLETION_S: Final = 0.3
TIMEOUT_S: Final = 10.0
_ERRORS: Final[dict[int, type[LlmuxError]]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: ForbiddenError,
    404: NotFoundError,
    409: LeaseUnavailableError,
}


@dataclass(frozen=True, slots=True)
class ServerSent:
    kind: str
    id: str | None
    data: str


def url_of(host: str, port: int) -> str:
    """The URL of a daemon that listens on this host and port, for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(
        host, host
    )  # a daemon that binds a wildcard address answers on loopback
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def quoted(name: str) -> str:
    return quote(name, safe="")


class OtherVersionError(LlmuxError):
    """An answer that this version can't parse."""

    code = "other_version"


@dataclass(frozen=True, slots=True)
class Operation:
    """A method and path of the API. `cli.operations` lists them."""

    method: str
    path: str  # such as /v1/admin/models/{name}

    def at(self, query: Query | None = None, **places: str) -> str:
        """The path of one request."""
        path = self.path.format_map({name: quoted(place) for name, place in places.items()})
        given = {name: value for name, value in (query or {}).items() if value is not None}
        words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
        return f"{path}?{urlencode(words)}" if words else path


@dataclass(frozen=True, slots=True)
class Call(Operation, Generic[T]):
    """An operation that answers with a struct, whose type is imported when the operation is called."""

    answer: str  # such as model.ModelView, a struct of supervisor.schema

    def kind(self) -> type[T]:
        module, _, name = self.answer.partition(".")
        kind: type[T] = getattr(import_module(f"supervisor.schema.{module}"), name)
        return kind


@dataclass(frozen=True, slots=True)
class Client:
    """A daemon's URL and a key: by default the key that the daemon offers to its own user on this machine.

    Requests raise UnreachableError, or the daemon's own error.
    """

    url: str
    key: str | None = None

    def __post_init__(self) -> None:
        """Also accept the URL with `/v1`, as other clients use it."""
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1").rstrip("/"))

    def get(self, path: str, *, timeout_s: float = TIMEOUT_S) -> Json:
        return self._parse_json(self._read("GET", path, timeout_s))

    def post(self, path: str, body: Json | None = None) -> Json:
        """POST, without a time limit: a load may take minutes."""
        return self._parse_json(self._read("POST", path, None, body))

    def call(
        self,
        call: Call[T],
        body: object = None,
        *,
        query: Query | None = None,
        timeout_s: float = TIMEOUT_S,
        **places: str,
    ) -> T:
        """The answer of an operation; a POST has no time limit: a load may take minutes."""
        import msgspec  # noqa: PLC0415  # half of the start

        limit_s = None if call.method == "POST" else timeout_s
        content = self._read(call.method, call.at(query, **places), limit_s, msgspec.to_builtins(body))
        try:
            return msgspec.convert(self._parse_json(content), call.kind())
        except msgspec.ValidationError as error:
            done = "" if call.method == "GET" else " It has done what was asked."
            raise OtherVersionError(
                f"The daemon at {self.url} and this llmux are of different versions: {error}.{done} "
                "Let it be replaced by the version that is installed: llmux service upgrade"
            ) from error

    def text(self, operation: Operation, query: Query | None = None, **places: str) -> str:
        """The answer of an operation that answers with text."""
        return self._read("GET", operation.at(query, **places), TIMEOUT_S).decode("utf-8", "replace")

    def names(self, *, public: bool) -> list[str]:
        """Names of models, for completion: quickly, or none."""
        path, field = ("/v1/models", "id") if public else ("/v1/admin/models", "name")
        try:
            return [str(entry.get(field)) for entry in rows(self.get(path, timeout_s=COMPLETION_S))]
        except LlmuxError:
            return []

    def serves(self, name: str) -> bool:
        """Whether the daemon has a model of this name for clients."""
        try:
            self.get(f"/v1/models/{quoted(name)}")
        except NotFoundError:
            return False
        return True

    def events(self, path: str, *, method: str = "GET", body: Json | None = None) -> Generator[ServerSent, None, None]:
        """Server-sent events as they come, until the daemon ends the stream. Closing the iterator closes the connection."""
        kind, identity, data = "message", None, list[str]()
        with self._response(method, path, None, body) as response:
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

    def _read(self, method: str, path: str, timeout_s: float | None, body: object = None) -> bytes:
        with self._response(method, path, timeout_s, body) as response:
            return response.read()

    @contextmanager
    def _response(self, method: str, path: str, timeout_s: float | None, body: object) -> Iterator[HTTPResponse]:
        """The response to a request on a new connection, which is closed when the block ends, also by an exception."""
        from http.client import HTTPConnection, HTTPException, HTTPSConnection  # noqa: PLC0415  # half of the start

        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequestError(f"{self.url} is no URL ({error}).") from error
        if parts.scheme not in {"http", "https"} or not host:
            raise InvalidRequestError(f"{self.url} is no URL of a daemon, such as http://127.0.0.1:8081.")
        access = self._offered_access(host, port or 80)
        # Use only the daemon's own address of `localhost`: on the other one a stranger might listen and get the key.
        host, key = (access.host, access.key) if access is not None else (host, self.key)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if body is not None:
            headers["content-type"] = "application/json"
        content = json.dumps(body).encode() if body is not None else None
        kind = HTTPConnection if parts.scheme == "http" else HTTPSConnection
        response = None
        with closing(kind(host, port, timeout=timeout_s)) as connection:
            try:
                connection.request(method, parts.path + path, content, headers)
                response = connection.getresponse()
                if response.status >= 400:
                    raise error_of(part(self._parse_json(response.read()), "error"), response.status, path)
                yield response
            except (OSError, HTTPException) as error:
                why = str(error) or type(error).__name__
                if response is not None:
                    raise UnreachableError(f"The daemon at {self.url} hung up ({why}).") from error
                others = " or ".join(other.url for other in local_access.running())
                remedy = f"One of yours runs elsewhere: --url {others}" if others else "Start one with: llmux serve"
                raise UnreachableError(f"No daemon answers at {self.url} ({why}). {remedy}") from error
            except UnicodeError as error:  # a character in the key or the host that HTTP can't carry
                message = f"The address or the key has characters that can't be sent ({error})."
                raise InvalidRequestError(message) from error

    def _offered_access(self, host: str, port: int) -> local_access.LocalAccess | None:
        is_wanted = not self.key and self.url.startswith("http:")
        return local_access.answering_at(host, port) if is_wanted else None

    def _parse_json(self, content: bytes) -> Json:
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise UnreachableError(f"What answers at {self.url} is not llmux.")
        return answer


def rows(answer: Json, field: str = "data") -> list[Json]:
    found = answer.get(field)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def part(answer: Json, field: str) -> Json:
    """The object in an answer; empty where there is none."""
    found = answer.get(field)
    return found if isinstance(found, dict) else {}


def error_of(fields: Json, status: int, path: str) -> LlmuxError:
    """The daemon's error answer to a request of `path` as an exception, with the remedy."""
    message = str(fields.get("message", f"HTTP {status}"))
    if status in {401, 403}:
        scope = "admin" if path.startswith("/v1/admin") else "inference"
        made = "llmux keys add" in message
        message += f"{'.' * made} Pass one with --key or $LLMUX_API_KEY"
        message += "" if made else f"; make one: llmux keys add NAME --scope {scope}"
    elif fields.get("code") == "model_not_found":
        message += " See them: llmux ps"
    detail, code, param = fields.get("detail"), fields.get("code"), fields.get("param")
    return _ERRORS.get(status, LlmuxError)(
        message,
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        detail=tuple(str(line) for line in detail) if isinstance(detail, list) else (),
    )
