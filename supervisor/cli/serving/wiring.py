"""Open, check and assemble a daemon's parts. Nothing runs yet: `daemon` posts the first event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable

import structlog

from supervisor.catalog import Catalog
from supervisor.catalog.catalog import Learned
from supervisor.catalog.keys import Keyring
from supervisor.catalog.models.fitting import specs_for_devices
from supervisor.cli.serving.sizes import named
from supervisor.core.effects import Learn, LearnLoad
from supervisor.core.events import Configured
from supervisor.core.types import DeviceId
from supervisor.daemon.configuration.runtime_config import RuntimeConfig, from_environment
from supervisor.daemon.configuration.sizes import log_model_sizes, warnings_of
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability.alert_hook import AlertHook
from supervisor.daemon.observability.request_log import RequestLog
from supervisor.engine.engine import Engine
from supervisor.engine.shared_leases import SharedLeases
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.local import LocalLauncher
from supervisor.gateway.filters.body_log import BodyLog
from supervisor.host.memory.devices import Opened, open_sampler
from supervisor.host.process.ports import PortRange
from supervisor.host.store.kept_bodies import KeptBodies
from supervisor.host.store.lease_store import LeaseStore
from supervisor.host.store.store import FOOTPRINTS, Footprints, Store
from supervisor.jobs.job import former_owners

log = structlog.get_logger("llmux.daemon")

WORKER_HOST = "127.0.0.1"
LOGS = "logs"


async def open_devices(catalog: Catalog) -> Opened:
    """Open the configured devices, or all of this machine; log notes about the others. Raises ConfigError for a missing device."""
    opened = await open_sampler(catalog.wanted_devices, named_by=catalog.devices_variable)
    for note in opened.notes:
        log.info("devices.note", message=note)
    return opened


async def open_stores(catalog: Catalog, *, pending: bool = False) -> tuple[Footprints, Store]:
    """Open the stores that outlive the daemon: the footprints, and the store of everything else. `pending`: see `Store.open`."""
    folder = catalog.server.state_dir
    return await asyncio.gather(
        Footprints.open(folder / FOOTPRINTS, pending=pending), Store.open(folder / "state.sqlite3", pending=pending)
    )


@contextlib.asynccontextmanager
async def closing(stores: Iterable[Store]) -> AsyncIterator[None]:
    """Close the stores when the block ends."""
    try:
        yield
    finally:
        for store in stores:
            await store.close()


async def sized(catalog: Catalog, opened: Opened) -> Catalog:
    """The catalog with contexts and slots that fit into these devices."""
    return await asyncio.to_thread(catalog.sized, [device.spec for device in opened.devices])


async def assemble(
    catalog: Catalog, keyring: Keyring, instance: str, opened: Opened, stores: tuple[Footprints, Store]
) -> tuple[Daemon, LocalLauncher, Configured]:
    """Assemble the daemon; returns it, its launcher, and the first event."""
    server, devices = catalog.server, opened.devices
    footprints, state = stores
    runtime = RuntimeConfig(state, allow_cloud_fallback=from_environment())
    catalog = catalog.with_set(runtime.active_set)
    specs = tuple(device.spec for device in devices)
    keys = {DeviceId(device.id): device.key for device in devices}
    by_key = {key: device for device, key in keys.items()}

    def learned() -> Learned:
        mib, raised = (named(found, by_key) for found in (footprints.learned(), footprints.raised()))
        return Learned(mib, footprints.load_times(), raised)

    async def learn(found: Learn | LearnLoad) -> None:
        if isinstance(found, Learn):
            await footprints.learn(found.footprint_key, keys[found.device], found.mib, raised=found.raised)
        else:
            await footprints.learn_load(found.footprint_key, found.load_s)

    models = await asyncio.to_thread(specs_for_devices, catalog, specs, learned())
    log_model_sizes(catalog, warnings_of(catalog, models, specs))
    (log_dir := server.state_dir / LOGS).mkdir(exist_ok=True)
    launcher = LocalLauncher(
        ports=PortRange(server.worker_port_first, server.worker_port_last, WORKER_HOST),
        runtimes_dir=server.runtimes_dir,
        log_dir=log_dir,
        instance=instance,
        devices={DeviceId(device.id): device.assignment for device in devices},
    )
    fleet = Fleet(launcher, catalog.models, catalog.limits)
    engine = Engine(fleet, opened.sampler, learn)
    run = f"{int(time.time()):x}"  # the prefix of request numbers, which start anew in each run
    body_log = BodyLog(KeptBodies(server.state_dir / "bodies"), run)
    daemon = Daemon(
        engine, fleet, opened.sampler, catalog, keyring, learned=learned, runtime=runtime, body_log=body_log
    )
    daemon.alerts = AlertHook(lambda: daemon.catalog.server.alerts, instance, log_dir)
    daemon.responses.owners = owners = await former_owners(state, keyring.keys)
    daemon.jobs.open(state, owners)
    daemon.restore(state)
    daemon.request_log = RequestLog(state, daemon.requests, daemon.wall_time(0.0), run)
    await daemon.request_log.open()
    daemon.inference.open(server.state_dir)
    daemon.batches.open(state, server.state_dir, owners)
    daemon.responses.open(server.state_dir)
    daemon.pictures.open(server.state_dir)
    if server.leases is not None:
        shared = SharedLeases(engine, LeaseStore(server.leases), devices, instance, server.leases_ttl_s)
        daemon.partners.shared, fleet.before_start = shared, shared.lease_for_start
    return daemon, launcher, Configured(models, specs, catalog.limits.limits(), catalog.policy)
