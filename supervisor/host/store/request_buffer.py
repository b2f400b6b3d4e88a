"""The buffers of requests' bodies: one budget of memory for all of them, and files for those that wait for long.

A body above 64 KiB counts until it was sent, or until its request ends. While a request waits for its model, its large body
is written to an unlinked file, off the loop, and no longer counts; the worker gets the body from the file. If the disk is
full, the body stays in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog

from supervisor.errors import UnavailableError, UpstreamError

log = structlog.get_logger("llmux.bodies")

Bytes = bytes | bytearray

SLICE: Final = 256 * 1024  # of a body in memory, sent in one turn of the loop
ALWAYS_TAKEN: Final = 64 * 1024  # bytes, which don't count: a short question is not refused because of others' pictures
SPILL_ABOVE: Final = 1024 * 1024  # bytes
RESENT: Final = 16 * 1024 * 1024  # bytes; a larger body is sent once
SPILL_AFTER_S: Final = 1.0  # of waiting; the disk has no part in a request that is served at once
BUSY_S: Final = 5.0  # until a refused client should try again
_FILE_SLICE: Final = 1024 * 1024


class BodyBudget:
    """The budget of bytes for all bodies together; the daemon has one. Use from one event loop."""

    def __init__(self) -> None:
        self.limit = 1 << 30
        self.used = 0
        self.disk_limit = 0
        self.disk_used = 0
        self.folder: Path | None = None
        self.writer = ThreadPoolExecutor(1, "bodies")  # one: a disk gets no faster by several
        self.spilling: set[asyncio.Task[None]] = set()
        self._disk_refuses = False

    def configure(self, *, limit: int, disk_limit: int, folder: Path) -> None:
        """Change the limits. Bodies that are kept already stay."""
        self.limit, self.disk_limit, self.folder = limit, disk_limit, folder

    def log_disk(self, error: OSError | None) -> None:
        """Log when the disk begins to refuse bodies, and when it accepts bodies again."""
        if (error is not None) != self._disk_refuses:
            self._disk_refuses = error is not None
            if error is not None:
                log.warning("bodies.kept_in_memory", folder=str(self.folder), reason=error.strerror)
            else:
                log.info("bodies.spilled_again", folder=str(self.folder))


_UNBOUNDED: Final = BodyBudget()
_UNBOUNDED.limit = 1 << 62


class _File:
    """An unlinked file, closed with the last reference: a thread may still read it when its request has ended."""

    def __init__(self, folder: Path, closer: ThreadPoolExecutor) -> None:
        try:
            self._fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # the file system has no O_TMPFILE
            self._fd, path = tempfile.mkstemp(dir=folder)
            Path(path).unlink()
        self._closer = closer

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, RuntimeError):  # the file could not be opened; the interpreter ends
            self._closer.submit(os.close, self._fd)  # closing frees the pages, which takes milliseconds

    def append(self, data: memoryview) -> None:
        """Raises OSError, such as ENOSPC."""
        while data:
            data = data[os.write(self._fd, data) :]

    def read(self, start: int) -> bytes:
        """A slice; shorter only at the end. Raises UnavailableError if the file can't be read."""
        try:
            return os.pread(self._fd, _FILE_SLICE, start)
        except OSError as error:
            raise UnavailableError(f"The request's body can't be read back from disk ({error.strerror}).") from error


