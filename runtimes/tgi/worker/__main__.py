"""Starts TGI's launcher with a private folder for the sockets between its processes.

By default they lie in /tmp, where any user of the machine can take their names first, or impersonate a shard. This process
becomes the launcher. The launcher and its shards lock the folder while they run, and the next launcher deletes folders that
were left. The supervisor's Python runs this module, because the launcher has none. Imports only the standard library.
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
