"""What the fleet knows of who answers a model's requests: a worker, or a remote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from supervisor.core.events import Event
from supervisor.core.types import Crash
from supervisor.io.memory import HolderPids
from supervisor.io.progress import Progress
from supervisor.io.upstream import Upstream
from supervisor.schema.model import WorkerFacts

Post = Callable[[Event], None]


class Replica(Protocol):
    """One generation of one model. It tells the engine by events whether it is ready."""

    @property
    def upstream(self) -> Upstream | None:
        """The way to it; None before it is ready for the first time."""

    @property
    def metrics(self) -> tuple[Upstream, str] | None:
        """Where its own metrics are, and on which path; None where it has none, or isn't ready."""

    @property
    def steps(self) -> tuple[Upstream, str] | None:
        """Where it tells how far its requests are, and on which path; None where it can't, or isn't ready."""

    @property
    def progress(self) -> Progress | None:
        """How far its start has come, as last seen; None: it has not been looked at."""

    async def run(self) -> Crash | None:
        """Its whole life. None: it was stopped. A Crash: it ended, or had to be ended, unasked."""

    def stop(self, *, force: bool) -> None:
        """Begin to stop; `force` skips the grace, also of a stop in progress."""

    def holder(self) -> HolderPids | None:
        """Its processes, for the memory sampler; None where it takes no memory here."""

    def facts(self) -> WorkerFacts:
        """For the admin API: pid, port and the like; never a secret."""
