"""Jobs: inference requests without a waiting client; see `jobs.inference`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import nullcontext
from typing import BinaryIO, Final, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from supervisor.api.operation import Api
from supervisor.daemon.daemon import Daemon
from supervisor.dialects import dialect_of
from supervisor.dialects.openai import OpenAI
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import read_body
from supervisor.gateway.body.json_body import JsonBody
from supervisor.gateway.body.typed import UNREADABLE
from supervisor.gateway.filters.event_stream import KEEPALIVE_S, EventStream
from supervisor.gateway.operation import Group
from supervisor.host.store.request_buffer import Bytes, RequestBuffer
from supervisor.jobs.job import KEPT_HEADERS, Inference, Job, owner_of
from supervisor.schema import job as schema
from supervisor.schema.operation import EVENTS, JSON, Example

LOOK_S: Final = 1.0
PIECE: Final = 1 << 20
"""The bytes of a result in memory at the same time."""
FOR_DAEMON: Final = "This request asks something of llmux itself, which is no job."
_FIELDS: Final = frozenset(schema.JobRequest.__struct_fields__)
_NOT_OFFERED: Final = "identity"  # a workload of the program that these jobs are modelled on
_ID: Final = "/v1/jobs/job_0123456789abcdef"
_NEEDS: Final = "the id of a job"
GROUP: Final = Group(
    "Jobs", "Inference requests whose clients don't wait: they are kept over restarts, and their results for a while."
)


@GROUP.operation(
    "POST",
    "/v1/jobs",
    scope="inference",
    answer=schema.Job,
    reads=schema.JobRequest,
    status=202,
    errors=(404, 503, 507),
    example=Example(
        {
            "endpoint": "/v1/chat/completions",
            "body": {"model": "Tiny-Instruct", "messages": [{"role": "user", "content": "Hello"}]},
        }
    ),
)
async def create_job(api: Api, request: Request) -> Response:
    """Leave a request to be answered later.

    The answer comes at once. `endpoint` is any path of inference; of those that take a form, `body` has the fields, and files as
    `data:` URLs. Who asks and how urgently is said in the headers of this request.
    """
    daemon = api.daemon
    headers = {name: value for name in KEPT_HEADERS if (value := request.headers.get(name)) is not None}
    owner, _ = owner_of(request.scope["state"])
    buffer = RequestBuffer(daemon.bodies)
    try:
        endpoint, model, body = await _requested_job(daemon, request, buffer)
        job = await daemon.inference.add(endpoint, model, headers, body, owner)
    finally:
        buffer.release()
    return Response(msgspec.json.encode(_job_view(daemon, job)), 202, {"location": f"/v1/jobs/{job.id}"}, JSON)


@GROUP.operation("GET", "/v1/jobs", scope="inference")
async def list_jobs(api: Api, query: schema.JobQuery, request: Request) -> schema.JobList:
    """The jobs of this key, newest first; with the scope `admin` all."""
    jobs = api.daemon.jobs
    await jobs.expire(Inference)
    owner, is_admin = owner_of(request.scope["state"])
    found = [job for job in jobs.listing(Inference, owner, is_admin=is_admin) if query.status in {None, job.state}]
    data = [_job_view(api.daemon, job) for job in found[: query.limit]]
    return schema.JobList("list", data, has_more=len(found) > query.limit)


@GROUP.operation("GET", "/v1/jobs/{id}", scope="inference", errors=(404,), example=Example(path=_ID, needs=_NEEDS))
async def get_job(api: Api, id: str, request: Request) -> schema.Job:
    """One of them."""
    job = await _find_job(api.daemon, request, id)
    await _refresh_progress(api.daemon, job)
    return _job_view(api.daemon, job)


@GROUP.operation("DELETE", "/v1/jobs/{id}", scope="inference", errors=(404,), example=Example(path=_ID, needs=_NEEDS))
async def delete_job(api: Api, id: str, request: Request) -> schema.DeletedJob:
    """Forget it, with its result. One that runs is cancelled."""
    job = await _find_job(api.daemon, request, id)
    await api.daemon.inference.remove(job)
    return schema.DeletedJob(job.id, "job", deleted=True)


@GROUP.operation(
    "GET",
    "/v1/jobs/{id}/result",
    scope="inference",
    answer_type="*/*",
    errors=(404,),
    example=Example(path=_ID + "/result", needs=_NEEDS),
)
async def read_result(api: Api, id: str, request: Request) -> Response:
    """What its endpoint answered.

    400 `job_not_completed` as long as there is none.
    """
    job = await _find_job(api.daemon, request, id)
    if job.state != "completed":
        raise InvalidRequestError(f"{job.id} is {job.state}: it has no result.", code="job_not_completed")
    file = await api.daemon.inference.result(job)
    size = str(os.fstat(file.fileno()).st_size)
    return StreamingResponse(pieces_of(file), job.status or 200, {"content-length": size}, job.content_type)


@GROUP.operation(
    "GET",
    "/v1/jobs/{id}/events",
    scope="inference",
    answer_type=EVENTS,
    errors=(404,),
    example=Example(path=_ID + "/events", needs=_NEEDS),
)
async def follow_job(api: Api, id: str, request: Request) -> Response:
    """Each change of it, as server-sent events `job`, the last one when it is over. A daemon that ends cuts the stream: ask again."""
    daemon, job = api.daemon, await _find_job(api.daemon, request, id)
    return EventStream(events_of(daemon, job, lambda: _job_view(daemon, job)), nullcontext())


@GROUP.operation(
    "POST",
    "/v1/jobs/{id}/cancel",
    scope="inference",
    errors=(404,),
    example=Example(path=_ID + "/cancel", needs=_NEEDS),
)
async def cancel_job(api: Api, id: str, request: Request) -> schema.Job:
    """End it, wherever it stands."""
    job = await _find_job(api.daemon, request, id)
    await api.daemon.jobs.cancel(job)
    return _job_view(api.daemon, job)


async def _requested_job(daemon: Daemon, request: Request, buffer: RequestBuffer) -> tuple[str, str | None, bytes]:
    """The job's endpoint, model and body. Raises LlmuxError."""
    limit = daemon.catalog.limits.body_mib * 1024 * 1024
    opened = await JsonBody.open(await read_body(request.scope, request.receive, limit, buffer))
    if unknown := sorted(opened.fields.keys() - _FIELDS):
        raise InvalidRequestError(f"{unknown[0][:100]}: unknown; there is endpoint and body.", param=unknown[0][:100])
    raw = await opened.field("endpoint")
    try:
        endpoint = msgspec.json.decode(raw or b"null")
    except UNREADABLE:
        endpoint = None
    if not isinstance(endpoint, str):
        raise InvalidRequestError(
            'The body must be {"endpoint": "/v1/chat/completions", "body": {…}}, with the path of an endpoint.',
            param="endpoint",
        )
    dialect = dialect_of({"method": "POST", "path": endpoint, "headers": request.scope["headers"]})
    if not daemon.gateway.routes.serves("POST", endpoint, dialect):
        if _NOT_OFFERED in endpoint:
            raise InvalidRequestError("Identity workloads are not offered.", code="job_not_offered", param="endpoint")
        raise InvalidRequestError(f"No configured model serves POST {endpoint[:200]}.", param="endpoint")
    raw = await opened.field("body")
    if raw is None or raw[:1] != b"{":
        raise InvalidRequestError('"body" must be the JSON object that the endpoint takes.', param="body")
    model, body = await _check_request(daemon, dialect, endpoint, raw)
    return endpoint, model, bytes(body)


