"""The launcher of this machine, with real processes; and what every launcher promises, also the one of the worker's tests."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from structlog.testing import capture_logs

from runtimes.base import ModelUnusableError
from runtimes.command.adapter import CommandAdapter, CommandConfig
from runtimes.device_kind import DeviceAssignment
from supervisor.catalog import CatalogModel
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.core.types import DeviceId, Generation, ModelId
from supervisor.errors import UnavailableError
from supervisor.fleet import local
from supervisor.fleet.launcher import Look, Started
from supervisor.fleet.local import LocalLauncher
from supervisor.host.memory.memory import WorkerKey
from supervisor.host.process.ports import Ownership, PortRange
from tests.support.daemon import fake
from tests.support.limits import LIMIT_S
from tests.support.scripted_launcher import ScriptedLauncher
from tests.support.trees import survivors

HOST = "127.0.0.1"
DEVICE = DeviceId("host")
A, B = (ModelId("a"), Generation(1)), (ModelId("b"), Generation(1))


def model(*flags: str, **keys: object) -> CatalogModel:
    config = CommandConfig.model_validate({**fake(*flags), **keys})
    return CatalogModel(A[0], config, CommandAdapter(), Rewrite())


@pytest.fixture
def instance():
    name = f"test-{secrets.token_hex(4)}"
    yield name
    left = survivors(name)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}


@pytest.fixture
def launcher(tmp_path, instance):
    """With one port, free a moment ago."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    assignment = {DEVICE: DeviceAssignment(DEVICE, "host")}
    return LocalLauncher(PortRange(port, port, HOST), tmp_path, tmp_path, instance, assignment)


async def start(launcher: LocalLauncher, model: CatalogModel, worker: WorkerKey = A) -> Started:
    return await launcher.start(worker, model, launcher.place(worker, (DEVICE,), (100,)))


async def gone(started: Started) -> None:
    async with asyncio.timeout(LIMIT_S):
        await started.exited


async def probed_until(launcher: LocalLauncher, wanted: object, *, starting: bool = True) -> Look:
    async with asyncio.timeout(LIMIT_S):
        while not wanted(look := await launcher.probe(A, LIMIT_S, starting=starting)):
            await asyncio.sleep(0.01)
    return look


async def killed(launcher: LocalLauncher, started: Started) -> None:
    await launcher.stop(A, kill=True)
    await gone(started)


class TestEveryLauncher:
    """A worker is listed from its start until it is gone, and its place is free again after that."""

    @pytest.fixture(params=["local", "scripted"])
    def any_launcher(self, request, launcher, tmp_path):
        return launcher if request.param == "local" else ScriptedLauncher(tmp_path)

    async def test_from_place_to_gone(self, any_launcher):
        context = any_launcher.place(A, (DEVICE,), (100,))
        assert context.model == A[0]
        assert dict(any_launcher.list()) == {}
        started = await any_launcher.start(A, model(), context)
        assert (started.spec.host, started.spec.port) == (context.host, context.port)
        assert list(any_launcher.list()) == [A]
        await any_launcher.stop(A, kill=False)
        await gone(started)
        assert started.main_ended.is_set()
        assert dict(any_launcher.list()) == {}
        again = await any_launcher.start(B, model(), any_launcher.place(B, (DEVICE,), (100,)))
        await any_launcher.stop(B, kill=True)
        await gone(again)

    async def test_refused(self, any_launcher):
        if isinstance(any_launcher, ScriptedLauncher):
            any_launcher.refuse_start = ModelUnusableError("no")
        with pytest.raises(ModelUnusableError):
            await any_launcher.start(A, model(cmd=["/nowhere"]), any_launcher.place(A, (DEVICE,), (100,)))
        assert dict(any_launcher.list()) == {}
        any_launcher.place(B, (DEVICE,), (100,))


