"""Tasks as the admin API shows them: their candidates as they are now, whom a request would go to first, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.catalog import Task
from supervisor.core.ladder import Rung, allowed, choose
from supervisor.core.messages import listed
from supervisor.daemon.views import Json
from supervisor.errors import NotFoundError
from supervisor.gateway.route.ladder import first_reason, rungs

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon


def task_view(daemon: Daemon, name: str) -> Json:
    """One task, by its public name. Raises NotFoundError."""
    task = daemon.catalog.resolve(name)
    if not isinstance(task, Task):
        raise NotFoundError(f"{name[:200]!r} is no task; GET /v1/admin/tasks lists them.", code="model_not_found")
    config, allow = task.config, daemon.runtime.allow_cloud_fallback
    steps = rungs(task, daemon.engine)
    chosen = choose(steps, pin_primary=config.pin_primary, allow_cloud_fallback=allow)
    assert chosen is not None
    usable = allowed(steps, allow_cloud_fallback=allow)
    return {
        "name": task.name,
        "description": task.description,
        "pin_primary": config.pin_primary,
        "keep_alive_s": config.keep_alive_s,
        "budget_s": config.budget_s,
        "allow_remote": config.allow_remote,
        "candidates": [_candidate(daemon, task, at, rung, is_allowed=at in usable) for at, rung in enumerate(steps)],
        "chosen": task.candidates[chosen].name,
        "reason": first_reason(chosen),
        "why": _why(task, steps, chosen),
    }


def task_views(daemon: Daemon) -> list[Json]:
    """All of them, in the order of the configuration."""
    return [task_view(daemon, name) for name in daemon.catalog.tasks]


def _candidate(daemon: Daemon, task: Task, at: int, rung: Rung, *, is_allowed: bool) -> Json:
    route = task.candidates[at]
    status = daemon.engine.model(route.model.id)
    return {
        "model": route.name,
        "physical": route.model.id,
        "state": None if status is None else status.state.value,
        "warm": rung.is_ready,
        "remote": rung.is_remote,
        "allowed": is_allowed,  # by the guard against cloud fallbacks
    }


def _why(task: Task, steps: tuple[Rung, ...], chosen: int) -> str:
    names = [candidate.name for candidate in task.candidates]
    name = names[chosen]
    if chosen == 0:
        if steps[0].is_ready:
            return f"{name} is the primary, and ready."
        if task.config.pin_primary:
            return f"{name} is the primary, and pinned: a request loads it."
        return f"No candidate of our own is ready, so a request loads the primary, {name}."
    before = [names[at] for at in range(chosen) if not steps[at].is_remote]
    verb = "is" if len(before) == 1 else "are"
    return f"{name} is ready" + (f", and {listed(before)}, which would come first, {verb} not." if before else ".")
