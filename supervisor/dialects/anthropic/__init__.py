"""Anthropic's API: `/v1/messages`, its token count, and its list of models.

Workers that serve these paths get their requests unchanged. For all other chat models `decode` translates the requests to chat
completions, and `encode` translates the answers and streams back. `types` has the requests and answers; `operations` describes
the paths and answers the list of models. `stops` corrects the reason that some workers give for the end of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.routing import Route

from supervisor.catalog.models.rewrite import Fields
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.anthropic import encode
from supervisor.dialects.anthropic.decode import CountTokens, Messages
from supervisor.dialects.anthropic.operations import GROUP, MESSAGES, MODELS, names_version
from supervisor.dialects.anthropic.stops import StreamedStop, WholeStop
from supervisor.dialects.openai import OpenAI
from supervisor.gateway.dialect import separated_event
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.translation import StreamTranslation, Translation

_COMPLETE: Final = "/v1/complete"  # not offered, but its errors have Anthropic's format
_ROOTS: Final = (MESSAGES, MODELS, _COMPLETE)
_TRANSLATIONS: Final[Mapping[tuple[str, str], Translation]] = {
    ("POST", MESSAGES): Messages(),
    ("POST", f"{MESSAGES}/count_tokens"): CountTokens(),
}


class Anthropic(OpenAI):
    """Errors are `{"type": "error", "error": {"type", "message", …}}` with Anthropic's types, llmux's other fields inside."""

    name = "anthropic"
    shares_paths = True
    has_openai_errors = False

    def owns(self, path: str) -> bool:
        """`/v1/messages`, the list of models, all paths below both, and `/v1/complete`, which is not offered."""
        return path.startswith(_ROOTS) and any(_is_at(path, root) for root in _ROOTS)

    def is_spoken_by(self, scope: Scope) -> bool:
        """OpenAI's list of models has the same path: there Anthropic's clients send a version header."""
        return _is_at(scope["path"], MESSAGES) or names_version(scope)

    def headers(self, request_id: bytes) -> list[tuple[bytes, bytes]]:
        """The header in which Anthropic's SDKs look for the id."""
        return [(b"request-id", request_id)]

    def scope_for(self, path: str) -> str | None:
        """See Dialect: always `inference`."""
        return "inference"

    def translation(self, method: str, path: str) -> Translation | None:
        """The translations of messages and of their count."""
        return _TRANSLATIONS.get((method, path))

    def repair(self, model: str, fields: Fields, *, stream: bool) -> StreamTranslation | None:
        """See Dialect. None for a request without stop sequences."""
        if b'"' not in bytes(fields.get("stop_sequences", b"")):
            return None
        return StreamedStop() if stream else WholeStop()

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """See Dialect."""
        return encode.error_body(fields, status)

    def error_event(self, body: bytes, sent: bytes) -> bytes:
        """See Dialect."""
        return separated_event(sent, encode.error_event(body))

    def routes(self, daemon: Daemon) -> list[Route]:
        """The routes of the list of models."""
        return GROUP.routes(daemon)


def _is_at(path: str, root: str) -> bool:
    return path.startswith(root) and path[len(root) :][:1] in {"", "/"}


ANTHROPIC: Final = Anthropic()
