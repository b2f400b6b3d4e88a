"""Downloads one file of known size and hash from any server; an interrupted download costs as little as possible.

    <folder>/<file>                 complete: moved to this path only with the right size and hash
    <folder>/<file>.<hash>.part     incomplete; the next attempt requests the rest

An `Origin` opens the connection to the server, so that credentials never reach this module, and words the failures.
"""

from __future__ import annotations

import glob
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http import HTTPStatus
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from supervisor.errors import LlmuxError

ATTEMPTS: Final = 5  # in a row without a byte
FIRST_PAUSE_S: Final = 0.2
TIMEOUT_S: Final = 30.0

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class File:
    """A file on a server. `size` in bytes; `digest` is its sha256, or git's sha1 of a blob."""

    name: str
    size: int
    digest: str

    @property
    def is_git_blob(self) -> bool:
        """Does `digest` come from git?"""
        return len(self.digest) == 40

    def part(self, folder: Path) -> Path:
        """The path of the incomplete file."""
        path = folder / self.name
        return path.with_name(f"{path.name}.{self.digest[:12]}.part")

    def is_of(self, path: Path) -> bool:
        """Does the file at `path` have this content? Reads the whole file."""
        with path.open("rb") as file:
            return path.stat().st_size == self.size and self.is_content(file)

    def is_content(self, stream: BufferedReader | BytesIO) -> bool:
        """Does the stream have this content?"""
        header = b"blob %d\0" % self.size
        hashed = hashlib.sha1(header) if self.is_git_blob else hashlib.sha256()  # noqa: S324  # git's choice
        return hashlib.file_digest(stream, lambda: hashed).hexdigest() == self.digest


class Response(Protocol):
    """A response with an unread body."""

    status_code: int

    def iter_bytes(self) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """The server of a file.

    `ask` requests the file with these headers and follows redirects. For an error status it raises an exception
    with a `response`; its other exceptions are no OSError. Another attempt follows after these, and after a status in
    `passing`. `explained` words the error that ends the download.
    """

    ask: Callable[[Mapping[str, str]], AbstractContextManager[Response]]
    passing: Collection[int]
    explained: Callable[[Exception], LlmuxError]

    def check(self, error: Exception, fruitless: int) -> None:
        """Raises LlmuxError if another attempt is useless, after `fruitless` ones in a row without a byte."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        if fruitless == ATTEMPTS or (status is not None and status not in self.passing):
            raise self.explained(error) from error


def fetch(file: File, folder: Path, fill: Callable[[Path], None], wrong: LlmuxError, notify: Notify) -> Path:
    """Let `fill` complete the part, check its hash, and move it to the file's path, which is returned. Blocks.

    Raises `wrong` if the hash is wrong twice, the errors of `fill`, and OSError.
    """
    path, part = folder / file.name, file.part(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    for again in (False, True):
        fill(part)
        if file.is_of(part):
            break
        part.unlink()
        if again:
            raise wrong
        notify(f"{file.name}: arrived with another hash than it must have; once more")
    part.replace(path)
    for old in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        old.unlink(missing_ok=True)
    return path


def resume(
    file: File,
    part: Path,
    origin: Origin,
    notify: Notify,
    stop: threading.Event,
    on_progress: Callable[[int], None] = lambda _there: None,
) -> None:
    """Fill `part` up to the file's size, with any number of connections, as long as bytes arrive. Blocks.

    `on_progress` gets the size of the part as it grows. Raises the origin's errors; OSError of the disk, InterruptedError once
    `stop` is set: the part stays.
    """
    fruitless = 0
    part.touch()
    with part.open("r+b") as out:
        if out.seek(0, os.SEEK_END) > file.size:
            out.seek(out.truncate(0))
        while (there := out.tell()) < file.size:
            problem: Exception = EOFError("the answer ended early")
            try:
                _append_rest(file, out, origin, stop, on_progress)
            except Exception as error:  # after any error the received bytes are kept and checked
                if isinstance(error, OSError) and not hasattr(error, "response"):  # a disk error, or `stop` is set
                    raise
                problem = error
            if (now := out.tell()) >= file.size:
                break
            fruitless = 0 if now > there else fruitless + 1
            origin.check(problem, fruitless)
            notify(f"{file.name}: broken off at {now} of {file.size} bytes ({line_of(problem)}); going on")
            pause(fruitless, stop)


def pause(fruitless: int, stop: threading.Event) -> None:
    """Wait before another attempt. Raises InterruptedError once `stop` is set."""
    if stop.wait(FIRST_PAUSE_S * 2**fruitless):
        raise InterruptedError


def read_up_to(response: Response, size: int) -> bytes:
    """The first `size` bytes of the body; little more is read."""
    found = bytearray()
    for chunk in response.iter_bytes():
        found += chunk
        if len(found) >= size:
            break
    return bytes(found[:size])


def line_of(error: BaseException) -> str:
    """The first line of an error: the cause, without advice."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _append_rest(
    file: File, out: BinaryIO, origin: Origin, stop: threading.Event, on_progress: Callable[[int], None]
) -> None:
    """Request the missing bytes and append them, up to the file's size and never more."""
    there = out.tell()
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
    with origin.ask(headers) as response:
        if there and response.status_code != HTTPStatus.PARTIAL_CONTENT:
            out.seek(out.truncate(0))
        for chunk in response.iter_bytes():
            if stop.is_set():
                raise InterruptedError
            out.write(chunk[: file.size - out.tell()])
            on_progress(out.tell())
            if out.tell() == file.size:  # further bytes don't belong to the file
                break
