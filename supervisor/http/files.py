"""`/v1/files`: what batches read and write; see `daemon.files`. A form is written to disk as it comes, never held."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from supervisor.daemon.batch import Batch
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.files import MOST, File
from supervisor.daemon.job import owner_of
from supervisor.errors import InvalidRequestError, TooLargeError, UnavailableError
from supervisor.gateway.body.parameters import number
from supervisor.gateway.disconnect import ClientDisconnectedError, Receive
from supervisor.gateway.head import head_of
from supervisor.http.jobs import PIECE, pieces_of

PATH: Final = "/v1/files"
VALUE_LIMIT: Final = 512  # bytes, of each field but the file, and of each header
NAME_LIMIT: Final = 255  # characters of a file's name
_PARTS_LIMIT: Final = 16
_SLICE: Final = 32 * 1024  # parsed in one turn of the loop
_FRAMING: Final = 64 * 1024  # bytes of a form beside its file
_FIELDS: Final = frozenset({"file", "purpose"})

R = TypeVar("R", File, Batch)


def routes(daemon: Daemon) -> list[Route]:
    """Upload, list, look at, read and delete files."""

    async def create(request: Request) -> Response:
        return JSONResponse(view(daemon, await _uploaded(daemon, request)))

    async def listing(request: Request) -> Response:
        await daemon.batches.expire()
        owner, is_admin = owner_of(request.scope["state"])
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise InvalidRequestError("order must be asc or desc.", param="order")
        files = daemon.jobs.files.listing(owner, is_admin=is_admin)
        found = [file for file in files if purpose in {None, file.purpose}]
        if order == "desc":
            found.reverse()
        page, more = page_of(request, found, number(request, "limit", MOST, MOST))
        expiry = daemon.batches.expiry_of(page)
        return listed([_view(file, expiry[file.id]) for file in page], more=more)

    async def one(request: Request) -> Response:
        return JSONResponse(view(daemon, await found_file(daemon, request, request.path_params["id"])))

    async def content(request: Request) -> Response:
        found = await found_file(daemon, request, request.path_params["id"])
        file = await daemon.jobs.files.open_file(found.id)
        size = str(os.fstat(file.fileno()).st_size)
        return StreamingResponse(pieces_of(file), 200, {"content-length": size}, "application/octet-stream")

    async def remove(request: Request) -> Response:
        file = await found_file(daemon, request, request.path_params["id"])
        await daemon.batches.remove_file(file)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    return [
        Route(PATH, create, methods=["POST"]),
        Route(PATH, listing, methods=["GET"]),
        Route(f"{PATH}/{{id}}", one, methods=["GET"]),
        Route(f"{PATH}/{{id}}", remove, methods=["DELETE"]),
        Route(f"{PATH}/{{id}}/content", content, methods=["GET"]),
    ]


async def found_file(daemon: Daemon, request: Request, file_id: str) -> File:
    """A file that this request may see. Raises NotFoundError."""
    await daemon.batches.expire()
    owner, is_admin = owner_of(request.scope["state"])
    return daemon.jobs.files.find(file_id, owner, is_admin=is_admin)


def page_of(request: Request, found: list[R], most: int) -> tuple[list[R], bool]:
    """Those behind `after`, and whether more follow. Raises InvalidRequestError."""
    after = request.query_params.get("after")
    if after is not None:
        at = next((place for place, each in enumerate(found, 1) if each.id == after), None)
        if at is None:
            raise InvalidRequestError(f"after: there is no {after[:100]!r} in this list.", param="after")
        found = found[at:]
    return found[:most], len(found) > most


def listed(page: list[dict[str, Any]], *, more: bool) -> Response:
    """A page as OpenAI's lists are."""
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return JSONResponse({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


def view(daemon: Daemon, file: File) -> dict[str, Any]:
    """A file as OpenAI's clients get it."""
    return _view(file, daemon.batches.expiry_of([file])[file.id])


def _view(file: File, expires_at: float | None) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "expires_at": None if expires_at is None else int(expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


# ---------------------------------------------------------------------------------------------------------------- uploads


async def _uploaded(daemon: Daemon, request: Request) -> File:
    """The file of a form, on disk. Raises LlmuxError."""
    limit = daemon.catalog.limits.files_mib << 20
    content_type = head_of(request.scope).media_type()
    kind, options = parse_options_header(content_type[:1024])
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequestError("Send a form of the kind multipart/form-data, with the fields purpose and file.")
    if int(request.headers.get("content-length", "0")) > limit + _FRAMING:
        raise _too_large(limit)
    owner, _ = owner_of(request.scope["state"])
    jobs, form = daemon.jobs, _Form(boundary)
    if jobs.config.jobs_waiting == 0:
        raise UnavailableError("No jobs are taken here, and no files for them (limits.jobs_waiting: 0).")
    await daemon.batches.expire()
    file = jobs.files.begin(owner, "batch")
    try:
        waiting = bytearray()
        async for piece in _pieces(request.receive):
            waiting += form.parse(piece)
            if file.bytes + len(waiting) > limit:
                raise _too_large(limit)
            if len(waiting) >= PIECE:
                jobs.make_room(len(waiting))
                await jobs.files.append(file, [bytes(waiting)], sync=False)
                waiting.clear()
        form.check()
        jobs.make_room(len(waiting))
        await jobs.files.append(file, [bytes(waiting)])
        file.filename = form.filename
        await jobs.files.keep(file)
    finally:
        jobs.files.drop(file)  # unless it is kept
    return file


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    """The body in small pieces, as it comes. Raises ClientDisconnectedError."""
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
    """The fields of a form that comes in pieces. All methods but `check` raise InvalidRequestError for what is no such form."""

    def __init__(self, boundary: bytes) -> None:
        self.filename = ""
        self._purpose = bytearray()
        self._field = ""  # the one that is being read
        self._seen: set[str] = set()
        self._parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._found = bytearray()  # of the file, since the last `parse`
        self._is_complete = False
        calls: dict[str, Callable[..., None]] = {
            "on_part_begin": self._part_begin,
            "on_header_begin": self._header_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, calls)  # type: ignore[arg-type]
        except FormParserError as error:  # of a boundary that is too long
            raise InvalidRequestError(f"The form can't be read: {error}.") from error

    def parse(self, piece: bytes) -> bytes:
        """What of the file is in this piece of the form."""
        self._found.clear()
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidRequestError(f"The form can't be read: {error}.") from error
        return bytes(self._found)

    def check(self) -> None:
        """All of it has come. Raises InvalidRequestError for what is missing or not offered."""
        if not self._is_complete:
            raise InvalidRequestError("The form has no end: a last boundary, followed by two hyphens.")
        if "file" not in self._seen:
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
        self._grow(self._header, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._grow(self._value, data[start:end])

    def _header_end(self) -> None:
        if self._header.lower() != b"content-disposition":
            return
        _, options = parse_options_header(bytes(self._value))
        self._name(options)

    def _name(self, options: Mapping[bytes, bytes]) -> None:
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        if self._field == "file":
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = "".join(each for each in name if each.isprintable())[:NAME_LIMIT]

    def _headers_finished(self) -> None:
        name = self._field
        if name not in _FIELDS:
            message = f"{name[:100]}: not offered; a file is kept as long as limits.jobs_keep_s says."
            raise InvalidRequestError(message, param=name[:100] or None)
        if name in self._seen:
            raise InvalidRequestError(f"The form has `{name}` twice.", param=name)
        self._seen.add(name)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self._found += data[start:end]
        else:
            self._grow(self._purpose, data[start:end])

    def _end(self) -> None:
        self._is_complete = True

    def _grow(self, text: bytearray, piece: bytes) -> None:
        text += piece
        if len(text) > VALUE_LIMIT:
            raise InvalidRequestError(f"A field or a header of the form is longer than {VALUE_LIMIT} bytes.")
