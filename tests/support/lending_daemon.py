"""A parent of one worker that hands its descriptors to whoever made it, and can then be killed at any moment.

Arguments: instance, folder, the descriptor of a socket, and the lines that it tells the shim afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from supervisor.io.fd_channel import FdChannel
from supervisor.io.spawn import spawn
from tests.support.trees import order


async def main(instance: str, folder: Path, connection: socket.socket, *lines: str) -> None:
    channel = FdChannel(connection)
    worker = await spawn(order(instance, folder, "--daemonize", "--fork", "--ignore-term"))
    worker.pause()
    for line in lines:
        worker.tell(line.encode() + b"\n")
    await channel.send({"pid": worker.pid, "shim": worker.shim_pid}, worker.descriptors)
    await asyncio.Event().wait()


if __name__ == "__main__":
    name, path, descriptor, *told = sys.argv[1:]
    asyncio.run(main(name, Path(path), socket.socket(fileno=int(descriptor)), *told))
