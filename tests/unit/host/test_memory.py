from __future__ import annotations

import asyncio
import threading
import time

import pytest
from structlog.testing import capture_logs

from runtimes.device_kind import CUDA
from supervisor.core.events import DeviceSample, WorkerSample
from supervisor.core.types import DeviceId, Generation, ModelId
from supervisor.host.memory.memory import CompositeSampler, DeviceInfo, HolderPids, Reading, ThreadedSampler, in_thread

X = DeviceId("x")
A = (ModelId("a"), Generation(1))
HOLDERS = {A: HolderPids((X,), (), loading=False)}


class ScriptedReader:
    """A device whose reading blocks while `open` is cleared and fails while `error` is set."""

    def __init__(self, device=X):
        self.info = DeviceInfo(device, CUDA, "scripted", 1000, 10)
        self.open = threading.Event()
        self.open.set()
        self.error = None
        self.free_mib = 900
        self.calls = 0

    def devices(self):
        return (self.info,)

    def read(self, holders):
        self.calls += 1
        self.open.wait()
        if self.error:
            raise self.error
        workers = tuple(
            WorkerSample(*key, self.info.id, 100) for key, h in holders.items() if self.info.id in h.devices
        )
        return Reading((DeviceSample(self.info.id, self.free_mib, outside_mib=0),), workers, {self.info.id: 0.5})


@pytest.fixture
def reader():
    scripted = ScriptedReader()
    yield scripted
    scripted.open.set()


class TestThreadedSampler:
    """A reading never blocks the loop, never piles up, and never fails: it gets stale."""

    async def test_how_busy_is_known_while_it_can_be_read(self, reader):
        sampler = CompositeSampler([ThreadedSampler(reader, timeout_s=30)])
        assert sampler.busy() == {}
        await sampler.sample(HOLDERS)
        assert sampler.busy() == {X: 0.5}
        reader.error = OSError("gone")
        await sampler.sample(HOLDERS)
        assert sampler.busy() == {}

    async def test_a_reading_says_when_it_began(self, reader):
        before = time.monotonic()
        sampled = await ThreadedSampler(reader, timeout_s=30).sample(HOLDERS)
        assert sampled.devices == (DeviceSample(X, 900, outside_mib=0),)
        assert sampled.workers == (WorkerSample(*A, X, 100),)
        assert before <= sampled.taken_at <= time.monotonic()

    async def test_one_that_hangs_gives_the_last_values_stale_and_the_loop_runs_on(self, reader):
        sampler = ThreadedSampler(reader, timeout_s=0.2)
        while (fresh := await sampler.sample(HOLDERS)).devices[0].stale:  # on a busy machine
            pass
        reader.open.clear()
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        for _ in range(10):  # a loop that doesn't run on makes a few turns
            stale = await sampler.sample(HOLDERS)
            if turns > 100:
                break
        counting.cancel()
        assert turns > 100
        assert stale.devices == (DeviceSample(X, 900, stale=True, outside_mib=0),)
        assert (stale.workers, stale.taken_at) == (fresh.workers, fresh.taken_at)

    @pytest.mark.parametrize("free_mib", [-1, 1.5, "900"])
    async def test_what_no_device_can_have_free_is_not_believed(self, reader, free_mib):
        sampler = ThreadedSampler(reader, timeout_s=30)
        await sampler.sample(HOLDERS)
        reader.free_mib = free_mib
        assert (await sampler.sample(HOLDERS)).devices == (DeviceSample(X, 900, stale=True, outside_mib=0),)

    async def test_calls_do_not_pile_up_behind_one_that_hangs(self, reader):
        reader.open.clear()
        before = set(threading.enumerate())
        sampler = ThreadedSampler(reader, timeout_s=0.05)
        results = [await sampler.sample(HOLDERS) for _ in range(5)]
        results += await asyncio.gather(*(sampler.sample(HOLDERS) for _ in range(20)))
        assert all(device.stale for sampled in results for device in sampled.devices)
        while not reader.calls:
            await asyncio.sleep(0)
        assert (reader.calls, len(set(threading.enumerate()) - before)) == (1, 1)

        reader.open.set()
        while (await sampler.sample({})).devices[0].stale:
            pass
        assert reader.calls <= 2

    async def test_never_read_is_nothing_free(self, reader):
        reader.open.clear()
        sampled = await ThreadedSampler(reader, timeout_s=0.05).sample(HOLDERS)
        assert sampled.devices == (DeviceSample(X, 0, stale=True),)
        assert sampled.workers == (WorkerSample(*A, X, None),)

    async def test_an_error_of_the_system_is_stale_too(self, reader):
        sampler = ThreadedSampler(reader, timeout_s=30)
        await sampler.sample(HOLDERS)
        reader.error = OSError(24, "Too many open files")
        assert (await sampler.sample(HOLDERS)).devices[0].stale
        reader.error = None
        assert not (await sampler.sample(HOLDERS)).devices[0].stale

    async def test_a_bug_is_not_hidden(self, reader):
        reader.error = KeyError("bug")
        with capture_logs() as logs:
            sampled = await ThreadedSampler(reader, timeout_s=30).sample(HOLDERS)
        assert sampled.devices == (DeviceSample(X, 0, stale=True),), "nothing is known, and nothing old believed"
        assert [entry["exc_info"] for entry in logs] == [reader.error]

    async def test_cancelling_a_call_leaves_the_reading_to_the_next(self, reader):
        reader.open.clear()
        sampler = ThreadedSampler(reader, timeout_s=30)
        call = asyncio.create_task(sampler.sample(HOLDERS))
        while not reader.calls:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        reader.open.set()
        assert not (await sampler.sample(HOLDERS)).devices[0].stale
        assert reader.calls == 1


class TestCompositeSampler:
    """Several samplers act as one; a sampler that hangs makes only its own devices stale."""

    async def test_it_joins_them(self, reader):
        other = ScriptedReader(DeviceId("y"))
        reader.open.clear()
        slow, quick = ThreadedSampler(reader, timeout_s=0.05), ThreadedSampler(other, timeout_s=30)
        composite = CompositeSampler([slow, quick])
        sampled = await composite.sample(HOLDERS)
        assert [device.id for device in composite.devices()] == ["x", "y"]
        assert [device.stale for device in sampled.devices] == [True, False]
        assert [worker.used_mib for worker in sampled.workers] == [None]


def test_a_thread_that_outlives_its_loop_is_no_trouble(recwarn):
    release, done = threading.Event(), threading.Event()

    def work():
        release.wait()
        done.set()

    async def main():
        in_thread(work)

    asyncio.run(main())
    release.set()
    assert done.wait(10)
    assert not [w for w in recwarn if "Thread" in str(w.category)]
