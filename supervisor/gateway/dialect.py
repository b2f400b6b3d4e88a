"""What the data path and the daemon know about an API dialect.

A dialect is one object with everything that is special about an API: its paths, the key scope that each needs, the headers
that may carry the key, the format of errors, and the bytes that keep a silent stream alive. `supervisor.dialects` has all
dialects; the server picks one by the request's path and passes it down.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.gateway.body.body import Body
from supervisor.gateway.disconnect import Scope
from supervisor.gateway.filters.stored_conversation import ConversationStore, StoredConversation
from supervisor.gateway.filters.translation import StreamTranslation, TargetedTranslation, Translation
from supervisor.io.upstream import Headers


class ReasoningEvent(Protocol):
    """Text as an event that may come before the answer's first. `created`: Unix seconds."""

    def __call__(self, text: str, model: str, request_id: str, created: int) -> bytes: ...


class ForDaemonError(Exception):
    """The request is for the daemon itself, though its path is one of inference. No error that a client sees."""

    def __init__(self, scope: str, fields: Fields) -> None:
        super().__init__(scope)
        self.scope = scope  # that a key needs for it
        self.fields = fields


class Dialect(abc.ABC):
    """One API that clients speak. What it doesn't say otherwise is as in OpenAI's, which workers speak."""

    name: str  # what a runtime's endpoints call it
    credential_headers: frozenset[bytes] = frozenset({b"authorization", b"x-api-key"})  # in lower case
    keepalive: bytes = b": keepalive\n\n"  # what a stream sends while nothing comes: clients skip it
    has_openai_errors: bool = True  # so that a worker's complete ones pass as they are
    unheard_settings: frozenset[str] = frozenset()
    """Fields of a configuration that its workers pass over, or take wrongly: its requests are translated then, if they can be."""
    reads_fields: bool = False
    """Do the fields of a request decide what becomes of it? See `daemon_scope`, `turn` and `required_translation`."""

    shares_paths: bool = False
    """Do clients of others speak on its paths, too? See `is_spoken_by`."""

    @abc.abstractmethod
    def owns(self, path: str) -> bool:
        """Do clients of this path speak it, at least some of them?"""

    def is_spoken_by(self, scope: Scope) -> bool:
        """Does the client of this request, to a path that it owns?"""
        return True

    def headers(self, request_id: bytes) -> Headers:
        """What each of its responses carries, beside `x-request-id`."""
        return []

    def scope_for(self, path: str) -> str | None:
        """The key scope that one of its paths needs; None where the path is open to all."""
        return "inference"

    def spoken_with(self, responses: str) -> Dialect:
        """What clients speak on its paths whose requests to `/v1/responses` are `openai`'s or `llm-pool`'s."""
        return self

    def is_for_daemon(self, method: str, path: str, query: bytes) -> bool:
        """Does the daemon answer this request itself, though workers serve its path as well?"""
        return False

    def streams_unasked(self, path: str) -> bool:
        """Is an answer of this path a stream where the request doesn't say what it is to be?"""
        return False

    def daemon_scope(self, path: str, fields: Fields) -> str | None:
        """The key scope for what these fields of a JSON request ask of the daemon itself; None: it is inference."""
        return None

    def model_name(self, name: str, is_known: Callable[[str], bool]) -> str:
        """Which model a name means that no model has; `is_known` says whether there is one of a name."""
        return name

    async def turn(self, path: str, body: Body, memory: ConversationStore) -> tuple[Body, StoredConversation | None]:
        """The whole conversation of a request that may refer to earlier ones, and what becomes of its answer.

        None: its answer passes as it is, and isn't kept. Raises InvalidRequestError.
        """
        return body, None

    def translation(self, method: str, path: str) -> Translation | None:
        """How this path is mapped to the canonical API; None where workers speak it themselves."""
        return None

    def required_translation(self, method: str, path: str, fields: Fields) -> TargetedTranslation | None:
        """How a request with these fields is mapped whatever its worker serves, since no worker would understand them.

        None: workers that serve the path do.
        """
        return None

    def completion(self, model: str, fields: Fields, *, stream: bool) -> StreamTranslation | None:
        """Puts into an answer of `model` what a worker leaves out, or says wrongly, and clients need. None: it passes as it is.

        `fields`: of the request. `stream`: the client asked for one.
        """
        return None

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """The body of an error answer as JSON without a line break. `fields`: message, type, param, code and more."""
        return msgspec.json.encode({"error": fields})

    def reasoning(self, path: str) -> ReasoningEvent | None:
        """How to tell a user of this path's streams something before the answer begins, as no part of its content.

        None: its clients take no event of ours.
        """
        return None

    def error_event(self, body: bytes, sent: bytes) -> bytes:
        """An error's body as the last event of a stream of server-sent events.

        `sent` is the end of what the client has; it may end within an event, unless the stream is a `translation`'s.
        """
        return after(sent, b"data: " + body + b"\n\n")


def after(sent: bytes, event: bytes) -> bytes:
    """A server-sent event that no unfinished one before it swallows."""
    return event if not sent or sent.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) else b"\n\n" + event
