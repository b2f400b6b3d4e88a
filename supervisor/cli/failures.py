"""Messages of a command's failure: a sentence for people on stderr, and with `--json` an object on stdout.

The object has the form of the API's errors, and the exit code. The object is printed only where a command has
printed no JSON yet: the output of `config check`, `doctor` or `pull` shows the mistakes itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from supervisor.cli import options
from supervisor.cli.exit_codes import ExitCode
from supervisor.errors import LlmuxError

_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MANY: Final = (errno.EMFILE, errno.ENFILE)
_LIMITS: Final = (*_REFUSED, *_FULL, *_MANY, errno.ENOMEM, errno.EAGAIN, errno.EIO)
_USAGE: Final = "invalid_usage"


def of_system(error: OSError) -> LlmuxError | None:
    """The error for a refusal of the operating system, with the remedy; None for a probable mistake of llmux.

    A refusal names a file, or a limit that was reached. No person could mend a bad descriptor, for example.
    """
    if error.filename is None and error.errno == errno.ENOENT and not _has_folder():
        return LlmuxError("The current folder is gone. Change to one that is there.", code="os_error")
    if error.filename is None and error.errno not in _LIMITS:
        return None
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
    what = error.strerror or str(error) or type(error).__name__
    message = f"{place}: {what}." if place is not None else f"{what}."
    return LlmuxError(f"{message}{_remedy(error.errno, place)}", code="os_error")


def _has_folder() -> bool:
    """Whether the current folder still exists."""
    try:
        os.getcwd()  # noqa: PTH109  # only this call raises for a deleted folder
    except FileNotFoundError:
        return False
    return True


def _remedy(number: int | None, place: str | None) -> str:
    if number in _FULL:
        return " Make room on that disk, or name a place on another one."
    if number in _MANY:
        return " Raise the limit of open files: ulimit -n."
    if number not in _REFUSED:
        return ""
    change = (
        "The file system is read-only" if number == errno.EROFS else f"User {os.getuid()} must be allowed to use it"
    )
    return f" {change}; or name another place{_settings_hint(Path(place)) if place is not None else ''}."


def _settings_hint(place: Path) -> str:
    """The settings that determine this place, if known, after a colon."""
    from supervisor.catalog.loading import folders  # noqa: PLC0415  # slow to import, and failures are rare

    found = []
    for find, setting in (
        (folders.config_dir, "XDG_CONFIG_HOME or --config for the configuration"),
        (folders.state_dir, "XDG_STATE_HOME or server.state_dir for state and logs"),
        (folders.runtimes_dir, "XDG_DATA_HOME or server.runtimes_dir for what is installed"),
        (folders.models_dir, "XDG_DATA_HOME or server.models_dir for what is pulled"),
    ):
        try:
            folder = find()
        except LlmuxError:  # there is no home folder
            continue
        if place == folder or folder in place.parents or place in folder.parents:
            found.append(setting)
    return f": {'; '.join(found)}" if found else ""


def _print_error(message: str, code: str, exit_code: int, more: Mapping[str, object] | None = None) -> None:
    """Print the failure on one line, because `serve` promises a line. Prints nothing where a command has printed JSON already."""
    if not options.has_printed():
        options.print_json(
            {"error": {"message": message, "code": code, "exit_code": int(exit_code), **(more or {})}}, indent=None
        )


def print_error_json(error: LlmuxError, exit_code: ExitCode) -> None:
    """The failure as JSON on stdout."""
    detail: dict[str, object] = {"detail": list(error.detail)} if error.detail else {}
    _print_error(error.message, error.code, exit_code, {"type": error.type, "param": error.param} | detail)


def print_usage_error_json(error: click.ClickException) -> None:
    """A mistake in the command line as JSON on stdout."""
    _print_error(error.format_message(), _USAGE, error.exit_code, {"type": "invalid_request_error", "param": None})
