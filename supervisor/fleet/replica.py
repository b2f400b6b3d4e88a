"""What the fleet knows of whoever answers a model's requests: a worker, or the connection to a remote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pydantic import JsonValue

from supervisor.core.events import Event
from supervisor.core.types import Crash
from supervisor.io.memory import HolderPids
from supervisor.io.upstream import Upstream

Post = Callable[[Event], None]


class Replica(Protocol):
    """One generation of one model. It tells the engine by events when it is ready, and when it isn't any more."""

    @property
    def upstream(self) -> Upstream | None:
        """The way to it; None before it is ready for the first time."""

    @property
    def metrics(self) -> tuple[Upstream, str] | None:
        """Where its own metrics are, and on which path; None where it has none, or isn't ready."""

    async def run(self) -> Crash | None:
        """Its whole life, once. None: it was stopped; a Crash: it ended, or had to be ended, without being asked to."""

    def stop(self, *, force: bool) -> None:
        """Begin to stop; `force` skips the grace, also of a stop that is under way."""

    def holder(self) -> HolderPids | None:
        """Its processes, for the memory sampler; None where it takes no memory here."""

    def facts(self) -> dict[str, JsonValue]:
        """For the admin API: pid, port and the like; never a secret."""
