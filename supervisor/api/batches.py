"""Files of requests, and batches that answer them, as OpenAI's API has them; see `jobs.files` and `jobs.batches`.

The file of an upload goes to disk piece by piece, never whole into memory.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from supervisor.api.jobs import PIECE, pieces_of
from supervisor.api.operation import Api
from supervisor.daemon.daemon import Daemon
from supervisor.dialects import dialect_of
from supervisor.errors import InvalidRequestError, TooLargeError, UnavailableError
from supervisor.gateway.disconnect import ClientDisconnectedError, Receive
from supervisor.gateway.head import head_of
from supervisor.gateway.operation import Group
from supervisor.jobs.batch_file import ENDPOINTS
from supervisor.jobs.files import File
from supervisor.jobs.job import KEPT_HEADERS, Batch, owner_of
from supervisor.schema import job as schema
from supervisor.schema.operation import FORM, Example

FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
LONGEST_S: Final = 30 * 86_400
"""The longest window of a batch."""
VALUE_LIMIT: Final = 512  # bytes of each header and of each field of an upload, except the file
NAME_LIMIT: Final = 255  # characters of a file's name
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_PARTS_LIMIT: Final = 16
_SLICE: Final = 32 * 1024  # bytes parsed before other tasks get a turn
_FRAMING: Final = 64 * 1024  # bytes of a form beside its file
_FIELDS: Final = frozenset(schema.FileForm.__struct_fields__)
_FILE_ID: Final = "file-0123456789abcdef01234567"
_BATCH_ID: Final = "batch_0123456789abcdef01234567"
_FILE: Final = Example(path=f"{FILES}/{_FILE_ID}", needs="the id of a file")
_BATCH: Final = "the id of a batch"
GROUP: Final = Group(
    "Batches", "Files of requests, as OpenAI's API has them: each line is a job, and a file has the answers."
)

_R = TypeVar("_R", File, Batch)


@GROUP.operation(
    "POST",
    FILES,
    scope="inference",
    reads=schema.FileForm,
    request_type=FORM,
    errors=(503, 507),
    example=Example({"purpose": "batch", "file": "@requests.jsonl"}, needs="a file of requests"),
)
async def upload_file(api: Api, request: Request) -> schema.File:
    """Upload the file of a batch.

    A form. Each line of `file` is a request: `custom_id`, `method` (`POST`), `url` (the endpoint of the batch) and `body`.
    """
    return _file_view_with_expiry(api.daemon, await _store_upload(api.daemon, request))


@GROUP.operation("GET", FILES, scope="inference")
async def list_files(api: Api, query: schema.FileQuery, request: Request) -> schema.FileList:
    """The files of this key, newest first; with the scope `admin` all."""
    daemon = api.daemon
    await daemon.batches.expire()
    owner, is_admin = owner_of(request.scope["state"])
    files = daemon.files.listing(owner, is_admin=is_admin)
    found = [file for file in files if query.purpose in {None, file.purpose}]
    if query.order == "desc":
        found.reverse()
    page, has_more = _page_after(found, query.after, query.limit)
    expiry = daemon.batches.expiry_of(page)
    data = [_file_view(file, expiry[file.id]) for file in page]
    return schema.FileList("list", data, *_first_and_last_id(page), has_more=has_more)


@GROUP.operation("GET", f"{FILES}/{{id}}", scope="inference", errors=(404,), example=_FILE)
async def get_file(api: Api, id: str, request: Request) -> schema.File:
    """One of them."""
    return _file_view_with_expiry(api.daemon, await _find_file(api.daemon, request, id))


@GROUP.operation(
    "GET",
    f"{FILES}/{{id}}/content",
    scope="inference",
    answer_type="application/octet-stream",
    errors=(404,),
    example=Example(path=f"{FILES}/{_FILE_ID}/content", needs="the id of a file"),
)
async def read_file_content(api: Api, id: str, request: Request) -> Response:
    """What is in it.

    Of an output, a line for each request: `id`, `custom_id`, `response` (`status_code`, `request_id`, `body`) and `error`.
    """
    found = await _find_file(api.daemon, request, id)
    file = await api.daemon.files.open_file(found.id)
    size = str(os.fstat(file.fileno()).st_size)
    return StreamingResponse(pieces_of(file), 200, {"content-length": size}, "application/octet-stream")


@GROUP.operation("DELETE", f"{FILES}/{{id}}", scope="inference", errors=(404, 507), example=_FILE)
async def delete_file(api: Api, id: str, request: Request) -> schema.DeletedFile:
    """Forget it. 400 `file_in_use` while a batch reads it."""
    file = await _find_file(api.daemon, request, id)
    await api.daemon.batches.remove_file(file)
    return schema.DeletedFile(file.id, "file", deleted=True)


async def _find_file(daemon: Daemon, request: Request, file_id: str) -> File:
    """A file that this request may see. Raises NotFoundError."""
    await daemon.batches.expire()
    owner, is_admin = owner_of(request.scope["state"])
    return daemon.files.find(file_id, owner, is_admin=is_admin)


def _file_view_with_expiry(daemon: Daemon, file: File) -> schema.File:
    return _file_view(file, daemon.batches.expiry_of([file])[file.id])


def _file_view(file: File, expires_at: float | None) -> schema.File:
    return schema.File(
        id=file.id,
        object="file",
        bytes=file.bytes,
        created_at=int(file.created_at),
        expires_at=None if expires_at is None else int(expires_at),
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
    )


def _page_after(found: list[_R], after: str | None, most: int) -> tuple[list[_R], bool]:
    """At most `most` entries after the id `after`, and whether more follow. Raises InvalidRequestError."""
    if after is not None:
        at = next((place for place, each in enumerate(found, 1) if each.id == after), None)
        if at is None:
            raise InvalidRequestError(f"after: there is no {after[:100]!r} in this list.", param="after")
        found = found[at:]
    return found[:most], len(found) > most


def _first_and_last_id(page: list[_R]) -> tuple[str | None, str | None]:
    """The ids of the page's first and last entry."""
    return (page[0].id, page[-1].id) if page else (None, None)


