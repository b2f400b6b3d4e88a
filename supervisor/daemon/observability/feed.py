"""Publishes the engine's decisions, alerts, models and memory as events, and writes them into the history.

Decisions and alerts are published one by one. A model is published as its whole view, if the view differs from the last
one published: at once after a change of state, at most five times a second for changed traffic. Memory is published when
it changed, at most once a second. Without subscribers only the history is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from supervisor.core.effects import Alert, Decided, Effect
from supervisor.core.events import Event, MemorySampled, RequestArrived, RequestFinished
from supervisor.core.types import ModelId
from supervisor.daemon.observability.views import decision_view, device_views, model_view
from supervisor.daemon.slices import SLICE_S
from supervisor.engine.events import SUBSCRIBERS, Kind, Subscription
from supervisor.engine.status import Mark
from supervisor.schema.memory import Device

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon

TRAFFIC_INTERVAL_S: Final = 0.2
MEMORY_INTERVAL_S: Final = 1.0


class Feed:
    """One for each daemon; `observe` is an observer of the engine."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._published: dict[ModelId, Mark] = {}
        self._changed: dict[ModelId, None] = {}  # changed and not published yet
        self._published_devices: list[Device] = []
        self._devices_at = float("-inf")
        self._flush: asyncio.Handle | None = None
        self._flush_at = 0.0  # loop time
        daemon.engine.observers.append(self.observe)
        daemon.engine.traffic.append(self._observe_traffic)

    def subscribe(self, kinds: Iterable[Kind], *, most: int = SUBSCRIBERS) -> Subscription:
        """Subscribe to events from now on. Raises UnavailableError if there are `most` subscribers."""
        daemon = self._daemon
        if not daemon.hub.wants("model"):
            self._published, self._changed = daemon.engine.marks(), {}
        subscription = daemon.hub.subscribe(kinds, most=most)
        if "progress" in subscription.kinds:
            daemon.steps.watch()
        return subscription

    def observe(self, event: Event, effects: Sequence[Effect]) -> None:
        """See `engine.Observer`."""
        daemon = self._daemon
        decided = 0
        for effect in effects:
            if isinstance(effect, Decided):
                decided += 1
                if effect.kind == "evicted":
                    daemon.history.count("swaps", daemon.engine.clock())
            elif isinstance(effect, Alert):
                at = round(daemon.wall_time(daemon.engine.clock()), 3)
                about = {"device": effect.device, "model": effect.model}
                if daemon.alerts is not None:
                    daemon.alerts.add(effect)
                daemon.hub.publish("alert", {"at": at, "code": effect.code, "message": effect.message, **about})
        if decided and daemon.hub.wants("decision"):
            for decision in daemon.engine.decisions(limit=decided):
                daemon.hub.publish("decision", decision_view(daemon, decision))
        if isinstance(event, MemorySampled):
            self._keep_history()
            self._publish_memory()
        if daemon.hub.wants("model"):
            self._flush_after(0.0 if not isinstance(event, RequestArrived | RequestFinished) else TRAFFIC_INTERVAL_S)

    def _observe_traffic(self) -> None:
        if self._daemon.hub.wants("model"):
            self._flush_after(TRAFFIC_INTERVAL_S)

    # models

    def _flush_after(self, delay_s: float) -> None:
        """After this delay, compare the models with the published ones, and publish changes. Not within the engine's turn."""
        loop = asyncio.get_running_loop()
        at = loop.time() + delay_s
        if self._flush is not None:
            if self._flush_at <= at:
                return
            self._flush.cancel()
        self._flush, self._flush_at = loop.call_at(at, self._publish_models), at

    def _publish_models(self) -> None:
        self._flush = None
        daemon = self._daemon
        if not daemon.hub.wants("model"):
            return
        before, self._published = self._published, daemon.engine.marks()
        differ = (model for model, mark in self._published.items() if before.get(model) != mark)
        self._changed.update(dict.fromkeys((*differ, *(model for model in before if model not in self._published))))
        until = time.perf_counter() + SLICE_S
        while self._changed:
            if time.perf_counter() >= until:  # a reload may change all
                self._flush_after(0.0)
                return
            del self._changed[model := next(iter(self._changed))]
            if model not in self._published:
                daemon.hub.publish("model", {"name": model, "state": "removed"})
            elif (view := model_view(daemon, model)) is not None:
                daemon.hub.publish("model", view)

    # memory

    def _publish_memory(self) -> None:
        hub, now = self._daemon.hub, self._daemon.engine.clock()
        if not hub.wants("memory") or now - self._devices_at < MEMORY_INTERVAL_S:
            return
        devices = device_views(self._daemon)
        if devices != self._published_devices:
            self._published_devices, self._devices_at = devices, now
            hub.publish("memory", {"devices": devices})

    def _keep_history(self) -> None:
        engine = self._daemon.engine
        queue = engine.queue()
        values: dict[str, float | None] = {"queued": queue.waiting, "in_flight": queue.in_flight}
        for device in engine.devices():
            free = device.totals.free_mib
            values[f"memory_free_mib:{device.id}"] = free
            values[f"memory_used_mib:{device.id}"] = None if free is None else max(0, device.totals.total_mib - free)
            for lease in device.leases:
                reserved_mib = lease.mib if lease.measured_mib is None else lease.measured_mib
                name = f"worker_memory_mib:{device.id}/{lease.holder[0]}"
                values[name] = (values.get(name) or 0) + reserved_mib  # a model may have an ending worker and its next
        self._daemon.history.sample(engine.clock(), values)
