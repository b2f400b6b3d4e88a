"""Descriptors, disk and tasks: running out of them harms no worker, and nothing is kept that is not needed any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import psutil
import yaml

from supervisor.catalog import Configuration, load
from supervisor.catalog.keys import Keyring
from supervisor.cli.serving import own_process
from supervisor.cli.serving.daemon import serve
from supervisor.cli.serving.server import Listeners, listen
from supervisor.host.process.reap import take_lock
from tests.support.clients import Call, Stream, stats
from tests.support.counts import times
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S

MIB = 1024 * 1024


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def limit(daemon: Daemon, count: int) -> None:
    """At most `count` open files for the daemon from now on."""
    _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (count, hard))


class Test28NoDescriptorsLeft:
    """Probes that fail for want of descriptors kill no worker, and service returns with the descriptors."""

    def test_none_left(self, tmp_path, measured):
        """EMFILE: probes that fail for want of descriptors kill no worker; admin answers soon after they are free again."""
        limits = {"readiness_interval_s": 0.1, "liveness_interval_s": 0.4}
        config = {"models": {"a": fake(), "cold": fake()}, "limits": limits}
        with running(tmp_path, config) as daemon, contextlib.ExitStack() as connections:
            assert daemon.chat("a").status_code == 200
            before = daemon.model("a")["worker"]["pid"]
            stream = Stream(daemon, "a", fake={"chunks": 40, "chunk_delay": 0.05})
            wait_until(lambda: stream.chunks > 2)
            limit(daemon, descriptors(daemon) + 8)
            for _ in range(200):
                connections.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            with contextlib.suppress(httpx.TransportError, httpx.HTTPStatusError):
                httpx.post(
                    f"{daemon.url}/v1/chat/completions",
                    json={"model": "cold", "messages": []},
                    trust_env=False,
                    verify=False,
                    timeout=1,
                )
            wait_until(lambda: descriptors(daemon) >= resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)[0])
            time.sleep(5)  # six liveness failures take half of it, and the stream ends before
            connections.close()
            freed_at = time.monotonic()
            wait_until(daemon._answers)
            admin_s = time.monotonic() - freed_at
            view = daemon.model("a")
            assert (view["worker"]["pid"], view["generation"]) == (before, 1)
            assert [decision for decision in daemon.decisions("a") if decision["kind"] == "crash"] == []
            assert stream.result().ended_cleanly, "what was running went on"
            limit(daemon, 1024)
            assert daemon.chat("a").status_code == 200
            assert daemon.chat("cold").status_code == 200
            measured(admin_answers_after_release_s=admin_s)

    def test_load_without_any(self, tmp_path):
        """A model asked for while there are no descriptors starts once there are."""
        limits = {"backoff_first_s": 0.2, "backoff_max_s": 0.2, "crash_limit": 1000}
        with running(tmp_path, {"models": {"a": fake(), "cold": fake()}, "limits": limits}) as daemon:
            assert daemon.chat("a").status_code == 200
            with daemon.client() as client:
                assert client.get("/health").status_code == 200  # its connection is open now
                limit(daemon, descriptors(daemon))
                asked = Sent(client, "cold")
                time.sleep(1.5)
                assert asked.is_alive(), "it can't have been served"
                limit(daemon, 1024)
                asked.join(40)
                assert asked.status == 200


class TestBaseline:
    """Descriptors, threads and tasks are as many after the work as before."""

    def test_back_to_baseline(self, tmp_path, measured):
        """Files open in the daemon are as many after hundreds of requests, swaps and cancellations as before."""
        models = {"a": fake(vram_mib=100), "b": fake(vram_mib=100)}
        devices = [{"kind": "host", "budget_mib": 150, "margin_mib": 0}]
        with running(tmp_path, {"models": models, "devices": devices, "limits": {"min_residency_s": 0}}) as daemon:
            pooled = lambda: daemon.model("a")["worker"]["connections"]  # kept for the next request; they expire
            for model in ("a", "b", "a"):
                assert daemon.chat(model).status_code == 200
            before, threads = descriptors(daemon) - pooled(), psutil.Process(daemon.process.pid).num_threads()
            with daemon.client() as client:

                def ask(model: str, timeout_s: float = LIMIT_S, **fields: object) -> int:
                    body = {"model": model, "messages": [], **fields}
                    return client.post("/v1/chat/completions", json=body, timeout=timeout_s).status_code

                for number in range(times(200, 5000)):
                    if number % 4 == 0:
                        with contextlib.suppress(httpx.TimeoutException):
                            ask("a", 0.02, fake={"delay": 0.2}, stream=number % 8 == 0)
                    elif number % 50 == 1:
                        assert [ask("b"), ask("a")] == [200, 200]
                    else:
                        assert ask("a") == 200
            wait_until(lambda: descriptors(daemon) - pooled() <= before, what=f"as many as before: {before}")
            assert daemon.model("a")["in_flight"] == 0
            after = psutil.Process(daemon.process.pid).num_threads()
            assert after <= threads + 8, "the pool of threads is bounded"
            measured(
                descriptors_before=before, descriptors_after=descriptors(daemon) - pooled(), threads=(threads, after)
            )


class Sent(threading.Thread):
    """A request on an open connection."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        super().__init__(daemon=True)
        self.status = 0
        self._client, self._model = client, model
        self.start()

    def run(self) -> None:
        body = {"model": self._model, "messages": []}
        self.status = self._client.post("/v1/chat/completions", json=body).status_code


