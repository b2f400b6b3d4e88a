"""A request of a conversation that llmux remembers: it may begin with what was said before, and its answer is kept.

A worker gets the whole conversation, as if the client had sent it: see `Dialect.turn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from supervisor.gateway.disconnect import Send
from supervisor.gateway.filters.translation import Times
from supervisor.io.held_body import BodyBudget
from supervisor.io.response_store import ResponseStore


@dataclass(frozen=True, slots=True)
class Memory:
    """Where responses are kept, and whose may be found for one request."""

    store: ResponseStore
    bodies: BodyBudget  # for what is kept of the request until its answer is there, and of that
    most: int  # bytes of an answer
    owner: str | None  # its key's id
    is_admin: bool  # all may be found
    response: str | None = None  # the name of the one that it generates in the background
    times: Times | None = None  # of the request


class Turn(Protocol):
    """One request. `release` it when it ends."""

    def observed(self, send: Send) -> Send:
        """`send`, by which the answer is kept when it is complete, and told what the worker can't know."""

    def release(self) -> None:
        """Let go of what is kept of the request."""
