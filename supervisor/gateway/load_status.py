"""What a streaming client is told while its request waits for a model: events of its dialect, each with a line of text.

A new line comes when what is awaited changes, and every few seconds while the model loads. The words are those of
`core.waiting`; the estimate is the time that the model's last load took, and there is none before the first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from supervisor.core.waiting import WaitKind, WaitReason

if TYPE_CHECKING:
    from supervisor.engine.engine import Engine
    from supervisor.gateway.dialect import ReasoningEvent
    from supervisor.gateway.request import Request

PROGRESS_S: Final = 5.0
_LOADED: Final = frozenset({WaitKind.PLACE, WaitKind.HEALTH})  # the model has a worker, which has no time for it


class LoadNews:
    """The news for one request. A call gives the next event; None: there is nothing new."""

    def __init__(self, engine: Engine, request: Request, event: ReasoningEvent) -> None:
        self._engine = engine
        self._request = request
        self._event = event
        self._created = int(time.time())
        self._told: WaitReason | None = None  # the last that was told
        self._told_at = 0.0

    def __call__(self) -> bytes | None:
        """See above."""
        waits = self._request.waits
        current = waits[-1].current if waits else None
        if current is None:
            return None
        now = self._engine.clock()
        loads_on = current.kind is WaitKind.LOAD and now - self._told_at >= PROGRESS_S
        if current == self._told and not loads_on:
            return None
        text = self._line(current, now)
        self._told, self._told_at = current, now
        name, request_id = self._request.name or "", self._request.request_id.decode("latin-1")
        return self._event(f"{text}\n", name, request_id, self._created)

    def _line(self, current: WaitReason, now: float) -> str:
        name, wait = self._request.name, self._request.waits[-1]
        if current.kind in _LOADED:
            return f"{name} waits for {current.what}."
        told = self._engine.forecast(wait.model).told
        if current.kind is not WaitKind.LOAD:
            return f"Loading {name}: waits for {current.what}, {told}."
        so_far = f"; {wait.parts(now)[-1][1]:.0f} s so far" if current == self._told else ""
        return f"Loading {name}: {told}{so_far}."
