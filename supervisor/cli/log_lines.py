"""Lines of the log: how to make one from any values, and how to write them.

A value may come from outside: it can't break a line, hide part of it, or make the code that logs fail. A line has at most
`LONGEST` bytes; the middle of longer values is left out.

A line that can't be written (full disk, reader gone) is lost: logging must not fail the code that logs. The lines of one
turn of the event loop are written together at its end: at a thousand requests a second, a write for each line would take as
long as making it.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Mapping
from typing import Final

import msgspec
from structlog.typing import EventDict

LONGEST: Final = 48_000  # systemd's journal breaks lines at 48 KiB
MOST_WAITING: Final = 10_000  # lines, while a thread waits for a reader
_SHORTER: Final = (8192, 512, 32)  # bytes of a value, until the line is short enough

# Those beyond ASCII, which msgspec leaves as they are: C1, line separators, what turns the direction of text.
_CONTROLS: Final = re.compile(rb"\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")

_encode = msgspec.json.Encoder(enc_hook=str).encode


class Lines:
    """The logger at the end of the pipeline, for any thread. It ignores write errors."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._due = False  # a write is scheduled
        self._writing = threading.Lock()
        self._rest = b""  # of a line that was written in part

    def info(self, line: bytes) -> None:
        """Write the line at the end of the loop's turn; at once where no loop runs."""
        self._lines.append(line)
        if not self._due:
            self._due = True
            try:
                asyncio.get_running_loop().call_soon(self.write)
            except RuntimeError:  # before or after the loop, or in a thread
                self.write()

    debug = warning = error = critical = info

    def write(self) -> None:
        """Write the waiting lines.

        Never waits for the lock: garbage collection may log in the middle of this. Whoever holds it writes our lines, too.
        """
        self._due = False
        while self._lines and self._writing.acquire(False):
            try:
                lines = self._lines[:]
                del self._lines[: len(lines)]  # not a new list: a thread may be about to append to this one
                self._write_all(b"\n".join([*lines, b""]))
            finally:
                self._writing.release()
        del self._lines[:-MOST_WAITING]

    def _write_all(self, lines: bytes) -> None:
        data, written = self._rest + lines, 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            pass
        if written:
            self._rest = b"" if data[written - 1] == ord("\n") else data[written : data.index(b"\n", written) + 1]


def json_line(fields: Mapping[str, object]) -> bytes:
    """One JSON object on one line, without its end."""
    try:
        line = _encode(fields)
    except Exception:  # noqa: BLE001  # a lone surrogate, a `__str__` that raises, a list that holds itself
        line = b""
    if line.isascii() and 0 < len(line) <= LONGEST:
        return line
    for most in _SHORTER:
        if 0 < len(line) <= LONGEST and len(line := _escaped(line)) <= LONGEST:
            return line
        line = _encode({name: _short(value, most) for name, value in fields.items()})
    return _escaped(line)


def _escaped(line: bytes) -> bytes:
    return _CONTROLS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), line)


def _short(value: object, most: int) -> object:
    """The value itself, or a shortened text of it."""
    try:
        encoded = _encode(value)
    except Exception:  # noqa: BLE001  # as above
        text = value if isinstance(value, str) else shown(value)
    else:
        if len(encoded) <= most:
            return msgspec.Raw(encoded)
        text = value if isinstance(value, str) else encoded.decode()
    return _cut(text, most).encode("utf-8", "backslashreplace").decode()


def _cut(text: str, most: int) -> str:
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}… {left_out} characters left out …{text[len(text) - most // 2 :]}"


def shown(value: object) -> str:
    """Its `repr`, also where that fails."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  # logging must not fail
        return f"<{type(value).__name__}>"


class _Shown(str):
    """A text that the console renderer takes as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def for_terminals(event: EventDict) -> EventDict:
    """Values as text in which nothing moves the cursor or begins a line; only tracebacks have several lines."""
    for name, value in event.items():
        if not isinstance(value, str):
            event[name] = _Shown(_printable(_cut(shown(value), LONGEST)))
        elif name in {"event", "exception"}:
            event[name] = _printable(_cut(value, LONGEST), "\n\t" if name == "exception" else "")
        elif len(value) > LONGEST or not value.isprintable():
            event[name] = _Shown(repr(_cut(value, LONGEST)))
    return event


def _printable(text: str, also: str = "") -> str:
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() or char in also else repr(char)[1:-1] for char in text])
