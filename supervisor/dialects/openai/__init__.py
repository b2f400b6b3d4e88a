"""OpenAI's API: the dialect of every client whose path belongs to no other dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from runtimes.endpoints import aliases_of
from supervisor.catalog.models.rewrite import Fields
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.openai import media_operations, operations
from supervisor.dialects.openai.completed import EmbeddingsTranslation, RerankingTranslation
from supervisor.dialects.openai.infill import Infill
from supervisor.gateway.body.body import Bytes
from supervisor.gateway.dialect import Dialect, ReasoningEvent
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.picture_links import PREFIX
from supervisor.gateway.filters.translation import Translation

LATEST: Final = ":latest"
"""Ollama's clients add this to a name without a tag, even in OpenAI's API."""
_TRANSLATED: Final[Mapping[str, Translation]] = {
    "/v1/completions": Infill(),
    "/v1/embeddings": EmbeddingsTranslation(),
    "/v1/rerank": RerankingTranslation(),
    "/v1/reranking": RerankingTranslation(),
}
_TRANSLATIONS: Final = {each: how for path, how in _TRANSLATED.items() for each in (path, *aliases_of(path))}
_OPEN: Final = frozenset(
    path for endpoint in media_operations.GROUP.endpoints if endpoint.scope is None for path in endpoint.paths
)
_CHATS: Final = frozenset({"/v1/chat/completions", "/chat/completions"})


class OpenAI(Dialect):
    """Errors are `{"error": {"message", "type", "param", "code"}}`; API keys come as `Authorization: Bearer` or `x-api-key`."""

    name = "openai"

    def owns(self, path: str) -> bool:
        """Every path that no other dialect owns."""
        return True

    def scope_for(self, path: str) -> str | None:
        """`inference`; none for lists that Open WebUI requests without a key, and for pictures, which have secret names."""
        return None if path in _OPEN or path.startswith(PREFIX) else "inference"

    def model_name(self, name: str, is_known: Callable[[str], bool]) -> str:
        """`NAME:latest` means NAME if nothing else has that name."""
        bare = name.removesuffix(LATEST)
        return bare if bare != name and not is_known(name) and is_known(bare) else name

    def translation(self, method: str, path: str) -> Translation | None:
        """See Dialect: for fields that some workers ignore, see `Endpoint.unsupported_fields`."""
        return _TRANSLATIONS.get(path) if method == "POST" else None

    def reasoning(self, path: str) -> ReasoningEvent | None:
        """See Dialect: chunks for chat streams."""
        return _reasoning_chunk if path in _CHATS else None

    async def answer_in_daemon(self, daemon: Daemon, scope: Scope, fields: Fields, raw: Bytes) -> Response:
        """Answer a request for which `daemon_scope` returned a scope; `raw` is its body. Raises LlmuxError."""
        raise NotImplementedError

    def routes(self, daemon: Daemon) -> list[Route]:
        """The routes that the daemon answers itself."""
        return [*operations.GROUP.routes(daemon), *media_operations.GROUP.routes(daemon)]


def _reasoning_chunk(text: str, model: str, request_id: str, created: int) -> bytes:
    """A chunk without `role`: the worker's first chunk has it, and OpenAI's client would join both."""
    chunk = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "delta": {"reasoning_content": text}, "finish_reason": None}],
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


OPENAI: Final = OpenAI()
