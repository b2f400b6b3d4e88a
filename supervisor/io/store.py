"""What must outlive the daemon: learned footprints and settings changed while running, in one SQLite file.

Everything is read once, at `open`, and answered from memory; changes go to memory at once and to the file in a thread.
So a full or broken disk costs only what would have been remembered: learning warns and goes on.

At `open` the file is checked. A damaged one is moved aside as `<name>.corrupt-<n>` and a copy of the backup, made at
every good start, takes its place; without a good backup the store begins empty. A file that is merely unusable now
(locked by another daemon, written by a newer llmux, no permission, no space) is left alone, and nothing is remembered
in this run. The file is locked for as long as it is open, which also spares SQLite its shared-memory file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import structlog

from supervisor.errors import LlmuxError

T = TypeVar("T")
FootprintKey = tuple[str, str]
"""A model's key and a device's."""

BUSY_S = 2.0
"""How long to wait for the lock of a daemon that is just ending."""

MIGRATIONS = (
    """
    CREATE TABLE footprints (
        definition TEXT NOT NULL,
        device TEXT NOT NULL,
        mib INTEGER NOT NULL CHECK (mib BETWEEN 0 AND 1 << 30),
        samples INTEGER NOT NULL CHECK (samples > 0),
        updated_at REAL NOT NULL,
        PRIMARY KEY (definition, device)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE settings (
        name TEXT NOT NULL PRIMARY KEY,
        value TEXT NOT NULL,
        updated_at REAL NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
)
"""One script a schema version, in order. Never change one that was released; add another."""

_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,  # a sound file with other tables than its schema version says
        sqlite3.SQLITE_CONSTRAINT,
    }
)

log = structlog.get_logger(__name__)


class NotSavedError(LlmuxError):
    """A change could not be written and was not made."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "state_not_saved"


class _UnusableError(Exception):
    """The file is sound, but not for us."""


@dataclass(slots=True)
class _Content:
    footprints: dict[FootprintKey, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


class Store:
    """An open store. Use it from one event loop; its file belongs to it until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: str | None = None  # why changes are not being saved now
        self._content = _Content()
        self._file: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @classmethod
    async def open(cls, path: Path) -> Store:
        """Open or create. Never fails: where the file can't be used the store works from memory and says so in `trouble`."""
        store = cls(path)
        try:
            store._file, store._content = await store._do(lambda: _open(path))
        except (sqlite3.Error, OSError, _UnusableError) as error:
            store.trouble = str(error)
            log.warning("store.unusable", path=str(path), reason=str(error), consequence="nothing is remembered")
        return store

    def learned(self) -> dict[FootprintKey, int]:
        """Measured footprints in MiB."""
        return dict(self._content.footprints)

    async def learn(self, key: str, device: str, mib: int) -> None:
        """Remember what a model took; the latest figure counts. Not being able to save it is only a warning."""
        self._content.footprints[key, device] = mib
        try:
            await self._write(
                "INSERT INTO footprints VALUES (?, ?, ?, 1, ?) ON CONFLICT DO UPDATE"
                " SET mib = excluded.mib, samples = samples + 1, updated_at = excluded.updated_at",
                (key, device, mib, time.time()),
            )
        except NotSavedError as error:
            log.warning("store.not_saved", what="footprint", device=device, mib=mib, reason=error.message)

    def setting(self, name: str) -> str | None:
        """A setting that was changed while running; None where it was not."""
        return self._content.settings.get(name)

    async def put(self, name: str, value: str | None) -> None:
        """Change a setting, or forget it (None). Raises NotSavedError, and then nothing has changed."""
        if value is None:
            await self._write("DELETE FROM settings WHERE name = ?", (name,))
            self._content.settings.pop(name, None)
        else:
            await self._write(
                "INSERT INTO settings VALUES (?, ?, ?) ON CONFLICT DO UPDATE"
                " SET value = excluded.value, updated_at = excluded.updated_at",
                (name, value, time.time()),
            )
            self._content.settings[name] = value

    async def close(self) -> None:
        """Wait for what is being written, and unlock the file."""
        file, self._file = self._file, None
        if file is not None:
            await self._do(file.close)
        self._thread.shutdown(wait=False)

    async def _write(self, statement: str, values: tuple[str | int | float, ...]) -> None:
        file = self._file
        if file is None:
            raise NotSavedError(f"the store {self.path} can't be used: {self.trouble or 'it is closed'}")

        def write() -> None:
            with file:  # commits, or rolls back
                file.execute(statement, values)

        try:
            await self._do(write)
        except sqlite3.Error as error:
            self.trouble = str(error)
            raise NotSavedError(f"the store {self.path} can't be written: {error}") from error
        self.trouble = None

    async def _do(self, work: Callable[[], T]) -> T:
        # Shielded: a caller that leaves must not leave a change half told to it.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))


