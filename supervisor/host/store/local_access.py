"""The addresses of this user's daemons on this machine, and a key for each that only this user can read.

A daemon offers its addresses and a fresh key in a file named by its process id; the commands of the same user on the same
machine find it there. So making the first key doesn't lock out a user who could change the configuration anyway. The daemon
keeps the key in memory alone: a file that a killed daemon left behind opens nothing.

Containers may share the folder but not process ids and addresses: in another one, 127.0.0.1:8081 is another program's.
So the file's name also has the daemon's namespaces, and only a command in the same namespaces finds the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class LocalAccess:
    """A daemon of this user, with its addresses and key."""

    pid: int
    url: str
    hosts: Sequence[str]  # the addresses of this machine at which it answers; at least one
    port: int
    key: str

    @property
    def host(self) -> str:
        """The first address, to which commands connect."""
        return self.hosts[0]


def folder() -> Path:
    """$XDG_RUNTIME_DIR/llmux, or a substitute for it where nobody has logged in, as in a container."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    runtime = Path(given) if given.startswith("/") else Path(f"/run/user/{os.getuid()}")
    if runtime.is_dir():
        return runtime / "llmux"
    import tempfile  # noqa: PLC0415  # seldom needed, and slow to import

    return Path(tempfile.gettempdir()) / f"llmux-{os.getuid()}"


@contextmanager
def offered(url: str, hosts: Sequence[str], port: int) -> Iterator[LocalAccess]:
    """Access to the daemon that answers at all of `hosts`, with a fresh key, until the block ends. Raises OSError before it begins."""
    import secrets  # noqa: PLC0415  # commands only read the file and need no secrets

    access = LocalAccess(os.getpid(), url, hosts, port, secrets.token_urlsafe(32))
    _write_file(access)
    try:
        yield access
    finally:
        with contextlib.suppress(OSError):
            _path_of(access.pid).unlink()


def offer_again(access: LocalAccess) -> None:
    """Write the file again if it is gone: the end of a user's last login empties the folder, which the daemon may outlive.

    Raises OSError.
    """
    if not _path_of(access.pid).exists():
        _write_file(access)


def _path_of(pid: int) -> Path:
    return folder() / f"{pid}{_suffix()}"


def _suffix() -> str:
    """Raises OSError."""
    pids, addresses = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))  # noqa: PTH116  # at each command
    return f".{pids}.{addresses}.json"


def _write_file(access: LocalAccess) -> None:
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(place.lstat()):
        raise PermissionError(f"{place} belongs to somebody else, or others may enter it")
    for path in place.glob(f"*{_suffix()}"):
        if not Path("/proc", path.name.partition(".")[0]).exists():  # killed
            path.unlink(missing_ok=True)
    path = _path_of(access.pid)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump({name: getattr(access, name) for name in access.__slots__}, file)


def of_process(pid: int) -> LocalAccess | None:
    """The daemon with this process id, if it runs and belongs to this user."""
    try:
        path = _path_of(pid)
        if not _is_ours(path.parent.lstat()):  # another user could put a pipe there, which would block us
            return None
        with path.open(encoding="utf-8") as file:
            if _is_ours(os.fstat(file.fileno())) and Path("/proc", str(pid)).exists():
                return LocalAccess(**json.load(file))
    except (OSError, ValueError, TypeError):
        pass
    return None


def answering_at(host: str, port: int) -> LocalAccess | None:
    """The daemon of this user that listens at this address; of several, as during an upgrade, the latest."""
    names = LOOPBACK if host == "localhost" else {host}
    return next((found for found in running() if found.port == port and names & {*found.hosts}), None)


def running() -> Iterator[LocalAccess]:
    """The daemons of this user, the latest first."""
    try:
        paths = sorted(folder().glob(f"*{_suffix()}"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return
    for path in paths:
        pid = path.name.partition(".")[0]
        if pid.isdecimal() and (found := of_process(int(pid))) is not None:
            yield found


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & 0o077
