"""What outlives the daemon, in two SQLite files: `Footprints`, a cache, and `State`, which nothing else could tell again.

Each is read once, at `open`, and answered from memory; changes are written in a thread. Neither ever keeps the daemon from
starting. A damaged file is moved aside (`….broken-TIME`), which the log says; the cache then begins empty, the state with its
backup. A file that merely can't be used now (locked by another daemon, written by a newer llmux, no permission, no space) is
left alone, and nothing is saved in this run. A file is locked while it is open, which spares SQLite its shared-memory file.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar, Final, Self, TypeVar

import structlog
from pydantic import JsonValue

from supervisor.errors import LlmuxError
from supervisor.io.files import move_aside, replacing

T = TypeVar("T")
FootprintKey = tuple[str, str]
"""A model's key and a device's."""

BUSY_S = 2.0
"""How long to wait for the lock of a daemon that is just ending."""

BACKUP_S = 60.0
"""Least time between two backups, but for those at the start and the end."""

_DAMAGE: Final = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,  # a sound file with other tables than its schema version says
        sqlite3.SQLITE_CONSTRAINT,
    }
)
Statement = tuple[str, tuple[str | int | float, ...]]

log = structlog.get_logger(__name__)


class NotSavedError(LlmuxError):
    """A change could not be written and was not made."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "state_not_saved"


class _UnusableError(Exception):
    """The file is sound, but not for us."""


class _DamagedError(Exception):
    """The file isn't what it should be."""


class _Database(abc.ABC):
    """An open file. Use it from one event loop; the file belongs to it until `close`."""

    migrations: ClassVar[tuple[str, ...]]
    """One script a schema version, in order. Never change one that was released; add another."""

    keeps_backup: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: str | None = None  # why changes are not being saved now
        self._backup = path.with_name(f"{path.name}.backup")
        self._backed_up = time.monotonic()
        self._file: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open or create. Never fails: where the file can't be used it works from memory and says so in `trouble`."""
        opened = cls(path)
        try:
            opened._file = await opened._do(opened._open)
        except (sqlite3.Error, OSError, _UnusableError) as error:
            opened.trouble = str(error)
            log.warning("store.unusable", path=str(path), reason=str(error), consequence="nothing is remembered")
        return opened

    async def close(self) -> None:
        """Wait for what is being written, and unlock the file."""
        file, self._file = self._file, None
        if file is not None:
            await self._do(lambda: self._copy(file))
            await self._do(file.close)
        self._thread.shutdown(wait=False)

    @abc.abstractmethod
    def _read(self, file: sqlite3.Connection) -> None:
        """Take in all that the file holds."""

    async def _write(self, *statements: Statement, then: Callable[[], object] = bool) -> None:
        """All of them or none, and `then` in the store's thread, whoever waits for it. Raises NotSavedError."""
        file = self._file
        if file is None:
            raise NotSavedError(f"the store {self.path} can't be used: {self.trouble or 'it is closed'}")

        def write() -> None:
            with file:  # commits, or rolls back
                for statement, values in statements:
                    file.execute(statement, values)
            then()

        try:
            await self._do(write)
        except sqlite3.Error as error:
            self.trouble = str(error)
            raise NotSavedError(f"the store {self.path} can't be written: {error}") from error
        self.trouble = None
        if time.monotonic() - self._backed_up > BACKUP_S:
            self._backed_up = time.monotonic()
            self._thread.submit(self._copy, file)

    async def _do(self, work: Callable[[], T]) -> T:
        # Shielded: a caller that leaves must not leave a change half told to it.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_lost = self.keeps_backup and not _begun(self.path) and _begun(self._backup)
        try:
            file = self._restored() if is_lost else self._connect()
        except _DamagedError as error:
            _set_aside(self.path, error)
            file = self._restored()
        self._copy(file)
        return file

    def _restored(self) -> sqlite3.Connection:
        """With the content of the backup; empty where there is no good one."""
        if not (self.keeps_backup and _begun(self._backup)):
            return self._connect()
        with replacing(self.path, 0o600) as fresh:
            shutil.copyfile(self._backup, fresh)
        try:
            file = self._connect()
        except _DamagedError as error:
            _set_aside(self._backup, error)
            self.path.unlink()
            return self._connect()
        log.warning("store.restored", path=str(self.path), backup=str(self._backup))
        return file

    def _connect(self) -> sqlite3.Connection:
        """Open, check, migrate and read. What SQLite puts beside the file gets the file's own permissions."""
        self.path.touch(mode=0o600)
        file = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False)
        try:
            self._check(file)
            self._read(file)
        except (sqlite3.DatabaseError, ValueError) as error:
            file.close()
            # Text that is not UTF-8 or no JSON, a message that quotes it too, is reported without a code.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            if code & 0xFF in _DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ:
                raise _DamagedError(str(error)) from error
            raise
        except BaseException:
            file.close()
            raise
        return file

    def _check(self, file: sqlite3.Connection) -> None:
        file.execute("PRAGMA locking_mode = EXCLUSIVE")
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = FULL")
        problems = [row[0] for row in file.execute("PRAGMA integrity_check")]
        if problems != ["ok"]:
            raise _DamagedError("; ".join(problems[:3]))
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version > len(self.migrations):
            known = len(self.migrations)
            raise _UnusableError(f"it was written by a newer llmux (schema {version}, known here: {known})")
        for number, script in enumerate(self.migrations[version:], version + 1):
            file.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT")

    def _copy(self, file: sqlite3.Connection) -> None:
        """Make the backup anew, whole or not at all. That it can't be is only a warning."""
        if not self.keeps_backup:
            return
        try:
            with replacing(self._backup, 0o600) as fresh, contextlib.closing(sqlite3.connect(fresh)) as target:
                file.backup(target)
        except (sqlite3.Error, OSError) as error:
            log.warning("store.no_backup", path=str(self._backup), reason=str(error))


