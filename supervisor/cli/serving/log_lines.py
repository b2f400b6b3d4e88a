"""Lines of the log: format any values as a line, and write lines.

A value may come from outside: it must not break a line, hide part of it, or make the code that logs fail. A line has at most
`LONGEST` bytes; longer values lose their middle.

Logging must neither fail nor stop the code that logs. A line that can't be written (full disk, closed pipe) is lost; while
the reader is stuck (a stopped journal, a pager), lines wait in bounded memory, and the oldest are lost. Lost lines are
counted, and a line says how many are missing. The lines of one iteration of the event loop are written together at its
end: at a thousand requests a second, a write for each line would take as long as formatting it.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec
from structlog.typing import EventDict

LONGEST: Final = 48_000  # systemd's journal breaks lines at 48 KiB
MOST_WAITING: Final = 1 << 20  # bytes that wait for a stuck reader, besides those that a thread is writing
LOOK_EVERY: Final = 100  # lines
EXIT_WAIT_S: Final = 1.0  # for a stuck reader
_VALUE_LIMITS: Final = (8192, 512, 32)  # bytes of a value: limits to try in turn until the line is short enough

# Control characters beyond ASCII, which msgspec doesn't escape: C1, line separators, marks of the text's direction.
_CONTROLS: Final = re.compile(rb"\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")

_encode = msgspec.json.Encoder(enc_hook=str).encode


class Lines:
    """The logger at the end of the pipeline, for any thread. It never waits for the reader, and ignores write errors.

    While the reader takes nothing, a thread waits for it, and the newest lines are kept. `dropped_line` formats the line
    with the number of lines missing at this place.
    """

    def __init__(self, descriptor: int, dropped_line: Callable[[int], bytes] = b"%d lines dropped".__mod__) -> None:
        self._descriptor = descriptor
        self._dropped_line = dropped_line
        self._send = _nonblocking_writer(descriptor)
        self._lines: deque[bytes] = deque()
        self._is_write_due = False  # a write is scheduled
        self._writing_lock = threading.Lock()
        self._is_reader_stuck = False  # a thread waits for the reader and writes
        self._waiting_thread: threading.Thread | None = None  # the last such thread
        self._unwritten = b""  # taken from `_lines`, not yet written
        self._is_line_begun = False  # a line was written in part
        self._failed_count = 0  # lines that could not be written; guarded by `_writing_lock`
        self._dropping_lock = threading.Lock()
        self._overflowed_count = 0  # lines that nobody read in time; guarded by `_dropping_lock`
        self._next_look = LOOK_EVERY
        self._reported = 0

    @property
    def dropped(self) -> int:
        """The number of lines lost so far."""
        return self._failed_count + self._overflowed_count

    def info(self, line: bytes) -> None:
        """Write the line at the end of the loop's iteration; at once where no loop runs."""
        self._lines.append(line)
        if not self._is_write_due:
            self._is_write_due = True
            try:
                asyncio.get_running_loop().call_soon(self.write)
            except RuntimeError:  # before or after the loop, or in a thread
                self.write()

    debug = warning = error = critical = info

    def write(self) -> None:
        """Write the waiting lines as far as the reader takes them.

        Never waits for the lock: garbage collection may log during this call. The thread that holds the lock writes our lines, too.
        """
        self._is_write_due = False
        while self._lines and not self._is_reader_stuck and self._writing_lock.acquire(False):
            try:
                self._is_reader_stuck = not self._write_some(self._send)
            finally:
                self._writing_lock.release()
            if self._is_reader_stuck:
                self._start_waiting()
        if self._lines:
            self._drop_oldest()

    def reopen(self) -> None:
        """Call this after the descriptor became another file. Unwritten lines go to the new file."""
        self.write()
        with self._writing_lock:
            self._send = _nonblocking_writer(self._descriptor)

    def flush(self) -> None:
        """At exit, write the remaining lines, also those that an ended loop left. Blocks for at most `EXIT_WAIT_S`."""
        self.write()
        if self._waiting_thread is not None:
            self._waiting_thread.join(EXIT_WAIT_S)

    def _write_some(self, send: Callable[[bytes], int] | None) -> bool:
        """Write as much as the reader takes; False: some is left. Only for the holder of `_writing_lock`."""
        if send is None:
            return False
        try:
            while self._unwritten or self._take_lines():
                written = send(self._unwritten)
                self._is_line_begun = self._unwritten[written - 1] != ord("\n")
                self._unwritten = self._unwritten[written:]
        except BlockingIOError:
            return False
        except OSError:  # a full disk, or a closed pipe
            begun = self._unwritten.index(b"\n") + 1 if self._is_line_begun else 0
            self._failed_count += self._unwritten.count(b"\n", begun)
            self._unwritten = self._unwritten[:begun]
        return True

    def _take_lines(self) -> bool:
        """Move the waiting lines to `_unwritten`. False: there are none."""
        lines = []
        try:
            while self._lines:
                lines.append(self._lines.popleft())
        except IndexError:  # `_drop_oldest` took the last line
            pass
        if lines and (missing := self.dropped - self._reported):
            self._reported += missing
            lines.insert(0, self._dropped_line(missing))
        self._unwritten = b"\n".join([*lines, b""])
        return bool(lines)

    def _start_waiting(self) -> None:
        try:
            waiting = threading.Thread(target=self._wait_and_write, name="log", daemon=True)
            waiting.start()
            self._waiting_thread = waiting
        except RuntimeError:  # no thread available: the next line tries again
            self._is_reader_stuck = False

    def _wait_and_write(self) -> None:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        send = self._send or partial(os.write, self._descriptor)
        while self._is_reader_stuck:
            poller.poll()
            with self._writing_lock:
                self._is_reader_stuck = not self._write_some(send)
        self._next_look = LOOK_EVERY
        self.write()  # lines that came in the last moment

    def _drop_oldest(self) -> None:
        """Drop the oldest lines beyond `MOST_WAITING`. Runs seldom, because adding up sizes takes as long as formatting a line."""
        if len(self._lines) < self._next_look or not self._dropping_lock.acquire(False):
            return
        try:
            size = sum(map(len, _snapshot(self._lines)))
            while size > MOST_WAITING:
                size -= len(self._lines.popleft())
                self._overflowed_count += 1
        except IndexError:  # the reader has taken them all
            pass
        finally:
            self._next_look = len(self._lines) + LOOK_EVERY
            self._dropping_lock.release()


