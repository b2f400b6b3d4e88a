"""The application in the test's own process, over a daemon's parts that never ran, behind our protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import yaml

from runtimes.device_kind import HOST, DeviceWanted
from supervisor.catalog import Configuration
from supervisor.catalog.keys import Keyring
from supervisor.daemon.configuration.reload import Reloader
from supervisor.daemon.daemon import Daemon
from supervisor.engine.engine import Engine
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.local import LocalLauncher
from supervisor.host.memory.devices import open_sampler
from supervisor.host.process.ports import PortRange
from supervisor.server.app import Application
from tests.support.daemon import fake
from tests.support.wire import Front, front, talk

ORIGIN = "https://chat.example.org"


@dataclass(frozen=True)
class Served:
    running: Front
    daemon: Daemon
    application: Application
    logged: list[dict[str, object]]  # through structlog, as it is logged

    @property
    def port(self) -> int:
        return self.running.port


@asynccontextmanager
async def serving(folder: Path, *, models: int = 1) -> AsyncIterator[Served]:
    """No keys; the model `plain`, and as many as there are to be in all; pages of ORIGIN are allowed."""
    path = folder / "llmux.yaml"
    server = {"allowed_hosts": ["a"], "allowed_origins": [ORIGIN], "state_dir": str(folder)}
    names = ("plain", *(f"m{number}" for number in range(1, models)))
    path.write_text(yaml.safe_dump({"models": {name: fake() for name in names}, "server": server}))
    configuration = Configuration(path)
    catalog, keyring = configuration.read(), Keyring()
    sampler = (await open_sampler((DeviceWanted(HOST, budget_mib=1000),))).sampler
    launcher = LocalLauncher(PortRange(40000, 40010, "127.0.0.1"), folder, folder, "test", {})
    fleet = Fleet(launcher, catalog.models, catalog.limits)
    daemon = Daemon(Engine(fleet, sampler), fleet, sampler, catalog, keyring)
    application = Application(daemon, Reloader(daemon, configuration, daemon.catalog.server.host))
    with structlog.testing.capture_logs() as logged:
        async with front(application) as running:
            yield Served(running, daemon, application, logged)


def get(path: bytes, *fields: bytes, method: bytes = b"GET") -> bytes:
    lines = (method + b" " + path + b" HTTP/1.1", b"Host: 127.0.0.1", *fields, b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def ask(port: int, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, header fields (each there once) and body, as it was framed."""
    head, _, body = (await talk(port, request)).partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    fields = [line.partition(": ") for line in lines]
    headers = {name: value for name, _, value in fields}
    assert len(headers) == len(fields), head
    return int(status.split()[1]), headers, body
