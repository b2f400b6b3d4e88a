"""The daemon, put together: lock, reap, devices, store, workers, engine, application, server; and taken apart again.

Leftovers of an earlier run are reaped before anything is bound. On SIGTERM or SIGINT new requests are refused while running
ones end within the drain time, then the workers are stopped, then the server; a second signal cuts the drain short.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial

import structlog
import uvicorn

from supervisor.catalog import Catalog, Configuration, check_devices
from supervisor.catalog.catalog import Learned
from supervisor.catalog.keys import Keyring, load_keys, refuse_exposed
from supervisor.catalog.sections import ServerConfig
from supervisor.cli.log_setup import dropped_lines
from supervisor.core.effects import Learn
from supervisor.core.events import Configured, UnloadAsked
from supervisor.core.types import DeviceId
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.engine import Engine
from supervisor.daemon.reload import Reloader
from supervisor.errors import ConfigError, LlmuxError
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.local import LocalLauncher
from supervisor.http.app import Application
from supervisor.http.protocol import GuardedProtocol
from supervisor.io import notify
from supervisor.io.devices import Opened, open_sampler
from supervisor.io.ports import PortRange, who_listens
from supervisor.io.process import become_subreaper
from supervisor.io.reap import instance_lock, reap_leftovers
from supervisor.io.store import Footprints, Store
from supervisor.io.venvs import sweep_aside

log = structlog.get_logger("llmux.daemon")

BACKLOG = 2048
OWN_STOP_S = 20.0  # of the end, besides requests and graces: unkillable workers are waited for, too
KEEP_ALIVE_S = 75  # longer than clients keep idle connections: whoever closes first must not be us, while they send
DESCRIPTORS = 65536  # each request takes two: the client's connection and the worker's
WORKER_HOST = "127.0.0.1"
LOGS = "logs"

OnListening = Callable[[str, int], None]


class CannotListenError(LlmuxError):
    """The address is taken or not ours."""

    code = "cannot_listen"


def run(configuration: Configuration, catalog: Catalog, *, on_listening: OnListening) -> None:
    """Serve `catalog`, as it was read from `configuration`, until a signal ends it. `on_listening` gets the URL and how many keys there are.

    Raises LlmuxError for what keeps it from starting.
    """
    import uvloop  # noqa: PLC0415  # only the daemon needs it

    keyring = load_keys(catalog.server.api_keys) if catalog.server.api_keys is not None else Keyring()
    refused = refuse_exposed(catalog.server, keyring)
    if refused is not None:
        raise ConfigError((refused,))
    for warning in keyring.warnings:
        log.warning("keys.exposed", message=warning)
    raise_descriptor_limit()
    state_dir = catalog.server.state_dir
    with instance_lock(state_dir) as instance:
        orphans = reap_leftovers(instance, logs=state_dir / LOGS)
        for reaped in orphans:
            log.warning("orphan.reaped", pid=reaped.pid, command=reaped.command, gone=reaped.gone)
        sweep_aside(catalog.server.runtimes_dir)
        become_subreaper()
        with contextlib.closing(notify.inherited_listener() or listen(catalog.server)) as listener, _signals_end():
            uvloop.run(serve(configuration, catalog, keyring, instance, listener, on_listening, orphans=len(orphans)))


async def serve(
    configuration: Configuration,
    catalog: Catalog,
    keyring: Keyring,
    instance: str,
    listener: socket.socket,
    on_listening: OnListening,
    *,
    orphans: int = 0,
) -> None:
    """Everything that runs on the event loop, until a signal ends it. Lock, leftovers and socket are seen to before."""
    starting = asyncio.current_task()
    assert starting is not None
    _on_signals(starting.cancel, signal.SIGTERM, signal.SIGINT)
    folder = catalog.server.state_dir
    opened, footprints, state = await asyncio.gather(
        open_sampler(catalog.wanted_devices),
        Footprints.open(folder / "llmux.sqlite3"),
        Store.open(folder / "state.sqlite3"),
    )
    for note in opened.notes:
        log.info("devices.note", message=note)
    try:
        daemon = await _assemble(catalog, keyring, instance, opened, footprints)
        reloader = Reloader(daemon, configuration)
        application = Application(daemon, reloader)
        daemon.metrics.orphans(orphans)
        daemon.metrics.dropped_lines = dropped_lines
        url = _url(*listener.getsockname()[:2])
        on_listening(url, len(keyring.keys))
        log.info("daemon.listening", url=url, keys=len(keyring.keys))
        await _until_stopped(daemon, application, reloader, listener)
    finally:
        await footprints.close()
        await state.close()


def _on_signals(act: Callable[[], object], *numbers: signal.Signals) -> None:
    """Call `act` in the loop at each of these signals.

    Not by `add_signal_handler`: when the loop closes, the signals would kill the process again, at its very end.
    """
    loop = asyncio.get_running_loop()
    for number in numbers:
        signal.signal(number, lambda *_: None if loop.is_closed() else loop.call_soon_threadsafe(act))


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """After a clean end in the block, no later signal becomes the exit code."""
    ending = signal.SIG_IGN
    try:
        with contextlib.suppress(asyncio.CancelledError):  # by a signal, while it starts
            yield
    except BaseException:
        ending = signal.SIG_DFL  # the error is still to be printed, perhaps for a reader that is stuck
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, ending)


def _url(host: str, port: int) -> str:
    """Where this machine reaches it: what listens everywhere listens on loopback too."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # not a bind, but what a bind means
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _assemble(
    catalog: Catalog, keyring: Keyring, instance: str, opened: Opened, footprints: Footprints
) -> Daemon:
    server, devices = catalog.server, opened.devices
    specs = tuple(device.spec for device in devices)
    keys = {DeviceId(device.id): device.key for device in devices}
    by_key = {key: device for device, key in keys.items()}

    def learned() -> Learned:
        return {
            (definition, by_key[key]): mib for (definition, key), mib in footprints.learned().items() if key in by_key
        }

    async def learn(found: Learn) -> None:
        await footprints.learn(found.footprint_key, keys[found.device], found.mib)

    models = await asyncio.to_thread(catalog.model_specs, learned())
    problems = check_devices(catalog, specs, models)
    if problems:
        raise ConfigError(problems)
    log_dir = server.state_dir / LOGS
    log_dir.mkdir(exist_ok=True)
    launcher = LocalLauncher(
        ports=PortRange(server.worker_port_first, server.worker_port_last, WORKER_HOST),
        runtimes_dir=server.runtimes_dir,
        log_dir=log_dir,
        instance=instance,
        devices={DeviceId(device.id): device.assignment for device in devices},
    )
    fleet = Fleet(launcher, catalog.models, catalog.limits)
    engine = Engine(fleet, opened.sampler, learn)
    engine.post(Configured(models, specs, catalog.limits.limits(), catalog.limits.policy()))
    return Daemon(engine, fleet, opened.sampler, catalog, keyring, learned=learned)


