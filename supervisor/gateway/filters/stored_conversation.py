"""A request of a conversation that llmux remembers: it may continue earlier turns, and its answer may be kept.

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
    """The store of responses, as one request may use it: the owner of the responses that it may read, and its own response."""

    store: ResponseStore
    bodies: BodyBudget  # for what is kept of the request until its answer is there, and of that
    owner: str | None  # its key's id
    is_admin: bool  # all may be found
    response: str | None = None  # the name of the one that it generates in the background
    times: Times | None = None  # of the request


class StoredConversation(Filter):
    """Keeps one request's complete answer, and adds to it the fields that the worker can't know. `release` it at the end."""

    @abc.abstractmethod
    def release(self) -> None:
        """Release everything that is kept of the request."""
