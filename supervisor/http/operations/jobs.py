"""Requests whose clients do not wait."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.operation import (
    EVENTS,
    Example,
    Operation,
    Parameter,
    Section,
    anything,
    array,
    choice,
    flag,
    mapping,
    named,
    number,
    record,
    request,
    text,
    whole,
)

_JOB: Final = named(
    record(
        {
            "id": text(),
            "object": {"const": "job"},
            "status": choice("queued", "running", "completed", "failed", "cancelled"),
            "endpoint": text("The path of its request."),
            "model": text("The name that it asks for; null where it names none.", null=True),
            "created_at": number("Seconds since 1970; null: not yet."),
            "started_at": number("Seconds since 1970; null: not yet.", null=True),
            "ended_at": number("Seconds since 1970; null: not yet.", null=True),
            "expires_at": number("When it is forgotten with its result (`limits.jobs_keep_s`).", null=True),
            "tries": whole("How often its request was sent."),
            "ahead": whole("How many jobs are before it."),
            "progress": record(
                {
                    "request_id": text(),
                    "state": choice("queued", "running"),
                    "model_state": text(null=True),
                    "eta_s": number(null=True),
                    "bytes": whole(),
                    "step": whole("Steps made, where its worker tells; of so many.", null=True),
                    "steps": whole("Steps made, where its worker tells; of so many.", null=True),
                },
                "Where its request stands; null while none is under way.",
                null=True,
            ),
            "result": text("Where its result is; null: there is none.", null=True),
            "result_bytes": whole("Of its result.", null=True),
            "content_type": text("Of its result.", null=True),
            "error": mapping(anything(), "As a client of the endpoint gets it; else null.", null=True),
        }
    ),
    "Job",
)
_ID: Final = "/v1/jobs/job_0123456789abcdef"
_NEEDS: Final = "the id of a job"
_VIEW: Final = {
    "id": "job_0123456789abcdef",
    "object": "job",
    "status": "completed",
    "endpoint": "/v1/chat/completions",
    "model": "Tiny-Instruct",
    "created_at": 1790000000.0,
    "started_at": 1790000000.1,
    "ended_at": 1790000001.5,
    "expires_at": 1790086401.5,
    "tries": 1,
    "ahead": 0,
    "progress": None,
    "result": f"{_ID}/result",
    "result_bytes": 512,
    "content_type": "application/json",
    "error": None,
}
SECTION: Final = Section(
    "Jobs",
    "Inference requests whose clients don't wait: they are kept over restarts, and their results for a while.",
    (
        Operation(
            "POST",
            "/v1/jobs",
            "Leave a request to be answered later.",
            "The answer comes at once. `endpoint` is any path of inference; of those that take a form, `body` has the fields, and files as "
            "`data:` URLs. Who asks and how urgently is said in the headers of this request.",
            request=request(
                {
                    "endpoint": text("Such as `/v1/chat/completions`.", pattern="^/"),
                    "body": mapping(anything(), "What the endpoint takes, without `stream`."),
                },
                "endpoint",
                "body",
            ),
            answer=_JOB,
            status=202,
            errors=(404, 503, 507),
            example=Example(
                {
                    "endpoint": "/v1/chat/completions",
                    "body": {"model": "Tiny-Instruct", "messages": [{"role": "user", "content": "Hello"}]},
                }
            ),
        ),
        Operation(
            "GET",
            "/v1/jobs",
            "The jobs of this key, newest first; with the scope `admin` all.",
            parameters=(
                Parameter("limit", "How many at most; 100 by default.", whole(minimum=1, maximum=1000)),
                Parameter("status", "Only those in this state."),
            ),
            answer=record({"object": {"const": "list"}, "data": array(_JOB), "has_more": flag()}),
        ),
        Operation(
            "GET",
            "/v1/jobs/{id}",
            "One of them.",
            answer=_JOB,
            errors=(404,),
            example=Example(path=_ID, needs=_NEEDS, answer=_VIEW),
        ),
        Operation(
            "DELETE",
            "/v1/jobs/{id}",
            "Forget it, with its result. One that runs is cancelled.",
            answer=record({"id": text(), "object": {"const": "job"}, "deleted": flag()}),
            errors=(404,),
            example=Example(
                path=_ID, needs=_NEEDS, answer={"id": "job_0123456789abcdef", "object": "job", "deleted": True}
            ),
        ),
        Operation(
            "GET",
            "/v1/jobs/{id}/result",
            "What its endpoint answered.",
            "400 `job_not_completed` as long as there is none.",
            answer_type="*/*",
            errors=(404,),
            example=Example(path=_ID + "/result", needs=_NEEDS),
        ),
        Operation(
            "GET",
            "/v1/jobs/{id}/events",
            "Each change of it, as server-sent events `job`, the last one when it is over. A daemon that ends cuts the stream: ask again.",
            answer_type=EVENTS,
            errors=(404,),
            example=Example(path=_ID + "/events", needs=_NEEDS),
        ),
        Operation(
            "POST",
            "/v1/jobs/{id}/cancel",
            "End it, wherever it stands.",
            answer=_JOB,
            errors=(404,),
            example=Example(path=_ID + "/cancel", needs=_NEEDS, answer=_VIEW | {"status": "cancelled"}),
        ),
    ),
)
