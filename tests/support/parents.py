"""Parents of fake workers that can be killed at any moment. Run as `python -m tests.support.parents KIND INSTANCE FOLDER …`."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from pathlib import Path

from supervisor.host.process.fd_channel import FdChannel
from supervisor.host.process.process import become_subreaper
from supervisor.host.process.reap import instance_lock, reap_leftovers
from supervisor.host.process.spawn import spawn
from tests.support.trees import order


async def lend(instance: str, folder: Path, descriptor: str, *lines: str) -> None:
    """Hands the descriptors of one worker to whoever made this process, over a socket, and then tells the shim `lines`."""
    channel = FdChannel(socket.socket(fileno=int(descriptor)))
    worker = await spawn(order(instance, folder, "--daemonize", "--fork", "--ignore-term"))
    worker.pause()
    for line in lines:
        worker.send_line(line.encode() + b"\n")
    await channel.send({"pid": worker.pid, "shim": worker.shim_pid}, worker.descriptors)
    await asyncio.Event().wait()


async def restart(instance: str, folder: Path, count: str, mode: str) -> None:
    """Starts, stops and restarts `count` trees at once for ever, and says so; a `steady` one only when they end.

    It takes the instance's lock and reaps first, as the real daemon does, and prints JSON lines:
    {"reaped": n, "took_s": s}, then {"shim": pid, "pid": pid} for each start.
    """
    with instance_lock(folder):
        began = time.monotonic()
        reaped = reap_leftovers(instance, logs=folder)
        print(json.dumps({"reaped": len(reaped), "took_s": time.monotonic() - began}), flush=True)
        become_subreaper()
        slots = range(int(count))
        await asyncio.gather(*(keep(instance, folder, slot, len(slots), mode == "steady") for slot in slots))


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


if __name__ == "__main__":
    kind, name, place, *rest = sys.argv[1:]
    asyncio.run({"lend": lend, "restart": restart}[kind](name, Path(place), *rest))
