"""Responses that clients may refer to later: a folder with a file for each, bounded by bytes, count and age.

The folder is the store: another process finds the files that one wrote, so nothing is handed over. Only the files' sizes and ages
are in memory. A thread writes a response, and `find` waits for that: else a client could get a background response that is
generated again after a crash. A response is lost if it can't be written, or if newer ones need its room.

A file is a line about the response, then its object and the unchanged items. A response is written and found without decoding
or joining, and read in pieces, because it may have megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from supervisor.errors import UnavailableError
from supervisor.host.store.files import replacing

Bytes = bytes | bytearray

PIECE: Final = 256 * 1024
"""Bytes that are read or written between two turns of the loop, or of other threads."""
GROUP_S: Final = 0.02
"""Responses that are kept within this time are written together."""
MOST_PENDING: Final = 64 * 1024 * 1024
"""The most bytes that wait to be written; with a slower disk further responses are not kept."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
_FOLDER: Final = "responses"
_RECORD: Final = ".json"
_EVENTS: Final = ".events"
_FIRST_LINE: Final = 4096  # bytes, at most
_BEGIN: Final = b'{"format":2,'

log = structlog.get_logger("llmux.responses")


class _File:
    """An open file, closed with the last reference: its reader may go on when the file is replaced or removed."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the file could not be opened
            os.close(self.fd)


class Part:
    """Some bytes, in memory or in a file."""

    def __init__(self, content: Bytes | _File, begin: int = 0, size: int | None = None) -> None:
        self._content = content
        self._begin = begin
        self.size = len(content) if isinstance(content, bytes | bytearray) else size or 0

    def blocks(self) -> Iterator[bytes]:
        """The whole part, in pieces. Blocks. Raises OSError."""
        for start in range(0, self.size, PIECE):
            yield self._read(start, start + PIECE)

    async def read(self, start: int, stop: int) -> bytes:
        """A range of bytes, no longer than `PIECE`. Raises UnavailableError."""
        try:
            return await asyncio.to_thread(self._read, start, stop)
        except OSError as error:
            raise UnavailableError(f"What is kept can't be read back from disk: {error.strerror}.") from error

    async def pieces(self) -> AsyncIterator[bytes]:
        """The whole part, in pieces. Raises UnavailableError."""
        for start in range(0, self.size, PIECE):
            yield await self.read(start, start + PIECE)

    async def whole(self) -> Bytes:
        """The whole part at once. Raises UnavailableError."""
        if not isinstance(self._content, _File):
            return self._content
        whole = bytearray()
        async for piece in self.pieces():
            whole += piece
        return whole

    def _read(self, start: int, stop: int) -> bytes:
        if not isinstance(self._content, _File):
            return bytes(memoryview(self._content)[start:stop])
        size = min(stop, self.size) - start
        found = os.pread(self._content.fd, size, self._begin + start)
        if len(found) < size:
            raise OSError(errno.EIO, "it is shorter than it was")
        return found


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, and the items that it answers."""

    owner: str | None  # the key's id; None: no key was needed
    response: Part  # the object, as JSON
    items: Part  # the model's whole input: a text or a list of items, as JSON
    status: str | None = None  # the object's
    is_background: bool = False
    is_streamed: bool = False  # clients can read its events again; only for background responses


class _Line(msgspec.Struct):
    """The first line of a file."""

    format: int
    owner: str | None
    status: str | None
    is_background: bool
    is_streamed: bool
    response: int  # bytes
    items: int


class _Status(msgspec.Struct):
    status: str | None = None


class _Former(msgspec.Struct):
    """A whole file as versions before 2 wrote it."""

    owner: str | None
    response: msgspec.Raw
    items: msgspec.Raw
    is_background: bool = False
    is_streamed: bool = False


_encode: Final = msgspec.json.Encoder().encode
_decode_line: Final = msgspec.json.Decoder(_Line).decode
_decode_former: Final = msgspec.json.Decoder(_Former).decode
_decode_status: Final = msgspec.json.Decoder(_Status).decode


class EventLog:
    """The events of a background response, in order of arrival; an event's index is its number."""

    def __init__(self, events: Iterable[bytes] = ()) -> None:
        self.events = [*events]
        self.size = sum(map(len, self.events))
        self._changed = asyncio.Event()

    def add(self, event: bytes) -> None:
        """Append the next complete event."""
        self.events.append(event)
        self.size += len(event)
        self.notify()

    def cut(self, count: int) -> None:
        """Keep the first `count` events; the rest is generated again."""
        del self.events[count:]
        self.size = sum(map(len, self.events))

    def notify(self) -> None:
        """Wake all tasks that wait in `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next event; False: none has arrived within that time."""
        event = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await event.wait()
        return False


