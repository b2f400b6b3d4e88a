"""The interface of API dialects, for the gateway and the daemon.

A dialect is one object with everything that is special about an API: its paths, the key scope of each path, the headers
that may carry the key, the format of errors, and the bytes that keep a silent stream alive. `supervisor.dialects` has all
dialects; the server selects one by the request's path.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from supervisor.catalog.models.rewrite import Fields
from supervisor.gateway.body.body import Body
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.stored_conversation import ConversationStore, StoredConversation
from supervisor.gateway.filters.translation import StreamTranslation, TargetedTranslation, Translation
from supervisor.host.upstream.upstream import Headers


class ReasoningEvent(Protocol):
    """Makes an event with `text`, to be sent before the answer's first event. `created`: Unix seconds."""

    def __call__(self, text: str, model: str, request_id: str, created: int) -> bytes: ...


class ForDaemonError(Exception):
    """The daemon itself answers this request on a path of inference. No client sees this error."""

    def __init__(self, scope: str, fields: Fields) -> None:
        super().__init__(scope)
        self.scope = scope  # the key scope that the request needs
        self.fields = fields


class Dialect(abc.ABC):
    """One API that clients speak. The defaults are those of OpenAI's API, which workers speak."""

    name: str  # its name in a runtime's endpoints
    credential_headers: frozenset[bytes] = frozenset({b"authorization", b"x-api-key"})  # in lower case
    keepalive: bytes = b": keepalive\n\n"  # a silent stream sends this; clients skip it
    has_openai_errors: bool = True  # then a worker's complete errors pass as they are
    unsupported_fields: frozenset[str] = frozenset()
    """Settings of a model that workers ignore or misread in this dialect: its requests are then translated, if possible."""
    reads_fields: bool = False
    """Do a request's fields decide how it is served? See `daemon_scope`, `conversation` and `required_translation`."""

    shares_paths: bool = False
    """Do clients of other dialects use this dialect's paths, too? See `is_spoken_by`."""

    @abc.abstractmethod
    def owns(self, path: str) -> bool:
        """Do all or some clients of this path speak this dialect?"""

    def is_spoken_by(self, scope: Scope) -> bool:
        """Does the client of this request speak this dialect? The dialect owns the request's path."""
        return True

    def headers(self, request_id: bytes) -> Headers:
        """Headers of each response, in addition to `x-request-id`."""
        return []

    def scope_for(self, path: str) -> str | None:
        """The key scope that a path of this dialect needs; None for a path that is open to all."""
        return "inference"

    def spoken_with(self, responses: str) -> Dialect:
        """The dialect for requests to `/v1/responses` in the form `responses`: `openai` or `llm-pool`."""
        return self

    def is_for_daemon(self, method: str, path: str, query: bytes) -> bool:
        """Does the daemon answer this request itself, though workers serve its path as well?"""
        return False

    def streams_by_default(self, path: str) -> bool:
        """Is an answer of this path a stream if the request doesn't choose?"""
        return False

    def daemon_scope(self, path: str, fields: Fields) -> str | None:
        """The key scope of a JSON request with these fields if the daemon itself answers it; None: it is inference."""
        return None

    def model_name(self, name: str, is_known: Callable[[str], bool]) -> str:
        """The model that an unknown `name` means in this dialect. `is_known`: is this the name of a model?"""
        return name

    async def conversation(
        self, path: str, body: Body, conversations: ConversationStore
    ) -> tuple[Body, StoredConversation | None]:
        """Put the earlier conversation that a request refers to in front of the request.

        Returns the complete body, and the filter that stores the answer; None: the answer is neither changed nor stored. Raises
        InvalidRequestError.
        """
        return body, None

    def translation(self, method: str, path: str) -> Translation | None:
        """The translation of requests to this path into canonical requests; None for a path that workers serve themselves."""
        return None

    def required_translation(self, method: str, path: str, fields: Fields) -> TargetedTranslation | None:
        """The translation that a request with these fields needs even from a worker that serves the path.

        No worker understands such fields. None: workers that serve the path understand the request.
        """
        return None

    def repair(self, model: str, fields: Fields, *, stream: bool) -> StreamTranslation | None:
        """The repair of an answer of `model`: it adds fields that workers leave out, and corrects wrong ones.

        None: the answer passes unchanged. `fields` are the request's; `stream`: the client asked for a stream.
        """
        return None

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """The body of an error answer as JSON without a line break. `fields`: message, type, param, code and more."""
        return msgspec.json.encode({"error": fields})

    def reasoning(self, path: str) -> ReasoningEvent | None:
        """Makes events that show text to users before a stream's answer begins, outside the answer's content.

        None: clients of this path accept no such event.
        """
        return None

    def error_event(self, body: bytes, sent: bytes) -> bytes:
        """An error's body as the last event of a stream of server-sent events.

        `sent` is the end of the bytes sent so far. They may end within an event, unless a `translation` makes the stream.
        """
        return separated_event(sent, b"data: " + body + b"\n\n")


def separated_event(sent: bytes, event: bytes) -> bytes:
    """`event`, separated from an unfinished event at the end of `sent`, so that clients read `event` on its own."""
    return event if not sent or sent.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) else b"\n\n" + event
