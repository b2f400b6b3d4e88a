"""Selects the candidates of a task's ladder for one request, in order, and the headers that report the selection.

`core.ladder` chooses. The next candidate gets the request only if the one before can't answer: that model can't be loaded, its
queue is full or too slow for the request, its worker can't be reached, or the prompt is too long for its context. Any other
error may be the request's own fault, or has used up its time: it ends the request as it would without a task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import structlog

from supervisor.catalog import Route, Task
from supervisor.core.ladder import Rung, choose
from supervisor.core.types import ModelId, RejectCode, WorkerState
from supervisor.engine.engine import Engine
from supervisor.errors import ForbiddenError, InvalidRequestError, LlmuxError, UnreachableError
from supervisor.gateway.upstream_error import is_overflow
from supervisor.host.upstream.upstream import Headers

if TYPE_CHECKING:
    from supervisor.gateway.attempt import Attempt

log = structlog.get_logger("llmux.task")

FALLS_BACK: Final = frozenset(
    {
        RejectCode.MODEL_FAILED.value,
        RejectCode.LOAD_FAILED.value,
        RejectCode.RUNTIME_NOT_INSTALLED.value,
        RejectCode.INSUFFICIENT_MEMORY.value,
        RejectCode.DEVICE_QUARANTINED.value,
        RejectCode.DEVICE_LOST.value,
        RejectCode.QUEUE_FULL.value,
        RejectCode.QUEUE_TIMEOUT.value,
        RejectCode.BUDGET_TOO_SMALL.value,
        RejectCode.REMOTE_UNAVAILABLE.value,
    }
)
"""The error codes after which the next candidate gets the request."""

_PRIMARY: Final = "primary"
_WARM: Final = "warm"


def rungs(task: Task, engine: Engine) -> tuple[Rung, ...]:
    """The current state of the task's candidates."""
    return tuple(_rung_of(candidate, engine) for candidate in task.candidates)


def _rung_of(candidate: Route, engine: Engine) -> Rung:
    status = engine.model(candidate.model.id)
    is_ready = status is not None and status.state is WorkerState.READY and status.answering
    return Rung(is_ready, candidate.model.adapter.remote)


def first_reason(at: int) -> Literal["primary", "warm"]:
    """The reason for selecting the candidate at this position first."""
    return _PRIMARY if at == 0 else _WARM


class Ladder:
    """The attempts of one request: `first` makes the first one, `after` the next one after an error."""

    def __init__(
        self,
        task: Task,
        engine: Engine,
        build: Callable[[Route], Awaitable[Attempt]],
        *,
        allow_cloud_fallback: bool,
    ) -> None:
        """`build` makes the attempt for a candidate. It raises InvalidRequestError or ForbiddenError if the candidate can't serve it."""
        self.task = task
        self._engine = engine
        self._build = build
        self._allow_cloud_fallback = allow_cloud_fallback
        self._tried = set[int]()
        self._current_name = self._reason = ""
        self._failures: list[str] = []  # the errors of earlier candidates, as text

    @property
    def headers(self) -> Headers:
        """Headers of a response by the current candidate."""
        return [(b"x-llmux-model", _header_value(self._current_name)), (b"x-llmux-reason", _header_value(self._reason))]

    async def first(self) -> Attempt:
        """The first attempt. Raises the last candidate's error if no candidate can serve the request."""
        route = self._next_candidate()
        while True:
            assert route is not None, "a ladder is never empty"
            try:
                return await self._build(route)
            except (InvalidRequestError, ForbiddenError) as error:
                route = self._fall_back_after(error)
                if route is None:
                    raise

    async def after(self, error: LlmuxError) -> Attempt | None:
        """The next attempt, after one that ended with `error` before any of its answer was sent. None: there is none.

        The detail of `error` then has the other candidates' errors, too.
        """
        if not (error.code in FALLS_BACK or isinstance(error, UnreachableError) or is_overflow(error)):
            return None
        route = self._fall_back_after(error)
        while route is not None:
            try:
                return await self._build(route)
            except (InvalidRequestError, ForbiddenError) as refused:  # not kept: its traceback's frames keep the body
                route = self._fall_back_after(refused)
        return None

    def has_another(self, fits: Callable[[ModelId], bool]) -> bool:
        """Is there a candidate that fits and hasn't been tried yet?"""
        others = (each for at, each in enumerate(self.task.candidates) if at not in self._tried)
        return any(fits(each.model.id) for each in others)

    def _next_candidate(self) -> Route | None:
        """Select the next candidate, among those that haven't been tried yet. None: there is none."""
        at = choose(
            rungs(self.task, self._engine),
            pin_primary=self.task.config.pin_primary,
            allow_cloud_fallback=self._allow_cloud_fallback,
            without=self._tried,
        )
        if at is None:
            return None
        self._reason = self._reason or first_reason(at)
        self._tried.add(at)
        self._current_name = self.task.candidates[at].name
        return self.task.candidates[at]

    def _fall_back_after(self, error: LlmuxError) -> Route | None:
        """Select the next candidate after this error, and note the reason. None: there is none."""
        before = self._current_name
        error.detail = (*error.detail, *self._failures)
        self._failures.append(f"{before}: {error.code}: {error.message}")
        self._reason = f"fallback after {error.code} of {before}"
        route = self._next_candidate()
        if route is not None:
            log.info("task.fell_back", task=self.task.name, model=before, code=error.code, to=route.name)
        return route


def _header_value(text: str) -> bytes:
    """A text as a header's value, percent-encoded: names may have any characters."""
    return quote(text, safe=" !#$&'()*+,/:;=?@[]{}|\"<>^`").encode()
