"""Requests that are answered later: jobs, and files of requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from supervisor.schema.operation import doc

_WHEN = "Seconds since 1970; null: not yet."
_STEP = "Steps made, where its worker tells; of so many."
Purpose = Literal["batch", "batch_output"]
JobState = Literal["queued", "running", "completed", "failed", "cancelled"]


class JobProgress(Struct, gc=False):
    """Where a job's request stands."""

    request_id: str
    state: Literal["queued", "running"]
    model_state: str | None
    eta_s: float | None
    bytes: int
    step: Annotated[int | None, doc(_STEP)]
    steps: Annotated[int | None, doc(_STEP)]


class Job(Struct, gc=False):
    """A request whose client does not wait."""

    id: str
    object: Literal["job"]
    status: JobState
    endpoint: Annotated[str, doc("The path of its request.")]
    model: Annotated[str | None, doc("The name that it asks for; null where it names none.")]
    created_at: Annotated[float, doc(_WHEN)]
    started_at: Annotated[float | None, doc(_WHEN)]
    ended_at: Annotated[float | None, doc(_WHEN)]
    expires_at: Annotated[float | None, doc("When it is forgotten with its result (`limits.jobs_keep_s`).")]
    tries: Annotated[int, doc("How often its request was sent.")]
    ahead: Annotated[int, doc("How many jobs are before it.")]
    progress: Annotated[JobProgress | None, doc("Where its request stands; null while none is under way.")]
    result: Annotated[str | None, doc("Where its result is; null: there is none.")]
    result_bytes: Annotated[int | None, doc("Of its result.")]
    content_type: Annotated[str | None, doc("Of its result.")]
    error: Annotated[dict[str, Any] | None, doc("As a client of the endpoint gets it; else null.")]


class JobList(Struct):
    """Jobs, the newest first."""

    object: Literal["list"]
    data: list[Job]
    has_more: bool


JobKind = Literal["inference", "response", "line", "batch", "load", "pull"]
State = Literal["queued", "running", "completed", "failed", "cancelled", "expired", "interrupted"]


class JobSummary(Struct, gc=False):
    """A job of any kind, as operators see it."""

    id: str
    object: Literal["job"]
    kind: Annotated[
        JobKind,
        doc(
            "`inference` (a job of a client), `response` (one in the background), `batch`, `line` (of a batch), `load` (of a"
            " model), `pull` (of a model's files)."
        ),
    ]
    state: Annotated[State, doc("`expired`: its time was over. `interrupted`: llmux ended before it was done.")]
    model: Annotated[str | None, doc("The model, as it was asked for; null: several, or none.")]
    owner: Annotated[
        str | None, doc("The name of the key that made it, or its id if the key is gone; null: no key did.")
    ]
    created_at: Annotated[float, doc(_WHEN)]
    started_at: Annotated[float | None, doc(_WHEN)]
    ended_at: Annotated[float | None, doc(_WHEN)]
    progress: Annotated[float | None, doc("The share that is done, from 0 to 1; null: unknown.")]
    eta_s: Annotated[float | None, doc("How much longer it takes; null: unknown.")]
    expected_s: Annotated[float | None, doc("Of a load: how long the model's last load took; else null.")]
    message: Annotated[str | None, doc("Why it waits, what it does now, or why it ended; null: nothing is known.")]
    details: Annotated[
        str | None, doc("The path of the operation that answers all that is known of it; null: there is none.")
    ]
    result: Annotated[str | None, doc("The path of its result; null: there is none.")]


class JobSummaryList(Struct):
    """Jobs of all kinds: first those that run, then those that wait, then those that ended; of each, the newest first."""

    object: Literal["list"]
    data: list[JobSummary]
    has_more: bool


class JobSummaryQuery(Struct):
    """Which jobs of all kinds."""

    limit: Annotated[Annotated[int, Meta(ge=1, le=1000)], doc("How many at most; 100 by default.")] = 100
    kind: Annotated[JobKind | None, doc("Only those of this kind. Without it lines of batches are left out.")] = None
    state: Annotated[State | None, doc("Only those in this state.")] = None
    model: Annotated[str | None, doc("Only those of this model.")] = None