class RequestBuffer:
    """One request's body. `release` it when its request ends, however it ends."""

    # Most bodies never set these.
    _counted = 0  # bytes of the budget's memory
    _on_disk = 0  # bytes of its disk
    _waits = False
    _file: _File | None = None
    _timer: asyncio.TimerHandle | None = None
    source: RequestBuffer | None = None  # the original body that this one was made from; kept as long

    def __init__(self, budget: BodyBudget = _UNBOUNDED, data: Bytes = b"") -> None:
        self._budget = budget
        self.data: Bytes | None = data  # the whole body, unless it is on disk or released
        self.size = len(data)

    def expect(self, size: int) -> None:
        """Raises UnavailableError if the budget has no room for a body of `size` bytes."""
        if size > ALWAYS_TAKEN and self._budget.used - self._counted + size > self._budget.limit:
            raise UnavailableError(
                "llmux keeps as many request bodies as it may (limits.bodies_mib).", code="busy", retry_after_s=BUSY_S
            )

    def grow(self, size: int) -> None:
        """Count the first `size` bytes, which have arrived. Raises UnavailableError."""
        self.expect(size)
        self._set_counted(size)

    def keep(self, data: Bytes) -> None:
        """Make `data` the body."""
        self.size = size = len(data)
        self.data = data
        if size > ALWAYS_TAKEN or self._counted:
            self._set_counted(size)

    def changed(self, data: Bytes) -> RequestBuffer:
        """The buffer for `data`, which was made from this body."""
        if data is self.data:
            return self
        buffer = RequestBuffer(self._budget)
        buffer.keep(data)
        buffer.source = self
        return buffer

    def take(self) -> Bytes:
        """Return the whole body and release the buffer. For a small body, which is never on disk."""
        data = self.data
        assert data is not None, "sent or released before"
        self.release()
        return data

    def sent(self) -> None:
        """Note that the worker has the body. For another attempt the body stays until the answer begins, unless it is huge."""
        if self.size > RESENT:
            self.release()

    @property
    def is_there(self) -> bool:
        """Can the body still be sent?"""
        return self.data is not None or self._file is not None

    async def whole(self) -> Bytes:
        """The whole body. Raises UnavailableError if it can't be read back from disk."""
        return self.data if self.data is not None else b"".join([bytes(piece) async for piece in self.pieces()])

    def release(self) -> None:
        """Free the memory and the file. Does nothing the second time."""
        self.data = None
        if self._counted or self._on_disk:
            self.run()
            self._set_counted(0)
            self._budget.disk_used -= self._on_disk
            self._on_disk = 0
            self._file = None
        if self.source is not None:
            self.source.release()

    def _set_counted(self, size: int) -> None:
        counted = size if size > ALWAYS_TAKEN else 0
        self._budget.used += counted - self._counted
        self._counted = counted

    async def pieces(self) -> AsyncIterator[Bytes | memoryview]:
        """The body in slices: the kernel takes megabytes at once, and all other requests would wait meanwhile.

        Raises UnavailableError if the body can't be read back from disk.
        """
        file, start = self._file, 0
        if file is not None:
            while start < self.size:
                piece = await asyncio.to_thread(file.read, start)
                if not piece:
                    raise UnavailableError("The request's body on disk is shorter than it was.")
                start += len(piece)
                yield piece
            return
        assert self.data is not None, "sent or released before"
        whole = memoryview(self.data)
        for start in range(0, self.size, SLICE):
            if start:
                await asyncio.sleep(0)
            yield whole[start : start + SLICE]

    async def slice(self, start: int) -> bytes:
        """The slice that begins there, from memory or disk. Raises UnavailableError if the disk can't be read."""
        if (file := self._file) is not None:
            return await asyncio.to_thread(file.read, start)
        assert self.data is not None, "sent or released before"
        return bytes(memoryview(self.data)[start : start + SLICE])

    # while its request waits

    @property
    def may_spill(self) -> bool:
        """Is the body large enough for the disk? If so, call `wait` when the request begins to wait, and `run` when it goes on."""
        return self.size > SPILL_ABOVE or (self.source is not None and self.source.may_spill)

    def wait(self) -> None:
        """Note that the request waits: the body goes to disk soon."""
        if self.source is not None:
            self.source.wait()
        if self._file is None and self.size > SPILL_ABOVE:
            self._waits = True
            self._timer = asyncio.get_running_loop().call_later(SPILL_AFTER_S, self._spill_soon)

    def run(self) -> None:
        """Note that the request no longer waits."""
        self._waits = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.source is not None:
            self.source.run()

    def _spill_soon(self) -> None:
        self._timer = None
        task = asyncio.get_running_loop().create_task(self._spill())
        self._budget.spilling.add(task)
        task.add_done_callback(self._budget.spilling.discard)

    async def _spill(self) -> None:
        budget = self._budget
        if self.data is None or self._on_disk or budget.disk_used + self.size > budget.disk_limit:
            return
        self._on_disk = self.size
        budget.disk_used += self._on_disk
        file = None
        try:
            file = await asyncio.get_running_loop().run_in_executor(budget.writer, self._write_file, self.data)
        except OSError as error:
            budget.log_disk(error)
        if file is not None and self._waits:
            budget.log_disk(None)
            self._file, self.data = file, None
            self._set_counted(0)
        else:
            budget.disk_used -= self._on_disk
            self._on_disk = 0

    def _write_file(self, data: Bytes) -> _File | None:
        """Write the body to a file, in the writer's thread. None: the request no longer waits. Raises OSError."""
        assert self._budget.folder is not None
        file = _File(self._budget.folder, self._budget.writer)
        with memoryview(data) as whole:
            for start in range(0, len(whole), _FILE_SLICE):
                if not self._waits:
                    return None
                file.append(whole[start : start + _FILE_SLICE])
        return file


class Gathered(RequestBuffer):
    """The pieces of one answer, kept until it is complete: counted in the budget, and no larger than a body may be."""

    def __init__(self, budget: BodyBudget = _UNBOUNDED, most: int = _UNBOUNDED.limit) -> None:
        super().__init__(budget)
        self._most = most

    def grow(self, size: int) -> None:
        """Count the `size` bytes kept so far. Raises UpstreamError if the answer is too long, and UnavailableError."""
        if size > min(self._most, self._budget.limit):
            raise UpstreamError(
                f"The answer is longer than the {self._most >> 20} MiB that llmux keeps of one (limits.body_mib).",
                code="upstream_too_large",
            )
        super().grow(size)
