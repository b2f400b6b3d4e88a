"""A request of a stored conversation: the request may continue earlier turns, and its answer may be stored.

A worker gets the whole conversation, as if the client had sent it: see `Dialect.conversation`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from supervisor.gateway.filters.filters import Filter
from supervisor.gateway.filters.translation import Times
from supervisor.host.store.request_buffer import BodyBudget
from supervisor.host.store.response_store import ResponseStore


@dataclass(frozen=True, slots=True)
class ConversationStore:
    """One request's access to the store of responses: the owner of the readable responses, and the request's own response."""

    store: ResponseStore
    bodies: BodyBudget  # for the kept parts of the request and its answer
    owner: str | None  # the id of the request's key
    is_admin: bool  # may the request read the responses of all owners?
    response: str | None = None  # the name of the response that the request generates in the background
    times: Times | None = None  # of the request


class StoredConversation(Filter):
    """Stores one request's complete answer, and adds fields to it that the worker doesn't know. Call `release` at the end."""

    @abc.abstractmethod
    def release(self) -> None:
        """Release all that is kept of the request."""
