"""A job's request on its way through a scripted gateway: what is kept of it and of its answer counts, and goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from supervisor.catalog.sections.sections import LimitsConfig
from supervisor.errors import LlmuxError
from supervisor.gateway.disconnect import ResponseBrokenError
from supervisor.host.store.request_buffer import BodyBudget, RequestBuffer
from supervisor.host.store.response_store import ResponseStore
from supervisor.jobs.job import Inference, Response
from supervisor.server.jobs import send

MIB = 1 << 20
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


def job(make: Callable[..., Inference] = Inference) -> Inference:
    return make(id="job_1", created_at=0.0, endpoint="/v1/chat/completions", model="m")


class Scripted:
    """A daemon whose gateway takes the request and answers with so many MiB."""

    def __init__(self, mib: int, *, limit_mib: int = 1024) -> None:
        self.catalog = SimpleNamespace(limits=LimitsConfig())
        self.keyring = ()
        self.bodies = BodyBudget()
        self.bodies.limit = limit_mib * MIB
        self.gateway = self.routes = self
        self.responses = ResponseStore()
        self.used: list[int] = []
        self._mib = mib

    def serves(self, *_) -> bool:
        return True

    async def __call__(self, _scope, receive, respond, _context) -> None:
        await receive()
        await respond(START)
        try:
            for _ in range(self._mib):
                await respond({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
                self.used.append(self.bodies.used)
        except LlmuxError as error:
            raise ResponseBrokenError(error.message) from error


class TestAnswer:
    """It counts as bodies do until it is on disk."""

    async def test_it_counts_as_it_comes(self):
        daemon = Scripted(3)
        answer = await send(daemon, job(), b"{}")
        assert (len(answer.body), daemon.used, daemon.bodies.used) == (3 * MIB, [MIB, 2 * MIB, 3 * MIB], 3 * MIB)
        answer.buffer.release()
        assert daemon.bodies.used == 0

    async def test_where_others_take_all_it_is_sent_again(self):
        daemon = Scripted(3, limit_mib=4)
        others = RequestBuffer(daemon.bodies, b"")
        others.grow(2 * MIB)
        answer = await send(daemon, job(), b"{}")
        assert (answer.status, answer.error["code"], answer.retry_after_s > 0) == (503, "busy", True)
        assert daemon.bodies.used == 2 * MIB
        others.release()
        assert (await send(daemon, job(), b"{}")).status == 200

    async def test_one_that_never_fits_is_not_sent_again(self):
        daemon = Scripted(3, limit_mib=2)
        answer = await send(daemon, job(), b"{}")
        assert (answer.status, answer.retry_after_s, daemon.bodies.used) == (502, None, 0)
        assert "limits.body_mib" in answer.error["message"]

    async def test_of_a_kept_response_nothing_is_kept_here(self):
        daemon, one = Scripted(3), job(partial(Response, response="resp_1"))
        answer = await send(daemon, one, b"{}")
        assert (answer.status, answer.body, daemon.bodies.used) == (200, b"", 0)

    async def test_a_gateway_that_breaks_leaves_nothing(self):
        class Broken(Scripted):
            """Answers, and breaks all the same."""

            async def __call__(self, *arguments) -> None:
                await super().__call__(*arguments)
                raise RuntimeError

        daemon = Broken(3)
        with pytest.raises(RuntimeError):
            await send(daemon, job(), b"{}")
        assert daemon.bodies.used == 0


async def test_the_request_is_the_gateways_alone():
    class Tracked(bytes):
        """Says when it goes."""

        def __del__(self) -> None:
            gone.append(len(self))

    gone: list[int] = []

    class Taking(Scripted):
        """Takes the request, and lets go of it."""

        async def __call__(self, _scope, receive, respond, _context) -> None:
            await receive()
            assert gone == [3]
            await respond(START)

    assert (await send(Taking(0), job(), Tracked(b"{ }"))).status == 200
