"""The operations for Anthropic's clients: messages, their token count, and the list of models.

The list has OpenAI's paths. A request with the header `anthropic-version`, which all Anthropic clients send, gets Anthropic's list.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from starlette.routing import Match, Route

from supervisor import catalog
from supervisor.daemon.daemon import Daemon
from supervisor.dialects import chat
from supervisor.dialects.anthropic import types
from supervisor.errors import NotFoundError
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.operation import Group
from supervisor.schema.operation import EVENTS, Example, Parameter

MESSAGES: Final = "/v1/messages"
MODELS: Final = "/v1/models"
_SERVING: Final = frozenset({f"POST {MESSAGES}", f"POST {chat.PATH}"})  # a model needs one of these
_VERSION: Final = (Parameter("anthropic-version", "Which Anthropic's clients always send.", place="header"),)
_HEADERS: Final = {"anthropic-version": "2023-06-01"}
_HELLO: Final = {"model": "Tiny-Instruct", "messages": [{"role": "user", "content": "Hello"}]}

GROUP: Final = Group(
    "Anthropic", "Anthropic's messages, for every model that chats.", scope="inference", error=types.AnthropicError
)

GROUP.model_endpoint(
    MESSAGES,
    """Let a model answer a conversation.

    Its stream has Anthropic's events, from `message_start` to `message_stop`.
    """,
    reads=types.MessageRequest,
    answer=types.Message,
    stream_type=EVENTS,
    parameters=_VERSION,
    example=Example(_HELLO | {"max_tokens": 64}, headers=_HEADERS),
)
GROUP.model_endpoint(
    f"{MESSAGES}/count_tokens",
    "How many tokens such a request has.",
    reads=types.CountRequest,
    answer=types.MessageTokensCount,
    parameters=_VERSION,
    example=Example(_HELLO, headers=_HEADERS),
)


def names_version(scope: Scope) -> bool:
    """Whether a request comes from an Anthropic client: it names a version of the API."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


class _VersionRoute(Route):
    """A route for Anthropic's clients only. Other clients get the next route with the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if names_version(scope) else (Match.NONE, {})


@GROUP.operation("GET", MODELS, route=_VersionRoute, parameters=_VERSION, example=Example(headers=_HEADERS))
async def list_models(daemon: Daemon, query: types.AnthropicModelQuery) -> types.AnthropicModelList:
    """With `anthropic-version`: the models that serve `/v1/messages` or chat.

    `limit`, `after_id` and `before_id` choose a page.
    """
    await daemon.know_capabilities()
    entries = [entry for entry in daemon.catalog.listing() if _serves_messages(entry)]
    names = [entry.name for entry in entries]
    begin = names.index(query.after_id) + 1 if query.after_id in names else 0
    end = names.index(query.before_id) if query.before_id in names else len(names)
    if is_backwards := query.before_id is not None:
        begin = max(begin, end - query.limit)
    else:
        end = min(end, begin + query.limit)
    page = [_model_view(daemon, entry) for entry in entries[begin:end]]
    return types.AnthropicModelList(
        page,
        has_more=begin > 0 if is_backwards else end < len(entries),
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


@GROUP.operation(
    "GET",
    f"{MODELS}/{{name:path}}",
    route=_VersionRoute,
    parameters=_VERSION,
    errors=(404,),
    example=Example(path="/v1/models/Tiny-Instruct", headers=_HEADERS),
)
async def get_model(daemon: Daemon, name: str) -> types.AnthropicModel:
    """With `anthropic-version`: one entry of that list."""
    await daemon.know_capabilities()
    entry = daemon.catalog.resolve(name)
    if not _serves_messages(entry):
        raise NotFoundError(f"{entry.name} can't be asked at {MESSAGES}; GET {MODELS} lists what can.")
    return _model_view(daemon, entry)


def _serves_messages(entry: catalog.Route) -> bool:
    return not _SERVING.isdisjoint(entry.model.paths)


def _model_view(daemon: Daemon, entry: catalog.Route) -> types.AnthropicModel:
    known = daemon.fleet.effective(entry.model.id).known_capabilities
    created = datetime.fromtimestamp(int(daemon.wall_time(daemon.started)), UTC)
    return types.AnthropicModel(
        type="model",
        id=entry.name,
        display_name=entry.name,
        created_at=created.isoformat().replace("+00:00", "Z"),
        max_input_tokens=known.context if known is not None else None,
    )
