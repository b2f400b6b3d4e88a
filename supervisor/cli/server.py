"""The socket that the daemon listens on, and the HTTP server behind it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator

import uvicorn

from supervisor.catalog.keys import Keyring, refuse_exposed
from supervisor.catalog.sections import ServerConfig
from supervisor.errors import ConfigError, LlmuxError
from supervisor.http.app import Application
from supervisor.http.protocol import GuardedProtocol
from supervisor.io import notify
from supervisor.io.ports import who_listens

BACKLOG = 2048
KEEP_ALIVE_S = 75  # longer than clients keep idle connections: whoever closes first must not be us, while they send


class CannotListenError(LlmuxError):
    """The address is taken or not ours."""

    code = "cannot_listen"


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: ours drain first. `up` is set once it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(application: Application) -> Server:
    """It serves once it is given sockets."""
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
    return Server(config)


def take_given() -> notify.Given:
    """What systemd gave us. Raises ConfigError for what can't be served."""
    try:
        return notify.given()
    except ValueError as error:
        raise ConfigError((f"{error} `llmux service install --socket HOST:PORT` writes one.",)) from error


def open_listener(given: socket.socket | None, server: ServerConfig, keyring: Keyring) -> socket.socket:
    """The listening socket: systemd's, if it gave one, or our own.

    Raises CannotListenError with what to do, ConfigError when others could reach it and there are no keys.
    """
    listener = given or listen(server)
    try:
        check_exposure(listener, keyring)
    except ConfigError:
        listener.close()
        raise
    return listener


def check_exposure(listener: socket.socket, keyring: Keyring) -> None:
    """Whoever opened it: without keys only this machine may reach it. Raises ConfigError."""
    refused = refuse_exposed(listener.getsockname()[0], keyring, "the address of the socket to listen on")
    if refused is not None:
        raise ConfigError((refused,))


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
