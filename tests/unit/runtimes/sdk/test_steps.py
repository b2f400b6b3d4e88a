"""How far requests are that are worked on in steps."""

from __future__ import annotations

import asyncio
import json

from prometheus_client import CollectorRegistry

from runtimes.sdk.steps import Steps


def told(steps):
    return json.loads(asyncio.run(steps.report(None)).body)["requests"]


def test_from_its_beginning_to_its_end():
    steps = Steps(CollectorRegistry())
    assert told(steps) == {}
    steps.begin("req_1", 4)
    steps.finish_step("req_2", 1, 8)
    assert told(steps) == {"req_1": {"step": 0, "steps": 4}, "req_2": {"step": 1, "steps": 8}}
    steps.finish_step("req_1", 1, 3)
    steps.end("req_2")
    assert told(steps) == {"req_1": {"step": 1, "steps": 3}}


def test_all_steps_are_counted():
    registry = CollectorRegistry()
    steps = Steps(registry)
    steps.begin("req_1", 2)
    for step in (1, 2):
        steps.finish_step("req_1", step, 2)
    steps.end("req_1")
    assert registry.get_sample_value("llmux_worker_steps_total") == 2
