"""When a runner can't take requests, and why."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec

from supervisor.api.health import runner_health
from supervisor.core.types import Crash, CrashClass, WorkerState
from supervisor.daemon.observability.health import trouble
from tests.support.cases import cases

OOM, OTHER = Crash(CrashClass.OUT_OF_MEMORY, ""), Crash(CrashClass.UNKNOWN, "")


def model(state, crash=None):
    return SimpleNamespace(state=state, crash=crash, answering=state is WorkerState.READY)


def daemon(*models, waiting=0, is_stopping=False, free_mib=1):
    engine = SimpleNamespace(
        figures=lambda: models,
        answering=lambda: [one for one in models if one.answering],
        queue=lambda: SimpleNamespace(waiting=waiting, most=4, is_stopping=is_stopping),
        devices=lambda: [SimpleNamespace(totals=SimpleNamespace(free_mib=free_mib))],
    )
    return SimpleNamespace(engine=engine, started=time.monotonic())


READY, STOPPED = model(WorkerState.READY), model(WorkerState.STOPPED)
FAILED = model(WorkerState.FAILED, OTHER)


@cases(
    ("found", "reason"),
    [
        (daemon(READY, STOPPED), None),
        (daemon(READY, FAILED), None),
        (daemon(waiting=3), None),
        (daemon(READY, model(WorkerState.STOPPED, OOM)), None),
        (daemon(READY, waiting=4), "queue_full"),
        (daemon(FAILED, FAILED), "all_models_failed"),
        (daemon(READY, model(WorkerState.FAILED, OOM)), "gpu_oom"),
        (daemon(READY, model(WorkerState.BACKOFF, OOM)), "gpu_oom"),
        (daemon(READY, is_stopping=True), "stopping"),
        (daemon(READY, free_mib=None), "starting"),
    ],
)
def test_trouble(found, reason):
    assert trouble(found) == reason
    view = msgspec.to_builtins(runner_health(found))
    assert view["status"] == ("healthy" if reason is None else "unhealthy")
    assert view.get("reason") == reason
