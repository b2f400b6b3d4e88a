"""`llmux` whose collector of garbage never runs by itself, and that gives memory back ten times as soon. Run as `python -m`.

SIGUSR2 has it collect, and write into the folder that GARBAGE_REPORTS names, as `<pid>.json`, how many MiB it took before
(`rss_mib`), and what the collection found that is no smaller than `LARGE`: each as a line that names its holders (`found`).
Whatever a request held must be gone with its last reference, so this list is to be empty.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from supervisor.cli import own_process
from supervisor.cli.main import main

LARGE = 64 * 1024  # bytes
_SIZED = (bytes, bytearray, str, msgspec.Raw)


def rss_mib(pid: int) -> float:
    """What a process takes of the memory. Raises OSError where there is none."""
    resident = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE") / 1024 / 1024


def _large(garbage: list[object]) -> Iterator[str]:
    seen = set(map(id, garbage))
    for holder in garbage:
        left = [holder]
        while left:
            for held in gc.get_referents(left.pop()):
                if gc.is_tracked(held) or id(held) in seen:
                    continue
                seen.add(id(held))
                left.append(held)
                if isinstance(held, _SIZED) and len(held) >= LARGE:
                    above = {type(one).__name__ for one in gc.get_referrers(holder) if one is not garbage}
                    yield f"{type(held).__name__} of {len(held)} in a {type(holder).__name__}, in {sorted(above)}"


def report(*_: object) -> None:
    """See above."""
    ctypes.CDLL(None).malloc_trim(0)
    taken = rss_mib(os.getpid())
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = sorted(_large(gc.garbage))
    gc.garbage.clear()
    gc.collect()
    path = Path(os.environ["GARBAGE_REPORTS"], f"{os.getpid()}.json")
    path.with_suffix(".new").write_text(json.dumps({"rss_mib": taken, "found": found}))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    gc.enable = lambda: None
    own_process.TRIM_S /= 10
    signal.signal(signal.SIGUSR2, report)
    main()
