"""State that outlives the daemon: collections of JSON values in SQLite files.

A file is read once, at `open`, and served from memory; changes are written in a thread. No file prevents the daemon from
starting. A damaged file is moved aside (`….broken-TIME`), which is logged, and its backup takes its place; a cache has none
and begins empty. A file that can't be used now (locked by another daemon, written by a newer llmux, no permission, no
space) is left alone, and nothing is saved in this run. Files are locked while open, so SQLite needs no shared-memory file.

A file of an older version is migrated when it is opened, in one transaction. The successor of a running daemon keeps that
transaction open until the takeover is certain: if the successor fails or is killed, the older daemon finds the file unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar, Final, Self, TypeVar

import structlog
from pydantic import JsonValue

from supervisor.core.types import ModelId, base_of
from supervisor.errors import LlmuxError
from supervisor.host.store.files import move_aside, replacing

T = TypeVar("T")
FootprintKey = tuple[str, str]
"""The keys of a model and of a device."""

BUSY_S = 2.0
"""How long to wait for the lock of a daemon that is ending."""

BACKUP_S = 60.0
"""Least time between two backups, except those at start and end."""

MIGRATIONS: Final = (
    """
    CREATE TABLE footprints (definition TEXT NOT NULL, device TEXT NOT NULL, mib INTEGER NOT NULL) STRICT;
    """,
    """
    CREATE TABLE entries (
        collection TEXT NOT NULL,
        key TEXT NOT NULL,
        value TEXT NOT NULL,
        PRIMARY KEY (collection, key)
    ) STRICT, WITHOUT ROWID;
    INSERT INTO entries SELECT device, definition, CAST(mib AS TEXT) FROM footprints;
    DROP TABLE footprints;
    """,
    """
    CREATE TABLE requests (number INTEGER PRIMARY KEY, view TEXT NOT NULL) STRICT;
    CREATE TABLE usage (
        day TEXT NOT NULL,
        key_id TEXT NOT NULL,
        key TEXT NOT NULL,
        model TEXT NOT NULL,
        requests INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        gpu_s REAL NOT NULL,
        PRIMARY KEY (day, key_id, model)
    ) STRICT, WITHOUT ROWID;
    """,
    """
    UPDATE entries SET value = as_job(collection, key, value) WHERE collection IN ('jobs', 'batches', 'loads');
    UPDATE OR IGNORE entries SET collection = 'jobs' WHERE collection = 'batches';
    UPDATE OR IGNORE entries SET collection = 'jobs', key = 'load-' || key WHERE collection = 'loads';
    DELETE FROM entries WHERE collection IN ('batches', 'loads');
    """,
)
"""One script for each schema version, in order. Never change the result of one that was released; add another."""

# SQLITE_ERROR: a sound file with other tables than its schema version says.
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)
FOOTPRINTS: Final = "llmux.sqlite3"
"""The name of the file of `Footprints`."""
MOST_MIB: Final = 1 << 30
MOST_LOAD_MS: Final = 7 * 24 * 3600 * 1000
_LOAD_MS: Final = "load_ms"
"""The collection of load times; all others of `Footprints` are devices."""
_RAISED: Final = "raised "
"""The prefix of a device's collection that holds the least MiB to lease there."""
Entry = tuple[str, str]
"""The name of a collection and a key in it."""
_BEGAN: Final[Entry] = "store", "began"
_FORMER_STATES: Final = {
    "waiting": "queued",  # of loads
    "loading": "running",
    "ready": "completed",
    "validating": "queued",  # of batches
    "in_progress": "running",
    "finalizing": "running",
    "cancelling": "running",
}

log = structlog.get_logger(__name__)


class NotSavedError(LlmuxError):
    """A change could not be written and was not made."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "state_not_saved"


class _UnusableError(Exception):
    """The file is sound, but this daemon can't use it."""


class _DamagedError(Exception):
    """The file is damaged."""


