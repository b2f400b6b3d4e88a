"""Starts the daemon: lock, reap, devices, store, workers, engine, application, server; and stops it in order.

Leftovers of an earlier run are reaped before anything is bound. On SIGTERM or SIGINT new requests are refused while running
ones end within the drain time, then the workers are stopped, then the server; a second signal cuts the drain short.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from functools import partial

import structlog
import uvicorn

from supervisor.catalog import Catalog, Configuration
from supervisor.catalog.keys import Key, Keyring, keyring_of, local_key, refuse_exposed
from supervisor.cli.client import url_of
from supervisor.cli.serving.log_setup import dropped_lines
from supervisor.cli.serving.own_process import (
    on_signals,
    own_stderr,
    raise_descriptor_limit,
    return_freed_memory,
    settle_garbage_collector,
    signals_end,
)
from supervisor.cli.serving.server import Listeners, listeners_of, make_server, open_listeners, reached_at, take_given
from supervisor.cli.serving.wiring import LOGS, assemble, closing, open_devices, open_stores, sized
from supervisor.core.events import UnloadRequested
from supervisor.daemon.configuration import rechecking
from supervisor.daemon.configuration.reload import Reloader
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.handover.handover import SOCKET, Handover, Holdings
from supervisor.daemon.handover.takeover import Takeover
from supervisor.engine.engine import Engine
from supervisor.engine.handover_messages import TakeoverError
from supervisor.errors import ConfigError, LlmuxError
from supervisor.fleet.local import LocalLauncher
from supervisor.host.environments.venvs import sweep_in_background
from supervisor.host.process import notify
from supervisor.host.process.fd_channel import connect, goes_on_listening
from supervisor.host.process.leftover_containers import settle_all
from supervisor.host.process.process import become_subreaper
from supervisor.host.process.reap import LOCK, InstanceLock, reap_leftovers, take_lock
from supervisor.host.store import local_access
from supervisor.host.store.store import Store
from supervisor.server.app import Application
from supervisor.server.response_cycle import ResponseCycle

log = structlog.get_logger("llmux.daemon")

OWN_STOP_S = 10.0  # of a stop, beyond requests and grace periods: covers the wait for unkillable workers
DRAIN_LOOK_S = 0.1
OFFERED_WITHIN_S = 3.0  # interval of renewing the offered key: a logout deletes it

OnListening = Callable[[str, int], None]


class _SignalRecorder:
    """A signal handler that records the signal."""

    came = False

    def __call__(self, *_: object) -> None:
        self.came = True


def run(configuration: Configuration, catalog: Catalog, *, on_listening: OnListening, takeover: bool = False) -> None:
    """Serve `catalog`, as it was read from `configuration`, until a signal comes.

    `on_listening` gets the URL and the number of keys. With `takeover`, a daemon that runs on the same state directory
    hands over its workers and its socket first. Raises LlmuxError where the daemon can't start.
    """
    import uvloop  # noqa: PLC0415  # only the daemon needs it

    signal.signal(
        signal.SIGHUP, _SignalRecorder()
    )  # before it is ready a SIGHUP must neither reload nor end the daemon
    keyring = keyring_of(catalog.server.api_keys)
    refused = refuse_exposed(catalog.server.host, keyring)
    if refused is not None:
        raise ConfigError((refused,))
    for warning in keyring.warnings:
        log.warning("keys.exposed", message=warning)
    raise_descriptor_limit()
    state_dir = catalog.server.state_dir
    predecessor = connect(state_dir / SOCKET) if takeover else None
    if predecessor is not None:
        sweep_in_background(catalog.server.runtimes_dir)
        become_subreaper()
        with signals_end():
            uvloop.run(take_over(configuration, catalog, keyring, predecessor, on_listening))
        return
    with contextlib.closing(take_lock(state_dir)) as lock:
        if goes_on_listening(state_dir / SOCKET):
            message = f"another llmux runs on {state_dir}, whose {LOCK} was removed: stop it first"
            raise LlmuxError(message, code="state_dir_in_use")
        orphans = reap_leftovers(lock.instance, logs=state_dir / LOGS)
        for reaped in orphans:
            log.warning("orphan.reaped", pid=reaped.pid, command=reaped.command, gone=reaped.has_ended)
        for note, trouble in settle_all(state_dir / LOGS):
            log.warning("remains.ended", note=note.name, trouble=trouble)
        sweep_in_background(catalog.server.runtimes_dir)
        become_subreaper()
        given = take_given()
        with contextlib.closing(open_listeners(given, catalog.server, keyring)) as listeners, signals_end():
            uvloop.run(serve(configuration, catalog, keyring, lock, listeners, on_listening, orphans=len(orphans)))


async def serve(
    configuration: Configuration,
    catalog: Catalog,
    keyring: Keyring,
    lock: InstanceLock,
    listeners: Listeners,
    on_listening: OnListening,
    *,
    orphans: int = 0,
) -> None:
    """Run the daemon on the event loop until a signal comes. The caller has taken the lock, reaped leftovers, opened sockets."""
    _cancel_on_signals()
    opened, stores = await asyncio.gather(open_devices(catalog), open_stores(catalog))
    async with closing(stores):
        catalog = await sized(catalog, opened)
        daemon, launcher, configured = await assemble(catalog, keyring, lock.instance, opened, stores)
        daemon.engine.post(configured)
        daemon.metrics.orphans(orphans)
        holdings = _holdings_of(catalog, lock, listeners, launcher, stores)
        await _serve_with_local_key(configuration, daemon, holdings, listeners, on_listening)


async def take_over(
    configuration: Configuration,
    catalog: Catalog,
    keyring: Keyring,
    predecessor: socket.socket,
    on_listening: OnListening,
) -> None:
    """As `serve`, with the lock, socket and workers of a running daemon. Raises LlmuxError; then the old daemon goes on."""
    _cancel_on_signals()
    opened = await open_devices(catalog)
    catalog = await sized(catalog, opened)
    takeover = Takeover(predecessor)
    inherited = await takeover.request_state((catalog.server.host, catalog.server.port))
    stores = takeover.stores = await open_stores(catalog, pending=True)
    async with closing(stores):
        try:
            for store in stores:
                if store.trouble is not None:
                    raise TakeoverError(f"{store.path} can't be used: {store.trouble}")
            listeners = listeners_of(inherited.listener, inherited.extra, catalog.server, keyring)
            takeover.check(device.spec for device in opened.devices)
            daemon, launcher, configured = await assemble(catalog, keyring, inherited.lock.instance, opened, stores)
        except LlmuxError as error:
            await takeover.report_failure(str(error))
            raise
        await takeover.report_prepared()
        own_stderr()
        takeover.adopt(daemon, launcher, configured)
        holdings = _holdings_of(catalog, inherited.lock, listeners, launcher, stores)
        await _serve_with_local_key(configuration, daemon, holdings, listeners, on_listening, takeover)


def _cancel_on_signals() -> None:
    starting = asyncio.current_task()
    assert starting is not None
    on_signals(starting.cancel, signal.SIGTERM, signal.SIGINT, within_s=lambda: OWN_STOP_S)


def _holdings_of(
    catalog: Catalog,
    lock: InstanceLock,
    listeners: Listeners,
    launcher: LocalLauncher,
    stores: tuple[Store, ...],
) -> Holdings:
    answers_at = reached_at(listeners.main)[0], listeners.main.getsockname()[1]
    address = catalog.server.host, catalog.server.port
    descriptors = tuple(listener.fileno() for listener in listeners.all)
    return Holdings(address, descriptors, lock, launcher, stores, answers_at)


async def _serve_with_local_key(
    configuration: Configuration,
    daemon: Daemon,
    holdings: Holdings,
    listeners: Listeners,
    on_listening: OnListening,
    takeover: Takeover | None = None,
) -> None:
    with contextlib.ExitStack() as offering:
        daemon.local_key = _offer_local_key(offering, listeners.main)
        await _serve_application(configuration, daemon, holdings, listeners, on_listening, takeover)


def _offer_local_key(offering: contextlib.ExitStack, listener: socket.socket) -> Key | None:
    """Offer a key to the commands of our own user until the stack closes. None where the key can't be stored."""
    addresses, port = reached_at(listener), listener.getsockname()[1]
    try:
        access = offering.enter_context(local_access.offered(url_of(addresses[0], port), addresses, port))
    except OSError as error:
        log.info("local_access.unavailable", reason=str(error))
        return None
    offering.callback(asyncio.create_task(_keep_offering(access)).cancel)
    return local_key(access.key)


