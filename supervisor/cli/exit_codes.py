"""The exit codes of every command: one table for the shell, `llmux --help` and the documents."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from supervisor.errors import (
    AuthenticationError,
    ConfigError,
    ForbiddenError,
    LeaseUnavailableError,
    LlmuxError,
    NotFoundError,
    UnavailableError,
)


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    REFUSED = 5
    NO_LEASE = 75
    INTERRUPTED = 130


MEANINGS: Final[Mapping[ExitCode, str]] = {
    ExitCode.DONE: "Done. `serve`: stopped cleanly by a signal.",
    ExitCode.FAILED: "Failed; the message says what to do. `doctor`: something must be fixed. `config check`: a model can't run on this machine. `reload --dry-run`: running requests may be cut. `jobs wait`: the job did not complete.",
    ExitCode.USAGE: "Mistakes in the command line or the configuration; all of them are listed.",
    ExitCode.UNREACHABLE: "No daemon answers at that address.",
    ExitCode.NOT_FOUND: "There is no such model, runtime, key or job.",
    ExitCode.REFUSED: "The daemon requires a key, or this key does not allow the request.",
    ExitCode.NO_LEASE: "`lease`: the memory is not free now; its command was not run.",
    ExitCode.INTERRUPTED: "Interrupted by Ctrl-C.",
}


class UnreachableError(UnavailableError):
    """At the daemon's address nothing answers, or another program does."""


_OF_ERRORS: Final = {
    ConfigError: ExitCode.USAGE,
    UnreachableError: ExitCode.UNREACHABLE,
    NotFoundError: ExitCode.NOT_FOUND,
    AuthenticationError: ExitCode.REFUSED,
    ForbiddenError: ExitCode.REFUSED,
    LeaseUnavailableError: ExitCode.NO_LEASE,
}


def exit_code_of(error: LlmuxError) -> ExitCode:
    return next((code for kind, code in _OF_ERRORS.items() if isinstance(error, kind)), ExitCode.FAILED)
