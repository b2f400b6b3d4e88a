"""What the routes share: the parts of a running daemon, by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from supervisor.catalog import Catalog
from supervisor.catalog.catalog import Learned
from supervisor.daemon.engine import Engine
from supervisor.daemon.events import Hub
from supervisor.daemon.history import History
from supervisor.daemon.pipeline import Pipeline
from supervisor.daemon.requests import InFlight
from supervisor.fleet.fleet import Fleet
from supervisor.http.auth import Auth
from supervisor.io.memory import MemorySampler


@dataclass(slots=True)
class Daemon:
    """A running daemon's parts. `catalog`, `gate` and `inference` are replaced as a whole by a reload."""

    engine: Engine
    fleet: Fleet
    sampler: MemorySampler
    catalog: Catalog
    auth: Auth
    hub: Hub = field(default_factory=Hub)
    history: History = field(default_factory=History)
    requests: InFlight = field(init=False)
    pipeline: Pipeline = field(init=False)
    learned: Callable[[], Learned] = dict  # what the store knows by now
    started: float = field(default_factory=time.monotonic)
    _epoch: float = field(default_factory=lambda: time.time() - time.monotonic())

    def __post_init__(self) -> None:
        self.requests = InFlight(self.hub, self.history)
        self.configure(self.catalog, self.auth)

    def configure(self, catalog: Catalog, auth: Auth) -> None:
        """What requests meet from now on; those under way go on with what they met."""
        self.catalog, self.auth = catalog, auth
        self.pipeline = Pipeline(self.engine, catalog, self.requests)

    async def know_capabilities(self) -> None:
        """Have the models' metadata read, once, so that views can show what they can do."""
        models = [self.fleet.effective(model) for model in self.catalog.models]
        unknown = [model for model in models if model.known_capabilities is None]
        if unknown:
            await asyncio.to_thread(lambda: [model.capabilities for model in unknown])

    def wall_time(self, monotonic: float) -> float:
        """Seconds since the epoch of a time on the core's clock."""
        return monotonic + self._epoch
