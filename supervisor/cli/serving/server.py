"""The sockets that the daemon listens on, and the HTTP server behind them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from supervisor.catalog.keys import Keyring, refuse_exposed
from supervisor.catalog.sections.sections import ServerConfig
from supervisor.errors import ConfigError, LlmuxError
from supervisor.host.process import notify
from supervisor.host.process.ports import who_listens
from supervisor.server.app import Application
from supervisor.server.protocol import GuardedProtocol

BACKLOG = 2048
DATE_S = 1.0
KEEP_ALIVE_S = 75  # longer than clients keep idle connections: closing first could cut a client that is sending

SOCKET_HINT = "`llmux service install --socket HOST:PORT` writes one."


class CannotListenError(LlmuxError):
    """The address is taken, or no address of this machine."""

    code = "cannot_listen"


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: ours drain first. `up` is set once it accepts connections; `end` stops it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Make `serve` return, at once."""
        self.should_exit = True
        self._ending.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        """Renew the Date header until `end`; uvicorn's own loop would check ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(application: Application) -> Server:
    """The server for this application, without sockets yet."""
    config = uvicorn.Config(
        application,
        http=GuardedProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # llmux doesn't use the client's address
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        timeout_graceful_shutdown=5,
    )
    return Server(config)


def take_given() -> tuple[socket.socket, ...]:
    """The sockets that systemd gave us. Raises ConfigError for a socket that can't be served."""
    try:
        return notify.systemd_sockets()
    except ValueError as error:
        raise ConfigError((f"{error} {SOCKET_HINT}",)) from error


@dataclass(frozen=True, slots=True)
class Listeners:
    """The listening sockets: the main one, and the extra ones by the key of `server` that sets their port."""

    main: socket.socket
    extra: dict[str, socket.socket]

    @property
    def all(self) -> list[socket.socket]:
        """All sockets, the main one first."""
        return [self.main, *self.extra.values()]

    @property
    def ports(self) -> dict[int, str]:
        """Extra port → the key of `server` that sets it."""
        return {listener.getsockname()[1]: key for key, listener in self.extra.items()}

    def close(self) -> None:
        """Close all sockets. Harmless when repeated."""
        for listener in self.all:
            listener.close()


def open_listeners(given: Sequence[socket.socket], server: ServerConfig, keyring: Keyring) -> Listeners:
    """The listening sockets: those that systemd gave, the extra ones by their ports, and new ones for the missing ports.

    Raises CannotListenError with the remedy; ConfigError for a socket that no setting uses, and when others could reach a
    socket and there are no keys. Then all sockets are closed.
    """
    ports = server.extra_ports.values()
    spare = {port: listener for listener in given if (port := listener.getsockname()[1]) in ports}
    main = [listener for listener in given if listener not in spare.values()]
    if len(main) > 1:
        for listener in given:
            listener.close()
        message = (
            f"systemd gave {len(given)} sockets, and llmux serves one, besides those of server.ollama_port and "
            f"server.metrics_port: leave one ListenStream= in the unit. {SOCKET_HINT}"
        )
        raise ConfigError((message,))
    return listeners_of(main[0] if main else None, spare.values(), server, keyring)


def listeners_of(
    main: socket.socket | None, spare: Iterable[socket.socket], server: ServerConfig, keyring: Keyring
) -> Listeners:
    """These sockets, and new ones for missing ports; unused sockets of `spare` are closed. Raises as `open_listeners`."""
    with contextlib.ExitStack() as opened:
        by_port = {listener.getsockname()[1]: opened.enter_context(listener) for listener in spare}
        main = opened.enter_context(main or listen(server.host, server.port))
        extra = {
            key: by_port.pop(port)
            if port in by_port
            else opened.enter_context(listen(server.host, port, f"server.{key}"))
            for key, port in server.extra_ports.items()
        }
        listeners = Listeners(main, extra)
        for listener in listeners.all:
            refused = refuse_exposed(listener.getsockname()[0], keyring, "the address of the socket to listen on")
            if refused is not None:
                raise ConfigError((refused,))
        opened.pop_all()
    for listener in by_port.values():
        listener.close()
    return listeners


def reached_at(listener: socket.socket) -> tuple[str, ...]:
    """The addresses by which this machine reaches the socket, the most usual first: a wildcard address includes loopback."""
    host: str = listener.getsockname()[0]
    if host == "::":
        is_alone = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return ("::1",) if is_alone else ("127.0.0.1", "::1")
    return ("127.0.0.1",) if host == "0.0.0.0" else (host,)


def listen(host: str, port: int, key: str | None = None) -> socket.socket:
    """The bound, listening socket. `key`: the setting of an extra port. Raises CannotListenError with the remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        holder = who_listens(port) if error.errno == errno.EADDRINUSE else None
        raise CannotListenError(
            f"Can't listen on {host}:{port}{f' ({key})' if key else ''}: {os.strerror(error.errno or 0)}"
            f"{f' by {holder}' if holder is not None else ''}. "
            f"Choose another port with {key or '--port'}, or end what uses this one."
        ) from error
    listener.set_inheritable(False)
    return listener
