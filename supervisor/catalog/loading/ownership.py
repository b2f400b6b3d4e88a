"""Checks that no other user can change the files of the configuration and of API keys.

A user who can write the configuration can run any program as the daemon's user. So a file is refused if the file, or a folder
above it, belongs to a user other than this one or root, or is writable by others. A group counts as others unless it is the
owner's own, without other members: many systems give each user a group of the same name with write permission. Files on a
read-only file system are accepted, because nobody can write them. In a folder with the sticky bit, such as /tmp, users can't
replace files of other users. A secret is also refused if others can read it, except a group with no members but us and its owner.
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
    """A sentence about other users who could change this file, or read a secret, with a remedy; None: nobody can. Raises OSError.

    Nothing is refused where `LLMUX_ALLOW_WRITABLE_CONFIG` is 1: for mounts that show every file as writable.
    """
    if os.environ.get(ALLOW_VARIABLE) == "1":
        return None
    for place in _paths_to_check(path):
        if (problem := _write_exposure(place)) is not None:
            return f"{problem}, or set {ALLOW_VARIABLE}=1 to allow it"
    if is_secret and (problem := _read_exposure(path)) is not None:
        return f"{problem}, or set {ALLOW_VARIABLE}=1 to allow it"
    return None


def read_guarded(path: Path, source: Source) -> tuple[Node | None, list[Problem]]:
    """As `document.read`, but with a problem for a file that others could change. Blocks on files."""
    try:
        problem = exposure(path)
    except OSError:  # `read` reports it
        problem = None
    return read(path, source) if problem is None else (None, [Problem(Place(source), (), problem)])


def _paths_to_check(path: Path) -> Iterator[Path]:
    """The file, the folders that lead to it, and those in which a link to it lies."""
    path, real = path.absolute(), Path(os.path.realpath(path))  # `resolve` raises RuntimeError for links in a circle
    yield from dict.fromkeys((real, *real.parents, *path.parents))


def _write_exposure(place: Path) -> str | None:
    status = place.stat()
    owner, mode = status.st_uid, status.st_mode
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return None
    if owner not in (os.geteuid(), ROOT) and _is_mapped_user(owner):
        return f"{place} belongs to {_user_name(owner)}, who could change what llmux runs; chown it to {_user_name(os.geteuid())}"
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return None
    if mode & stat.S_IWOTH:
        return f"everybody on this machine can change {place} (mode {mode & 0o7777:o}); chmod go-w {place}"
    if mode & stat.S_IWGRP and not _is_private_group(status.st_gid, owner):
        group = _group_name(status.st_gid)
        return f"the group {group} can change {place} (mode {mode & 0o7777:o}); chmod g-w {place}"
    return None


def _read_exposure(file: Path) -> str | None:
    """A problem if others can read the file. Read-only mounts, such as of a container's secrets, are accepted: their modes can't be changed."""
    status = file.stat()
    mode = status.st_mode
    if os.statvfs(file).f_flag & os.ST_RDONLY:
        return None
    if mode & stat.S_IROTH:
        return f"everybody on this machine can read {file} (mode {mode & 0o7777:o}); chmod o-r {file}"
    if mode & stat.S_IRGRP and not _group_members(status.st_gid) <= {
        _user_name(status.st_uid),
        _user_name(os.geteuid()),
        _user_name(ROOT),
    }:
        group = _group_name(status.st_gid)
        return f"the group {group} can read {file} (mode {mode & 0o7777:o}); chmod g-r {file}"
    return None


def _is_private_group(gid: int, owner: int) -> bool:
    """Whether this is the owner's own group (of the same name or number, or root's), without other members."""
    user = _user_name(owner)
    return _group_members(gid) <= {user} and (owner in (gid, ROOT) or user == _group_name(gid))


def _group_members(gid: int) -> set[str]:
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        members = set()
    return members | {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid}


def _is_mapped_user(uid: int) -> bool:
    """Whether this user exists in this user namespace. Others, such as the host's root, appear under the overflow number."""
    overflow = Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii").strip()
    ours = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    return str(uid) != overflow or ours == ["0", "0", "4294967295"]


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