def _snapshot(lines: deque[bytes]) -> tuple[bytes, ...]:
    """A copy of the lines, though threads or finalizers add and take lines meanwhile."""
    while True:
        try:
            return tuple(lines)
        except RuntimeError:  # changed during the copy
            continue


def _nonblocking_writer(descriptor: int) -> Callable[[bytes], int] | None:
    """A function that writes to the descriptor and raises BlockingIOError for a stuck reader. None: no such function is possible.

    O_NONBLOCK would affect every process that shares the open file, such as the shell: so pipes and terminals are reopened.
    """
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # `2>&-`: every write fails
        return partial(os.write, descriptor)
    if stat.S_ISSOCK(mode):
        connection = socket.socket(fileno=os.dup(descriptor))
        return lambda data: connection.send(data, socket.MSG_DONTWAIT)
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:  # the file is another user's
            return None
    return partial(os.write, descriptor)


def json_line(fields: Mapping[str, object]) -> bytes:
    """One JSON object on one line, without the newline."""
    try:
        line = _encode(fields)
    except Exception:  # noqa: BLE001  # a lone surrogate, a `__str__` that raises, a list that holds itself
        line = b""
    if line.isascii() and 0 < len(line) <= LONGEST:
        return line
    for most in _VALUE_LIMITS:
        if 0 < len(line) <= LONGEST and len(line := _escape_controls(line)) <= LONGEST:
            return line
        line = _encode({name: _shortened(value, most) for name, value in fields.items()})
    return _escape_controls(line)


def line_of(first: msgspec.Struct, fields: Mapping[str, object]) -> bytes:
    """As `json_line`, of all fields of `first` followed by `fields`, which are short."""
    try:
        line = _encode(first)[:-1] + b"," + _encode(fields)[1:]
    except Exception:  # noqa: BLE001  # as above
        line = b""
    return line if line.isascii() and 0 < len(line) <= LONGEST else json_line(msgspec.to_builtins(first) | fields)


def _escape_controls(line: bytes) -> bytes:
    return _CONTROLS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), line)


def _shortened(value: object, most: int) -> object:
    """The value itself, or a shortened text of it."""
    try:
        encoded = _encode(value)
    except Exception:  # noqa: BLE001  # as above
        text = value if isinstance(value, str) else shown(value)
    else:
        if len(encoded) <= most:
            return msgspec.Raw(encoded)
        text = value if isinstance(value, str) else encoded.decode()
    return _truncate_middle(text, most).encode("utf-8", "backslashreplace").decode()


def _truncate_middle(text: str, most: int) -> str:
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}… {left_out} characters left out …{text[len(text) - most // 2 :]}"


def shown(value: object) -> str:
    """The `repr` of a value, with a substitute where that fails."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  # logging must not fail
        return f"<{type(value).__name__}>"


class _Verbatim(str):
    """A text that the console renderer prints unquoted."""

    __slots__ = ()
    __repr__ = str.__str__


def for_terminals(event: EventDict) -> EventDict:
    """Turn values into text that neither moves the cursor nor begins a line; only tracebacks have several lines."""
    for name, value in event.items():
        if not isinstance(value, str):
            event[name] = _Verbatim(_printable(_truncate_middle(shown(value), LONGEST)))
        elif name in {"event", "exception"}:
            event[name] = _printable(_truncate_middle(value, LONGEST), "\n\t" if name == "exception" else "")
        elif len(value) > LONGEST or not value.isprintable():
            event[name] = _Verbatim(repr(_truncate_middle(value, LONGEST)))
    return event


def _printable(text: str, also: str = "") -> str:
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() or char in also else repr(char)[1:-1] for char in text])
