"""A worker's life on a launcher that has no processes: what the worker does follows from what it is told alone."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import replace

import pytest

from runtimes.base import ModelUnusableError, RuntimeNotInstalledError
from runtimes.command.adapter import CommandAdapter
from runtimes.model_config import ModelConfig
from supervisor.catalog import CatalogModel
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.catalog.sections.sections import LimitsConfig
from supervisor.core.events import Event, WorkerReady, WorkerUnkillable, WorkerUnready
from supervisor.core.types import Crash, CrashClass, DeviceId, Generation, ModelId
from supervisor.errors import UnavailableError
from supervisor.fleet import worker
from supervisor.fleet.worker import Worker
from supervisor.host.memory.memory import HolderPids
from supervisor.host.process.ports import Ownership
from supervisor.host.process.process import ProcessExit, SpawnError, UnkillableError
from supervisor.host.process.progress import Progress
from supervisor.host.upstream.upstream import UpstreamPool
from supervisor.schema.request import Step
from tests.support.limits import LIMIT_S
from tests.support.scripted_launcher import PIDS, PORT, STRANGE, ScriptedLauncher, look

KEY = (ModelId("a"), Generation(3))
GPU = DeviceId("gpu0")
FOR_EVER_S = 80_000.0


class Bench:
    """One worker and its launcher."""

    def __init__(self, launcher: ScriptedLauncher) -> None:
        self.launcher = launcher
        self.events: list[Event] = []
        self.limits = LimitsConfig(readiness_interval_s=0.001, liveness_interval_s=FOR_EVER_S)
        self.worker: Worker
        self.life: asyncio.Task[Crash | None]

    def start(self, **config: object) -> None:
        config = ModelConfig(**{"runtime": "scripted", "grace_s": FOR_EVER_S, **config})
        model = CatalogModel(KEY[0], config, CommandAdapter(), Rewrite())
        self.worker = Worker(KEY, model, (GPU,), self.launcher, self.limits, self.events.append)
        self.life = asyncio.create_task(self.worker.run())

    async def start_ready(self, **config: object) -> None:
        self.launcher.look = look()
        self.start(**config)
        await self.until(lambda: self.events)
        assert self.events == [WorkerReady(*KEY)]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def probed(self, times: int = 3) -> None:
        """Until it was probed some times more."""
        before = self.launcher.probes
        await self.until(lambda: self.launcher.probes >= before + times)

    async def end(self) -> Crash | None:
        async with asyncio.timeout(LIMIT_S):
            return await self.life


@pytest.fixture
async def bench(tmp_path):
    bench = Bench(ScriptedLauncher(tmp_path))
    yield bench
    assert bench.life.done()
    assert (bench.launcher.held, bench.launcher.list()) == (set(), {})


class TestWholeLife:
    """It is placed, started, probed, watched and stopped, all by its launcher."""

    async def test_from_start_to_end(self, bench):
        bench.start()
        await bench.probed()
        assert bench.worker.holder() == HolderPids((GPU,), (PIDS.shim_pid,), loading=True)
        assert (bench.events, bench.worker.upstream) == ([], None)
        bench.launcher.look = look()
        await bench.until(lambda: bench.events == [WorkerReady(*KEY)])
        assert bench.worker.upstream is not None
        assert bench.worker.holder() == HolderPids((GPU,), (PIDS.shim_pid,), loading=False)
        facts = bench.worker.facts()
        assert (facts.pid, facts.shim_pid, facts.port) == (PIDS.pid, PIDS.shim_pid, PORT)
        assert facts.log == str(bench.launcher.log_path(KEY[0]))
        bench.worker.stop(force=False)
        assert await bench.end() is None
        assert bench.launcher.told == ["place", "start", "ask"]
        assert bench.events == [WorkerReady(*KEY)]
        assert bench.worker.holder() == HolderPids((GPU,), (), loading=True)

    async def test_its_processes_say_nothing_of_what_runs_elsewhere(self, bench):
        """A container's memory would be learned as that of the engine's client."""
        bench.launcher.kill_argv = ("kill",)
        bench.start()
        await bench.probed()
        assert bench.worker.holder() == HolderPids((GPU,), (), loading=True)
        bench.worker.stop(force=True)
        assert await bench.end() is None

    async def test_stopped_before_it_is_started(self, bench):
        bench.start()
        bench.worker.stop(force=True)
        assert await bench.end() is None
        assert bench.launcher.told == ["place", "start", "kill"]


class TestNotStarted:
    """Each refusal is a crash of its class, and nothing is held any more."""

    async def test_no_place(self, bench):
        bench.launcher.refuse_place = UnavailableError("no free port", code="no_free_port")
        bench.start()
        assert await bench.end() == Crash(CrashClass.PORT, "no free port")
        assert bench.launcher.told == ["place"]

    @pytest.mark.parametrize(
        ("error", "crash"),
        [
            (
                RuntimeNotInstalledError("r", "not there.", "make it"),
                Crash(CrashClass.NOT_INSTALLED, "not there. Remedy: make it"),
            ),
            (ModelUnusableError("no file"), Crash(CrashClass.UNUSABLE, "no file")),
            (SpawnError("no program", CrashClass.BAD_ARGUMENTS), Crash(CrashClass.BAD_ARGUMENTS, "no program")),
            (SpawnError("no processes"), Crash(CrashClass.HOST, "no processes")),
            (OSError("odd"), Crash(CrashClass.UNKNOWN, "can't be started now: odd")),
            (
                OSError(errno.EMFILE, "none"),
                Crash(CrashClass.HOST, f"can't be started now: [Errno {errno.EMFILE}] none"),
            ),
        ],
    )
    async def test_no_start(self, bench, error, crash):
        bench.launcher.refuse_start = error
        bench.start()
        assert await bench.end() == crash


class TestOwner:
    """Requests go to nobody but the worker itself."""

    async def test_a_foreign_owner_ends_the_start(self, bench):
        bench.launcher.look = look(owner=STRANGE)
        bench.start()
        crash = await bench.end()
        assert (crash.kind, crash.summary) == (CrashClass.PORT, f"port {PORT}: {STRANGE}")
        assert bench.launcher.told == ["place", "start", "kill"], "it would make no use of its grace"
        assert (bench.events, bench.worker.upstream) == ([], None)

    async def test_a_foreign_owner_later(self, bench):
        await bench.start_ready()
        bench.launcher.look = look(owner=STRANGE)
        crash = await bench.end()
        assert crash.kind is CrashClass.PORT
        assert bench.events == [WorkerReady(*KEY), WorkerUnready(*KEY, crash.summary)]

    async def test_its_stop_program_is_run_all_the_same(self, bench):
        bench.launcher.stop_argv = ("stop",)
        bench.launcher.look = look(owner=STRANGE)
        bench.start()
        assert (await bench.end()).kind is CrashClass.PORT
        assert bench.launcher.told == ["place", "start", "ask"]

    @pytest.mark.parametrize("owner", [None, Ownership.NO_LISTENER])
    async def test_not_known_yet(self, bench, owner):
        bench.launcher.look = look(owner=owner)
        bench.start()
        await bench.probed()
        assert bench.events == []
        bench.launcher.look = look()
        await bench.until(lambda: bench.events == [WorkerReady(*KEY)])
        bench.launcher.look = look(owner=None)
        await bench.probed()
        bench.worker.stop(force=False)
        assert await bench.end() is None


class TestWatched:
    """It is taken out of service when it doesn't answer, and replaced when that lasts or can't be told."""

    async def test_unready_and_back(self, bench):
        await bench.start_ready()
        bench.launcher.look = look(ok=False)
        await bench.until(lambda: len(bench.events) == 2)
        bench.launcher.look = look()
        await bench.until(lambda: len(bench.events) == 3)
        assert bench.events[1:] == [WorkerUnready(*KEY, "HTTP 503"), WorkerReady(*KEY)]
        bench.worker.stop(force=False)
        assert await bench.end() is None

    async def test_unresponsive(self, bench):
        bench.limits = LimitsConfig(readiness_interval_s=0.001, liveness_interval_s=0.001)
        await bench.start_ready()
        bench.launcher.look = look(ok=False)
        crash = await bench.end()
        assert crash.kind is CrashClass.UNRESPONSIVE
        assert bench.launcher.told[-1] == "kill"

    async def test_no_progress(self, bench):
        bench.launcher.look = look(ok=False, progress=Progress(1, 1, 1))
        bench.start(startup_timeout_s=0.01)
        crash = await bench.end()
        assert crash.kind is CrashClass.START_TIMEOUT
        assert crash.operator_summary.endswith("its health check says: HTTP 503")
        assert crash.summary.endswith("; it answers /health with HTTP 503"), "what it says itself is for operators"

    async def test_no_progress_and_a_program_that_listens_on_another_port(self, bench):
        seen = replace(look(ok=False, progress=Progress(1, 1, 1)), elsewhere=(8188,))
        bench.launcher.look = replace(seen, health=replace(seen.health, status=None))
        bench.start(startup_timeout_s=0.01)
        crash = await bench.end()
        assert "it listens on port 8188 instead of the one that llmux gave it" in crash.summary

    async def test_a_mistake_in_watching(self, bench):
        await bench.start_ready()
        bench.launcher.look = ValueError("a mistake")
        crash = await bench.end()
        assert (crash.kind, "a mistake" in crash.summary) == (CrashClass.UNKNOWN, True)
        assert bench.launcher.told[-1] == "kill"


class TestEnd:
    """Its task ends when nothing of it is left, however long that takes."""

    async def test_grace_is_over(self, bench):
        bench.launcher.ignores_stop = True
        await bench.start_ready(grace_s=0.01)
        bench.worker.stop(force=False)
        assert await bench.end() is None
        assert bench.launcher.told == ["place", "start", "ask", "kill"]

    async def test_no_grace(self, bench):
        await bench.start_ready(grace_s=0)
        bench.worker.stop(force=False)
        assert await bench.end() is None
        assert bench.launcher.told == ["place", "start", "kill"]

    async def test_force_cuts_the_grace_short(self, bench):
        bench.launcher.ignores_stop = True
        await bench.start_ready()
        bench.worker.stop(force=False)
        await bench.until(lambda: bench.launcher.told[-1] == "ask")
        bench.worker.stop(force=True)
        bench.worker.stop(force=True)
        assert await bench.end() is None
        assert bench.launcher.told == ["place", "start", "ask", "kill"]

    async def test_unkillable(self, bench):
        bench.launcher.refuse_kill = UnkillableError("still there", (70, 71))
        await bench.start_ready()
        bench.worker.stop(force=True)
        await bench.until(lambda: len(bench.events) == 2)
        assert bench.events[-1] == WorkerUnkillable(*KEY, "still there")
        assert bench.worker.holder().roots == (PIDS.shim_pid,), "it holds its memory"
        assert not bench.life.done()
        bench.worker.stop(force=True)
        await bench.until(lambda: bench.launcher.told.count("kill") == 2)
        assert len(bench.events) == 2, "said once"
        bench.launcher.end(KEY, ProcessExit(-9))
        assert await bench.end() is None

    async def test_by_itself(self, bench):
        await bench.start_ready()
        bench.launcher.log_path(KEY[0]).write_text("loading\nCUDA error: out of memory\n")
        bench.launcher.end_leader(KEY)
        await bench.until(lambda: len(bench.events) == 2)
        assert bench.events[-1] == WorkerUnready(*KEY, "it ended")
        assert not bench.life.done(), "something of it is left"
        bench.launcher.end(KEY, ProcessExit(1))
        crash = await bench.end()
        assert (crash.kind, crash.exit_code) == (CrashClass.OUT_OF_MEMORY, 1)
        assert crash.log_tail == ("loading", "CUDA error: out of memory")
        assert len(bench.events) == 2

    async def test_by_itself_while_it_is_stopped(self, bench):
        bench.launcher.ignores_stop = True
        await bench.start_ready()
        bench.worker.stop(force=False)
        await bench.until(lambda: bench.launcher.told[-1] == "ask")
        bench.launcher.end(KEY, ProcessExit(0))
        assert await bench.end() is None
        assert "kill" not in bench.launcher.told


async def test_what_makes_steps_is_not_silent(bench, monkeypatch):
    """A picture may take longer than a worker may be silent, as long as its steps go on."""
    asked, steps = 0, {"a": Step(1, 4)}

    async def told(_upstream: object, path: str) -> dict[str, Step]:
        nonlocal asked
        asked += path == "/progress"
        return steps

    async def asked_again() -> None:
        before = asked
        await bench.until(lambda: asked > before + 2)

    monkeypatch.setattr(worker, "steps_of", told)
    bench.launcher.progress = "/progress"
    bench.limits = bench.limits.model_copy(update={"first_byte_s": 0.001})
    await bench.start_ready()
    await bench.probed()
    assert asked == 0  # nothing is under way
    monkeypatch.setattr(UpstreamPool, "is_busy", True)
    await asked_again()
    first = bench.worker.upstream.worked_at
    await asked_again()
    steps = {}  # it didn't answer in time
    await asked_again()
    steps = {"a": Step(1, 4)}
    await asked_again()
    assert bench.worker.upstream.worked_at == first > 0  # the same step
    steps = {"a": Step(2, 4)}
    await asked_again()
    assert bench.worker.upstream.worked_at > first
    bench.worker.stop(force=True)
    assert await bench.end() is None
