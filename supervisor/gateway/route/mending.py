"""Mends a request that its worker refused, so that it can be sent again: see `body.tolerance`."""

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

_REFUSALS: Final = frozenset({400, 422, 500})  # llama.cpp answers some client errors with 500
_MOST_TRIES: Final = 4


class Mending:
    """Mends one attempt that its worker has refused. Call `end` when the attempt is over."""

    __slots__ = ("_bodies", "_reordered", "_sent_first", "_strict", "_tries")

    def __init__(self, attempt: Attempt, bodies: BodyBudget, strict: set[ModelId]) -> None:
        """`strict`: models whose chat templates require ordered messages, see `tolerance.ordered`; `end` may add one."""
        self._sent_first = attempt.body, attempt.ignored
        self._bodies = bodies
        self._strict = strict
        self._tries = 0
        self._reordered = False  # was the order of the messages changed?

    async def mend(self, attempt: Attempt, error: WorkerAnswerError) -> bool:
        """Mend the body of an attempt that was refused with `error`. False: it can't be mended."""
        endpoint = attempt.endpoint
        if (
            endpoint is None
            or error.status not in _REFUSALS
            or self._tries == _MOST_TRIES
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
        except LlmuxError:  # the body is no JSON, or there is no room for another body
            return False
        self._release_mended(attempt)
        attempt.body, attempt.ignored = mended, (*attempt.ignored, *ignored)
        self._reordered |= "messages" in changes and bool(ordered(body.fields, endpoint.meaning))
        return True

    def end(self, attempt: Attempt) -> None:
        """Restore the attempt's first body, and note a strict model. Call this after the worker's last answer."""
        if self._reordered and attempt.outcome.status < 400 and attempt.model is not None:
            self._strict.add(attempt.model)
        self._release_mended(attempt)
        attempt.body, attempt.ignored = self._sent_first

    def _release_mended(self, attempt: Attempt) -> None:
        if attempt.body is not self._sent_first[0]:
            attempt.body.release()
