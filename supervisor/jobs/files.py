"""Files of batches: uploads of clients, and the answers of batches. Each is a row of the jobs' store and a file on disk.

A file counts against the disk budget of jobs from its first byte. Clients find it once its row is written. No file is held in
memory: threads write, search and read it in chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import structlog
from pydantic import JsonValue

from supervisor.errors import NotFoundError, UnavailableError
from supervisor.host.store.request_buffer import Bytes
from supervisor.host.store.store import Entry, NotSavedError, Store
from supervisor.schema.job import Purpose

MOST: Final = 10_000
"""The most files that are kept."""
FULL_S: Final = 60.0  # `retry-after` of a refused client
_COLLECTION: Final = "files"  # also the name of the folder

log = structlog.get_logger("llmux.jobs")


@dataclass(slots=True)
class File:
    """A file's row. `created_at`: seconds since the epoch."""

    id: str
    owner: str | None  # the key's id; None: no key was needed
    filename: str
    purpose: Purpose
    created_at: float
    bytes: int = 0


def new_id() -> str:
    """An id for a new file."""
    return f"file-{secrets.token_hex(12)}"


@dataclass(slots=True)
class Files:
    """One for each daemon. Use from the event loop's thread."""

    folder: Path | None = None  # None until `open`
    _store: Store | None = None
    _all: dict[str, File] = field(default_factory=dict)  # files that clients find, oldest first
    _growing: dict[str, File] = field(default_factory=dict)  # files that are still being written
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "files"))
    """One thread, so that chunks are appended in order."""

    def open(
        self, store: Store, folder: Path, growing: Iterable[File] = (), owners: Mapping[str, str] | None = None
    ) -> None:
        """Read the rows of stored files, and continue files that are still `growing`. Blocks on a folder.

        Deletes all other files in the folder, if the store could be read. An unusable folder is logged, and then no files are accepted.
        `owners`: see `job.former_owners`.
        """
        folder /= _COLLECTION
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = {path.name: path for path in folder.iterdir()}
        except OSError as error:
            log.warning("files.unusable", folder=str(folder), reason=str(error), consequence="no batches are taken")
            return
        self._store, self.folder = store, folder
        found = []
        for name, row in store.items(_COLLECTION).items():
            try:
                found.append(msgspec.convert(row, File))
            except msgspec.ValidationError as error:
                log.warning("file.unreadable", file=name, reason=str(error))
        for file in sorted(found, key=lambda file: (file.created_at, file.id)):
            file.owner = (owners or {}).get(file.owner or "", file.owner)
            self._all[file.id] = file
            paths.pop(file.id, None)
        for file in growing:
            self.grow(file)
            if (path := paths.pop(file.id, None)) is not None:
                file.bytes = path.stat().st_size
        for path in paths.values() if store.trouble is None else ():  # else they may belong to unreadable jobs
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def disk_bytes(self) -> int:
        """The bytes of all files on disk."""
        return sum(file.bytes for files in (self._all, self._growing) for file in files.values())

    # ------------------------------------------------------------------------------------------------------ for clients

    def find(self, file_id: str, owner: str | None, *, is_admin: bool) -> File:
        """The file, for its owner or an admin. Raises NotFoundError."""
        file = self._all.get(file_id)
        if file is None or not (is_admin or file.owner == owner):
            raise NotFoundError(f"There is no file {file_id[:100]!r}, or no longer.", code="file_not_found")
        return file

    def listing(self, owner: str | None, *, is_admin: bool) -> list[File]:
        """The files of this owner, oldest first; an admin sees all."""
        return [file for file in self._all.values() if is_admin or file.owner == owner]

    async def open_file(self, file_id: str) -> BinaryIO:
        """Open a file's content; the caller closes it. Raises NotFoundError if it is gone."""
        try:
            return await asyncio.to_thread(self._path(file_id).open, "rb")
        except OSError as error:
            raise NotFoundError(f"The content of {file_id} is gone.", code="file_not_found") from error

    # ---------------------------------------------------------------------------------------------------------- writing

    def begin(self, owner: str | None, purpose: Purpose) -> File:
        """Create a file, which clients find only after `keep`. Raises UnavailableError."""
        if self.folder is None:
            raise UnavailableError("Files can't be kept; the log says why.")
        if len(self._all) + len(self._growing) >= MOST:
            raise UnavailableError(
                f"{MOST} files are kept already; delete some.", code="queue_full", retry_after_s=FULL_S
            )
        file = File(new_id(), owner, "", purpose, round(time.time(), 3))
        self.grow(file)
        return file

    def grow(self, file: File) -> None:
        """Register a file that will be appended to."""
        self._growing[file.id] = file

    async def append(self, file: File, pieces: Sequence[Bytes], *, sync: bool = True) -> None:
        """Append chunks, and return when they are on disk. Raises NotSavedError: then nothing was added."""

        def write() -> None:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(number, "r+b", buffering=0) as raw:
                raw.truncate(file.bytes)  # without the part that a failed append has left
                raw.seek(file.bytes)
                for piece in pieces:
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[raw.write(rest) :]
                if sync:
                    os.fsync(number)
                file.bytes = raw.tell()  # in this thread: the next append may begin before the event loop runs

        path = self._path(file.id)
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, write)
        except OSError as error:
            raise NotSavedError(f"{path} can't be written: {error.strerror or error}") from error

    def row(self, file: File) -> dict[Entry, JsonValue]:
        """The entry of the store for this file."""
        return {(_COLLECTION, file.id): msgspec.to_builtins(file)}

    def publish(self, file: File) -> None:
        """Let clients find a file whose row was written."""
        self._growing.pop(file.id, None)
        self._all[file.id] = file

    async def keep(self, file: File) -> None:
        """Write the file's row, and let clients find it. Raises NotSavedError."""
        await self._change(self.row(file))
        self.publish(file)

    def drop(self, file: File) -> None:
        """Delete a file that is still being written."""
        if self._growing.pop(file.id, None) is not None:
            self._unlink(file.id)

    async def remove(self, ids: Sequence[str]) -> None:
        """Delete these files. Raises NotSavedError: then the files stay."""
        if not ids:
            return
        await self._change({(_COLLECTION, file_id): None for file_id in ids})
        for file_id in ids:
            self._all.pop(file_id, None)
            self._unlink(file_id)

    def _unlink(self, file_id: str) -> None:
        with contextlib.suppress(OSError):  # the next `open` deletes leftovers
            self._path(file_id).unlink()

    def _path(self, file_id: str) -> Path:
        assert self.folder is not None
        return self.folder / file_id

    async def _change(self, entries: dict[Entry, JsonValue]) -> None:
        assert self._store is not None
        async with self._store.transaction() as changes:
            changes.update(entries)