class JobQuery(Struct):
    """Which jobs."""

    limit: Annotated[Annotated[int, Meta(ge=1, le=1000)], doc("How many at most; 100 by default.")] = 100
    status: Annotated[JobState | None, doc("Only those in this state.")] = None


class JobRequest(Struct, forbid_unknown_fields=True):
    """A request to answer later."""

    endpoint: Annotated[str, Meta(pattern="^/", description="Such as `/v1/chat/completions`.")]
    body: Annotated[dict[str, Any], doc("What the endpoint takes, without `stream`.")]


class DeletedJob(Struct):
    """A job that is forgotten."""

    id: str
    object: Literal["job"]
    deleted: bool


class File(Struct, gc=False):
    """A file of requests, or of answers."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: Annotated[int | None, doc("When it is forgotten (`limits.jobs_keep_s`); null while a batch reads it.")]
    filename: str
    purpose: Purpose
    status: Literal["processed"]


class FileList(Struct):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileQuery(Struct):
    """Which files."""

    purpose: Annotated[str | None, doc("Only those of this purpose.")] = None
    limit: Annotated[Annotated[int, Meta(ge=1, le=10_000)], doc("How many at most; 10,000 by default.")] = 10_000
    order: Annotated[Literal["asc", "desc"], doc("By time.")] = "desc"
    after: Annotated[str | None, doc("Only those behind this id.")] = None


class FileForm(Struct, forbid_unknown_fields=True):
    """The form of an upload."""

    purpose: Literal["batch"]
    file: Annotated[
        str, Meta(description="The JSON lines.", extra_json_schema={"contentMediaType": "application/jsonl"})
    ]


class DeletedFile(Struct):
    """A file that is forgotten."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchProblem(Struct, gc=False):
    """A mistake in a batch's file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(Struct, gc=False):
    """All mistakes in a batch's file."""

    object: Literal["list"]
    data: list[BatchProblem]


class BatchCounts(Struct, gc=False):
    """How many of a batch's requests were answered."""

    total: int
    completed: int
    failed: int


_TIME = "Seconds since 1970; null: it has not come to that."


BatchState = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]


class Batch(Struct, gc=False):
    """A file of requests that is answered as a whole."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: Annotated[BatchProblems | None, doc("Why its file was refused, with the numbers of the lines; else null.")]
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: Annotated[str | None, doc("A line for each request that was answered; null before the end.")]
    error_file_id: Annotated[str | None, doc("A line for each request that failed or expired; null before the end.")]
    created_at: int
    in_progress_at: Annotated[int | None, doc(_TIME)]
    expires_at: Annotated[int, doc("When its window is over.")]
    finalizing_at: Annotated[int | None, doc(_TIME)]
    completed_at: Annotated[int | None, doc(_TIME)]
    failed_at: Annotated[int | None, doc(_TIME)]
    expired_at: Annotated[int | None, doc(_TIME)]
    cancelling_at: Annotated[int | None, doc(_TIME)]
    cancelled_at: Annotated[int | None, doc(_TIME)]
    request_counts: BatchCounts
    metadata: Annotated[dict[str, str] | None, doc("As it was given.")]


class BatchList(Struct):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchQuery(Struct):
    """Which batches."""

    limit: Annotated[Annotated[int, Meta(ge=1, le=100)], doc("How many at most; 20 by default.")] = 20
    after: Annotated[str | None, doc("Only those behind this id.")] = None


class BatchRequest(Struct, forbid_unknown_fields=True):
    """A file to answer."""

    endpoint: Annotated[
        str,
        Meta(
            description="`/v1/chat/completions`, `/v1/completions`, `/v1/embeddings` or `/v1/responses`.",
            extra_json_schema={"pattern": "^/"},
        ),
    ]
    completion_window: Annotated[
        str,
        Meta(
            pattern=r"^(?!.*\n)[1-9][0-9]{0,5}[smhd]$", description="`24h`, or another time up to `30d`, such as `30m`."
        ),
    ]
    input_file_id: Annotated[str, doc("The id of a file: POST /v1/files with purpose=batch.")]
    metadata: Annotated[
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None,
        doc("Up to 16 texts of your own, of at most 512 characters, with keys of at most 64."),
    ] = None