async def _keep_offering(access: local_access.LocalAccess) -> None:
    while True:
        await asyncio.sleep(OFFERED_WITHIN_S)
        with contextlib.suppress(OSError):
            local_access.offer_again(access)


async def _serve_application(
    configuration: Configuration,
    daemon: Daemon,
    holdings: Holdings,
    listeners: Listeners,
    on_listening: OnListening,
    takeover: Takeover | None,
) -> None:
    daemon.metrics.dropped_lines = dropped_lines
    daemon.partners.restore(holdings.stores[1])
    reloader = Reloader(daemon, configuration, *(listener.getsockname()[0] for listener in listeners.all))
    daemon.pulls.open(configuration, reloader.reload)
    daemon.additions.open(configuration.base, reloader.reload)
    handover = Handover(daemon, holdings, daemon.catalog.server.state_dir / SOCKET)
    application = Application(daemon, reloader, handover, listeners.ports)
    url, keys = url_of(*holdings.answers_at), len(daemon.keyring.keys)
    on_listening(url, keys)
    log.info("daemon.listening", url=url, keys=keys, **daemon.catalog.server.extra_ports)
    await _until_stopped(daemon, application, reloader, listeners, handover, takeover)


async def _until_stopped(
    daemon: Daemon,
    application: Application,
    reloader: Reloader,
    listeners: Listeners,
    handover: Handover,
    takeover: Takeover | None,
) -> None:
    engine = daemon.engine
    server = make_server(application)
    stopping = asyncio.Event()
    end = partial(_on_signal, stopping, engine)
    on_signals(end, signal.SIGTERM, signal.SIGINT, within_s=partial(_longest_end_s, daemon, stopping))
    early = signal.getsignal(signal.SIGHUP)
    on_signals(partial(reloader.begin, "SIGHUP"), signal.SIGHUP)
    if isinstance(early, _SignalRecorder) and early.came:
        reloader.begin("SIGHUP")
    engine.start()
    settle_garbage_collector()
    serving = asyncio.create_task(server.serve(sockets=listeners.all))
    if takeover is not None:
        await asyncio.wait({serving, asyncio.create_task(server.up.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await takeover.report_serving(daemon)
    handover.listen()
    background = [
        asyncio.create_task(task) for task in (notify.feed_watchdog(), reloader.watch(), rechecking.watch(daemon))
    ]
    if daemon.request_log is not None:
        background.append(asyncio.create_task(daemon.request_log.run()))
    if daemon.alerts is not None:
        background.append(asyncio.create_task(daemon.alerts.run()))
    trimming = asyncio.create_task(
        return_freed_memory()
    )  # until the very end: a daemon that hands over still has bodies
    shared = daemon.partners.shared
    if shared is not None:
        background.append(asyncio.create_task(shared.run()))
    daemon.batches.start(application.check_line)
    daemon.inference.start(application.send_job)
    daemon.jobs.start()
    # Pictures that an earlier daemon left; the daemon deletes its own by itself.
    asyncio.get_running_loop().call_later(daemon.pictures.keep_s + 1, daemon.pictures.expire)
    notify.notify("READY=1", f"STATUS=serving {len(daemon.catalog.listing())} models")
    ends = {serving, *(asyncio.create_task(event.wait()) for event in (stopping, handover.done))}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await daemon.pulls.close()
    await daemon.additions.close()
    if not handover.done.is_set():
        await handover.close()  # a handover may have been committed just now
    if handover.done.is_set():
        for task in background:
            task.cancel()
        application.close()
        await _drain_and_exit(server, stopping, takeover)
    else:
        log.info("daemon.stopping")
        notify.stopping(_longest_end_s(daemon))
        await daemon.batches.close()
        await daemon.inference.close()
        daemon.jobs.stop()
        await engine.shutdown()
    application.close()
    server.end()
    await serving
    daemon.requests.record()
    await daemon.responses.close()
    if daemon.request_log is not None and not handover.done.is_set():
        await daemon.request_log.flush()
    if daemon.tracing is not None:
        await daemon.tracing.close()
    if not handover.done.is_set():  # after a handover the pictures belong to the successor
        await asyncio.to_thread(daemon.pictures.clear)
    await handover.close()
    for task in (*background, trimming):
        task.cancel()
    if shared is not None:
        await shared.close(released=not handover.done.is_set())
    log.info("daemon.stopped")


async def _drain_and_exit(server: uvicorn.Server, stopping: asyncio.Event, takeover: Takeover | None) -> None:
    """After a handover: wait until every connection here and every request of our own predecessor has ended, or a signal comes.

    The successor accepts new connections. Idle connections stay until their timeout: closing one could cut a client that is
    sending. Each response asks its client to reconnect.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is nothing left to reload
    for accepting in server.servers:
        accepting.close()
    ResponseCycle.closes_connections = True
    # Our successor learns of our predecessor's requests through this process alone.
    while not stopping.is_set() and (server.server_state.connections or (takeover is not None and takeover.running)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_LOOK_S):
                await stopping.wait()


def _longest_end_s(daemon: Daemon, stopping: asyncio.Event | None = None) -> float:
    """The longest time of a stop: running requests, unless a second signal cuts them, the slowest worker, and our own part."""
    drain_s = 0.0 if stopping is not None and stopping.is_set() else daemon.engine.longest_drain_s()
    graces = (model.config.grace_s for model in daemon.catalog.models.values())
    return drain_s + max(graces, default=0.0) + OWN_STOP_S


def _on_signal(stopping: asyncio.Event, engine: Engine) -> None:
    if stopping.is_set():  # the second signal: cut running requests
        for model in engine.models():
            engine.post(UnloadRequested(model.id, force=True))
    stopping.set()