class ResponseStore:
    """The responses of one daemon. Use from the event loop's thread."""

    def __init__(self) -> None:
        self.logs: dict[str, EventLog] = {}  # of background responses that are being generated
        self.owners: Mapping[str, str] = {}  # ids of keys by the names that older files have
        self._folder: Path | None = None  # None until `open`
        self._most_bytes, self._most, self._keep_s = 0, 0, 0.0
        self._sizes: dict[str, tuple[int, float]] = {}  # name → bytes, time; oldest first
        self._bytes = 0
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._pending_bytes = 0
        self._unwritten: list[_Work] = []  # handed to the writer soon
        self._writer = ThreadPoolExecutor(1, "responses")  # one thread, so that writes keep their order

    @property
    def is_on(self) -> bool:
        """Is anything kept?"""
        return self._folder is not None and self._most_bytes > 0

    def open(self, folder: Path) -> None:
        """Go on with the responses below `folder`. Blocks. A folder that can't be used is logged, and nothing is kept."""
        folder /= _FOLDER
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found: dict[str, tuple[int, float]] = {}
            for path in folder.iterdir():
                if _NAME.fullmatch(path.stem) is None:  # a daemon was killed while it wrote the file
                    path.unlink()
                    continue
                status = path.stat()
                size, at = found.get(path.stem, (0, 0.0))
                found[path.stem] = size + status.st_size, max(at, status.st_mtime)
        except OSError as error:
            log.warning("responses.unusable", folder=str(folder), reason=str(error), consequence="none is kept")
            return
        self._folder = folder
        self._sizes = dict(sorted(found.items(), key=lambda item: item[1][1]))
        self._bytes = sum(size for size, _ in found.values())
        self._make_room()

    def configure(self, *, most_bytes: int, most: int, keep_s: float) -> None:
        """Change the limits."""
        self._most_bytes, self._most, self._keep_s = most_bytes, most, keep_s
        if self._folder is not None:
            self._make_room()

    async def flushed(self) -> None:
        """Wait until all responses kept so far are written."""
        self._write_now()
        await asyncio.wrap_future(self._writer.submit(bool))

    async def close(self) -> None:
        """Wait until all responses are written. Nothing is kept from now on."""
        self._write_now()
        self._folder = None
        await asyncio.to_thread(self._writer.shutdown)

    # ------------------------------------------------------------------------------------------------------ one response

    def keep(self, name: str, kept: StoredResponse, *, replaces: bool = False) -> asyncio.Future[None] | None:
        """Keep a response, with the events of its log if it has one. Returns a future of the write; None: it isn't kept.

        An existing response of this name stays, unless `replaces`: a worker chose the name.
        """
        if self._folder is None or _NAME.fullmatch(name) is None or (name in self._sizes and not replaces):
            return None
        line = _Line(
            2, kept.owner, kept.status, kept.is_background, kept.is_streamed, kept.response.size, kept.items.size
        )
        begin = Part(_encode(line) + b"\n")
        events = self.logs.get(name)
        size = begin.size + kept.response.size + kept.items.size + (0 if events is None else events.size)
        if size > self._most_bytes or self._pending_bytes + size > MOST_PENDING:
            log.warning("response.not_kept", response=name, bytes=size, reason="it is too large, or the disk too slow")
            return None
        self._forget_size(name)
        self._sizes[name] = size, time.time()
        self._bytes += size
        self._pending_bytes += size
        path, frames = f"{self._folder}/{name}", None if events is None else [*events.events]

        def write() -> None:
            if frames is not None:
                _write_file(path + _EVENTS, map(Part, frames), is_synced=replaces)
            _write_file(path + _RECORD, (begin, kept.response, kept.items), is_synced=replaces)

        def written(done: asyncio.Future[None]) -> None:
            self._pending_bytes -= size
            if self._pending.get(name) is writing:
                del self._pending[name]
            if not done.cancelled() and (error := done.exception()) is not None:
                log.warning("response.not_kept", response=name, reason=str(error))
                if not replaces:  # else the earlier version still exists
                    self._forget_size(name)

        loop = asyncio.get_running_loop()
        self._pending[name] = writing = loop.create_future()
        writing.add_done_callback(written)
        self._unwritten.append((writing, write))
        if replaces:  # the caller waits for the write
            self._write_now()
        elif len(self._unwritten) == 1:
            loop.call_later(GROUP_S, self._write_now)
        self._make_room()
        return writing

    def _write_now(self) -> None:
        """Hand all pending work to the writer in one call: each call costs the loop as much as a request."""
        group, self._unwritten = self._unwritten, []
        if group:
            asyncio.get_running_loop().run_in_executor(self._writer, _do_all, group).add_done_callback(_settle_futures)

    async def find(self, name: str, owner: str | None, *, is_admin: bool = False) -> StoredResponse | None:
        """The response of this name, for its owner or for an admin; None: there is none, or it has expired."""
        if self._folder is None or _NAME.fullmatch(name) is None:
            return None
        self._make_room()
        path = self._folder / f"{name}{_RECORD}"
        if name in self._pending:
            await self.flushed()
        kept = await asyncio.to_thread(_read, path, time.time() - self._keep_s)
        if kept is None or is_admin or self.owners.get(kept.owner or "", kept.owner) == owner:
            return kept
        return None

    async def events(self, name: str) -> Part:
        """The events of a response that has ended."""
        assert self._folder is not None
        path = self._folder / f"{name}{_EVENTS}"
        try:
            file = await asyncio.to_thread(_File, path)
            return Part(file, size=os.fstat(file.fd).st_size)
        except OSError:
            return Part(b"")

    async def remove(self, name: str) -> None:
        """Delete a response, also from disk."""
        self._pending.pop(name, None)
        self._forget_size(name)
        self._unlink_files([name])
        await self.flushed()

    # -------------------------------------------------------------------------------------------------------------- room

    def _forget_size(self, name: str) -> None:
        size, _ = self._sizes.pop(name, (0, 0.0))
        self._bytes -= size

    def _make_room(self) -> None:
        """Remove the oldest responses while there are expired ones, too many, or too many bytes."""
        before, expired = time.time() - self._keep_s, []
        while self._sizes:
            name, (_, at) = next(iter(self._sizes.items()))
            if at > before and self._bytes <= self._most_bytes and len(self._sizes) <= self._most:
                break
            self._pending.pop(name, None)
            self._forget_size(name)
            expired.append(name)
        if expired:
            self._unlink_files(expired)

    def _unlink_files(self, names: list[str]) -> None:
        folder = self._folder
        assert folder is not None

        def unlink() -> None:
            for name in names:
                for suffix in (_RECORD, _EVENTS):
                    with contextlib.suppress(OSError):
                        (folder / f"{name}{suffix}").unlink()

        if self._unwritten:  # in order: the pending writes come first
            self._unwritten.append((None, unlink))
        else:
            self._writer.submit(unlink)


