"""How the daemon logs: structlog, one line per event to stderr; JSON for machines, columns for a terminal.

A line that can't be written (full disk, reader gone) is lost: it must not fail whatever was about to be told.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from typing import BinaryIO, Literal, cast

import msgspec
import structlog


def configure(level: str, form: Literal["auto", "console", "json"]) -> None:
    """Set structlog up for this process; what other libraries log through `logging` comes along from WARNING on."""
    number = logging.getLevelNamesMapping()[level.upper()]
    timestamp = structlog.processors.TimeStamper(fmt="iso", utc=False)
    shared: list[structlog.typing.Processor] = [structlog.processors.add_log_level, timestamp]
    if form == "json" or (form == "auto" and not sys.stderr.isatty()):
        structlog.configure(
            processors=[*shared, structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_dumps)],
            wrapper_class=structlog.make_filtering_bound_logger(number),
            logger_factory=structlog.BytesLoggerFactory(cast("BinaryIO", _Stderr())),
            cache_logger_on_first_use=True,
        )
    else:
        structlog.configure(
            processors=[*shared, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())],
            wrapper_class=structlog.make_filtering_bound_logger(number),
            logger_factory=structlog.PrintLoggerFactory(
                io.TextIOWrapper(cast("BinaryIO", _Stderr()), "utf-8", "backslashreplace", write_through=True)
            ),
            cache_logger_on_first_use=True,
        )
    logging.basicConfig(
        level=max(number, logging.WARNING), stream=sys.stderr, format="%(levelname)s %(name)s %(message)s"
    )


class _Stderr(io.RawIOBase):
    """Unbuffered, and silent about what went wrong."""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # structlog writes bytes only
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), data)
        return len(data)


def _dumps(event: object, **_ignored: object) -> bytes:
    return msgspec.json.encode(event, enc_hook=str)
