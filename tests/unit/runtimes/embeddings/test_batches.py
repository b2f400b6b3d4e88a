"""How requests are batched."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.embeddings.worker.batches import Batches
from runtimes.sdk.errors import WorkerError


class TestBatches:
    """Whatever comes together and in whatever order: each gets its own results, and no batch is too large."""

    @given(
        requests=st.lists(st.lists(st.integers(1, 60), max_size=12), max_size=8),
        left=st.sets(st.integers(0, 7)),
        most=st.integers(1, 100),
    )
    def test_everybody_gets_their_own(self, requests, left, most):
        batches: list[list[tuple[int, int, int]]] = []

        async def compute(batch):
            batches.append(batch)
            await asyncio.sleep(0)
            return [item[:2] for item in batch]

        async def run():
            subject = Batches(compute, lambda item: item[2], most, 100)
            tasks = [
                asyncio.create_task(subject.run([(number, place, size) for place, size in enumerate(sizes)]))
                for number, sizes in enumerate(requests)
            ]
            await asyncio.sleep(0)
            for number in left & set(range(len(tasks))):
                tasks[number].cancel()
            for number, task in enumerate(tasks):
                try:
                    assert await task == [(number, place) for place in range(len(requests[number]))]
                except asyncio.CancelledError:
                    assert number in left
            assert not subject._waiting

        asyncio.run(run())
        for batch in batches:
            assert len(batch) == 1 or max(item[2] for item in batch) * len(batch) <= most

    async def test_one_that_leaves_is_told_from_others_by_identity(self):
        """Tensors can't be told apart by comparison."""

        class Tensor:
            __hash__ = None

            def __eq__(self, other):
                raise RuntimeError("its truth value is ambiguous")

        computing = asyncio.Event()

        async def compute(batch):
            await computing.wait()
            return [1 for _ in batch]

        subject = Batches(compute, lambda _item: 1, 1, 100)
        first, stays, leaves = (asyncio.create_task(subject.run([Tensor()] * count)) for count in (1, 2, 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        computing.set()
        assert (await first, await stays) == ([1], [1, 1])

    async def test_a_small_request_overtakes_a_large_one(self):
        order: list[str] = []

        async def compute(batch):
            await asyncio.sleep(0)
            return batch

        async def ask(subject, name, count):
            await subject.run([name] * count)
            order.append(name)

        subject = Batches(compute, lambda item: 1, 4, 10)
        await asyncio.gather(ask(subject, "large", 100), ask(subject, "small", 2))
        assert order == ["small", "large"]

    async def test_a_failure_reaches_those_it_concerns(self):
        async def compute(batch):
            if "bad" in batch:
                raise ValueError("no")
            return batch

        subject = Batches(compute, lambda item: 1, 1, 10)
        results = await asyncio.gather(subject.run(["a", "b"]), subject.run(["bad", "c"]), return_exceptions=True)
        assert results[0] == ["a", "b"]
        assert isinstance(results[1], ValueError)

    async def test_full(self):
        gate = asyncio.Event()

        async def compute(batch):
            await gate.wait()
            return batch

        subject = Batches(compute, lambda item: 1, 1, 1)
        running = []
        for number in range(2):  # one is computed, one waits
            running.append(asyncio.create_task(subject.run([number])))
            for _ in range(3):
                await asyncio.sleep(0)
        with pytest.raises(WorkerError, match="waiting already"):
            await subject.run([3])
        gate.set()
        assert await asyncio.gather(*running) == [[0], [1]]