class TestPlace:
    """An address is held until the worker is gone, or its start has failed."""

    async def test_held(self, launcher):
        context = launcher.place(A, (DEVICE,), (100,))
        assert (context.host, context.port) == (HOST, launcher.ports.first)
        assert [device.id for device in context.devices] == [DEVICE]
        with pytest.raises(UnavailableError):
            launcher.place(B, (DEVICE,), (100,))
        started = await launcher.start(A, model(), context)
        with pytest.raises(UnavailableError):
            launcher.place(B, (DEVICE,), (100,))
        await killed(launcher, started)
        assert launcher.place(B, (DEVICE,), (100,)).key != context.key

    async def test_free_after_a_mistake_of_the_adapters(self, launcher, monkeypatch):
        monkeypatch.setattr(CommandAdapter, "launch", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await start(launcher, model())


class TestProbe:
    """Its health, who listens on its port, and how far its start has come."""

    async def test_ready(self, launcher):
        started = await start(launcher, model("--warmup", "0.1"))
        look = await probed_until(launcher, lambda look: look.ready)
        assert look.owner is Ownership.OURS
        assert (await launcher.probe(A, LIMIT_S)).ready
        pids = launcher.list()[A]
        assert survivors(launcher.instance).keys() == {pids.pid, pids.shim_pid}
        await killed(launcher, started)
        with pytest.raises(KeyError):
            await launcher.probe(A, LIMIT_S)

    @pytest.mark.parametrize(
        ("host", "keys", "told"),
        [("0.0.0.0", {}, [("0.0.0.0",)]), ("0.0.0.0", {"auth": "bearer"}, []), (HOST, {}, [])],
        ids=["exposed", "with a key", "loopback"],
    )
    async def test_who_can_reach_it(self, launcher, host, keys, told):
        """Without a key, nobody but this machine should: it is said once, as it becomes ready."""
        keyed = ("--key-env", "LLMUX_WORKER_KEY") if keys else ()
        started = await start(launcher, model("--host", host, *keyed, **keys))
        with capture_logs() as lines:
            await probed_until(launcher, lambda look: look.ready)
            await launcher.probe(A, LIMIT_S)
        assert [line["addresses"] for line in lines if line["event"] == "worker.exposed"] == told
        await killed(launcher, started)

    async def test_nobody_listens(self, launcher):
        started = await start(launcher, model("--no-listen"))
        look = await launcher.probe(A, LIMIT_S)
        assert (look.ready, look.health.detail) == (False, "nothing listens")
        assert look.owner is Ownership.NO_LISTENER
        await killed(launcher, started)

    async def test_an_impostor(self, launcher):
        class Healthy(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()

        started = await start(launcher, model("--no-listen"))
        with ThreadingHTTPServer((HOST, launcher.ports.first), Healthy) as impostor:
            Thread(target=impostor.serve_forever).start()
            look = await launcher.probe(A, LIMIT_S, starting=True)
            impostor.shutdown()
        assert (look.health.ok, look.ready) == (True, False)
        assert look.owner is Ownership.FOREIGN
        await killed(launcher, started)

    async def test_progress(self, launcher, monkeypatch):
        started = await start(launcher, model("--no-listen", "--log-text", "loading"))
        monkeypatch.setattr(local, "PROGRESS_INTERVAL_S", 0.0)
        assert (await launcher.probe(A, LIMIT_S)).progress is None, "it isn't starting"
        look = await probed_until(launcher, lambda look: look.progress.log_size)
        assert look.progress.rss > 0
        await killed(launcher, started)

    async def test_progress_is_seldom_looked_for(self, launcher, monkeypatch):
        monkeypatch.setattr(local, "PROGRESS_INTERVAL_S", 3600.0)
        started = await start(launcher, model("--no-listen"))
        assert (await launcher.probe(A, LIMIT_S, starting=True)).progress is None
        await killed(launcher, started)


class TestStop:
    """Asking is one thing, killing another; the whole tree goes."""

    async def test_asked(self, launcher):
        started = await start(launcher, model())
        await probed_until(launcher, lambda look: look.ready)
        await launcher.stop(A, kill=False)
        await gone(started)
        assert not started.exited.result().killed

    async def test_ignored_until_killed(self, launcher):
        started = await start(launcher, model("--ignore-term", "--fork", "--daemonize"))
        await probed_until(launcher, lambda look: look.ready)
        await launcher.stop(A, kill=False)
        assert (await launcher.probe(A, LIMIT_S)).ready
        await launcher.stop(A, kill=True)
        assert survivors(launcher.instance) == {}
        await gone(started)
        assert started.exited.result().killed

    async def test_its_leader_ends_first(self, launcher):
        started = await start(launcher, model("--no-listen", "--daemonize", "--leader-exits-after", "0"))
        async with asyncio.timeout(LIMIT_S):
            await started.main_ended.wait()
        await killed(launcher, started)


class TestLogPath:
    """Each model has a log file of its own, whatever its name."""

    def test_names(self, launcher):
        names = ["plain-1.0_x", "a/b", "a_b", "..", ".hidden", "ä" * 300]
        paths = [launcher.log_path(ModelId(name)) for name in names]
        assert paths[0] == launcher.log_dir / "plain-1.0_x.log"
        assert {path.parent for path in paths} == {launcher.log_dir}
        assert len({path.name for path in paths}) == len(names)
        assert all(len(path.name) < 120 and not path.name.startswith(".") for path in paths)
