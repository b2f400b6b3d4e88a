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
        """The upstream for its requests; None before it is ready for the first time."""

    @property
    def metrics(self) -> tuple[Upstream, str] | None:
        """The upstream and the path of its own metrics; None if it has none, or isn't ready."""

    @property
    def steps(self) -> tuple[Upstream, str] | None:
        """The upstream and the path of its reports of its requests' progress; None if it has none, or isn't ready."""

    @property
    def progress(self) -> Progress | None:
        """The last known progress of its start; None: unknown."""

    async def run(self) -> Crash | None:
        """Run the replica to its end. Returns None after `stop`; a Crash if it ended, or had to be ended, without `stop`."""

    def stop(self, *, force: bool) -> None:
        """Begin to stop; `force` skips the grace, also of a stop in progress."""

    def holder(self) -> HolderPids | None:
        """Its processes, for the memory sampler; None if it uses no memory of this machine."""

    def facts(self) -> WorkerFacts:
        """Its pid, port and the like for the admin API; never a secret."""
