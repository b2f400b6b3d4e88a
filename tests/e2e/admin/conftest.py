"""The daemon that these tests share, and a reader of event streams."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support import tiny
from tests.support.daemon import Daemon, fake, gguf, running, wait_until
from tests.support.held import held
from tests.support.limits import LIMIT_S

GATE = "slow-may-come-up"
ENDPOINTS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "GET /stats"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """No keys. `big` and `huge` don't fit together; `one` serves one request at a time; all others fit.

    `slow` comes up as fast as the others unless a test keeps it `loading`.
    """
    folder = tmp_path_factory.mktemp("admin")
    (folder / GATE).touch()
    config = {
        "models": {
            "chat": gguf(parallel=2, env={"SOME_TOKEN": "hush", "PLAIN": "seen"}),
            "seer": gguf(tiny.model(name="tiny-seer", seed=5), mmproj=str(tiny.projector())),
            "one": fake("--chunk-delay", "0.05", target_inflight=1, drain_s=2.5, endpoints=ENDPOINTS, thinking=True),
            "blind": fake("--key-env", "LLMUX_WORKER_KEY", auth="bearer", modalities=["text"], endpoints=ENDPOINTS),
            "slow": held(folder / GATE, endpoints=ENDPOINTS),
            "big": fake(vram_mib=2200, endpoints=ENDPOINTS),
            "huge": fake(vram_mib=2200, endpoints=ENDPOINTS),
            "broken": fake("--exit-code", "1", "--log-text", "unknown argument: --nonsense", endpoints=ENDPOINTS),
        },
        "virtual_models": {"quick": {"model": "chat", "enable_thinking": False}, "talk": {"model": "chat"}},
    }
    with running(folder, config) as daemon:
        yield daemon


@contextlib.contextmanager
def loading(daemon: Daemon) -> Iterator[None]:
    """`slow` begins anew, and does not come up before the block ends."""
    (daemon.folder / GATE).unlink()
    try:
        daemon.post("/v1/admin/models/slow/unload").raise_for_status()
        daemon.post("/models/load", json={"model": "slow"}).raise_for_status()
        yield
    finally:
        (daemon.folder / GATE).touch()


@dataclass
class Listener:
    """What came on a stream so far, read in a thread: events as (name, data), comments and ids apart."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    ended: bool = False

    def of(self, name: str) -> list[Any]:
        return [data for event, data in self.events if event == name]

    def wait(self, name: str, condition: Any = lambda _data: True, timeout_s: float = LIMIT_S) -> Any:
        """The first event of that name that satisfies the condition."""
        return wait_until(lambda: next((d for d in self.of(name) if condition(d)), None), timeout_s, f"{name} event")

    def read(self, response: httpx.Response) -> None:
        name, plain = "message", response.request.url.path.endswith("/logs")
        with contextlib.suppress(httpx.StreamClosed, httpx.ReadError, httpx.RemoteProtocolError):
            for line in response.iter_lines():
                key, _, value = line.partition(": ")
                if key == "event":
                    name = value
                elif key == "id":
                    self.ids.append(value if plain else int(value))
                elif key == "data":
                    self.events.append((name, value if plain else json.loads(value)))
                elif line.startswith(":"):
                    self.comments.append(line)
                else:
                    name = "message"
        self.ended = True


@contextlib.contextmanager
def listening(daemon: Daemon, path: str) -> Iterator[Listener]:
    """A stream, read until the block ends; it begins when the first comment or event is there."""
    listener = Listener()
    with daemon.client() as client, client.stream("GET", path) as response:
        assert response.status_code == 200, response.read()
        listener.headers = dict(response.headers)
        thread = threading.Thread(target=listener.read, args=(response,), daemon=True)
        thread.start()
        wait_until(lambda: listener.comments or listener.events, what="the stream has begun")
        yield listener
        # The reader blocks in recv; the stream is closed under it, unless the daemon has ended it.
        with contextlib.suppress(OSError):
            response.extensions["network_stream"].get_extra_info("socket").shutdown(2)
        thread.join(LIMIT_S)
