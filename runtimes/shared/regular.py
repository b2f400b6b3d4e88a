"""Opening files of models, which may be anything that has a path."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """The file, to be read. Raises OSError for all but regular files: to read a pipe, or /proc/kmsg, may last for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):  # those of the kernel have no size, either
        return io.BytesIO()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))
