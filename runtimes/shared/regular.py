"""Opens files of models safely: their paths may lead to pipes, devices or folders."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open the file for reading. Raises OSError unless it is a regular file: reading a pipe or /proc/kmsg may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):  # files of the kernel have no size, either
        return io.BytesIO()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))
