"""A daemon that others take over from."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.support.daemon import Daemon, wait_until
from tests.support.limits import LIMIT_S


class Upgraded(Daemon):
    """A daemon that may be succeeded by others on the same state directory. These are never forked: it starts them itself."""

    @property
    def serving(self) -> int:
        """The pid of the one that holds the lock."""
        return int((self.state_dir / "instance.lock").read_text().split()[1])

    def upgrade(self) -> int:
        """Upgrade, and return the new one's pid."""
        answer = self.post("/v1/admin/upgrade")
        assert answer.status_code == 200, f"{answer.text}\n{self.log_text()}"
        assert answer.json()["pid"] == self.serving
        return self.serving

    def successors(self) -> list[int]:
        """Every living successor, also one that doesn't serve yet."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if b"--takeover" in words and str(self.config_path).encode() in words:
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        """End all daemons, by force where it must be; then nothing may be left."""
        serving = None
        with contextlib.suppress(OSError, ValueError, IndexError):
            serving = self.serving  # once: a successor may begin to serve meanwhile
        for pid in self.successors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if pid == serving else signal.SIGKILL)
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(LIMIT_S)
        wait_until(
            lambda: not self.successors() and not self.workers(), what=f"nothing is left: {self.log_text()[-2000:]}"
        )
