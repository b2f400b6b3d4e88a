"""One daemon, and a worker that each test scripts byte by byte; what a client sees of it is compared with the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, running
from tests.support.held import behind
from tests.support.wire import PATIENCE_S, Script, Worker, handed, handing, worker

CHAT = "/v1/chat/completions"
OWN = "/own"
SOCKET = "worker.socket"
GATE = "gate"


class Site:
    """Where the daemon is, and how to script its worker."""

    def __init__(self, daemon: Daemon, socket: Path, key: str = "") -> None:
        self.daemon = daemon
        self.port = daemon.port
        self._socket = socket
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def call(self, method: str, path: str, **keys: Any) -> Any:
        with self.daemon.client(headers=self._headers) as client:
            answer = client.request(method, path, **keys)
        answer.raise_for_status()
        return answer.json()

    def admin(self, method: str, path: str, **keys: Any) -> Any:
        return self.call(method, f"/v1/admin/{path}", **keys)

    def model(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.admin("GET", f"models/{name}")
        return found

    @asynccontextmanager
    async def scripted(self, script: Script) -> AsyncIterator[Worker]:
        """The daemon's worker does this for each connection."""
        async with handed(self._socket, script) as behind:
            try:
                yield behind
            finally:
                await asyncio.to_thread(self._forget)

    def _forget(self) -> None:
        """Its connections to the worker, which the next test scripts anew: they go with the worker."""
        for view in self.admin("GET", "models")["data"]:
            if view["worker"]:
                self.admin("POST", f"models/{view['name']}/unload", params={"force": "true"})

    @asynccontextmanager
    async def both(self, script: Script) -> AsyncIterator[tuple[int, int, Worker, Worker]]:
        """Port of the worker itself and of the daemon before another that does the same; and both workers."""
        async with worker(script) as direct, self.scripted(script) as behind:
            yield direct.port, self.port, direct, behind


def configuration(folder: Path, keepalive_s: float) -> dict[str, Any]:
    """Each model has another name, too, whose requests are changed: the file `gate` lets `gated` come up, and `one` answers one request at a time."""
    socket = folder / SOCKET
    endpoints = [CHAT, f"POST {OWN}", f"GET {OWN}", "POST /v1/audio/transcriptions"]
    models = {
        "m": handing(socket, endpoints=endpoints, loads=True),
        "one": handing(socket, endpoints=[CHAT], target_inflight=1),
        "gated": behind(folder / GATE, handing(socket, endpoints=[CHAT])),
        "native": handing(socket, endpoints=["/v1/messages", "/v1/images/generations"]),
    }
    return {
        "models": models,
        "virtual_models": {f"called-{name}": {"model": name, "defaults": {"seed": 1}} for name in models},
        "tasks": {
            f"{called}falls": {"candidates": [f"{called}one", f"{called}m"], "pin_primary": True}
            for called in ("", "called-")
        },
        "limits": {"keepalive_s": keepalive_s},
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("wire")
    config = configuration(folder, keepalive_s=60)
    config["limits"]["body_mib"] = 1
    with running(folder, config) as daemon:
        yield Site(daemon, folder / SOCKET)


async def exchange(port: int, *pieces: bytes, pause_s: float = 0.0, half_closed: bool = False) -> bytes:
    """Send the pieces one after the other, and read until the peer closes, or has nothing more to say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if half_closed:
            writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read(-1)
    except ConnectionError:
        return b""
    finally:
        writer.close()
