"""`llmux` as a user without an entry in the system's list, as in a container that runs with any number.

Run by root as `python -m tests.support.stranger …`. It keeps the right to read everything: Python may be installed anywhere.
"""

from __future__ import annotations

import ctypes
import os
import struct

from supervisor.cli.main import main

NUMBER = 12345
CAP_DAC_READ_SEARCH = 2
PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 4, 8, 47, 2  # linux/prctl.h
CAPABILITY_VERSION = 0x20080522  # linux/capability.h: two sets of 32 bits


def become_stranger() -> None:
    """As `setpriv --ambient-caps=+dac_read_search` does, without an exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    kept = [1 << CAP_DAC_READ_SEARCH] * 3  # effective, permitted, inheritable
    steps = (
        lambda: libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0),
        lambda: os.setgroups([]) or 0,
        lambda: os.setresgid(NUMBER, NUMBER, NUMBER) or 0,
        lambda: os.setresuid(NUMBER, NUMBER, NUMBER) or 0,
        lambda: libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), struct.pack("6I", *kept, 0, 0, 0)),
        lambda: libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0),
        lambda: libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0),  # else its own /proc were root's; an exec does it, too
    )
    for step in steps:
        if step() != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    become_stranger()
    main(prog_name="llmux")
