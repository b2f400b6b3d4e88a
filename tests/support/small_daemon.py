"""A parent of workers that can be killed at any moment: starts, stops and restarts trees for ever, and says so.

Arguments: instance, folder, how many workers at once. It takes the instance's lock and reaps first, as the real daemon
does, and prints JSON lines: {"reaped": n, "took_s": s}, then {"shim": pid, "pid": pid} for each start.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

from supervisor.io.process import become_subreaper
from supervisor.io.reap import instance_lock, reap_leftovers
from supervisor.io.spawn import spawn
from tests.support.trees import order


async def keep(instance: str, folder: Path, slot: int, count: int, steady: bool) -> None:
    generation = slot
    while True:
        generation += count
        worker = await spawn(
            order(instance, folder, "--daemonize", "2", "--fork", "--ignore-term", generation=generation)
        )
        print(json.dumps({"shim": worker.shim_pid, "pid": worker.pid}), flush=True)
        if steady:
            await worker.wait()
        await asyncio.sleep(random.uniform(0.0, 0.2))
        await worker.stop(random.uniform(0.0, 0.1))


async def main(instance: str, folder: Path, count: int, steady: bool) -> None:
    await asyncio.gather(*(keep(instance, folder, slot, count, steady) for slot in range(count)))


if __name__ == "__main__":
    name, folder, count, mode = sys.argv[1:]
    with instance_lock(Path(folder)):
        began = time.monotonic()
        reaped = reap_leftovers(name, logs=Path(folder))
        print(json.dumps({"reaped": len(reaped), "took_s": time.monotonic() - began}), flush=True)
        become_subreaper()
        asyncio.run(main(name, Path(folder), int(count), mode == "steady"))
