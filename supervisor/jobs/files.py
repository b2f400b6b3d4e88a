"""Files of batches: those that clients upload, and those that hold a batch's answers. They are rows of the jobs' store, each
with a file on disk.

A file counts on the disk that jobs may take from its first byte. Clients find it once its row is written. Nothing holds a
file in memory: it is written, searched and read in pieces, in threads.
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
"""So many files there may be."""
FULL_S: Final = 60.0  # until a refused client should try again
_COLLECTION: Final = "files"  # and the folder

log = structlog.get_logger("llmux.jobs")


@dataclass(slots=True)
class File:
    """One file. `created_at`: seconds since the epoch."""

    id: str
    owner: str | None  # the key's id; None: no key was needed
    filename: str
    purpose: Purpose
    created_at: float
    bytes: int = 0


def new_id() -> str:
    """A name for a file."""
    return f"file-{secrets.token_hex(12)}"


@dataclass(slots=True)
class Files:
    """One for each daemon. Use from the event loop's thread."""

    folder: Path | None = None  # None until `open`
    _store: Store | None = None
    _all: dict[str, File] = field(default_factory=dict)  # that clients find, oldest first
    _written: dict[str, File] = field(default_factory=dict)  # that grow still
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "files"))
    """One thread: what is appended to a file comes in order."""

    def open(
        self, store: Store, folder: Path, growing: Iterable[File] = (), owners: Mapping[str, str] | None = None
    ) -> None:
        """Go on with the files that are kept, and with those that are `growing` still. Blocks on a folder.

        Removes all others there, if the store could be read. A folder that can't be used is logged, and no files are taken. `owners`: see
        `job.former_owners`.
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
        for path in paths.values() if store.trouble is None else ():  # else they may be of jobs that can't be read now
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def taken(self) -> int:
        """Bytes on disk of all."""
        return sum(file.bytes for files in (self._all, self._written) for file in files.values())

    # ------------------------------------------------------------------------------------------------------- for clients

    def find(self, file_id: str, owner: str | None, *, is_admin: bool) -> File:
        """The file, for whom it is or for an admin. Raises NotFoundError."""
        file = self._all.get(file_id)
        if file is None or not (is_admin or file.owner == owner):
            raise NotFoundError(f"There is no file {file_id[:100]!r}, or no longer.", code="file_not_found")
        return file

    def listing(self, owner: str | None, *, is_admin: bool) -> list[File]:
        """The files of this owner, oldest first; an admin sees all."""
        return [file for file in self._all.values() if is_admin or file.owner == owner]

    async def open_file(self, file_id: str) -> BinaryIO:
        """Its content; close it. Raises NotFoundError if it is gone."""
        try:
            return await asyncio.to_thread(self._path(file_id).open, "rb")
        except OSError as error:
            raise NotFoundError(f"The content of {file_id} is gone.", code="file_not_found") from error

    # ----------------------------------------------------------------------------------------------------------- writing

    def begin(self, owner: str | None, purpose: Purpose) -> File:
        """A new file, which nobody finds before `keep`. Raises UnavailableError."""
        if self.folder is None:
            raise UnavailableError("Files can't be kept; the log says why.")
        if len(self._all) + len(self._written) >= MOST:
            raise UnavailableError(
                f"{MOST} files are kept already; delete some.", code="queue_full", retry_after_s=FULL_S
            )
        file = File(new_id(), owner, "", purpose, round(time.time(), 3))
        self.grow(file)
        return file

    def grow(self, file: File) -> None:
        """Something will be appended to it."""
        self._written[file.id] = file

    async def append(self, file: File, pieces: Sequence[Bytes], *, sync: bool = True) -> None:
        """Write at its end, and return when that is on disk. Raises NotSavedError: then nothing was added."""

        def write() -> None:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(number, "r+b", buffering=0) as raw:
                raw.truncate(file.bytes)  # what one that failed has left goes
                raw.seek(file.bytes)
                for piece in pieces:
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[raw.write(rest) :]
                if sync:
                    os.fsync(number)
                file.bytes = raw.tell()  # here: the next one begins before the loop's turn

        path = self._path(file.id)
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, write)
        except OSError as error:
            raise NotSavedError(f"{path} can't be written: {error.strerror or error}") from error

    def row(self, file: File) -> dict[Entry, JsonValue]:
        """What the store is to have of it."""
        return {(_COLLECTION, file.id): msgspec.to_builtins(file)}

    def kept(self, file: File) -> None:
        """Its row is in the store: clients find it."""
        self._written.pop(file.id, None)
        self._all[file.id] = file

    async def keep(self, file: File) -> None:
        """Let clients find it, also after a restart. Raises NotSavedError."""
        await self._change(self.row(file))
        self.kept(file)

    def drop(self, file: File) -> None:
        """Give up one that nobody has found yet."""
        if self._written.pop(file.id, None) is not None:
            self._unlink(file.id)

    async def remove(self, ids: Sequence[str]) -> None:
        """Forget these. Raises NotSavedError: then they stay."""
        if not ids:
            return
        await self._change({(_COLLECTION, file_id): None for file_id in ids})
        for file_id in ids:
            self._all.pop(file_id, None)
            self._unlink(file_id)

    def _unlink(self, file_id: str) -> None:
        with contextlib.suppress(OSError):  # the next `open` removes what is left
            self._path(file_id).unlink()

    def _path(self, file_id: str) -> Path:
        assert self.folder is not None
        return self.folder / file_id

    async def _change(self, entries: dict[Entry, JsonValue]) -> None:
        assert self._store is not None
        async with self._store.transaction() as changes:
            changes.update(entries)
