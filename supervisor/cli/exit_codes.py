"""How every command ends: one table of exit codes, for the shell, `llmux --help` and the documents."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from supervisor.errors import (
    AuthenticationError,
    ConfigError,
    ForbiddenError,
    LlmuxError,
    NotFoundError,
    UnavailableError,
)


class ExitCode(IntEnum):
    """An exit code."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    REFUSED = 5
    INTERRUPTED = 130


MEANINGS: Final[Mapping[ExitCode, str]] = {
    ExitCode.DONE: "Done. `serve`: ended by a signal, orderly.",
    ExitCode.FAILED: "It didn't work; the message says what to do. `doctor`: something has to be mended.",
    ExitCode.USAGE: "Mistakes in the command line, or in the configuration: all of them are listed.",
    ExitCode.UNREACHABLE: "No daemon answers at that address.",
    ExitCode.NOT_FOUND: "There is no such model, runtime or key.",
    ExitCode.REFUSED: "The daemon wants a key, or this one doesn't open that.",
    ExitCode.INTERRUPTED: "Ended by Ctrl-C.",
}


class UnreachableError(UnavailableError):
    """Nobody answers where the daemon should be, or somebody else does."""


def exit_code_of(error: LlmuxError) -> ExitCode:
    """The code that says it."""
    match error:
        case ConfigError():
            return ExitCode.USAGE
        case UnreachableError():
            return ExitCode.UNREACHABLE
        case NotFoundError():
            return ExitCode.NOT_FOUND
        case AuthenticationError() | ForbiddenError():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILED
