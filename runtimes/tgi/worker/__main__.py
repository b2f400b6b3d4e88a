"""TGI's launcher with a folder of its own for the sockets by which its processes talk to each other.

They stand in /tmp by default, where any user of the machine can take their names first, or pass for a shard. This process
becomes the launcher, which holds the folder as long as it runs, with its shards; the next launcher deletes what was left. Run
by the supervisor's Python: the launcher is a program without one. Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from runtimes.sdk.own_folder import OwnFolder

LONGEST: Final = 107  # bytes of a socket's path
NUMBER: Final = "-00"  # which the launcher adds: the shard's


def main() -> None:
    """Arguments: the launcher, then its own."""
    program, *words = sys.argv[1:]
    own = OwnFolder("llmux-tgi-")
    sockets = str(own.path / "shard")
    if len(os.fsencode(sockets + NUMBER)) > LONGEST:
        own.close()
        sys.exit(f"TMPDIR is too long: {sockets} can't be the path of a socket; set TMPDIR to a shorter one")
    own.hold_through_exec()
    os.execv(program, [program, *words, "--shard-uds-path", sockets])


if __name__ == "__main__":
    main()
