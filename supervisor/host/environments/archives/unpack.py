"""Unpacks an untrusted archive: no file of it lands outside its folder, and it can't fill the disk."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Final

from supervisor.host.environments.archives import ReleaseError

MOST_FILES: Final = 5000
MOST_BYTES: Final = 8 << 30


def unpack(archive: Path, folder: Path) -> None:
    """Put the archive's files, without its topmost folder, into `folder`, which may have other files already.

    Takes files, with plain modes, and links to files beside them. Blocks. Raises ReleaseError for other members, OSError.
    """
    count = size = 0
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                if member.isdir():
                    continue
                place = _path_below(member.name)
                count, size = count + 1, size + max(0, member.size)
                if count > MOST_FILES or size > MOST_BYTES:
                    raise ReleaseError(f"{archive.name} has more in it than a build of llama.cpp.")
                path = folder / place
                path.parent.mkdir(parents=True, exist_ok=True)
                if member.issym():
                    target = PurePosixPath(os.path.normpath(place.parent / member.linkname))
                    if PurePosixPath(member.linkname).is_absolute() or ".." in target.parts:
                        raise ReleaseError(f"{archive.name}: {member.name} is a link to {member.linkname}.")
                    path.symlink_to(member.linkname)
                elif member.isreg():
                    _write_file(tar, member, path)
                else:
                    raise ReleaseError(f"{archive.name}: {member.name} is neither a file nor a link beside it.")
    except (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError) as error:
        raise ReleaseError(f"{archive.name} can't be unpacked: {error}") from error
    if not count:
        raise ReleaseError(f"{archive.name} is empty.")


def _path_below(name: str) -> PurePosixPath:
    whole = PurePosixPath(name)
    parts = [part for part in whole.parts if part != "."]
    if whole.is_absolute() or ".." in parts:
        raise ReleaseError(f"the archive has a file outside of its folder: {name}")
    return PurePosixPath(*parts[1:]) if len(parts) > 1 else PurePosixPath(*parts)


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write a new file, never through a link."""
    content = tar.extractfile(member)
    assert content is not None  # a file has content
    mode = 0o755 if member.mode & 0o100 else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as out:
        shutil.copyfileobj(content, out)