async def test_tasks_back_to_baseline(tmp_path, measured, monkeypatch):
    """After requests that ended, failed and were cancelled the loop has the tasks it had before."""
    monkeypatch.setattr(own_process, "_end_within", lambda _s: None)  # this process goes on after the daemon
    config = Daemon(tmp_path, {"models": {"a": fake(), "dud": fake("--exit-code", "1")}, "limits": {"crash_limit": 1}})
    config.config_path.write_text(yaml.safe_dump(config.config))
    catalog = load(config.config_path)
    catalog.server.state_dir.mkdir(parents=True)
    listening = asyncio.Event()
    with (
        contextlib.closing(take_lock(catalog.server.state_dir)) as lock,
        contextlib.closing(listen(catalog.server.host, catalog.server.port)) as listener,
    ):
        configuration = Configuration(config.config_path)
        serving = asyncio.create_task(
            serve(configuration, catalog, Keyring(), lock, Listeners(listener, {}), lambda _url, _keys: listening.set())
        )
        await listening.wait()
        async with httpx.AsyncClient(base_url=config.url, trust_env=False, verify=False, timeout=30) as client:

            async def ask(**fields: object) -> int:
                return (
                    await client.post("/v1/chat/completions", json={"model": "a", "messages": [], **fields})
                ).status_code

            assert await ask() == 200
            names = lambda: sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks())
            before = None
            while before != (before := names()):  # until it has settled
                await asyncio.sleep(0.5)
            for number in range(times(60, 1000)):
                match number % 4:
                    case 0:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.03):
                                await ask(fake={"delay": 0.2}, stream=number % 8 == 0)
                    case 1:
                        assert await ask(model="dud") == 503
                    case _:
                        assert await ask() == 200
            deadline = asyncio.get_running_loop().time() + 20
            while (after := names()) != before and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.05)
            assert after == before
            measured(tasks=len(before))
        os.kill(os.getpid(), signal.SIGTERM)
        await serving


class Test21DiskFull:
    """When nothing can be written any more, what is loaded serves on and nothing stored is lost."""

    def test_full(self, tmp_path, measured):
        """Not a byte can be written any more, to logs or store: what is loaded serves on, nothing is lost, loading recovers."""
        limits = {"backoff_first_s": 0.1, "backoff_max_s": 0.1}
        daemon = Daemon(tmp_path, {"models": {"a": fake(), "b": fake(), "c": fake()}, "limits": limits})
        with open("/dev/full", "w") as full, open(os.devnull, "w") as nothing:
            daemon.start(wait=False, stdout=nothing, stderr=full)
        try:
            wait_until(daemon._answers)
            for model in ("a", "b"):
                assert daemon.chat(model).status_code == 200
            unlimited = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            served = [daemon.chat(model).status_code for model in ("a", "b") * 20]
            assert served == [200] * 40
            assert daemon.post("/v1/admin/models/b/unload").status_code == 200
            refused = daemon.chat("c")
            assert refused.status_code in {200, 503}, "a worker that can't write its log may end; ours may not"
            assert daemon.get("/v1/admin/models").status_code == 200
            resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, unlimited)
            for model in ("b", "c"):
                assert daemon.post(f"/v1/admin/models/{model}/load").status_code == 200
                assert daemon.chat(model).status_code == 200
            assert daemon.model("a")["generation"] == 1
            measured(served_on_a_full_disk=len(served))
        finally:
            assert daemon.stop() == 0
        wait_until(lambda: not daemon.workers())


class Test12LogFlood:
    """A worker may write as much as it likes: the disk is bounded, and it never blocks."""

    def test_log_flood(self, tmp_path, measured):
        """A worker that logs as fast as it can fills no disk, and goes on serving."""
        with running(tmp_path, {"models": {"loud": fake("--flood")}}) as daemon:
            assert daemon.chat("loud").status_code == 200
            logs = daemon.state_dir / "logs"
            io = Path(f"/proc/{daemon.model('loud')['worker']['pid']}/io")
            most, written, until = 0, 0, time.monotonic() + times(1, 60)
            # How much lies there depends on how often the machine lets the file be looked at; all of it never does.
            while time.monotonic() < until or written < max(256 * MIB, 3 * most):
                most = max(most, sum(path.stat().st_blocks * 512 for path in logs.iterdir() if path.exists()))
                assert most < 2048 * MIB
                assert daemon.chat("loud").status_code == 200
                written = int(io.read_text().split("wchar: ")[1].split()[0])
            measured(written_mib=written // MIB, most_on_disk_mib=most // MIB)


class Test28Slowloris:
    """Connections that never finish their headers hold nobody up."""

    def test_slow_senders(self, tmp_path, measured):
        """Connections that never finish their headers hold nobody up."""
        config = {"models": {"a": fake()}, "limits": {"header_s": 5}}
        with running(tmp_path, config) as daemon, contextlib.ExitStack() as connections:
            assert daemon.chat("a").status_code == 200
            address = ("127.0.0.1", daemon.port)
            slow = [connections.enter_context(socket.create_connection(address)) for _ in range(200)]
            for connection in slow:
                connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            call = Call(daemon, "a").result()
            assert call.status == 200
            wait_until(lambda: all(b"408" in connection.recv(100) for connection in slow))
            assert stats(daemon, "a")["requests"] == 2
            measured(served_meanwhile_s=call.elapsed_s)
