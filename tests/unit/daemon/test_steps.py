"""Steps of requests: asked of the workers that tell them, once each, and of those that don't answer nothing is known."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from supervisor.daemon.observability import steps
from supervisor.daemon.observability.steps import Steps
from supervisor.dialects.openai import OPENAI
from supervisor.engine.events import Hub
from supervisor.errors import UnreachableError
from supervisor.gateway.request import Request
from supervisor.schema.request import Step
from tests.support.cases import cases


class Worker:
    """Tells what it is given, and counts how often it was asked. An exception is raised."""

    def __init__(self, told: object) -> None:
        self.told, self.asked, self.status = told, 0, 200

    async def request(self, method: str, path: bytes, headers: object) -> Worker:
        assert (method, path) == ("GET", b"/progress")
        self.asked += 1
        if isinstance(self.told, Exception):
            raise self.told
        return self

    async def read(self, limit: int) -> bytes:
        return (self.told if isinstance(self.told, bytes) else json.dumps(self.told).encode())[:limit]

    def close(self) -> None:
        pass


def told(**by_id: tuple[int, int]) -> dict[str, object]:
    return {"requests": {name: {"step": step, "steps": count} for name, (step, count) in by_id.items()}}


def request(name: str, generation: int | None = 1) -> Request:
    context = Request(name.encode(), 0.0, OPENAI)
    context.name, context.ticket_id = "painter", name
    context.attempt.ticket = SimpleNamespace(model="painter", generation=generation)
    return context


def daemon_of(worker: Worker | None, *contexts: Request) -> Any:
    source = None if worker is None else (worker, "/progress")
    return SimpleNamespace(
        hub=Hub(),
        fleet=SimpleNamespace(steps_source=lambda _model, _generation: source),
        requests=SimpleNamespace(running=lambda: list(contexts)),
    )


async def test_a_worker_is_asked_once_for_all_its_requests():
    worker, one, other = Worker(told(a=(1, 4), b=(2, 4))), request("a"), request("b")
    looking = Steps(daemon_of(worker))
    assert await looking.look([one, other]) == [one, other]
    assert (one.attempt.step, other.attempt.step, worker.asked) == (Step(1, 4), Step(2, 4), 1)
    assert await looking.look([one, other]) == []  # no news


@cases(
    "worker",
    [None, Worker(b"nothing"), Worker({"requests": 1}), Worker(told(c=(1, 2))), Worker(UnreachableError("gone"))],
    ids=["tells none", "no JSON", "another form", "of others", "unreachable"],
)
async def test_of_others_nothing_is_known(worker):
    one = request("a")
    assert await Steps(daemon_of(worker)).look([one, request("b", generation=None)]) == []
    assert one.attempt.step is None


async def test_they_are_told_while_somebody_listens(monkeypatch):
    monkeypatch.setattr(steps, "INTERVAL_S", 0.0)
    worker, one = Worker(told(a=(1, 4))), request("a")
    daemon = daemon_of(worker, one)
    looking = Steps(daemon)
    with daemon.hub.subscribe(["progress"]) as subscription:
        looking.watch()
        looking.watch()  # no second one
        (first,) = await subscription.next(5)
        worker.told = told(a=(2, 4))
        (second,) = await subscription.next(5)
    assert first.data == {"id": "a", "request_id": "a", "model": "painter", "step": 1, "steps": 4}
    assert second.data["step"] == 2
    watching = looking._watching
    await asyncio.wait_for(watching, 5)  # nobody listens any more


async def test_after_the_end_of_a_request_no_step_of_it_is_told(monkeypatch):
    monkeypatch.setattr(steps, "INTERVAL_S", 0.0)
    worker, one, other = Worker(told(a=(1, 4), b=(1, 4))), request("a"), request("b")
    daemon = daemon_of(worker)
    running = [[one, other], [other]]  # before the worker is asked, and after
    daemon.requests.running = lambda: running.pop(0) if running else []
    with daemon.hub.subscribe(["progress"]) as subscription:
        Steps(daemon).watch()
        assert [event.data["id"] for event in await subscription.next(5)] == ["b"]