_Work = tuple[asyncio.Future[None] | None, Callable[[], None]]  # the future that gets its result, if any
_Results = list[tuple[asyncio.Future[None] | None, Exception | None]]


def _do_all(group: Sequence[_Work]) -> _Results:
    """Do the work, in the writer's thread. An error in one item doesn't affect the others."""
    results: _Results = []
    for future, work in group:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # the future gets the error
            results.append((future, error))
        else:
            results.append((future, None))
    return results


def _settle_futures(done: asyncio.Future[_Results]) -> None:
    for future, error in done.result():
        if future is None or future.done():  # its caller was cancelled
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _write_file(path: str, parts: Iterable[Part], *, is_synced: bool) -> None:
    """Write a file: whole or not at all with `is_synced`; else a crash may leave half of it, which `find` ignores.

    Raises OSError.
    """
    with (
        replacing(Path(path), 0o600) if is_synced else contextlib.nullcontext(path) as new,
        os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file,
    ):
        for part in parts:
            file.writelines(part.blocks())


def _read(path: Path, oldest: float) -> StoredResponse | None:
    """The response in this file; None if it isn't there, is too old, or can't be read."""
    try:
        file = _File(path)
        about = os.fstat(file.fd)
        if about.st_mtime <= oldest:
            return None
        begin = os.pread(file.fd, _FIRST_LINE, 0)
        if not begin.startswith(_BEGIN):
            return _convert_former(path.read_bytes())
        first, end, _ = begin.partition(b"\n")
        line, at = _decode_line(first), len(first + end)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        log.warning("response.unreadable", path=str(path), reason=str(error))
        return None
    if about.st_size != at + line.response + line.items:
        log.warning("response.unreadable", path=str(path), reason="it is half written")
        return None
    response, items = Part(file, at, line.response), Part(file, at + line.response, line.items)
    return StoredResponse(line.owner, response, items, line.status, line.is_background, line.is_streamed)


def _convert_former(data: bytes) -> StoredResponse:
    """Convert a file of a former version. Raises MsgspecError, UnicodeDecodeError, RecursionError."""
    found = _decode_former(data)
    response, items = Part(bytes(found.response)), Part(bytes(found.items))
    status = _decode_status(found.response).status
    return StoredResponse(found.owner, response, items, status, found.is_background, found.is_streamed)
