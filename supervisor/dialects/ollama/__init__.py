"""Ollama's API, below `/api`: llmux translates chats, prompts and embeddings; the daemon answers all other requests.

Errors are `{"error": "MESSAGE"}`, also as the last line of a stream. Ollama's clients add `:latest` to a name without a tag,
and some look for that name in the list, so the list has names with the tag; see `OpenAI.model_name`. llmux refuses requests to
create or remove a model: models come from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route

from supervisor.catalog.models.rewrite import Fields
from supervisor.daemon import loading
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.ollama import decode, models
from supervisor.dialects.ollama.encode import Answers
from supervisor.dialects.ollama.operations import GROUP
from supervisor.dialects.openai import OpenAI
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import Bytes
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.translation import TargetedTranslation, Translation
from supervisor.schema.operation import JSON, LINES

AT_OWN_PORT: Final = "ollama_port"
"""Key in the state of a request to the port for Ollama's clients. That port has no page at its root."""
_BLOBS: Final = "/api/blobs/"
_SCOPES: Final = {endpoint.path: endpoint.scope for endpoint in GROUP.endpoints}
_GENERATING: Final = frozenset({decode.CHAT, decode.GENERATE})
# Clients read every line as JSON, and most check that it is an answer. This line is valid for chats and for prompts.
_KEEPALIVE: Final = (
    b'{"model":"","created_at":"1970-01-01T00:00:00Z","message":{"role":"assistant","content":""},"response":"",'
    b'"done":false}\n'
)


class Ollama(OpenAI):
    """API keys work as with OpenAI's API: clients send `Authorization: Bearer`."""

    name = "ollama"
    reads_fields = True
    keepalive = _KEEPALIVE
    has_openai_errors = False

    def owns(self, path: str) -> bool:
        """Known paths below `/api`; llmux has other paths of its own there."""
        return path.startswith("/api/") and (path in _SCOPES or path.startswith(_BLOBS))

    def scope_for(self, path: str) -> str | None:
        """The operation's scope; changes to models need the admin scope."""
        return "admin" if path.startswith(_BLOBS) else _SCOPES.get(path, "inference")

    def is_for_daemon(self, method: str, path: str, query: bytes) -> bool:
        """Every path without a translation, even if a worker serves it."""
        return path not in decode.TRANSLATIONS

    def streams_by_default(self, path: str) -> bool:
        """See Dialect."""
        return path in _GENERATING

    def translation(self, method: str, path: str) -> Translation | None:
        """See Dialect."""
        return decode.TRANSLATIONS.get(path) if method == "POST" else None

    def required_translation(self, method: str, path: str, fields: Fields) -> TargetedTranslation | None:
        """See Dialect: for prompts that go to their model without a template."""
        return decode.raw_prompt_translation(fields) if method == "POST" and path == decode.GENERATE else None

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """See Dialect. Ollama's clients know no other field."""
        return msgspec.json.encode({"error": fields["message"]})

    def daemon_scope(self, path: str, fields: Fields) -> str | None:
        """`keep_alive: 0` without a prompt unloads the model for all of its users, so it needs the admin scope."""
        return "admin" if path in _GENERATING and decode.is_unload(path, fields) else None

    async def answer_in_daemon(self, daemon: Daemon, scope: Scope, fields: Fields, raw: Bytes) -> Response:
        """Unload a model after its running requests. Raises LlmuxError."""
        request, _ = decode.read_load(fields)
        if not request.model:
            raise InvalidRequestError('The field "model" is missing.', code="missing_model", param="model")
        loading.ask_unload(daemon, models.resolve(daemon, request.model).model.id)
        answers = Answers(request.model, shape="chat" if scope["path"] == decode.CHAT else "generate")
        line = answers.empty(request.model, done_reason="unload") + b"\n"
        return Response(line, media_type=LINES if request.stream else JSON)

    def routes(self, daemon: Daemon) -> list[Route]:
        """The daemon's own operations, and the root, which clients request to see whether a server runs."""
        return [_Root("/", _answer_root, methods=["GET"]), *GROUP.routes(daemon)]


class _Root(Route):
    """A route for programs. Browsers, which want a page, get the next route with its path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.NONE, {}) if _wants_page(scope) else super().matches(scope)


def _wants_page(scope: Scope) -> bool:
    return AT_OWN_PORT not in scope["state"] and any(
        name == b"accept" and b"text/html" in value.lower() for name, value in scope["headers"]
    )


async def _answer_root(_request: Request) -> Response:
    return PlainTextResponse("Ollama is running")


OLLAMA: Final = Ollama()
