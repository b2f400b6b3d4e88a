"""OpenAI's Responses: `/v1/responses`. Its streams have events with types, numbers and positions.

Workers that serve this path get their requests unchanged, and `stream_repair` adds missing fields to their streams. For all
other chat models llmux translates requests to chat completions:

- `types`: the requests and answers of clients
- `decode`: a request for a response or a token count → a request for a chat completion
- `items`: `input` → messages;  `tools`: functions and the tool choice
- `encode`: a chat completion → the response object, whole or event by event

The daemon stores responses of all workers, and generates responses in the background:

- `stored_conversation`: requests that continue a stored response, or have a response to store;  `stored_response`: reads stored responses
- `background`: responses that a job generates while no client waits
- `operations`: the operations on a stored response
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from supervisor.catalog.models.rewrite import Fields
from supervisor.daemon.daemon import Daemon
from supervisor.dialects.llm_pool import LLM_POOL, is_llm_pool
from supervisor.dialects.openai import OpenAI
from supervisor.dialects.responses import background
from supervisor.dialects.responses.decode import CountTokens, CreateResponse
from supervisor.dialects.responses.encode import ResponseTemplate
from supervisor.dialects.responses.operations import GROUP
from supervisor.dialects.responses.stored_conversation import conversation_of, event
from supervisor.dialects.responses.stream_repair import NUMBER, ResponsesRepair
from supervisor.gateway.body.body import Body, Bytes
from supervisor.gateway.dialect import Dialect, separated_event
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters import frames
from supervisor.gateway.filters.stored_conversation import ConversationStore, StoredConversation
from supervisor.gateway.filters.translation import StreamTranslation, TargetedTranslation, Translation
from supervisor.jobs import job as jobs

__all__ = ["RESPONSES", "Completion", "Responses"]

_PATHS: Final = frozenset({"/v1/responses", "/responses"})
_COUNTED: Final = frozenset({f"{path}/input_tokens" for path in _PATHS})
_CREATE: Final = CreateResponse()
_COUNT: Final = CountTokens()


class Responses(OpenAI):
    """Like OpenAI's dialect, except for the events of its streams."""

    name = "responses"
    unsupported_fields = frozenset({"max_tokens", "max_completion_tokens", "n_predict"})  # here `max_output_tokens`
    reads_fields = True

    def __init__(self, *, is_llm_pools: bool = False) -> None:
        """`is_llm_pools`: all requests to `/v1/responses` are llm-pool's, not only those with its fields."""
        self._is_llm_pools = is_llm_pools

    def spoken_with(self, responses: str) -> Dialect:
        """See Dialect."""
        return _LLM_POOLS if responses == "llm-pool" else self

    def owns(self, path: str) -> bool:
        """The paths of responses, and of their token counts."""
        return path in _PATHS or path in _COUNTED

    def daemon_scope(self, path: str, fields: Fields) -> str | None:
        """The daemon generates a response in the background as a job."""
        is_for_background = path in _PATHS and bytes(fields.get("background", b"")) == b"true"
        return "inference" if is_for_background and not self._is_llm_pool_request(path, fields) else None

    async def answer_in_daemon(self, daemon: Daemon, scope: Scope, fields: Fields, raw: Bytes) -> Response:
        """Generate a response in the background. Raises LlmuxError."""
        return await background.begin(daemon, scope, raw)

    async def conversation(
        self, path: str, body: Body, conversations: ConversationStore
    ) -> tuple[Body, StoredConversation | None]:
        """See Dialect."""
        if self._is_llm_pool_request(path, body.fields):
            return body, None
        return await conversation_of(body, conversations, is_counted=path in _COUNTED)

    def routes(self, daemon: Daemon) -> list[Route]:
        """The operations on stored responses."""
        daemon.inference.on_end[jobs.Response] = partial(background.end, daemon)
        return GROUP.routes(daemon)

    def translation(self, method: str, path: str) -> Translation | None:
        """The translation of a request for a response, or for its token count."""
        if method != "POST":
            return None
        return _COUNT if path in _COUNTED else _CREATE

    def required_translation(self, method: str, path: str, fields: Fields) -> TargetedTranslation | None:
        """See Dialect: for llm-pool's requests, which have the same path."""
        return LLM_POOL if method == "POST" and self._is_llm_pool_request(path, fields) else None

    def error_event(self, body: bytes, sent: bytes) -> bytes:
        """See Dialect."""
        error = msgspec.json.decode(body)["error"]
        shown = {field: error.get(field) for field in ("code", "message", "param")}
        numbers = NUMBER.findall(sent)
        if sent and not numbers:  # a stream of llm-pool's
            return separated_event(sent, frames.event("error", shown))
        at = int(numbers[-1]) + 1 if numbers else 0
        begun = b""
        if not sent:  # OpenAI's own SDKs fail if another event comes first
            begun = event("response.created", at, response=ResponseTemplate.of({}).response("in_progress"))
            at += 1
        return begun + separated_event(sent, event("error", at, **shown))

    def repair(self, model: str, fields: Fields, *, stream: bool) -> StreamTranslation | None:
        """See Dialect."""
        return ResponsesRepair(model) if stream else None

    def _is_llm_pool_request(self, path: str, fields: Fields) -> bool:
        """Whether this is a request of llm-pool's API."""
        return path in _PATHS and (self._is_llm_pools or is_llm_pool(fields))


RESPONSES: Final = Responses()
_LLM_POOLS: Final = Responses(is_llm_pools=True)
