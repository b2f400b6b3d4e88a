"""Starts a worker below a shim (see shim.py), which reads its launch order as one line; marks identify all descendants.

Shims should be started by the main thread: each gets its parent-death signal when the *thread* that spawned it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from supervisor.host.process import cgroup
from supervisor.host.process.process import SpawnError, WorkerProcess
from supervisor.host.process.reap import Mark

SHIM = Path(__file__).with_name("shim.py")
SPAWN_LIMIT_S = 30.0  # a shim takes 30 ms; only a machine that is out of memory or CPU needs seconds

_tasks: set[asyncio.Task[WorkerProcess]] = set()


@dataclass(frozen=True, slots=True)
class SpawnOrder:
    """The order to start a worker. `env` is the whole environment; the worker's mark is added to it.

    The log begins empty with each start (the last one is kept as `LOG.1`) and takes at most about 1.5 × `log_limit` bytes on
    disk. `stop_argv` is run in the worker's environment instead of the first SIGTERM. `leftovers`: the note
    (leftover_containers.py) that the shim settles if the daemon is dead when the worker ends. `keeps` are descriptors that
    shim and worker hold open as long as they live. `stdio`: our descriptors, none below 3, for the worker's stdin, stdout
    and stderr; None: it reads nothing and writes its log. `dies_first`: out of memory, the kernel should kill the worker before
    other processes; without it, the worker keeps our oom_score_adj.
    """

    instance: str
    model: str
    generation: int
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    log_limit: int = 16 * 1024 * 1024
    stop_argv: tuple[str, ...] | None = None
    leftovers: Path | None = None
    keeps: tuple[int, ...] = ()
    stdio: tuple[int, int, int] | None = None
    dies_first: bool = True

    @property
    def worker(self) -> str:
        """The worker's name, `model:generation`."""
        return f"{self.model}:{self.generation}"


async def spawn(order: SpawnOrder) -> WorkerProcess:
    """Start a worker and return once its program runs. Takes about 50 ms, of which it blocks the loop for 2.

    Cancellation is safe at any point: the worker is killed. Raises SpawnError.
    """
    task = asyncio.create_task(_start_worker(order), name=f"spawn {order.worker}")
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_kill_spawned)
        raise


def _kill_spawned(task: asyncio.Task[WorkerProcess]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().kill()


async def _start_worker(order: SpawnOrder) -> WorkerProcess:
    mark = Mark(order.instance, order.worker, order.log.resolve())
    group = cgroup.create(f"{order.instance}-{order.worker}")
    launch = {
        "parent": os.getpid(),
        "argv": order.argv,
        "env": {**order.env, **mark.environment()},
        "cwd": None if order.cwd is None else str(order.cwd),
        "log": str(order.log),
        "log_limit": order.log_limit,
        "stdio": order.stdio,
        "dies_first": order.dies_first,
        "stop_argv": order.stop_argv,
        "leftovers": None if order.leftovers is None else str(order.leftovers),
        "cgroup": None if group is None else str(group),
    }
    try:
        worker = WorkerProcess(order.worker, mark, group, _start_shim(order, mark))
    except OSError as error:
        if group is not None:
            cgroup.remove(group)
        raise SpawnError(str(error)) from error
    try:
        worker.send_line(json.dumps(launch).encode() + b"\n")
        async with asyncio.timeout(SPAWN_LIMIT_S):
            await worker.running
    except TimeoutError as error:
        worker.abandon()
        raise SpawnError(f"it did not start within {SPAWN_LIMIT_S:.0f} s") from error
    except SpawnError:
        worker.abandon()
        await worker.ends_within(1.0)  # so that no process is left when the caller gets the error
        raise
    except asyncio.CancelledError:  # the loop closes: nobody else cancels this task
        worker.abandon()
        raise
    return worker


def _start_shim(order: SpawnOrder, mark: Mark) -> subprocess.Popen[bytes]:
    env = mark.environment()
    if "LD_LIBRARY_PATH" in os.environ:
        env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]  # Python itself may need it
    # A session of its own: Ctrl-C in the daemon's terminal is the daemon's to handle.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(SHIM), order.worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,
        bufsize=0,
        pass_fds=(*order.keeps, *(order.stdio or ())),
    )
