"""Jobs of all kinds, for operators; see `supervisor.jobs`. Clients see their own jobs at the paths of each kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from supervisor.api.jobs import events_of
from supervisor.api.operation import Api
from supervisor.daemon.daemon import Daemon
from supervisor.errors import InvalidRequestError, NotFoundError
from supervisor.gateway.filters.event_stream import EventStream
from supervisor.gateway.operation import Group
from supervisor.jobs import job as jobs
from supervisor.jobs.jobs import Progress
from supervisor.schema import job as schema
from supervisor.schema.operation import EVENTS, Example

_PATH: Final = "/v1/admin/jobs/load-7"
_NEEDS: Final = "a load under way"
_PLACES: Final = {"running": 0, "queued": 1}
_DETAILS: Final[dict[type[jobs.Job], Callable[..., str]]] = {
    jobs.Inference: lambda job: f"/v1/jobs/{job.id}",
    jobs.Response: lambda job: f"/v1/responses/{job.response}",
    jobs.Line: lambda job: f"/v1/batches/{job.batch}",
    jobs.Batch: lambda job: f"/v1/batches/{job.id}",
    jobs.Load: lambda job: f"/v1/admin/loads/{job.id.removeprefix('load-')}",
}
GROUP: Final = Group(
    "Administration: jobs",
    "Everything that runs longer than the request that asked for it, in one list: jobs and batches of clients, responses in the"
    " background, loads of models, pulls of their files.",
)


@GROUP.operation("GET", "/v1/admin/jobs")
async def list_all_jobs(api: Api, query: schema.JobSummaryQuery) -> schema.JobSummaryList:
    """Jobs of all kinds: first those that run, then those that wait, then those that ended, for as long as they are kept.

    Of each, the newest come first.
    """
    daemon = api.daemon
    await daemon.jobs.expire()
    wanted = (
        job
        for job in sorted(daemon.jobs.listing(jobs.Job, None, is_admin=True), key=lambda job: _PLACES.get(job.state, 2))
        if (job.kind == query.kind if query.kind else job.kind != "line")
        and query.state in {None, job.state}
        and query.model in {None, job.model}
    )
    found = [*islice(wanted, query.limit + 1)]
    data = [_job_summary(daemon, job) for job in found[: query.limit]]
    return schema.JobSummaryList("list", data, has_more=len(found) > query.limit)


@GROUP.operation("GET", "/v1/admin/jobs/{id}", errors=(404,), example=Example(path="/v1/admin/jobs/load-1"))
async def get_any_job(api: Api, id: str) -> schema.JobSummary:
    """One of them."""
    return _job_summary(api.daemon, _find_job(api.daemon, id))


@GROUP.operation(
    "POST",
    "/v1/admin/jobs/{id}/cancel",
    errors=(404,),
    example=Example(path=_PATH + "/cancel", needs=_NEEDS),
)
async def cancel_any_job(api: Api, id: str) -> schema.JobSummary:
    """End it, wherever it stands.

    400 `job_ended` for one that has ended. A batch ends once what it sent is answered.
    """
    job = _find_job(api.daemon, id)
    if job.is_over:
        raise InvalidRequestError(f"{job.id} has ended: it is {job.state}.", code="job_ended")
    await api.daemon.jobs.cancel(job)
    return _job_summary(api.daemon, job)


@GROUP.operation(
    "GET",
    "/v1/admin/jobs/{id}/events",
    answer_type=EVENTS,
    errors=(404,),
    example=Example(path=_PATH + "/events", needs=_NEEDS),
)
async def follow_any_job(api: Api, id: str, request: Request) -> Response:
    """Each change of it, as server-sent events `job`, the last one when it is over. A daemon that ends cuts the stream: ask again."""
    daemon, job = api.daemon, _find_job(api.daemon, id)
    return EventStream(events_of(daemon, job, lambda: _job_summary(daemon, job)), nullcontext())


def _find_job(daemon: Daemon, job_id: str) -> jobs.Job:
    """The job with this id, of any kind. Raises NotFoundError."""
    if (job := daemon.jobs.get(job_id)) is None:
        message = f"There is no job {job_id[:100]!r}, or no longer; GET /v1/admin/jobs lists them."
        raise NotFoundError(message, code="job_not_found")
    return job


def _job_summary(daemon: Daemon, job: jobs.Job) -> schema.JobSummary:
    kind = daemon.jobs.kinds[type(job)]
    progress: Progress = kind.progress(job)
    details = _DETAILS.get(type(job))
    return schema.JobSummary(
        id=job.id,
        object="job",
        kind=job.kind,
        state=job.state,
        model=job.model,
        owner=_owner_name(daemon, job.owner),
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        progress=None if progress.share is None else round(progress.share, 3),
        eta_s=progress.eta_s,
        expected_s=job.expected_s if isinstance(job, jobs.Load) else None,
        message=progress.message or (job.error or {}).get("message"),
        details=None if details is None else details(job),
        result=_result_path(job),
    )


def _owner_name(daemon: Daemon, key_id: str | None) -> str | None:
    """The name of the key, or its id if the key no longer exists."""
    names = (key.name for key in (*daemon.keyring.keys, daemon.local_key) if key is not None and key.id == key_id)
    return next(names, key_id)


def _result_path(job: jobs.Job) -> str | None:
    if isinstance(job, jobs.Batch) and job.has_output:
        return f"/v1/files/{job.output_file}/content"
    if isinstance(job, jobs.Inference) and job.result_bytes is not None:
        return f"/v1/jobs/{job.id}/result"
    return None
