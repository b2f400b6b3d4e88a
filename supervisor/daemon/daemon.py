"""A running daemon: its parts by name. The HTTP server, signal handlers and tests share this one object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from supervisor.catalog import Catalog
from supervisor.catalog.catalog import Learned
from supervisor.catalog.keys import Key, Keyring
from supervisor.daemon.clients import Clients
from supervisor.daemon.configuration.additions import Additions
from supervisor.daemon.configuration.runtime_config import RuntimeConfig
from supervisor.daemon.observability.alert_hook import AlertHook
from supervisor.daemon.observability.feed import Feed
from supervisor.daemon.observability.history import History
from supervisor.daemon.observability.metrics import Metrics
from supervisor.daemon.observability.request_log import RequestLog
from supervisor.daemon.observability.runner_metrics import RunnerMetrics
from supervisor.daemon.observability.steps import Steps
from supervisor.daemon.observability.tracing import Tracing
from supervisor.daemon.op_tokens import OpTokens
from supervisor.engine.engine import Engine
from supervisor.engine.events import Hub
from supervisor.engine.partners import Partners
from supervisor.fleet.fleet import Fleet
from supervisor.gateway.answer_times import AnswerLog
from supervisor.gateway.filters.body_log import BodyLog
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.in_flight import InFlight
from supervisor.gateway.route.caching import CacheSalts
from supervisor.gateway.route.context_use import ContextUse
from supervisor.host.memory.host_memory import HostMemory
from supervisor.host.memory.memory import MemorySampler
from supervisor.host.store.picture_store import PictureStore
from supervisor.host.store.request_buffer import BodyBudget
from supervisor.host.store.response_store import ResponseStore
from supervisor.host.store.store import Store
from supervisor.host.upstream.upstream import Upstream
from supervisor.jobs.batches import Batches
from supervisor.jobs.files import Files
from supervisor.jobs.inference import InferenceJobs
from supervisor.jobs.jobs import Jobs
from supervisor.jobs.loads import Loads
from supervisor.jobs.pulls import Pulls


@dataclass(slots=True)
class Daemon:
    """`catalog`, `keyring` and `gateway` are replaced as a whole by a reload."""

    engine: Engine
    fleet: Fleet
    sampler: MemorySampler
    catalog: Catalog
    keyring: Keyring = field(default_factory=Keyring)
    local_key: Key | None = None  # the key of our own user's commands; never in the keyring, which may be empty
    hub: Hub = field(default_factory=Hub)
    history: History = field(default_factory=History)
    bodies: BodyBudget = field(default_factory=BodyBudget)
    requests: InFlight = field(init=False)
    clients: Clients = field(init=False)
    gateway: Gateway = field(init=False)
    feed: Feed = field(init=False)
    metrics: Metrics = field(init=False)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    cache_salts: CacheSalts = field(default_factory=CacheSalts)
    answers: AnswerLog = field(init=False)
    contexts: ContextUse = field(default_factory=ContextUse)
    tracing: Tracing | None = None
    partners: Partners = field(init=False)
    loads: Loads = field(init=False)
    steps: Steps = field(init=False)
    jobs: Jobs = field(default_factory=Jobs)
    files: Files = field(default_factory=Files)
    inference: InferenceJobs = field(init=False)
    batches: Batches = field(init=False)
    responses: ResponseStore = field(default_factory=ResponseStore)
    pictures: PictureStore = field(default_factory=PictureStore)
    body_log: BodyLog | None = None  # set iff bodies can be kept
    alerts: AlertHook | None = None  # set iff this process may start others
    request_log: RequestLog | None = None  # set iff ended requests are stored
    pulls: Pulls = field(init=False)
    additions: Additions = field(default_factory=Additions)
    op_tokens: OpTokens = field(default_factory=OpTokens)
    learned: Callable[[], Learned] = Learned  # reads the measured figures from the store
    on_configure: list[Callable[[], None]] = field(
        default_factory=list
    )  # called by each reload, in the same turn of the loop
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # cleared during a handover
    successor: Upstream | None = None  # set iff another daemon has taken over: new requests go there
    started: float = field(default_factory=time.monotonic)
    _memory_mib: int = field(default_factory=lambda: HostMemory().physical_mib)
    _epoch: float = field(default_factory=lambda: time.time() - time.monotonic())

    def __post_init__(self) -> None:
        self.settled.set()
        self.requests = InFlight(self.hub, self.wall_time(0.0))
        self.requests.listeners.append(self.history.count_tokens)
        self.engine.before_line = self.requests.record
        self.answers = AnswerLog(self.engine.clock)
        self.requests.observers += [self.answers.observe, self.contexts.observe]
        if self.catalog.server.traces:
            self.tracing = Tracing(self.wall_time(0.0))
            self.requests.listeners.append(self.tracing.observe)
        self.clients = Clients(self)
        self.feed = Feed(self)
        self.steps = Steps(self)
        self.metrics = Metrics(self)
        RunnerMetrics(self)
        self.partners = Partners(self.engine, self.sampler)
        self.loads = Loads(self.engine, self.fleet, self.hub, self.jobs)
        self.pulls = Pulls(self.jobs)
        self.inference = InferenceJobs(self.jobs, self.files, self.requests.find)
        self.batches = Batches(self.inference, self.bodies)
        self.configure(self.catalog, self.keyring)

    def restore(self, store: Store) -> None:
        """Restore the state in the store. Call it once, before the engine's first event."""
        self.loads.restore()
        self.pulls.restore()
        self.cache_salts.restore(store)
        self.op_tokens = OpTokens(store)

    def configure(self, catalog: Catalog, keyring: Keyring) -> None:
        """Use this catalog and keyring for new requests; running requests keep the old ones."""
        self.requests.record()  # under the present names of models and clients
        self.catalog, self.keyring = catalog, keyring
        limits = catalog.limits
        self.bodies.configure(
            limit=limits.bodies_bytes(self._memory_mib),
            disk_limit=limits.spill_mib << 20,
            folder=catalog.server.state_dir,
        )
        self.gateway = Gateway(
            self.engine,
            catalog,
            self.requests,
            self.bodies,
            self.clients.arrived,
            self.answers,
            lambda: self.runtime.allow_cloud_fallback,
            self.cache_salts,
            self.responses,
            self.pictures,
            self.contexts,
            self.body_log,
        )
        if self.body_log is not None:
            self.body_log.limit_to({model.id for model in catalog.models.values() if model.config.keep_bodies})
        self.inference.configure(limits)
        self.batches.line_limit = limits.body_mib << 20
        self.responses.configure(
            most_bytes=limits.responses_mib << 20, most=limits.responses_most, keep_s=limits.responses_keep_s
        )
        self.pictures.configure(most_bytes=limits.pictures_mib << 20, keep_s=limits.pictures_keep_s)
        for listener in self.on_configure:
            listener()

    async def know_capabilities(self) -> None:
        """Read the models' metadata, once, so that views can show their capabilities."""
        models = [self.fleet.effective(model) for model in self.catalog.models]
        unknown = [model for model in models if model.known_capabilities is None]
        if unknown:
            await asyncio.to_thread(lambda: [(model.capabilities, model.load_constraints) for model in unknown])

    def wall_time(self, monotonic: float) -> float:
        """Seconds since the epoch of a time on the core's clock."""
        return monotonic + self._epoch
