"""A daemon for `llmux run`: the running one, else a new one that ends with the command."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from supervisor.cli.client import Client
from supervisor.errors import LlmuxError
from supervisor.host.store import files

LOG: Final = "run.log"
ANSWER_S: Final = 5.0
_LAST_LINES: Final = 10
_PR_SET_PDEATHSIG: Final = 1
Echo = Callable[[str], None]


class NotStartedError(LlmuxError):
    """The daemon ended before it listened; `detail` has its last log lines."""

    code = "daemon_not_started"


def is_daemon(daemon: Client) -> bool:
    try:
        return "models_loaded" in daemon.get("/health", timeout_s=ANSWER_S)
    except LlmuxError:
        return False


@contextlib.contextmanager
def own_daemon(usual: Client, arguments: Sequence[str], state_dir: Path, echo: Echo) -> Iterator[str | None]:
    """The URL of a daemon that serves with these arguments until the block ends. Its log goes into a file.

    None: another process has started a daemon meanwhile, which answers at the usual address. Raises NotStartedError, or OSError.
    """
    with contextlib.ExitStack() as ends:
        with files.locked_folder(state_dir):  # two commands at the same time start one daemon
            url = None if is_daemon(usual) else _start_daemon(arguments, state_dir / LOG, ends)
        if url is not None:
            echo(
                f"No daemon runs: started one for this chat, with its log in {state_dir / LOG}. One that stays: llmux serve"
            )
        yield url


def _start_daemon(arguments: Sequence[str], path: Path, ends: contextlib.ExitStack) -> str:
    """Start a daemon, with its log in this file; returns its URL."""
    prctl = ctypes.CDLL(None).prctl  # loaded here: between fork and exec as little as possible may happen
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "supervisor.cli", "serve", *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,  # Ctrl-C cuts off an answer, not the daemon
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  # there are no threads
        )
    ends.enter_context(process)
    ends.callback(process.terminate)
    assert process.stdout is not None
    greeting = json.loads(process.stdout.readline() or "{}")
    if "url" not in greeting:
        last = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        raise NotStartedError(f"The daemon could not start; {path} has all that it said:", detail=tuple(last))
    return str(greeting["url"])
