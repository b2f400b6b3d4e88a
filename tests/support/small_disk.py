"""A real disk of a megabyte for a daemon's state, which can be filled: a tmpfs in a mount namespace of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import REPOSITORY, Daemon

_INSIDE = (
    "mkdir -p {0} && mount -t tmpfs -o size=1m,nr_inodes=128,mode=700 llmux {0} && echo mounted && exec sleep 86400"
)


class SmallDisk:
    """Seen from outside at `path`. `holder` keeps the namespace."""

    def __init__(self, inside: Path, holder: int) -> None:
        self.inside = inside
        self.holder = holder
        self.path = Path(f"/proc/{holder}/root{inside}")

    @property
    def enter(self) -> list[str]:
        """What to put before a command that is to see the disk."""
        return ["nsenter", "-t", str(self.holder), "-U", "-m", "--preserve-credentials", f"--wd={REPOSITORY}"]

    def fill_space(self) -> None:
        with contextlib.suppress(OSError), (self.path / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def fill_inodes(self) -> None:
        with contextlib.suppress(OSError):
            for number in range(128):
                (self.path / f"fill{number}").touch()

    def free(self) -> None:
        for path in self.path.glob("fill*"):
            path.unlink()


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[SmallDisk]:
    """Skips the test where this machine gives nobody such a namespace."""
    command = ["unshare", "-Urm", "sh", "-c", _INSIDE.format(at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as holder:
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != b"mounted\n":
                pytest.skip("no mount namespaces here")
            yield SmallDisk(at, holder.pid)
        finally:
            holder.kill()


class OnSmallDisk(Daemon):
    """A daemon with its state on the disk."""

    def __init__(self, folder: Path, config: dict[str, object], disk: SmallDisk) -> None:
        config = config | {"server": {"state_dir": str(disk.inside)}}
        super().__init__(folder, config)
        self.state_dir = disk.path
        command = [*disk.enter, sys.executable, "-m", "supervisor.cli"]
        self.program = ("-c", f"import os, sys; os.execvp('nsenter', {command} + sys.argv[1:])")
