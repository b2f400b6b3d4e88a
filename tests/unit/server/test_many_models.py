"""A thousand models: no view keeps the loop for long, and the feed looks only at what changed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from supervisor.core.events import Configured, PinRequested
from supervisor.core.types import ModelId
from supervisor.daemon import slices
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability import feed
from tests.support.application import ask, get, serving

MODELS = 1000


@pytest.fixture
async def served(tmp_path):
    async with serving(tmp_path, models=MODELS) as served:
        daemon = served.daemon
        engine = daemon.engine
        devices = tuple(device.spec for device in daemon.sampler.devices())
        engine.post(Configured(daemon.catalog.model_specs(), devices))
        yield served


@pytest.mark.parametrize(
    ("path", "most"),
    [
        (b"/v1/models", 10),
        (b"/v1/admin/models", 10),
        (b"/v1/admin/gpu-memory", 10),
        (b"/metrics", 100),
        (b"/api/tags", 10),
    ],
)
async def test_a_view_is_made_in_slices(served, monkeypatch, path, most):
    """So small ones here that each is of a few models: the loop turns between them, and nothing is lost."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    made = []

    async def watched(items):
        async for each in slices.slices(items):
            made.append(len(each))
            yield each

    monkeypatch.setattr("supervisor.dialects.listed.slices", watched)
    monkeypatch.setattr("supervisor.api.metrics.slices", watched)
    status, headers, body = await ask(served.port, get(path))
    assert (status, int(headers["content-length"])) == (200, len(body))
    assert max(made) <= most
    assert len(made) >= MODELS
    if path != b"/metrics":
        (listed,) = [value for value in json.loads(body).values() if isinstance(value, list) and len(value) > 1]
        assert len(listed) == MODELS


async def test_the_feed_looks_at_what_changed(served, monkeypatch):
    daemon, seen = served.daemon, []
    view = feed.model_view

    def looked(daemon: Daemon, model: ModelId):
        seen.append(model)
        return view(daemon, model)

    monkeypatch.setattr(feed, "model_view", looked)
    with daemon.feed.subscribe(("model",)) as subscription:
        daemon.engine.post(PinRequested(ModelId("m7"), True))
        (event,) = await subscription.next(5)
        assert (event.data.name, event.data.pin) == ("m7", True)
        assert seen == ["m7"]


async def test_the_feed_tells_of_many_in_slices(served, monkeypatch):
    """Of each once, and who listens has turns between them."""
    monkeypatch.setattr(feed, "SLICE_S", 0.0005)
    daemon, told, turns = served.daemon, [], 0
    devices = tuple(device.spec for device in daemon.sampler.devices())
    with daemon.feed.subscribe(("model",)) as subscription:
        daemon.engine.post(Configured(tuple(replace(one, hold_s=7) for one in daemon.catalog.model_specs()), devices))
        while len(told) < MODELS and (events := await subscription.next(5)):
            told += [event.data.name for event in events]
            turns += 1
    assert sorted(told) == sorted(daemon.catalog.models)
    assert turns > 3
