"""`llmux` on a machine that can't kill the model `immortal`: the pidfds of its processes fire when the file LLMUX_TEST_MORTAL is there.

A process in an uninterruptible sleep of its driver is such a one. Nothing can make one on purpose.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from pathlib import Path

from supervisor.cli.main import main

_open, _send = os.pidfd_open, signal.pidfd_send_signal
_immortal: set[int] = set()
_MORTAL = Path(os.environ["LLMUX_TEST_MORTAL"])


def pidfd_open(pid: int, flags: int = 0) -> int:
    if b"LLMUX_WORKER=immortal:" not in Path(f"/proc/{pid}/environ").read_bytes():
        return _open(pid, flags)
    silent, fire = os.pipe()
    _immortal.add(silent)
    threading.Thread(target=_fire, args=(_open(pid), fire), daemon=True).start()
    return silent


def _fire(real: int, fire: int) -> None:
    select.select([real], [], [])
    while not _MORTAL.exists():
        time.sleep(0.02)
    os.close(real)
    os.close(fire)


def send(pidfd: int, number: int, *more: object) -> None:
    if pidfd not in _immortal:
        _send(pidfd, number, *more)


os.pidfd_open, signal.pidfd_send_signal = pidfd_open, send
main()
