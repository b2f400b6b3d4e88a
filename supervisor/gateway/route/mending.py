"""Sends a request that its worker refused again, if it can be mended: see `body.tolerance`."""

from __future__ import annotations

from typing import Final

from supervisor.catalog.models.rewrite import NO_REWRITE
from supervisor.core.types import ModelId
from supervisor.errors import LlmuxError
from supervisor.gateway.attempt import Attempt
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.body.tolerance import ordered, put_right
from supervisor.gateway.upstream_error import WorkerAnswerError
from supervisor.host.store.request_buffer import BodyBudget, RequestBuffer

_REFUSALS: Final = frozenset({400, 422, 500})  # llama.cpp blames itself for much that its clients send
_MOST: Final = 4


class Mending:
    """Mends one attempt that its worker has refused. Call `end` at last."""

    __slots__ = ("_bodies", "_first", "_strict", "_talks", "_tries")

    def __init__(self, attempt: Attempt, bodies: BodyBudget, strict: set[ModelId]) -> None:
        """`strict`: models whose chat templates refuse what others take; `end` may add one."""
        self._first = attempt.body, attempt.ignored  # as it was sent at first
        self._bodies = bodies
        self._strict = strict
        self._tries = 0
        self._talks = False  # was it the order of who speaks?

    async def mend(self, attempt: Attempt, error: WorkerAnswerError) -> bool:
        """Can the attempt that was refused with `error` be sent again? Then its body is changed."""
        endpoint = attempt.endpoint
        if (
            endpoint is None
            or error.status not in _REFUSALS
            or self._tries == _MOST
            or endpoint.meaning.role == "other"
        ):
            return False
        if not attempt.body.is_there:  # it was too large to be kept
            return False
        self._tries += 1
        try:
            body = await JsonBody.open(await attempt.body.whole())
            changes, ignored = put_right(body.fields, endpoint.meaning, error.message)
            if not changes:
                return False
            mended = RequestBuffer(self._bodies)
            mended.keep(await body.changed(changes).rewritten(NO_REWRITE, endpoint))
        except LlmuxError:  # it is no JSON, or there is no room for another one
            return False
        self._release(attempt)
        attempt.body, attempt.ignored = mended, (*attempt.ignored, *ignored)
        self._talks |= "messages" in changes and bool(ordered(body.fields, endpoint.meaning))
        return True

    def end(self, attempt: Attempt) -> None:
        """The worker has answered for the last time. Gives the attempt its first body back."""
        if self._talks and attempt.outcome.status < 400 and attempt.model is not None:
            self._strict.add(attempt.model)
        self._release(attempt)
        attempt.body, attempt.ignored = self._first

    def _release(self, attempt: Attempt) -> None:
        if attempt.body is not self._first[0]:
            attempt.body.release()
