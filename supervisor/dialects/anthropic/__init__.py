"""Anthropic's API: `/v1/messages`, its count of tokens, and its list of models.

Workers that serve these paths get their requests untouched. For all other chat models `request` maps them to chat
completions, and `answer` maps the answers and streams back; `errors` has the shape of errors, and `stops` mends what some
workers say of the end of an answer. The list is where OpenAI's is: whoever sends `anthropic-version`, which Anthropic's clients
always do, gets this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from supervisor import catalog
from supervisor.catalog.rewrite import Fields
from supervisor.daemon.daemon import Daemon
from supervisor.dialects import chat
from supervisor.dialects.anthropic import errors
from supervisor.dialects.anthropic.answer import CountTokens, Messages
from supervisor.dialects.anthropic.stops import StreamedStop, WholeStop
from supervisor.dialects.openai import OpenAI
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.gateway.dialect import after
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.translation import StreamTranslation, Translation

Json = dict[str, object]
_PATH: Final = "/v1/messages"
_MODELS: Final = "/v1/models"
_COMPLETE: Final = "/v1/complete"  # not offered; its clients know errors as all of Anthropic's do
_ROOTS: Final = (_PATH, _MODELS, _COMPLETE)
_MOST: Final = 1000  # models in one answer
_SERVING: Final = frozenset({f"POST {_PATH}", f"POST {chat.PATH}"})  # either is enough
_TRANSLATIONS: Final[Mapping[tuple[str, str], Translation]] = {
    ("POST", _PATH): Messages(),
    ("POST", f"{_PATH}/count_tokens"): CountTokens(),
}


class Anthropic(OpenAI):
    """Errors as `{"type": "error", "error": {"type", "message", …}}` with Anthropic's types, our other fields inside."""

    name = "anthropic"
    shares_paths = True
    has_openai_errors = False

    def owns(self, path: str) -> bool:
        """`/v1/messages`, the list of models, and below, and what is not offered."""
        return path.startswith(_ROOTS) and any(_is_at(path, root) for root in _ROOTS)

    def is_spoken_by(self, scope: Scope) -> bool:
        """On paths that others have too, only by its clients."""
        return _is_at(scope["path"], _PATH) or _names_a_version(scope)

    def headers(self, request_id: bytes) -> list[tuple[bytes, bytes]]:
        """Where its SDKs look for the id."""
        return [(b"request-id", request_id)]

    def scope_for(self, path: str) -> str | None:
        """Inference."""
        return "inference"

    def translation(self, method: str, path: str) -> Translation | None:
        """Of messages, and of their count."""
        return _TRANSLATIONS.get((method, path))

    def completion(self, model: str, fields: Fields, *, stream: bool) -> StreamTranslation | None:
        """See Dialect. Nothing, where no text ends the answer."""
        if b'"' not in bytes(fields.get("stop_sequences", b"")):
            return None
        return StreamedStop() if stream else WholeStop()

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """See Dialect."""
        return errors.body(fields, status)

    def error_event(self, body: bytes, sent: bytes) -> bytes:
        """See Dialect."""
        return after(sent, errors.event(body))

    def routes(self, daemon: Daemon) -> list[Route]:
        """`GET /v1/models` and `GET /v1/models/{id}`: the models that can be asked at `/v1/messages`."""
        created = datetime.fromtimestamp(int(daemon.wall_time(daemon.started)), UTC).isoformat().replace("+00:00", "Z")

        def serves(entry: catalog.Route) -> bool:
            return not _SERVING.isdisjoint(entry.model.paths)

        def view(entry: catalog.Route) -> Json:
            known = daemon.fleet.effective(entry.model.id).known_capabilities
            return {
                "type": "model",
                "id": entry.name,
                "display_name": entry.name,
                "created_at": created,
                "max_input_tokens": known.context if known is not None else None,
            }

        async def listing(request: Request) -> Response:
            await daemon.know_capabilities()
            rows = [row for row in daemon.catalog.listing() if serves(row)]
            return JSONResponse(_page([view(row) for row in rows], request))

        async def one(request: Request) -> Response:
            await daemon.know_capabilities()
            entry = daemon.catalog.resolve(request.path_params["name"])
            if not serves(entry):
                raise NotFoundError(f"{entry.name} can't be asked at {_PATH}; GET {_MODELS} lists what can.")
            return JSONResponse(view(entry))

        return [_Route(_MODELS, listing, methods=["GET"]), _Route(f"{_MODELS}/{{name:path}}", one, methods=["GET"])]


class _Route(Route):
    """A route for Anthropic's clients alone; others get the next one with its path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if _names_a_version(scope) else (Match.NONE, {})


def _is_at(path: str, root: str) -> bool:
    return path.startswith(root) and path[len(root) :][:1] in {"", "/"}


def _names_a_version(scope: Scope) -> bool:
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def _page(rows: list[Json], request: Request) -> Json:
    """The part of the list that is asked for. Raises InvalidRequestError."""
    query = request.query_params
    limit = query.get("limit", str(_MOST))
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST:
        raise InvalidRequestError(f"limit: expected a number from 1 to {_MOST}, got {limit[:50]!r}.", param="limit")
    ids = [row["id"] for row in rows]
    begin = ids.index(query["after_id"]) + 1 if query.get("after_id") in ids else 0
    end = ids.index(query["before_id"]) if query.get("before_id") in ids else len(ids)
    is_backwards = "before_id" in query
    begin, end = (max(begin, end - int(limit)), end) if is_backwards else (begin, min(begin + int(limit), end))
    page = rows[begin:end]
    return {
        "data": list(page),
        "has_more": begin > 0 if is_backwards else end < len(rows),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


ANTHROPIC: Final = Anthropic()