class Store:
    """An open file, locked until `close`. Use it from one event loop."""

    keeps_backup: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: str | None = None  # the reason why changes are not saved now
        self._is_pending = False  # all changes so far are one transaction that is open
        self._entries: dict[Entry, str] = {}
        self._backup = path.with_name(f"{path.name}.backup")
        self._backed_up = time.monotonic()
        self._file: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @classmethod
    async def open(cls, path: Path, *, pending: bool = False) -> Self:
        """Open or create. Never fails: where the file can't be used, `trouble` says why, and nothing is saved.

        `pending`: no change reaches the file before `settle`, not even that to a newer schema.
        """
        opened = cls(path)
        opened._is_pending = pending
        await opened._try_open()
        return opened

    async def _try_open(self) -> None:
        try:
            self._file = await self._run_in_thread(self._open_file)
        except (sqlite3.Error, OSError, _UnusableError) as error:
            self._note_unusable(error)

    def _note_unusable(self, error: Exception) -> None:
        self.trouble = str(error)
        log.warning("store.unusable", path=str(self.path), reason=str(error), consequence="nothing is remembered")

    async def settle(self) -> None:
        """Write the changes since `open`, and from now on each change at once.

        Never fails, as `open`. If the disk is full, for example, the changes are lost, and the file is opened again.
        """
        file = self._file
        if file is None or not self._is_pending:
            return

        def settle() -> None:
            file.execute("COMMIT")
            self._is_pending = False
            self._back_up(file)

        try:
            await self._run_in_thread(settle)
        except sqlite3.Error as error:
            consequence = "what changed since the start is lost"
            log.warning("store.not_saved", path=str(self.path), reason=str(error), consequence=consequence)
            self._file, self._is_pending = None, False
            await self._run_in_thread(file.close)
            await self._try_open()

    async def close(self) -> None:
        """Wait for pending writes and unlock the file."""
        file, self._file = self._file, None
        if file is not None:
            await self._run_in_thread(lambda: self._back_up(file))
            await self._run_in_thread(file.close)
        self._thread.shutdown(wait=False)

    async def lend(self) -> None:
        """Unlock the file for a successor. Nothing is saved from now on."""
        file, self._file = self._file, None
        if file is not None:
            self.trouble = "a successor has it"
            await self._run_in_thread(file.close)

    async def take_back(self) -> None:
        """Open the file again after `lend`, with its present content. Never fails, as `open`."""
        if self._file is None and self.trouble == "a successor has it":
            self.trouble = None
            await self._try_open()

    def get(self, collection: str, key: str) -> JsonValue:
        """The value of a key; None: the collection doesn't have the key."""
        found: JsonValue = json.loads(self._entries.get((collection, key), "null"))
        return found

    def items(self, collection: str) -> dict[str, JsonValue]:
        """A collection, by key."""
        return {key: json.loads(text) for (name, key), text in sorted(self._entries.items()) if name == collection}

    @property
    def began(self) -> float:
        """Since when (Unix seconds) the file has all changes: it was new then, or an older copy took its place."""
        return float(self._entries.get(_BEGAN, "0"))

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in the store's thread, in one transaction, and return its result. For tables besides the entries.

        Raises NotSavedError; then nothing has changed.
        """
        file = self._file
        if file is None:
            raise NotSavedError(f"the store {self.path} can't be used: {self.trouble or 'it is closed'}")

        def within() -> T:
            with self._atomic_change(file):
                return work(file)

        try:
            return await self._run_in_thread(within)
        except sqlite3.Error as error:
            self.trouble = str(error)
            raise NotSavedError(f"the store {self.path} can't be used: {error}") from error

    async def put(self, collection: str, key: str, value: JsonValue) -> None:
        """Change one value, or delete it (None). Raises NotSavedError; then nothing has changed."""
        async with self.transaction() as changes:
            changes[collection, key] = value

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[dict[Entry, JsonValue]]:
        """Yields a dict to fill with changes. All or none of them are made when the block ends; None deletes.

        Raises NotSavedError at the end of the block.
        """
        changes: dict[Entry, JsonValue] = {}
        yield changes
        file = self._file
        if file is None:
            raise NotSavedError(f"the store {self.path} can't be used: {self.trouble or 'it is closed'}")
        put = {entry: json.dumps(value) for entry, value in changes.items() if value is not None}

        def write() -> None:
            with self._atomic_change(file):
                file.executemany("DELETE FROM entries WHERE collection = ? AND key = ?", changes)
                file.executemany(
                    "INSERT INTO entries VALUES (?, ?, ?)", [(*entry, text) for entry, text in put.items()]
                )

        def apply() -> None:
            for entry in changes:
                self._entries.pop(entry, None)
            self._entries.update(put)
            self.trouble = None

        try:
            await self._run_in_thread(write, apply)
        except sqlite3.Error as error:
            self.trouble = str(error)
            raise NotSavedError(f"the store {self.path} can't be written: {error}") from error
        if self._file is not None and time.monotonic() - self._backed_up > BACKUP_S:
            self._backed_up = time.monotonic()
            self._thread.submit(self._back_up, file)

    async def _run_in_thread(self, work: Callable[[], T], then: Callable[[], object] = bool) -> T:
        """Run `work` in the store's thread and, if it succeeds, `then` here, even if the caller is cancelled."""
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        doing.add_done_callback(lambda done: None if done.exception() else then())
        return await asyncio.shield(doing)

    @contextlib.contextmanager
    def _atomic_change(self, file: sqlite3.Connection) -> Iterator[None]:
        """All changes of the block are made, or none. Raises sqlite3.Error."""
        if not self._is_pending:
            with file:  # commits, or rolls back
                yield
            return
        if not file.in_transaction:  # SQLite has undone the whole transaction, because the disk is full
            raise sqlite3.OperationalError("its earlier changes were lost")
        file.execute("SAVEPOINT change")
        try:
            yield
        except BaseException:
            file.execute("ROLLBACK TO change")
            raise
        finally:
            file.execute("RELEASE change")

    def _open_file(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_whole = _has_content(self.path)
        try:
            file = self._connect() if is_whole else self._open_restored()
        except _DamagedError as error:
            _move_damaged(self.path, error)
            is_whole, file = False, self._open_restored()
        if self.keeps_backup and not is_whole:
            self._entries[_BEGAN] = json.dumps(time.time())
            with self._atomic_change(file):
                file.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", (*_BEGAN, self._entries[_BEGAN]))
        self._back_up(file)
        return file

    def _open_restored(self) -> sqlite3.Connection:
        """Open the file with the backup's content; empty where there is no good backup."""
        if not (self.keeps_backup and _has_content(self._backup)):
            return self._connect()
        with replacing(self.path, 0o600) as fresh:
            shutil.copyfile(self._backup, fresh)
        try:
            file = self._connect()
        except _DamagedError as error:
            _move_damaged(self._backup, error)
            self.path.unlink()
            return self._connect()
        log.warning("store.restored", path=str(self.path), backup=str(self._backup))
        return file

    def _connect(self) -> sqlite3.Connection:
        """Open, check, migrate and read. Files that SQLite puts beside the file get its permissions."""
        self.path.touch(mode=0o600)
        file = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False)
        try:
            self._check_and_migrate(file)
            rows = file.execute("SELECT collection, key, value FROM entries")
            self._entries = {(collection, key): json.dumps(json.loads(text)) for collection, key, text in rows}
        except BaseException as error:
            file.close()
            # Text that is not UTF-8, not JSON or nested too deeply is reported without a code.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            is_damage = code & 0xFF in _DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ
            if isinstance(error, sqlite3.DatabaseError | ValueError | RecursionError) and is_damage:
                raise _DamagedError(str(error)) from error
            raise
        return file

    def _check_and_migrate(self, file: sqlite3.Connection) -> None:
        file.execute("PRAGMA locking_mode = EXCLUSIVE")
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = FULL")
        problems = [row[0] for row in file.execute("PRAGMA integrity_check")]
        if problems != ["ok"]:
            raise _DamagedError("; ".join(problems[:3]))
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version > (known := len(MIGRATIONS)):
            raise _UnusableError(f"it was written by a newer llmux (schema {version}, known here: {known})")
        migration = [*MIGRATIONS[version:], f"PRAGMA user_version = {known}"] if version < known else []
        file.create_function("as_job", 3, _as_job, deterministic=True)
        if migration or self._is_pending:
            file.executescript("; ".join(("BEGIN IMMEDIATE", *migration, "" if self._is_pending else "COMMIT")))

    def _back_up(self, file: sqlite3.Connection) -> None:
        """Replace the backup as a whole, or not at all. Failure is only a warning."""
        if self._is_pending:
            return
        if not self.keeps_backup:
            self._backup.unlink(missing_ok=True)  # of an earlier version
            return
        try:
            with replacing(self._backup, 0o600) as fresh, contextlib.closing(sqlite3.connect(fresh)) as target:
                file.backup(target)
        except (sqlite3.Error, OSError) as error:
            log.warning("store.no_backup", path=str(self._backup), reason=str(error))