async def check_line(daemon: Daemon, endpoint: str, body: Bytes) -> tuple[str | None, Bytes]:
    """See `jobs.batches.Check`."""
    dialect = dialect_of({"method": "POST", "path": endpoint, "headers": []})
    return await _check_request(daemon, dialect, endpoint, body)


async def _check_request(daemon: Daemon, dialect: OpenAI, endpoint: str, body: Bytes) -> tuple[str | None, Bytes]:
    """Check a request for later. Returns its model and its body. Raises LlmuxError."""
    opened = await JsonBody.open(body)
    if opened.stream:
        raise InvalidRequestError("The result comes in one piece: leave stream out.", param="body.stream")
    if dialect.daemon_scope(endpoint, opened.fields) is not None:
        raise InvalidRequestError(FOR_DAEMON, param="body")
    if opened.name is not None:
        daemon.catalog.resolve(dialect.model_name(opened.name, lambda one: daemon.catalog.route(one) is not None))
    if dialect.streams_by_default(endpoint):
        body = await opened.changed({"stream": b"false"}).whole()
    return opened.name, body


async def pieces_of(file: BinaryIO) -> AsyncIterator[bytes]:
    """The file's content in pieces, read as the client reads. Closes the file at the end."""
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece


async def _find_job(daemon: Daemon, request: Request, job_id: str) -> Inference:
    """A job that this request may see. Raises NotFoundError."""
    await daemon.jobs.expire(Inference)
    owner, is_admin = owner_of(request.scope["state"])
    return daemon.jobs.find(Inference, job_id, owner, is_admin=is_admin)


