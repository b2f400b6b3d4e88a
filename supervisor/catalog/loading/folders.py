"""The folders that belong to llmux by default: the XDG base directories of this user."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from supervisor.errors import LlmuxError


class NoHomeError(LlmuxError):
    """A default folder lies below the home folder, and there is no home folder."""

    code = "no_home"


def config_dir() -> Path:
    """$XDG_CONFIG_HOME/llmux: llmux.yaml, local.yaml, api_keys.yaml."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def state_dir() -> Path:
    """$XDG_STATE_HOME/llmux: the store, worker logs."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def runtimes_dir() -> Path:
    """$XDG_DATA_HOME/llmux/runtimes: a virtual environment for each runtime."""
    return _xdg("XDG_DATA_HOME", ".local/share") / "runtimes"


def models_dir() -> Path:
    """$XDG_DATA_HOME/llmux/models: the files that `llmux pull` fetches, a folder for each repository."""
    return _xdg("XDG_DATA_HOME", ".local/share") / "models"


def _xdg(variable: str, below_home: str) -> Path:
    value = os.environ.get(variable, "")
    # The XDG specification: a relative path is invalid and to be ignored.
    return (Path(value) if value.startswith("/") else _home(variable) / below_home) / "llmux"


def _home(variable: str) -> Path:
    """The home folder. Raises NoHomeError, which names the variable to set instead."""
    try:
        return Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise NoHomeError(
            f"There is no home folder: HOME is not set, and the system knows no user {os.getuid()}. Set HOME, or {variable}."
        ) from None
