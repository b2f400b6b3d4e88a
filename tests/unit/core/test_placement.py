"""Plans of only what changed, on machines with many devices: nobody waits in vain, nobody is forgotten.

The simulated machine plans everybody from scratch after every event, and compares.
"""

from __future__ import annotations

import random

import pytest

from supervisor.core.types import DeviceId, Limits
from tests.support.counts import times
from tests.support.simulation import World, model


def busy_fleet(seed: int, *, devices: int, models: int, events: int) -> World:
    """Random requests of many models over many devices, with some spread over two, some pinned, some preloaded."""
    chance = random.Random(seed)
    world = World(totals={DeviceId(f"gpu{i:02}"): chance.choice([8192, 16384]) for i in range(devices)}, load_s=1.0)
    specs = [
        model(
            f"m{i:02}",
            chance.choice([1500, 3000, 6000, 7000, 12000]),
            chance.choice(["llm", "llm", "tts", "embedding"]),
            pin=chance.random() < 0.05,
            preload=chance.random() < 0.2,
            gpus=2 if devices > 1 and chance.random() < 0.1 else 1,
        )
        for i in range(models)
    ]
    world.configure(*specs, limits=Limits(min_residency_s=chance.choice([0.0, 5.0])))
    for _ in range(events):
        kind = chance.random()
        if kind < 0.5:
            world.request(f"m{int(models * chance.random() ** 2):02}", chance.choice([20, 50, 50, 80]))
        elif kind < 0.9 and world.open:
            world.finish(chance.choice(sorted(world.open)))
        else:
            world.run(chance.choice([0.1, 0.5, 2.0]))
    return world


@pytest.mark.parametrize("seed", range(times(3, 12)))
@pytest.mark.parametrize(("devices", "models"), [(1, 12), (3, 20), (12, 60)])
def test_nobody_waits_in_vain(seed, devices, models):
    world = busy_fleet(seed, devices=devices, models=models, events=150)
    for _ in range(400):
        if not world.open:
            break
        for ticket in sorted(world.dispatched):
            world.finish(ticket)
        world.run(1.0)
    assert not world.open, "everybody was served at last"
    assert world.replays()


def test_a_device_that_a_reload_takes_away_is_no_place():
    world = World(totals={DeviceId("gpu0"): 16384, DeviceId("gpu1"): 16384}, load_s=1.0)
    models = [model("goes", 15000), model("idle", 15000), model("waits", 15000)]
    world.configure(*models, limits=Limits(min_residency_s=0.0))
    for name in ("goes", "idle"):
        ticket = world.request(name)
        world.run(2.0)
        world.finish(ticket)
    world.request("waits")
    assert world.state("goes") == "stopping"
    (place,) = world.scheduler.state.wanted.place("waits").devices
    del world.totals[place]
    world.configure(*models, limits=Limits(min_residency_s=0.0))
    assert world.state("idle") == "stopping"
    world.run(5.0)
    assert world.loaded() == {"waits"}
    assert world.replays()