@dataclass(frozen=True, slots=True)
class _Damage:
    reason: str


def _open(path: Path) -> tuple[sqlite3.Connection, _Content]:
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = path.with_name(f"{path.name}.backup")
    opened = _load(path) if _begun(path) or not _begun(backup) else _Damage("it is gone or empty, its backup is not")
    if isinstance(opened, _Damage):
        kept = _move_aside(path)
        log.error("store.damaged", path=str(path), reason=opened.reason, kept=str(kept))
        opened = _restore(path, backup)
        log.warning("store.restored", footprints=len(opened[1].footprints), settings=len(opened[1].settings))
    try:
        _copy(opened[0], backup)
    except (sqlite3.Error, OSError) as error:
        log.warning("store.no_backup", path=str(backup), reason=str(error))
    return opened


def _restore(path: Path, backup: Path) -> tuple[sqlite3.Connection, _Content]:
    if _begun(backup):
        saved = _load(backup)
        if isinstance(saved, _Damage):
            kept = _move_aside(backup)
            log.error("store.damaged", path=str(backup), reason=saved.reason, kept=str(kept))
        else:
            with contextlib.closing(saved[0]) as source:
                _copy(source, path)
    opened = _load(path)
    assert not isinstance(opened, _Damage), opened
    return opened


def _begun(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _load(path: Path) -> tuple[sqlite3.Connection, _Content] | _Damage:
    """Open, check, migrate and read. What SQLite puts beside the file gets the file's own permissions."""
    path.touch(mode=0o600)
    file = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        content = _read(file)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        file.close()
        # Text that is not UTF-8, a message that quotes it too, is reported without a code.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code & 0xFF in _DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ:
            return _Damage(str(error))
        raise
    except BaseException:
        file.close()
        raise
    if isinstance(content, _Damage):
        file.close()
        return content
    return file, content


def _read(file: sqlite3.Connection) -> _Content | _Damage:
    file.execute("PRAGMA locking_mode = EXCLUSIVE")
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = FULL")
    problems = [row[0] for row in file.execute("PRAGMA integrity_check")]
    if problems != ["ok"]:
        return _Damage("; ".join(problems[:3]))
    (version,) = file.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise _UnusableError(f"it was written by a newer llmux (schema {version}, known here: {len(MIGRATIONS)})")
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        file.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT")
    rows = file.execute("SELECT definition, device, mib FROM footprints")
    footprints = {(definition, device): mib for definition, device, mib in rows}
    return _Content(footprints, dict(file.execute("SELECT name, value FROM settings")))


def _copy(source: sqlite3.Connection, path: Path) -> None:
    """Write a copy of the store to `path`, whole or not at all."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600)
    with contextlib.closing(sqlite3.connect(fresh)) as target:
        source.backup(target)
    fresh.replace(path)


def _move_aside(path: Path) -> Path:
    """Keep a damaged file, and its journal, under the first free number."""
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(f"{aside}{suffix}")
    return aside
