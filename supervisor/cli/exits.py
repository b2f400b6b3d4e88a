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


class Exit(IntEnum):
    """An exit code."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    REFUSED = 5
    INTERRUPTED = 130


MEANINGS: Final[Mapping[Exit, str]] = {
    Exit.DONE: "Done. `serve`: ended by a signal, orderly.",
    Exit.FAILED: "It didn't work; the message says what to do. `doctor`: something has to be mended.",
    Exit.USAGE: "Mistakes in the command line, or in the configuration: all of them are listed.",
    Exit.UNREACHABLE: "No daemon answers at that address.",
    Exit.NOT_FOUND: "There is no such model, runtime or key.",
    Exit.REFUSED: "The daemon wants a key, or this one doesn't open that.",
    Exit.INTERRUPTED: "Ended by Ctrl-C.",
}


class UnreachableError(UnavailableError):
    """Nobody answers where the daemon should be, or somebody else does."""


def exit_of(error: LlmuxError) -> Exit:
    """The code that says it."""
    match error:
        case ConfigError():
            return Exit.USAGE
        case UnreachableError():
            return Exit.UNREACHABLE
        case NotFoundError():
            return Exit.NOT_FOUND
        case AuthenticationError() | ForbiddenError():
            return Exit.REFUSED
        case _:
            return Exit.FAILED
