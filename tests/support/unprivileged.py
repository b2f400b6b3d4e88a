"""A daemon to which the limits of a user apply: they don't apply to root."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.daemon import Daemon

NOBODY = 65534
_USER = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


@contextlib.contextmanager
def unprivileged(config: dict[str, object]) -> Iterator[Daemon]:
    """Not started yet. Where the tests run as root it runs as another user, who may do no more than read every file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = Daemon(folder, config)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            folder.chmod(0o755)
            caps = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # for where Python is installed
            command = ["setpriv", *_USER, *caps, sys.executable, "-m", "supervisor.cli"]
            daemon.program = ("-c", f"import os, sys; os.execvp('setpriv', {command} + sys.argv[1:])")
        yield daemon


def limit_processes(daemon: Daemon, count: int | None) -> None:
    """At most so many processes and threads for the daemon's user; counts when it makes another. None: as before."""
    assert daemon.process is not None
    as_user = ["setpriv", *_USER] if os.geteuid() == 0 else []
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1] if count is None else count
    soft = "unlimited" if most == resource.RLIM_INFINITY else most
    subprocess.run([*as_user, "prlimit", f"--pid={daemon.process.pid}", f"--nproc={soft}:"], check=True)
