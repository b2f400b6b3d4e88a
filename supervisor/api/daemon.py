"""The daemon itself: its version and files, settings, sets and tasks, usage, reload, upgrade."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from datetime import date
from typing import Final

import structlog
from starlette.requests import Request
from starlette.responses import Response

from supervisor import catalog
from supervisor.api.operation import Api
from supervisor.core.ladder import Rung, allowed, choose
from supervisor.core.messages import listed
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.observability.usage import as_csv, rows, today
from supervisor.errors import InvalidRequestError, NotFoundError, UnavailableError
from supervisor.gateway.operation import Group
from supervisor.gateway.route.ladder import first_reason, rungs
from supervisor.host.distribution import version
from supervisor.schema.daemon import (
    AlertDelivery,
    ChangedSettings,
    ConfigurationFile,
    Difference,
    Info,
    ReloadQuery,
    ReloadRequest,
    RuntimeSettings,
    SetList,
    Switch,
    Upgrade,
    UsageList,
    UsageQuery,
)
from supervisor.schema.operation import Example
from supervisor.schema.task import Candidate, Task, TaskList

UPGRADE: Final = "/v1/admin/upgrade"
CSV: Final = "text/csv; charset=utf-8"
SHOWN_DAYS: Final = 30
GROUP: Final = Group("Administration: daemon", "The daemon itself, its configuration and its tasks.")
log = structlog.get_logger("llmux.config")


@GROUP.operation("GET", "/v1/admin/info")
async def read_info(api: Api) -> Info:
    """Which daemon this is.

    `watch` says whether it reloads when a file changes. `configuration` has the files that a reload reads: the first is the
    configuration itself, then come tasks, the changes on this machine (`local`) and the API keys.
    """
    server, files = api.daemon.catalog.server, api.reloader.files()
    existing = await asyncio.to_thread(lambda: [path.exists() for path in files])
    return Info(
        version=version(),
        python=platform.python_version(),
        pid=os.getpid(),
        uptime_s=round(time.monotonic() - api.daemon.started, 3),
        host=server.host,
        port=server.port,
        state_dir=str(server.state_dir),
        watch=server.watch,
        configuration=[
            ConfigurationFile(str(path), kind, there)
            for (path, kind), there in zip(files.items(), existing, strict=True)
        ],
    )


# ------------------------------------------------------------------------------------------------------------------ tasks


@GROUP.operation("GET", "/v1/admin/tasks")
async def list_tasks(api: Api) -> TaskList:
    """Every [task](tasks.md), with its keys, its candidates as they are now, and whom a request would go to."""
    return TaskList("list", [_task_view(api.daemon, name) for name in api.daemon.catalog.tasks])


@GROUP.operation(
    "GET",
    "/v1/admin/tasks/{name:path}",
    errors=(404,),
    example=Example(path="/v1/admin/tasks/task:reply", needs="a task"),
)
async def get_task(api: Api, name: str) -> Task:
    """One of them, by its public name: `task:NAME`."""
    return _task_view(api.daemon, name)


def _task_view(daemon: Daemon, name: str) -> Task:
    """The task with this name, in its current state. Raises NotFoundError."""
    task = daemon.catalog.resolve(name)
    if not isinstance(task, catalog.Task):
        raise NotFoundError(f"{name[:200]!r} is no task; GET /v1/admin/tasks lists them.", code="model_not_found")
    config, allow = task.config, daemon.runtime.allow_cloud_fallback
    steps = rungs(task, daemon.engine)
    chosen = choose(steps, pin_primary=config.pin_primary, allow_cloud_fallback=allow)
    assert chosen is not None
    usable = allowed(steps, allow_cloud_fallback=allow)
    return Task(
        name=task.name,
        description=task.description,
        pin_primary=config.pin_primary,
        keep_alive_s=config.keep_alive_s,
        budget_s=config.budget_s,
        allow_remote=config.allow_remote,
        candidates=[_candidate_view(daemon, task, at, rung, is_allowed=at in usable) for at, rung in enumerate(steps)],
        chosen=task.candidates[chosen].name,
        reason=first_reason(chosen),
        why=_choice_text(task, steps, chosen),
    )


def _candidate_view(daemon: Daemon, task: catalog.Task, at: int, rung: Rung, *, is_allowed: bool) -> Candidate:
    route = task.candidates[at]
    status = daemon.engine.model(route.model.id)
    state = None if status is None else status.state.value
    return Candidate(route.name, route.model.id, state, rung.is_ready, rung.is_remote, is_allowed)


def _choice_text(task: catalog.Task, steps: tuple[Rung, ...], chosen: int) -> str:
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


# --------------------------------------------------------------------------------------------------------- usage, alerts


@GROUP.operation(
    "GET",
    "/v1/admin/usage",
    answer=UsageList,
    other_types=("text/csv",),
    errors=(507,),
    example=Example(needs="requests of an earlier day"),
)
async def read_usage(api: Api, query: UsageQuery, request: Request) -> Response | UsageList:
    """What each key used on each day: requests, tokens, seconds of GPUs.

    The last 30 days, or those of `from` and `to`, as this machine's clock names them; 400 days are kept. Each request counts once, on
    the day of its end, for its key and the model that answered. A GPU second is one second of one GPU during which a worker had the
    request; requests that a worker computes together count each as if alone. As CSV, names that a spreadsheet would take for formulas
    have an apostrophe before them.
    """
    if api.daemon.request_log is None:
        raise UnavailableError("Usage isn't counted here.")
    last = _parse_day("to", query.last, today())
    first = _parse_day("from", query.first, date.fromordinal(max(1, last.toordinal() - SHOWN_DAYS + 1)))
    if first > last:
        raise InvalidRequestError(f"from: {first} is after {last}, the last day: change one of them.", param="from")
    found = [
        one
        for one in await api.daemon.request_log.usage(first, last)
        if (query.key is None or query.key in (one.key, one.key_id))
        and (query.model is None or query.model == one.model)
    ]
    data = rows(found, by_model=query.by_model)
    accepts_csv = request.headers.get("accept", "").startswith("text/csv")
    if (query.format or ("csv" if accepts_csv else "json")) == "json":
        return UsageList(data)
    headers = {"content-disposition": f'attachment; filename="llmux-usage-{first}-{last}.csv"'}
    return Response(as_csv(data, by_model=query.by_model), headers=headers, media_type=CSV)


def _parse_day(name: str, text: str | None, default: date) -> date:
    try:
        return default if text is None else date.fromisoformat(text)
    except ValueError as error:
        message = f"{name}: expected a day such as 2026-11-01, got {(text or '')[:50]!r}."
        raise InvalidRequestError(message, param=name) from error


@GROUP.operation("POST", "/v1/admin/alerts/test", example=Example(needs="`server.alerts`"))
async def test_alerts(api: Api) -> AlertDelivery:
    """Send an alert on all [configured ways](operations.md#alerts), once, to see whether it arrives."""
    if api.daemon.alerts is None:
        raise UnavailableError("Alerts go nowhere from here.")
    return await api.daemon.alerts.test()


# ---------------------------------------------------------------------------------------------------------- configuration


@GROUP.operation("GET", "/v1/admin/sets", example=Example(needs="sets"))
async def list_sets(api: Api) -> SetList:
    """The [sets](configuration.md#sets), and which of them is active."""
    return api.sets.listing()


@GROUP.operation("PUT", "/v1/admin/sets", errors=(404, 503, 507), example=Example({"active": "coding"}, needs="sets"))
async def switch_set(api: Api, body: Switch) -> SetList:
    """Switch to another set, or to none (`null`): all as configured.

    It holds at once, and is kept over restarts. Pins that operators set by hand end with it. No worker ends, and none is loaded by
    the switch itself. Where it can't be kept, nothing changes, and the answer is 507 `state_not_saved`.
    """
    await api.sets.switch(body.active)
    return api.sets.listing()


@GROUP.operation("GET", "/api/v1/config")
async def read_settings(api: Api) -> RuntimeSettings:
    """What operators change while the daemon runs."""
    return RuntimeSettings(api.daemon.runtime.allow_cloud_fallback)


@GROUP.operation("PUT", "/api/v1/config", errors=(507,), example=Example({"allowCloudFallback": False}))
async def change_settings(api: Api, body: ChangedSettings) -> RuntimeSettings:
    """Change it. It holds at once, and is kept over restarts.

    Where it can't be kept, nothing changes, and the answer is 507 `state_not_saved`.
    """
    await api.daemon.runtime.allow(cloud_fallback=body.allow_cloud_fallback)
    log.info("config.changed", allow_cloud_fallback=body.allow_cloud_fallback)
    return await read_settings(api)


@GROUP.operation("POST", "/v1/admin/reload", is_body_optional=True, errors=(503,), example=Example({"dry_run": True}))
async def reload_configuration(api: Api, query: ReloadQuery, body: ReloadRequest) -> Difference:
    """Read the configuration again and apply [the differences](configuration.md#reload).

    The response comes when these are decided; the replacement of workers follows. If the file has mistakes, nothing changes: 400
    `invalid_configuration`, and `detail` lists all mistakes. A reload after which there would be no models or no keys any more is
    refused, too.

    `?dry_run=true` or the body `{"dry_run": true}` only tells the differences and changes nothing; `force`, in the same two ways,
    reloads although no models or no keys are left.
    """
    force = body.force or query.force
    if body.dry_run or query.dry_run:
        return await api.reloader.preview(force=force)
    return await api.reloader.reload("asked by API", force=force)


@GROUP.operation("POST", UPGRADE, errors=(503,), example=Example(needs="a daemon that may be replaced"))
async def upgrade_daemon(api: Api) -> Upgrade:
    """Replace the daemon by the llmux that is installed now, with the arguments of the running one.

    See [upgrades](operations.md#upgrades). The response comes when the new daemon serves: `pid` is its process id, `running` is how
    many requests still run in the old one. If it can't take over, the old one goes on: 503 `upgrade_failed`, and `detail` has the
    last lines that the new one wrote.
    """
    if api.handover is None:
        raise UnavailableError("This daemon can't be upgraded while it runs.", code="upgrade_failed")
    return await api.handover.upgrade()
