"""Files of requests whose clients do not wait."""

from __future__ import annotations

from typing import Final

from supervisor.dialects.operation import (
    FORM,
    Example,
    Operation,
    Parameter,
    Section,
    array,
    choice,
    flag,
    mapping,
    named,
    record,
    request,
    text,
    whole,
)

_FILE: Final = named(
    record(
        {
            "id": text(),
            "object": {"const": "file"},
            "bytes": whole(),
            "created_at": whole(),
            "expires_at": whole("When it is forgotten (`limits.jobs_keep_s`); null while a batch reads it.", null=True),
            "filename": text(),
            "purpose": choice("batch", "batch_output"),
            "status": {"const": "processed"},
        }
    ),
    "File",
)
_STATES: Final = (
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)
_TIME: Final = whole("Seconds since 1970; null: it has not come to that.", null=True)
_BATCH: Final = named(
    record(
        {
            "id": text(),
            "object": {"const": "batch"},
            "endpoint": text(),
            "errors": record(
                {
                    "object": {"const": "list"},
                    "data": array(
                        record(
                            {
                                "code": text(),
                                "message": text(),
                                "param": text(null=True),
                                "line": whole(null=True),
                            }
                        )
                    ),
                },
                "Why its file was refused, with the numbers of the lines; else null.",
                null=True,
            ),
            "input_file_id": text(),
            "completion_window": text(),
            "status": choice(*_STATES),
            "output_file_id": text("A line for each request that was answered; null before the end.", null=True),
            "error_file_id": text("A line for each request that failed or expired; null before the end.", null=True),
            "created_at": whole(),
            "in_progress_at": _TIME,
            "expires_at": whole("When its window is over."),
            "finalizing_at": _TIME,
            "completed_at": _TIME,
            "failed_at": _TIME,
            "expired_at": _TIME,
            "cancelling_at": _TIME,
            "cancelled_at": _TIME,
            "request_counts": record({"total": whole(), "completed": whole(), "failed": whole()}),
            "metadata": mapping(text(), "As it was given.", null=True),
        }
    ),
    "Batch",
)
_AFTER: Final = Parameter("after", "Only those behind this id.")
_FILE_ID: Final = "file-0123456789abcdef01234567"
_BATCH_ID: Final = "batch_0123456789abcdef01234567"
_NEEDS_FILE: Final = "the id of a file"
_NEEDS_BATCH: Final = "the id of a batch"
_FILE_VIEW: Final = {
    "id": _FILE_ID,
    "object": "file",
    "bytes": 1024,
    "created_at": 1790000000,
    "expires_at": 1790086400,
    "filename": "requests.jsonl",
    "purpose": "batch",
    "status": "processed",
}
_BATCH_VIEW: Final = {
    "id": _BATCH_ID,
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "errors": None,
    "input_file_id": _FILE_ID,
    "completion_window": "24h",
    "status": "completed",
    "output_file_id": "file-89abcdef0123456789abcdef",
    "error_file_id": None,
    "created_at": 1790000000,
    "in_progress_at": 1790000001,
    "expires_at": 1790086400,
    "finalizing_at": 1790000060,
    "completed_at": 1790000060,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "request_counts": {"total": 100, "completed": 100, "failed": 0},
    "metadata": {"night": "monday"},
}
_ENDS: Final = {"first_id": text(null=True), "last_id": text(null=True), "has_more": flag()}
SECTION: Final = Section(
    "Batches",
    "Files of requests, as OpenAI's API has them: each line is a job, and a file has the answers.",
    (
        Operation(
            "POST",
            "/v1/files",
            "Upload the file of a batch.",
            "A form. Each line of `file` is a request: `custom_id`, `method` (`POST`), `url` (the endpoint of the batch) and `body`.",
            request=request(
                {"purpose": {"const": "batch"}, "file": text("The JSON lines.", contentMediaType="application/jsonl")},
                "purpose",
                "file",
            ),
            request_type=FORM,
            answer=_FILE,
            errors=(503, 507),
            example=Example(
                {"purpose": "batch", "file": "@requests.jsonl"}, needs="a file of requests", answer=_FILE_VIEW
            ),
        ),
        Operation(
            "GET",
            "/v1/files",
            "The files of this key, newest first; with the scope `admin` all.",
            parameters=(
                Parameter("purpose", "Only those of this purpose."),
                Parameter("limit", "How many at most; 10,000 by default.", whole(minimum=1, maximum=10_000)),
                Parameter("order", "By time.", choice("asc", "desc")),
                _AFTER,
            ),
            answer=record({"object": {"const": "list"}, "data": array(_FILE), **_ENDS}),
        ),
        Operation(
            "GET",
            "/v1/files/{id}",
            "One of them.",
            answer=_FILE,
            errors=(404,),
            example=Example(path=f"/v1/files/{_FILE_ID}", needs=_NEEDS_FILE, answer=_FILE_VIEW),
        ),
        Operation(
            "GET",
            "/v1/files/{id}/content",
            "What is in it.",
            "Of an output, a line for each request: `id`, `custom_id`, `response` (`status_code`, `request_id`, `body`) and `error`.",
            answer_type="application/octet-stream",
            errors=(404,),
            example=Example(path=f"/v1/files/{_FILE_ID}/content", needs=_NEEDS_FILE),
        ),
        Operation(
            "DELETE",
            "/v1/files/{id}",
            "Forget it. 400 `file_in_use` while a batch reads it.",
            answer=record({"id": text(), "object": {"const": "file"}, "deleted": flag()}),
            errors=(404, 507),
            example=Example(
                path=f"/v1/files/{_FILE_ID}",
                needs=_NEEDS_FILE,
                answer={"id": _FILE_ID, "object": "file", "deleted": True},
            ),
        ),
        Operation(
            "POST",
            "/v1/batches",
            "Answer all requests of a file.",
            "The answer comes at once; the file is checked after that. How urgent its requests are is said in the headers of this one; by "
            "default they go last.",
            request=request(
                {
                    "input_file_id": text(),
                    "endpoint": text(
                        "`/v1/chat/completions`, `/v1/completions`, `/v1/embeddings` or `/v1/responses`.", pattern="^/"
                    ),
                    "completion_window": text("`24h`, or another time up to `30d`.", pattern="^[1-9][0-9]*[smhd]$"),
                    "metadata": {
                        **mapping(text(maxLength=512), "Up to 16 texts of your own.", null=True),
                        "maxProperties": 16,
                    },
                },
                "input_file_id",
                "endpoint",
                "completion_window",
            ),
            answer=_BATCH,
            errors=(404, 503, 507),
            example=Example(
                {"input_file_id": _FILE_ID, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
                needs=_NEEDS_FILE,
                answer=_BATCH_VIEW,
            ),
        ),
        Operation(
            "GET",
            "/v1/batches",
            "The batches of this key, newest first; with the scope `admin` all.",
            parameters=(
                Parameter("limit", "How many at most; 20 by default.", whole(minimum=1, maximum=100)),
                _AFTER,
            ),
            answer=record({"object": {"const": "list"}, "data": array(_BATCH), **_ENDS}),
        ),
        Operation(
            "GET",
            "/v1/batches/{id}",
            "One of them.",
            answer=_BATCH,
            errors=(404,),
            example=Example(path=f"/v1/batches/{_BATCH_ID}", needs=_NEEDS_BATCH, answer=_BATCH_VIEW),
        ),
        Operation(
            "POST",
            "/v1/batches/{id}/cancel",
            "End it soon. What is answered stays.",
            "400 `batch_ended` where it has ended in another way.",
            answer=_BATCH,
            errors=(404, 507),
            example=Example(
                path=f"/v1/batches/{_BATCH_ID}/cancel",
                needs=_NEEDS_BATCH,
                answer=_BATCH_VIEW | {"status": "cancelling", "completed_at": None, "output_file_id": None},
            ),
        ),
    ),
)
