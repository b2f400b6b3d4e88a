"""The protocol of replicas: a worker or a remote, which answers a model's requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from supervisor.core.events import Event
from supervisor.core.types import Crash
from supervisor.host.memory.memory import HolderPids
from supervisor.host.process.progress import Progress
from supervisor.host.upstream.upstream import Upstream
from supervisor.schema.model import WorkerFacts

Post = Callable[[Event], None]


class Replica(Protocol):
    """One generation of one model. It reports to the engine by events whether it is ready."""

    @property
    def upstream(self) -> Upstream | None:
        """The address that its requests go to; None before it is ready for the first time."""

    @property
    def metrics(self) -> tuple[Upstream, str] | None:
        """The upstream and the path of its own metrics; None where it has none, or isn't ready."""

    @property
    def steps(self) -> tuple[Upstream, str] | None:
        """The upstream and the path where it reports its requests' progress; None where it can't, or isn't ready."""

    @property
    def progress(self) -> Progress | None:
        """The last known progress of its start; None: unknown."""

    async def run(self) -> Crash | None:
        """Run it to its end. Returns None if it was stopped; a Crash if it ended, or had to be ended, without that."""

    def stop(self, *, force: bool) -> None:
        """Begin to stop; `force` skips the grace, also of a stop in progress."""

    def holder(self) -> HolderPids | None:
        """Its processes, for the memory sampler; None where it takes no memory of this machine."""

    def facts(self) -> WorkerFacts:
        """Its pid, port and the like for the admin API; never a secret."""