async def _until_stopped(daemon: Daemon, application: Application, reloader: Reloader, listener: socket.socket) -> None:
    engine, catalog = daemon.engine, daemon.catalog
    config = uvicorn.Config(
        application,
        http=GuardedProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here depends on who the client says it is
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    stopping = asyncio.Event()
    _on_signals(partial(_on_signal, stopping, engine), signal.SIGTERM, signal.SIGINT)
    _on_signals(partial(reloader.begin, "SIGHUP"), signal.SIGHUP)
    engine.start()
    _settle_garbage_collector()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    background = [asyncio.create_task(_feed_watchdog()), asyncio.create_task(reloader.watch())]
    notify.notify("READY=1", f"STATUS=serving {len(catalog.listing())} models")
    await asyncio.wait({serving, asyncio.create_task(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
    log.info("daemon.stopping")
    # At most as long as the running requests, then the slowest worker, then what is ours.
    graces = [model.config.grace_s for model in daemon.catalog.models.values()]
    notify.stopping(daemon.catalog.limits.drain_s + max(graces, default=0.0) + OWN_STOP_S)
    await engine.shutdown()
    application.close()
    server.should_exit = True
    await serving
    for task in background:
        task.cancel()
    log.info("daemon.stopped")


def _settle_garbage_collector() -> None:
    """What is there now stays: never look through it again, and look for new cycles less often.

    Requests are freed by their reference counts. With the defaults the collector took an eighth of a busy daemon's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def _feed_watchdog() -> None:
    """Tell systemd that the event loop runs, as often as it wants to hear it."""
    interval_s = notify.watchdog_interval_s()
    while interval_s is not None:
        notify.notify("WATCHDOG=1")
        await asyncio.sleep(interval_s)


def _on_signal(stopping: asyncio.Event, engine: Engine) -> None:
    if stopping.is_set():  # again: whoever asks twice does not want to wait for streams
        for model in engine.models():
            engine.post(UnloadAsked(model.id, force=True))
    stopping.set()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(server: ServerConfig) -> socket.socket:
    """The bound, listening socket. Raises CannotListenError with what to do."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((server.host, server.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        holder = who_listens(server.port) if error.errno == errno.EADDRINUSE else None
        raise CannotListenError(
            f"Can't listen on {server.host}:{server.port}: {os.strerror(error.errno or 0)}"
            f"{f' by {holder}' if holder is not None else ''}. "
            f"Choose another port with --port, or end what uses this one."
        ) from error
    listener.set_inheritable(False)
    return listener


def raise_descriptor_limit() -> None:
    """As many open files as the system lets us have: 1024, the usual start, are 500 requests. Workers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
