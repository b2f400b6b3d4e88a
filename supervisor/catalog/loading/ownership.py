"""Files that decide what llmux runs and who may use it: nobody else may be able to change them.

Whoever can write the configuration can run any program as the daemon's user. So a file is refused when it, or a folder above
it, belongs to somebody other than this user or root, or can be written by others. A group counts as others unless it is the
owner's own, with nobody else in it: many systems give each user a group of the same name and let it write. Files on a
read-only file system are fine, because nobody can write them. In a folder with the sticky bit, such as /tmp, nobody can
replace what is somebody else's. A secret is also refused where others can read it; a group may that has nobody in it but us
and its owner.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from supervisor.catalog.document.document import Node, Place, Problem, Source, read

ALLOW_VARIABLE: Final = "LLMUX_ALLOW_WRITABLE_CONFIG"
ROOT: Final = 0


def exposure(path: Path, *, is_secret: bool = False) -> str | None:
    """A sentence that says who else could change this file, or read a secret, and the remedy; None: nobody. Raises OSError.

    Nothing is refused where `LLMUX_ALLOW_WRITABLE_CONFIG` is 1: for mounts that show every file as writable.
    """
    if os.environ.get(ALLOW_VARIABLE) == "1":
        return None
    for place in _places(path):
        if (problem := _problem(place)) is not None:
            return f"{problem}, or set {ALLOW_VARIABLE}=1 to allow it"
    if is_secret and (problem := _readers(path)) is not None:
        return f"{problem}, or set {ALLOW_VARIABLE}=1 to allow it"
    return None


def read_guarded(path: Path, source: Source) -> tuple[Node | None, list[Problem]]:
    """`document.read`, which is refused for a file that others could change. Blocks on files."""
    try:
        problem = exposure(path)
    except OSError:  # `read` says what is wrong with it
        problem = None
    return read(path, source) if problem is None else (None, [Problem(Place(source), (), problem)])


def _places(path: Path) -> Iterator[Path]:
    """The file, the folders that lead to it, and those in which a link to it lies."""
    path, real = path.absolute(), Path(os.path.realpath(path))  # `resolve` raises RuntimeError for links in a circle
    yield from dict.fromkeys((real, *real.parents, *path.parents))


def _problem(place: Path) -> str | None:
    status = place.stat()
    owner, mode = status.st_uid, status.st_mode
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return None
    if owner not in (os.geteuid(), ROOT) and _is_mapped(owner):
        return f"{place} belongs to {_user(owner)}, who could change what llmux runs; chown it to {_user(os.geteuid())}"
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return None
    if mode & stat.S_IWOTH:
        return f"everybody on this machine can change {place} (mode {mode & 0o7777:o}); chmod go-w {place}"
    if mode & stat.S_IWGRP and not _is_private(status.st_gid, owner):
        group = _group(status.st_gid)
        return f"the group {group} can change {place} (mode {mode & 0o7777:o}); chmod g-w {place}"
    return None


def _readers(file: Path) -> str | None:
    """A read-only mount, such as a container's of its secrets, often shows modes that nobody can change."""
    status = file.stat()
    mode = status.st_mode
    if os.statvfs(file).f_flag & os.ST_RDONLY:
        return None
    if mode & stat.S_IROTH:
        return f"everybody on this machine can read {file} (mode {mode & 0o7777:o}); chmod o-r {file}"
    if mode & stat.S_IRGRP and not _members(status.st_gid) <= {_user(status.st_uid), _user(os.geteuid()), _user(ROOT)}:
        group = _group(status.st_gid)
        return f"the group {group} can read {file} (mode {mode & 0o7777:o}); chmod g-r {file}"
    return None


def _is_private(gid: int, owner: int) -> bool:
    """Is it the owner's own group (of the same name or number, or root's), with nobody else in it?"""
    user = _user(owner)
    return _members(gid) <= {user} and (owner in (gid, ROOT) or user == _group(gid))


def _members(gid: int) -> set[str]:
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        members = set()
    return members | {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid}


def _is_mapped(uid: int) -> bool:
    """Is it a user of this user namespace? An unmapped one, such as the host's root, is shown under the overflow number."""
    overflow = Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii").strip()
    ours = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    return str(uid) != overflow or ours == ["0", "0", "4294967295"]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
