"""The daemon's logging: one structlog pipeline to stderr, JSON for machines, columns for a terminal.

The pipeline gets our events, libraries' records at WARNING or above, Python's warnings, and uncaught exceptions. In JSON each
is one object on one line, with the traceback as a string. log_lines.py formats and writes the lines.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger

from supervisor.cli.serving.log_lines import Lines, for_terminals, json_line, line_of, shown

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

log = structlog.get_logger("llmux.log")

_Render = Callable[[object, str, EventDict], bytes]
_lines: Lines | None = None


def configure(level: str, form: Literal["auto", "console", "json"]) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    descriptor = sys.stderr.fileno() if sys.stderr is not None else -1  # `2>&-`
    terminal = os.isatty(descriptor)
    stamp = _Stamp()
    as_json = form == "json" or (form == "auto" and not terminal)
    render: _Render = (lambda _log, _method, event: json_line(event)) if as_json else _console_renderer(colors=terminal)

    def dropped_line(count: int) -> bytes:
        return render(None, "warning", stamp(None, "warning", {"event": "log.dropped", "lines": count}))

    global _lines  # noqa: PLW0603  # the process has one pipeline
    _lines = lines = Lines(descriptor, dropped_line)
    structlog.configure(
        processors=[stamp, structlog.processors.format_exc_info, render],
        wrapper_class=_json_logger(number, stamp, lines) if as_json else structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_names: lines,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[_FromLogging(lines)], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = _log_unraisable


def reopen() -> None:
    """Call this after stderr became another file."""
    if _lines is not None:
        _lines.reopen()


def dropped_lines() -> int:
    """The number of lost log lines: nobody read them in time, or they could not be written."""
    return 0 if _lines is None else _lines.dropped


def say(text: str) -> None:
    """Print a line on stdout without waiting for its reader."""
    if sys.stdout is None:  # `>&-`
        return
    lines, descriptor = _lines, sys.stdout.fileno()
    if lines is None or sys.stderr is None or not os.path.sameopenfile(descriptor, sys.stderr.fileno()):
        lines = Lines(descriptor)
        atexit.register(lines.flush)
    lines.info(text.encode(errors="backslashreplace"))


_MILLISECONDS = tuple(f"{number:03d}" for number in range(1000))  # formatting one would take as long as writing a line


class _Stamp:
    """Adds level and local time with its offset. The part up to the second is formatted once a second.

    An event in the past has its time as `_at`; `_line`, a msgspec.Struct, has the first fields of a line.
    """

    def __init__(self) -> None:
        self._formatted = (-1, "", "")  # replaced as a whole: threads log, too

    def __call__(self, _logger: object, method: str, event: EventDict) -> EventDict:
        now = event.pop("_at", None) or time.time()
        if (line := event.pop("_line", None)) is not None:
            event |= msgspec.to_builtins(line)
        second, prefix, offset = self._formatted
        if int(now) != second:
            second = int(now)
            local = time.localtime(second)
            prefix, offset = time.strftime("%Y-%m-%dT%H:%M:%S", local), time.strftime("%z", local)
            self._formatted = (second, prefix, offset)
        event["level"] = method
        event["timestamp"] = f"{prefix}.{_MILLISECONDS[int((now - second) * 1000)]}{offset}"
        return event


def _json_logger(number: int, stamp: _Stamp, lines: Lines) -> type[FilteringBoundLogger]:
    """A logger with a fast path for `info` without positional arguments: every request logs one such line."""
    usual = structlog.make_filtering_bound_logger(number)
    if number > logging.INFO:
        return usual

    write = lines.info

    class JsonLogger(usual):  # type: ignore[misc, valid-type]  # made at run time
        def info(self, event: str, *args: object, **fields: object) -> None:
            if args or "exc_info" in fields:
                super().info(event, *args, **fields)
                return
            fields["event"] = event
            line = fields.pop("_line", None)
            stamped = stamp(None, "info", {**self._context, **fields} if self._context else fields)
            write(line_of(line, stamped) if isinstance(line, msgspec.Struct) else json_line(stamped))

    return JsonLogger


def _console_renderer(*, colors: bool) -> _Render:
    # Plain tracebacks: structlog's usual ones show local variables, which contain prompts and keys.
    render = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
    return lambda logger, method, event: render(logger, method, for_terminals(event)).encode(
        "utf-8", "backslashreplace"
    )


class _FromLogging(logging.Handler):
    """Forwards records of `logging`: the message is the event, `logger` names the logger."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def flush(self) -> None:
        """Called by `logging` at exit."""
        self._lines.flush()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001  # the arguments don't fit, or fail: log the message without them
            message = shown(record.msg)
        fields = {"exc_info": record.exc_info} if record.exc_info else {}
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)  # rounded to a level of structlog
        log.log(level, message.strip(), logger=record.name, **fields)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.error("exception.uncaught", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        thread = args.thread.name if args.thread is not None else None
        log.error("exception.uncaught", thread=thread, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))


def _log_unraisable(args: UnraisableHookArgs) -> None:
    """Log an exception that nobody could catch, such as one in a `__del__`."""
    where = f"{args.err_msg or 'Exception ignored in'}: {shown(args.object)}"
    log.error("exception.unraisable", where=where, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))
