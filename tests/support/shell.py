"""`llmux` commands as a person calls them, in pipes and on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.support import forker
from tests.support.daemon import REPOSITORY
from tests.support.limits import LIMIT_S

LLMUX = [sys.executable, "-m", "supervisor.cli"]


def environment(home: Path, **variables: str) -> dict[str, str]:
    """A home of its own, and nothing of the outer llmux."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMUX_") and name != "NO_COLOR"}
    xdg = dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"), "")
    return {**kept, **xdg, "HOME": str(home), "TERM": "xterm", **variables}


def heed_ctrl_c() -> None:
    """As in a person's shell: what a script runs in the background, as these tests may be, ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def llmux(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    stdin: str | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """The command with these words, forked where it can be. `env`: else this process's own."""
    env = os.environ if env is None else env
    if forker.can_start(tuple(LLMUX[1:]), env, {}):
        return forker.run([*LLMUX[1:], *words], cwd=cwd, env=env, stdin=stdin, timeout=timeout)
    source = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(
        [*LLMUX, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, **source
    )


class Shell:
    """Runs commands against one daemon, or none."""

    def __init__(self, home: Path, url: str | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.url = url
        self.variables = variables or {}

    def env(self, **variables: str) -> dict[str, str]:
        url = {"LLMUX_URL": self.url} if self.url else {}
        return environment(self.home, **{**url, **self.variables, **variables})

    def __call__(
        self, *words: str, stdin: str | None = None, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        env = self.env(PYTHONPATH=str(REPOSITORY), **variables)
        return llmux(*words, env=env, cwd=self.home, stdin=stdin, timeout=timeout)

    def terminal(self, *words: str, columns: int = 120, stdout: Path | None = None, **variables: str) -> Terminal:
        return Terminal(words, self.env(PYTHONPATH=str(REPOSITORY), **variables), self.home, columns, stdout)


class Terminal:
    """A command on a terminal of its own, which it is in control of: Ctrl-C works as for a person.

    Its output may go to a file.
    """

    def __init__(
        self, words: tuple[str, ...], env: dict[str, str], cwd: Path, columns: int, stdout: Path | None = None
    ) -> None:
        self.screen = ""
        self._seen = 0
        self.master, slave = pty.openpty()
        self.settings = termios.tcgetattr(self.master)  # before the command has changed them
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        output = slave if stdout is None else os.open(stdout, os.O_WRONLY | os.O_CREAT, 0o600)
        streams = {"stdin": slave, "stdout": output, "stderr": slave}
        self.process: subprocess.Popen[bytes] | forker.Forked
        if forker.can_start(tuple(LLMUX[1:]), env, streams):
            self.process = forker.start([*LLMUX[1:], *words], env=env, cwd=cwd, terminal=True, **streams)
        else:
            own = {"start_new_session": True, "preexec_fn": self._take_over}
            self.process = subprocess.Popen([*LLMUX, *words], env=env, cwd=cwd, **own, **streams)
        for descriptor in {slave, output}:
            os.close(descriptor)

    @staticmethod
    def _take_over() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        heed_ctrl_c()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.master)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, timeout_s: float = LIMIT_S) -> None:
        """Read until it stands there, behind what was waited for last."""
        deadline = time.monotonic() + timeout_s
        while text not in self.screen[self._seen :]:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen!r}"
            if not self._read(0.5):
                assert text in self.screen[self._seen :], f"ended without {text!r}: {self.screen!r}"
        self._seen = self.screen.index(text, self._seen) + len(text)

    def end(self, timeout_s: float = LIMIT_S) -> int:
        """Read until it ends; its exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(0.5):
            assert time.monotonic() < deadline, self.screen
        return self.process.wait(timeout_s)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self.master], [], [], timeout_s)[0]:
            return True
        try:
            piece = os.read(self.master, 65536)
        except OSError:  # nobody has the other side open any more
            return False
        self.screen += piece.decode("utf-8", "replace")
        return bool(piece)
