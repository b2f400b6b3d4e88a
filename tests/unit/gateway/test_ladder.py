"""A request's way down its task's ladder, with an engine that only says who is ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from supervisor.catalog import Route, Task
from supervisor.catalog.sections.tasks import TaskConfig
from supervisor.core.types import WorkerState
from supervisor.errors import InvalidRequestError, UnavailableError, UnreachableError, UpstreamError
from supervisor.gateway.route.ladder import FALLS_BACK, Ladder
from tests.support.cases import cases


@dataclass
class Engine:
    ready: set[str] = field(default_factory=set)

    def model(self, name):
        return SimpleNamespace(state=WorkerState.READY if name in self.ready else WorkerState.STOPPED, answering=True)


def ladder(*names, ready=(), remote=(), unfit=(), pin=False, cloud=True):
    candidates = tuple(
        Route(name, SimpleNamespace(id=name, adapter=SimpleNamespace(remote=name in remote)), None) for name in names
    )
    config = TaskConfig(candidates=tuple({"model": name} for name in names), pin_primary=pin)
    task = Task("task:t", candidates[0].model, None, config=config, candidates=candidates)

    async def build(route):
        if route.name in unfit:
            raise InvalidRequestError(f"{route.name} takes no pictures.", code="modality_unsupported")
        return route.name

    return Ladder(task, Engine(set(ready)), build, allow_cloud_fallback=cloud)


def failed(code="load_failed"):
    return UnavailableError("It failed.", code=code)


class TestLadder:
    """Who is asked, in which order, and what the client is told."""

    async def test_down_to_the_end(self):
        way = ladder("a", "b", "c")
        assert await way.first() == "a"
        assert way.headers == [(b"x-llmux-model", b"a"), (b"x-llmux-reason", b"primary")]
        assert await way.after(failed()) == "b"
        assert way.headers == [(b"x-llmux-model", b"b"), (b"x-llmux-reason", b"fallback after load_failed of a")]
        assert await way.after(failed("queue_full")) == "c"
        last = failed("model_failed")
        assert await way.after(last) is None
        assert last.detail == ("a: load_failed: It failed.", "b: queue_full: It failed.")

    async def test_a_warm_one_first_and_the_primary_after_it(self):
        way = ladder("a", "b", ready={"b"})
        assert await way.first() == "b"
        assert way.headers[1] == (b"x-llmux-reason", b"warm")
        assert await way.after(failed("queue_timeout")) == "a"

    async def test_who_cannot_get_the_request_is_passed_over(self):
        way = ladder("a", "b", "c", unfit={"a", "b"})
        assert await way.first() == "c"
        assert way.headers[1] == (b"x-llmux-reason", b"fallback after modality_unsupported of b")

    async def test_nobody_can_get_it(self):
        with pytest.raises(InvalidRequestError, match="b takes no pictures") as caught:
            await ladder("a", "b", unfit={"a", "b"}).first()
        assert caught.value.detail == ("a: modality_unsupported: a takes no pictures.",)

    async def test_the_guard(self):
        way = ladder("a", "far", "b", remote={"far"}, cloud=False)
        assert await way.first() == "a"
        assert await way.after(failed()) == "b"
        assert await ladder("far", "a", remote={"far"}, cloud=False).first() == "far"

    async def test_other_letters_in_a_name(self):
        way = ladder("größe")
        await way.first()
        assert way.headers[0] == (b"x-llmux-model", b"gr%C3%B6%C3%9Fe")

    @pytest.mark.parametrize(
        "error",
        [
            UnavailableError("", code="model_unloaded"),
            UnavailableError("", code="shutting_down"),
            UpstreamError("", code="upstream_broken"),
            InvalidRequestError("no such field"),
        ],
    )
    async def test_other_errors_are_final(self, error):
        way = ladder("a", "b")
        await way.first()
        assert await way.after(error) is None

    @cases("error", [UnreachableError("nobody listens"), *map(failed, sorted(FALLS_BACK))])
    async def test_these_are_not(self, error):
        way = ladder("a", "b")
        await way.first()
        assert await way.after(error) == "b"