# ---------------------------------------------------------------------------------------------------------------- batches


@GROUP.operation(
    "POST",
    BATCHES,
    scope="inference",
    errors=(404, 503, 507),
    example=Example(
        {"input_file_id": _FILE_ID, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        needs="the id of a file",
    ),
)
async def create_batch(api: Api, body: schema.BatchRequest, request: Request) -> schema.Batch:
    """Answer all requests of a file.

    The answer comes at once; the file is checked after that. How urgent its requests are is said in the headers of this one; by
    default they go last.
    """
    daemon = api.daemon
    endpoint, window_s = _served_endpoint(daemon, body.endpoint), _window_s(body.completion_window)
    file = await _find_file(daemon, request, body.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequestError(f"{file.id} has the purpose {file.purpose}, not batch.", param="input_file_id")
    owner, _ = owner_of(request.scope["state"])
    headers = {name: value for name in KEPT_HEADERS if (value := request.headers.get(name)) is not None}
    batch = await daemon.batches.add(
        endpoint,
        file,
        owner,
        window=body.completion_window,
        window_s=window_s,
        headers=headers,
        metadata=body.metadata,
    )
    return await _batch_view(daemon, batch)


@GROUP.operation("GET", BATCHES, scope="inference")
async def list_batches(api: Api, query: schema.BatchQuery, request: Request) -> schema.BatchList:
    """The batches of this key, newest first; with the scope `admin` all."""
    await api.daemon.batches.expire()
    owner, is_admin = owner_of(request.scope["state"])
    found = api.daemon.jobs.listing(Batch, owner, is_admin=is_admin)
    page, has_more = _page_after(found, query.after, query.limit)
    data = [await _batch_view(api.daemon, batch) for batch in page]
    return schema.BatchList("list", data, *_first_and_last_id(page), has_more=has_more)


@GROUP.operation(
    "GET",
    f"{BATCHES}/{{id}}",
    scope="inference",
    errors=(404,),
    example=Example(path=f"{BATCHES}/{_BATCH_ID}", needs=_BATCH),
)
async def get_batch(api: Api, id: str, request: Request) -> schema.Batch:
    """One of them."""
    return await _batch_view(api.daemon, await _find_batch(api.daemon, request, id))


@GROUP.operation(
    "POST",
    f"{BATCHES}/{{id}}/cancel",
    scope="inference",
    errors=(404, 507),
    example=Example(path=f"{BATCHES}/{_BATCH_ID}/cancel", needs=_BATCH),
)
async def cancel_batch(api: Api, id: str, request: Request) -> schema.Batch:
    """End it soon. What is answered stays.

    400 `batch_ended` where it has ended in another way.
    """
    batch = await _find_batch(api.daemon, request, id)
    await api.daemon.batches.cancel(batch)
    return await _batch_view(api.daemon, batch)


async def _find_batch(daemon: Daemon, request: Request, batch_id: str) -> Batch:
    """A batch that this request may see. Raises NotFoundError."""
    await daemon.batches.expire()
    owner, is_admin = owner_of(request.scope["state"])
    return daemon.jobs.find(Batch, batch_id, owner, is_admin=is_admin, code="batch_not_found")


def _served_endpoint(daemon: Daemon, requested: str) -> str:
    """The requested endpoint. Raises InvalidRequestError, with the list of served endpoints."""
    served = [
        path
        for path in ENDPOINTS
        if daemon.gateway.routes.serves("POST", path, dialect_of({"method": "POST", "path": path, "headers": []}))
    ]
    if requested not in served:
        choice = f"one of {', '.join(served)}" if served else "one that a configured model serves; there is none"
        raise InvalidRequestError(f"endpoint must be {choice}.", param="endpoint")
    return requested


def _window_s(window: str) -> float:
    """The window in seconds. Raises InvalidRequestError."""
    seconds = int(window[:-1]) * _SECONDS[window[-1]]
    if seconds > LONGEST_S:
        message = "completion_window must be 24h, or another time up to 30d, such as 30m or 7d."
        raise InvalidRequestError(message, param="completion_window")
    return seconds


async def _batch_view(daemon: Daemon, batch: Batch) -> schema.Batch:
    """A batch in OpenAI's format."""
    completed, failed = await daemon.batches.counts(batch)
    problems = [schema.BatchProblem(each.code, each.message, each.param, each.line) for each in batch.problems]

    def when(seconds: float | None) -> int | None:
        return None if seconds is None else int(seconds)

    def ended(state: str) -> int | None:
        return when(batch.ended_at) if batch.state == state else None

    return schema.Batch(
        id=batch.id,
        object="batch",
        endpoint=batch.endpoint,
        errors=schema.BatchProblems("list", problems) if problems else None,
        input_file_id=batch.input_file,
        completion_window=batch.window,
        status=batch.api_state,
        output_file_id=batch.output_file if batch.has_output else None,
        error_file_id=batch.error_file if batch.has_errors else None,
        created_at=int(batch.created_at),
        in_progress_at=when(batch.started_at),
        expires_at=int(batch.expires_at),
        finalizing_at=when(batch.finalizing_at),
        completed_at=ended("completed"),
        failed_at=ended("failed"),
        expired_at=ended("expired"),
        cancelling_at=when(batch.cancelling_at),
        cancelled_at=ended("cancelled"),
        request_counts=schema.BatchCounts(batch.total, completed, failed),
        metadata=batch.metadata,
    )


# ---------------------------------------------------------------------------------------------------------------- uploads


async def _store_upload(daemon: Daemon, request: Request) -> File:
    """Store the file of a form on disk. Raises LlmuxError."""
    limit = daemon.catalog.limits.files_mib << 20
    content_type = head_of(request.scope).media_type()
    kind, options = parse_options_header(content_type[:1024])
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequestError("Send a form of the kind multipart/form-data, with the fields purpose and file.")
    if int(request.headers.get("content-length", "0")) > limit + _FRAMING:
        raise _too_large(limit)
    owner, _ = owner_of(request.scope["state"])
    jobs, files, form = daemon.inference, daemon.files, _Form(boundary)
    if jobs.config.jobs_waiting == 0:
        raise UnavailableError("No jobs are taken here, and no files for them (limits.jobs_waiting: 0).")
    await daemon.batches.expire()
    file = files.begin(owner, "batch")
    try:
        waiting = bytearray()
        async for piece in _body_pieces(request.receive):
            waiting += form.parse(piece)
            if file.bytes + len(waiting) > limit:
                raise _too_large(limit)
            if len(waiting) >= PIECE:
                jobs.make_room(len(waiting))
                await files.append(file, [bytes(waiting)], sync=False)
                waiting.clear()
        form.check()
        jobs.make_room(len(waiting))
        await files.append(file, [bytes(waiting)])
        file.filename = form.filename
        await files.keep(file)
    finally:
        files.drop(file)  # no effect after `keep`
    return file


async def _body_pieces(receive: Receive) -> AsyncIterator[bytes]:
    """The body in small pieces, as they arrive. Raises ClientDisconnectedError."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        body, more = message.get("body", b""), message.get("more_body", False)
        for start in range(0, len(body), _SLICE):
            yield body[start : start + _SLICE]


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The file is larger than {limit >> 20} MiB (limits.files_mib).", param="file")


class _Form:
    """Parses an upload form piece by piece. All methods except `check` raise InvalidRequestError for an invalid form."""

    def __init__(self, boundary: bytes) -> None:
        self.filename = ""
        self._purpose = bytearray()
        self._field = ""  # the current field
        self._seen_fields: set[str] = set()
        self._parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._file_data = bytearray()  # the file's bytes of the current `parse`
        self._is_complete = False
        calls: dict[str, Callable[..., None]] = {
            "on_part_begin": self._part_begin,
            "on_header_begin": self._header_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_end": self._form_end,
        }
        try:
            self._parser = MultipartParser(boundary, calls)  # type: ignore[arg-type]
        except FormParserError as error:  # the boundary is too long
            raise InvalidRequestError(f"The form can't be read: {error}.") from error

    def parse(self, piece: bytes) -> bytes:
        """Parse a piece of the form. Returns the file's bytes in it."""
        self._file_data.clear()
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidRequestError(f"The form can't be read: {error}.") from error
        return bytes(self._file_data)

    def check(self) -> None:
        """Check the form at its end. Raises InvalidRequestError for missing parts or another purpose."""
        if not self._is_complete:
            raise InvalidRequestError("The form has no end: a last boundary, followed by two hyphens.")
        if "file" not in self._seen_fields:
            raise InvalidRequestError("The form has no file: send it as the field `file`.", param="file")
        if bytes(self._purpose) != b"batch":
            raise InvalidRequestError("purpose must be batch: no other files are kept here.", param="purpose")

    def _part_begin(self) -> None:
        self._parts += 1
        self._field = ""
        if self._parts > _PARTS_LIMIT:
            raise InvalidRequestError(f"The form has more than {_PARTS_LIMIT} parts.")

    def _header_begin(self) -> None:
        self._header.clear()
        self._value.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._append_limited(self._header, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._append_limited(self._value, data[start:end])

    def _header_end(self) -> None:
        if self._header.lower() != b"content-disposition":
            return
        _, options = parse_options_header(bytes(self._value))
        self._read_names(options)

    def _read_names(self, options: Mapping[bytes, bytes]) -> None:
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        if self._field == "file":
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = "".join(each for each in name if each.isprintable())[:NAME_LIMIT]

    def _headers_finished(self) -> None:
        name = self._field
        if name not in _FIELDS:
            message = f"{name[:100]}: not offered; a file is kept as long as limits.jobs_keep_s says."
            raise InvalidRequestError(message, param=name[:100] or None)
        if name in self._seen_fields:
            raise InvalidRequestError(f"The form has `{name}` twice.", param=name)
        self._seen_fields.add(name)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self._file_data += data[start:end]
        else:
            self._append_limited(self._purpose, data[start:end])

    def _form_end(self) -> None:
        self._is_complete = True

    def _append_limited(self, text: bytearray, piece: bytes) -> None:
        text += piece
        if len(text) > VALUE_LIMIT:
            raise InvalidRequestError(f"A field or a header of the form is longer than {VALUE_LIMIT} bytes.")