class Footprints(Store):
    """The measured footprints of models, in MiB by device, and their load times: a cache, learned again if lost."""

    keeps_backup = False

    def learned(self) -> dict[FootprintKey, int]:
        """The learned footprints, without impossible figures."""
        return _split_rows((key, name, _number_in(text)) for (name, key), text in self._entries.items())[0]

    def raised(self) -> dict[FootprintKey, int]:
        """The least MiB to lease, without impossible figures."""
        return _split_rows((key, name, _number_in(text)) for (name, key), text in self._entries.items())[1]

    def load_times(self) -> dict[str, float]:
        """The seconds that each model's last load took, by its key, without impossible figures."""
        taken = {key: _number_in(text) for (name, key), text in self._entries.items() if name == _LOAD_MS}
        return {key: ms / 1000 for key, ms in taken.items() if 0 < ms < MOST_LOAD_MS}

    async def learn(self, key: str, device: str, mib: int, *, raised: bool = False) -> None:
        """Remember a model's footprint or, with `raised`, the least to lease; the latest figure counts. Failure is only a warning."""
        await self._save(f"{_RAISED}{device}" if raised else device, key, mib)

    async def learn_load(self, key: str, load_s: float) -> None:
        """Remember how long a model's load took, as `learn` does."""
        await self._save(_LOAD_MS, key, max(1, round(load_s * 1000)))

    async def _save(self, collection: str, key: str, value: int) -> None:
        self._entries[collection, key] = str(value)
        try:
            await self.put(collection, key, value)
        except NotSavedError as error:
            log.warning("store.not_saved", what=collection, value=value, reason=error.message)


