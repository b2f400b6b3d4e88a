"""How the daemon logs: structlog, one line per event to stderr; JSON for machines, columns for a terminal.

A line that can't be written (full disk, reader gone) is lost: it must not fail whatever was about to be told. Lines of
one turn of the event loop are written together, at its end: at a thousand requests a second each write of its own would
cost as much as the line's making.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import sys
import time
from typing import BinaryIO, Literal, cast

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger


def configure(level: str, form: Literal["auto", "console", "json"]) -> None:
    """Set structlog up for this process; what other libraries log through `logging` comes along from WARNING on."""
    number = logging.getLevelNamesMapping()[level.upper()]
    stamp, stderr = _Stamp(), _Stderr()
    if form == "json" or (form == "auto" and not sys.stderr.isatty()):
        structlog.configure(
            processors=[stamp, structlog.processors.format_exc_info, _render],
            wrapper_class=_json_lines(number, stamp, stderr),
            logger_factory=structlog.BytesLoggerFactory(cast("BinaryIO", stderr)),
            cache_logger_on_first_use=True,
        )
    else:
        structlog.configure(
            processors=[
                stamp,
                structlog.dev.ConsoleRenderer(  # its own choice of tracebacks shows variables, with what is secret in them
                    colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
                ),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(number),
            logger_factory=structlog.PrintLoggerFactory(
                io.TextIOWrapper(cast("BinaryIO", stderr), "utf-8", "backslashreplace", write_through=True)
            ),
            cache_logger_on_first_use=True,
        )
    logging.basicConfig(
        level=max(number, logging.WARNING), stream=sys.stderr, format="%(levelname)s %(name)s %(message)s"
    )


class _Stderr(io.RawIOBase):
    """Writes at the end of the loop's turn, at once where no loop runs; silent about what went wrong."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # structlog writes bytes only
        self._lines.append(data)
        if len(self._lines) == 1:
            try:
                asyncio.get_running_loop().call_soon(self._write)
            except RuntimeError:  # before or after the loop, or in a thread
                self._write()
        return len(data)

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), b"".join(lines))


class _Stamp:
    """Adds level and local time with its offset. The part up to the second is made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._prefix = self._offset = ""

    def __call__(self, _logger: object, method: str, event: EventDict) -> EventDict:
        now = time.time()
        second = int(now)
        if second != self._second:
            local = time.localtime(second)
            self._second, self._prefix = second, time.strftime("%Y-%m-%dT%H:%M:%S", local)
            self._offset = time.strftime("%z", local)
        event["level"] = method
        event["timestamp"] = f"{self._prefix}.{int((now - second) * 1000):03d}{self._offset}"
        return event


def _json_lines(number: int, stamp: _Stamp, stderr: _Stderr) -> type[FilteringBoundLogger]:
    """A logger with a short way for `info` without positional arguments: every request logs one such line."""
    usual = structlog.make_filtering_bound_logger(number)
    if number > logging.INFO:
        return usual

    class JsonLines(usual):  # type: ignore[misc, valid-type]  # made at run time
        def info(self, event: str, *args: object, **fields: object) -> None:
            if args or "exc_info" in fields:
                super().info(event, *args, **fields)
            else:
                fields["event"] = event
                line = _encode(stamp(None, "info", {**self._context, **fields} if self._context else fields))
                stderr.write(line + b"\n")

    return JsonLines


_encode = msgspec.json.Encoder(enc_hook=str).encode


def _render(_logger: object, _method: str, event: EventDict) -> bytes:
    return _encode(event)
