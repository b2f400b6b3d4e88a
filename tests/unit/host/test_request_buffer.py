"""Buffers of requests' bodies: counted once, released once, and on disk while the requests wait."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from pathlib import Path

import pytest
import structlog

from supervisor.errors import UnavailableError, UpstreamError
from supervisor.host.store import request_buffer
from supervisor.host.store.request_buffer import ALWAYS_TAKEN, SPILL_ABOVE, BodyBudget, Gathered, RequestBuffer
from tests.support.wire import open_fds, until

LARGE = SPILL_ABOVE + 700_000


@pytest.fixture
def budget(tmp_path, monkeypatch):
    monkeypatch.setattr(request_buffer, "SPILL_AFTER_S", 0.01)
    made = BodyBudget()
    made.configure(limit=10 * LARGE, disk_limit=10 * LARGE, folder=tmp_path)
    yield made
    made.writer.shutdown()
    assert (made.used, made.disk_used) == (0, 0)


def held(budget: BodyBudget, data: bytes) -> RequestBuffer:
    made = RequestBuffer(budget)
    made.grow(len(data))
    made.keep(data)
    return made


async def whole(body: RequestBuffer) -> bytes:
    return b"".join([bytes(piece) async for piece in body.pieces()])


class TestBudget:
    """All bodies together take no more than the budget, and each is counted until it is released."""

    def test_refuses_what_is_too_much(self, budget):
        first = held(budget, bytes(9 * LARGE))
        second = RequestBuffer(budget)
        with pytest.raises(UnavailableError) as refused:
            second.expect(2 * LARGE)
        assert refused.value.code == "busy"
        assert refused.value.retry_after_s
        second.grow(LARGE)
        with pytest.raises(UnavailableError):
            second.grow(LARGE + 1)
        first.release()
        second.grow(LARGE + 1)
        assert budget.used == LARGE + 1
        second.release()

    def test_a_short_question_is_never_refused(self, budget):
        first = held(budget, bytes(10 * LARGE))
        second = held(budget, bytes(ALWAYS_TAKEN))
        assert budget.used == 10 * LARGE
        first.release()
        second.release()

    def test_counts_what_is_sent_and_not_what_came(self, budget):
        body = RequestBuffer(budget)
        body.grow(LARGE)
        body.keep(bytes(LARGE + 30))
        assert budget.used == LARGE + 30
        body.keep(b"small")
        assert budget.used == 0
        body.keep(bytes(LARGE))
        body.release()
        body.release()
        assert budget.used == 0


class TestSpilling:
    """A large body that waits goes to disk and comes back as it was."""

    async def test_comes_back(self, budget, tmp_path):
        data = random.Random(1).randbytes(LARGE)
        body = held(budget, data)
        body.wait()
        await until(lambda: budget.used == 0)
        assert budget.disk_used == LARGE
        assert not list(tmp_path.iterdir()), "nobody finds it"
        body.run()
        assert await whole(body) == data
        assert await whole(body) == data, "it can be sent again"
        body.release()

    async def test_a_small_one_and_one_that_is_served_at_once_stay(self, budget):
        small, quick = held(budget, bytes(1000)), held(budget, bytes(LARGE))
        assert not small.may_spill
        assert quick.may_spill
        quick.wait()
        quick.run()
        await asyncio.sleep(0.05)
        assert (budget.used, budget.disk_used) == (LARGE, 0)
        small.release()
        quick.release()

    async def test_one_whose_request_ends_meanwhile(self, budget):
        before = open_fds()
        bodies = [held(budget, bytes(LARGE)) for _ in range(8)]
        for body in bodies:
            body.wait()
        await until(lambda: budget.disk_used > 0)
        for body in bodies[::2]:
            body.run()
        for body in bodies:
            body.release()
        assert (budget.used, budget.disk_used) == (0, 0)
        await until(lambda: not budget.spilling and open_fds() <= before)

    async def test_waits_again_while_it_is_written(self, budget):
        body = held(budget, bytes(LARGE))
        for _ in range(20):
            body.wait()
            await asyncio.sleep(random.Random().uniform(0.0, 0.03))
            body.run()
        body.wait()
        await until(lambda: budget.used == 0 and not budget.spilling)
        assert budget.disk_used == LARGE
        body.release()

    async def test_no_more_than_the_disk_may_take(self, budget):
        budget.disk_limit = LARGE
        bodies = [held(budget, bytes(LARGE)) for _ in range(3)]
        for body in bodies:
            body.wait()
        await until(lambda: budget.used == 2 * LARGE and not budget.spilling)
        for body in bodies:
            body.release()

    async def test_a_full_disk_is_told_once_and_keeps_it_in_memory(self, budget, monkeypatch):
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        real = os.write
        data = random.Random(2).randbytes(LARGE)
        bodies = [held(budget, data) for _ in range(3)]
        with structlog.testing.capture_logs() as logged:
            monkeypatch.setattr(request_buffer.os, "write", full)
            for body in bodies[:2]:
                body.wait()
            await until(lambda: len(logged) == 1)
            await until(lambda: not budget.spilling)
            assert budget.used == 3 * LARGE
            monkeypatch.setattr(request_buffer.os, "write", real)
            bodies[2].wait()
            await until(lambda: budget.used == 2 * LARGE)
        assert [line["event"] for line in logged] == ["bodies.kept_in_memory", "bodies.spilled_again"]
        assert await whole(bodies[0]) == data
        for body in bodies:
            body.release()

    async def test_where_the_file_system_has_no_nameless_files(self, budget, monkeypatch, tmp_path):
        real = os.open

        def refusing(path: Path, flags: int, *more: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no such thing")
            return real(path, flags, *more)

        monkeypatch.setattr(request_buffer.os, "open", refusing)
        body = held(budget, bytes(LARGE))
        body.wait()
        await until(lambda: budget.used == 0)
        assert not list(tmp_path.iterdir())
        body.release()


class TestGathered:
    """Buffered answers: each is bounded, and all together count as bodies."""

    async def test_one(self, budget):
        answer = Gathered(budget, 2 * LARGE)
        answer.grow(2 * LARGE)
        with pytest.raises(UpstreamError, match=r"limits\.body_mib") as told:
            answer.grow(2 * LARGE + 1)
        assert (told.value.code, budget.used) == ("upstream_too_large", 2 * LARGE)
        answer.release()

    async def test_all(self, budget):
        answers = [Gathered(budget, 6 * LARGE) for _ in range(2)]
        answers[0].grow(6 * LARGE)
        with pytest.raises(UnavailableError) as told:
            answers[1].grow(6 * LARGE)
        assert told.value.code == "busy"
        answers[0].release()
        answers[1].grow(6 * LARGE)
        answers[1].release()