def _job_view(daemon: Daemon, job: Inference) -> schema.Job:
    keep_s = daemon.catalog.limits.jobs_keep_s
    return schema.Job(
        id=job.id,
        object="job",
        status=cast("schema.JobState", job.state),  # inference jobs are never expired or interrupted
        endpoint=job.endpoint,
        model=job.model,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        expires_at=None if job.ended_at is None else round(job.ended_at + keep_s, 3),
        tries=job.tries,
        ahead=daemon.inference.ahead(job) if job.state == "queued" else 0,
        progress=_job_progress(daemon, job),
        result=f"/v1/jobs/{job.id}/result" if job.result_bytes is not None else None,
        result_bytes=job.result_bytes,
        content_type=job.content_type or None,
        error=job.error,
    )


def _job_progress(daemon: Daemon, job: Inference) -> schema.JobProgress | None:
    """The progress of the job's current request; None between two tries."""
    if (found := daemon.inference.request_of(job)) is None:
        return None
    model = None if found.attempt.model is None else daemon.engine.model(found.attempt.model)
    return schema.JobProgress(
        request_id=job.request_id,
        state="queued" if found.attempt.ticket is None else "running",
        model_state=None if model is None else model.state.value,
        eta_s=None if model is None else model.eta_s,
        bytes=found.attempt.outcome.bytes_sent,
        step=None if found.attempt.step is None else found.attempt.step.step,
        steps=None if found.attempt.step is None else found.attempt.step.steps,
    )


async def _refresh_progress(daemon: Daemon, job: Job) -> None:
    """Ask the worker for the current step of the job's request."""
    if isinstance(job, Inference) and (found := daemon.inference.request_of(job)) is not None:
        await daemon.steps.look([found])


async def events_of(daemon: Daemon, job: Job, look: Callable[[], msgspec.Struct]) -> AsyncGenerator[bytes, None]:
    """An event for each change of the job's view, the last when it is over. Ends early if the daemon stops or hands over."""
    sent, sent_at = None, 0.0
    while True:
        await _refresh_progress(daemon, job)
        view = look()
        if view != sent or time.monotonic() - sent_at > KEEPALIVE_S:
            yield b"" if view == sent else b"event: job\ndata: " + msgspec.json.encode(view) + b"\n\n"
            sent, sent_at = view, time.monotonic()
        if job.is_over or daemon.inference.is_paused:
            return
        await daemon.jobs.changed(LOOK_S)