class Footprints(_Database):
    """What models were measured to take, in MiB: worth keeping, and learned again where it is lost."""

    migrations = (
        """
        CREATE TABLE footprints (
            definition TEXT NOT NULL,
            device TEXT NOT NULL,
            mib INTEGER NOT NULL CHECK (mib BETWEEN 0 AND 1 << 30),
            samples INTEGER NOT NULL CHECK (samples > 0),
            updated_at REAL NOT NULL,
            PRIMARY KEY (definition, device)
        ) STRICT, WITHOUT ROWID;
        """,
    )

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._learned: dict[FootprintKey, int] = {}

    def learned(self) -> dict[FootprintKey, int]:
        """All of them."""
        return dict(self._learned)

    async def learn(self, key: str, device: str, mib: int) -> None:
        """Remember what a model took; the latest figure counts. Not being able to save it is only a warning."""
        self._learned[key, device] = mib
        statement = (
            "INSERT INTO footprints VALUES (?, ?, ?, 1, ?) ON CONFLICT DO UPDATE"
            " SET mib = excluded.mib, samples = samples + 1, updated_at = excluded.updated_at"
        )
        try:
            await self._write((statement, (key, device, mib, time.time())))
        except NotSavedError as error:
            log.warning("store.not_saved", what="footprint", device=device, mib=mib, reason=error.message)

    def _read(self, file: sqlite3.Connection) -> None:
        rows = file.execute("SELECT definition, device, mib FROM footprints")
        self._learned = {(definition, device): mib for definition, device, mib in rows}


Entry = tuple[str, str]
"""The name of a collection and a key in it."""


class State(_Database):
    """Named collections of JSON values by key, and a backup of them."""

    keeps_backup = True
    migrations = (
        """
        CREATE TABLE entries (
            collection TEXT NOT NULL,
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            PRIMARY KEY (collection, key)
        ) STRICT, WITHOUT ROWID;
        """,
    )

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._entries: dict[Entry, str] = {}

    def get(self, collection: str, key: str) -> JsonValue:
        """None where there is none."""
        found: JsonValue = json.loads(self._entries.get((collection, key), "null"))
        return found

    def items(self, collection: str) -> dict[str, JsonValue]:
        """A collection, by key."""
        return {key: json.loads(text) for (name, key), text in sorted(self._entries.items()) if name == collection}

    async def put(self, collection: str, key: str, value: JsonValue) -> None:
        """Change one, or delete it (None). Raises NotSavedError, and then nothing has changed."""
        async with self.transaction() as changes:
            changes[collection, key] = value

    async def delete(self, collection: str, key: str) -> None:
        """Harmless where there is none. Raises NotSavedError."""
        await self.put(collection, key, None)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[dict[Entry, JsonValue]]:
        """Yields changes to fill, made all together or not at all when the block ends well; None deletes.

        Raises NotSavedError at the end of the block.
        """
        changes: dict[Entry, JsonValue] = {}
        yield changes
        put = {entry: json.dumps(value) for entry, value in changes.items() if value is not None}

        def apply() -> None:  # replaced, not changed: the event loop may be looking at it
            self._entries = {entry: text for entry, text in self._entries.items() if entry not in changes} | put

        await self._write(
            *(("DELETE FROM entries WHERE collection = ? AND key = ?", entry) for entry in changes),
            *(("INSERT INTO entries VALUES (?, ?, ?)", (*entry, text)) for entry, text in put.items()),
            then=apply,
        )

    def _read(self, file: sqlite3.Connection) -> None:
        rows = file.execute("SELECT collection, key, value FROM entries")
        self._entries = {(collection, key): json.dumps(json.loads(text)) for collection, key, text in rows}


def _begun(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _set_aside(path: Path, error: _DamagedError) -> None:
    kept = move_aside(path, "-wal", "-shm")
    log.error("store.damaged", path=str(path), reason=str(error), kept=str(kept))
