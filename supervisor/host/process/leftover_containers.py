"""Containers and other work that a worker runs outside its own processes: killing the worker's tree doesn't end them.

A stop program ends them. It is noted in a file before the worker starts, so one of these runs it after the worker's end: the daemon
once the tree is gone, the shim if the daemon is dead, or the next daemon if the shim was killed, too. The exit status is
ignored: there may be nothing left to end.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from supervisor.host.store import files

SUFFIX: Final = ".remains"
LIMIT_S: Final = 20.0


def note(path: Path, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> None:
    """Note the program, its whole environment and its working directory in a file. Raises OSError."""
    with files.replacing(path, 0o600) as fresh:
        fresh.write_text(json.dumps({"argv": argv, "env": env, "cwd": None if cwd is None else str(cwd)}))


def settle(path: Path) -> str | None:
    """Run the noted program and delete the note. Blocks, at most LIMIT_S. Returns an error; None: done, or nothing is noted."""
    try:
        noted = json.loads(path.read_text())
        argv, env, cwd = noted["argv"], noted["env"], noted["cwd"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} can't be read: {error}"
    try:
        # A process group of its own: Ctrl-C in the daemon's terminal must not end it.
        subprocess.run(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
            process_group=0,
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not end within {LIMIT_S:g} s"
    except (OSError, ValueError) as error:
        return f"{argv[0]} can't be run: {error}"
    path.unlink(missing_ok=True)
    return None


def settle_all(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Settle every note that an earlier daemon left there; yields each note with its error, or None."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        yield path, settle(path)