def learned_footprints(path: Path) -> tuple[dict[FootprintKey, int], dict[FootprintKey, int]]:
    """The learned and raised footprints of a file, even while a daemon has locked it; empty if the file can't be read.

    Changes nothing.
    """
    with (
        tempfile.TemporaryDirectory(prefix="llmux-") as folder,
        contextlib.suppress(OSError, sqlite3.Error, ValueError),
    ):
        copy = Path(shutil.copy(path, folder))
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(f"{path}-wal", folder)
        with contextlib.closing(sqlite3.connect(copy)) as file:
            rows = file.execute("SELECT key, collection, value FROM entries").fetchall()
        return _split_rows((key, name, int(text)) for key, name, text in rows)
    return {}, {}


def _split_rows(rows: Iterable[tuple[str, str, int]]) -> tuple[dict[FootprintKey, int], dict[FootprintKey, int]]:
    """The learned and the raised footprints among rows of (key, collection, value)."""
    learned: dict[FootprintKey, int] = {}
    raised: dict[FootprintKey, int] = {}
    for key, name, mib in rows:
        if name != _LOAD_MS and 0 < mib < MOST_MIB:
            device = name.removeprefix(_RAISED)
            (learned if device == name else raised)[key, device] = mib
    return learned, raised


def _number_in(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _as_job(collection: str, key: str, text: str) -> str:
    """Convert a value of the third schema to one of the collection of all jobs. Other values stay unchanged. Raises nothing."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(row, dict):
        return text
    if collection == "jobs":
        if isinstance(line := row.pop("line", None), dict):
            return json.dumps({**row, **line, "kind": "line"})
        return json.dumps({**row, "kind": "response" if row.get("response") else "inference"})
    former = str(row.get("state"))
    row["state"] = _FORMER_STATES.get(former, former)
    if collection == "batches":
        return json.dumps({**row, "kind": "batch"})
    error = {"message": row.get("reason"), "code": "load_failed"} if former == "failed" else None
    new = {"kind": "load", "id": f"load-{key}", "created_at": row.pop("asked_at", None), "error": error}
    return json.dumps({**row, **new, "model": base_of(ModelId(str(row.get("worker"))))})


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _move_damaged(path: Path, error: _DamagedError) -> None:
    kept = move_aside(path, "-wal", "-shm")
    log.error("store.damaged", path=str(path), reason=str(error), kept=str(kept))
