"""What the process tests share: orders for fake workers, an eye on /proc that is independent of the code under test."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from supervisor.host.process.spawn import SpawnOrder
from tests.support.limits import LIMIT_S, pause_s

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
PYTHON = (sys.executable, "-I", "-S")


def order(instance: str, folder: Path, *switches: str, generation: int = 1, **more) -> SpawnOrder:
    """A fake worker called `fake` with these switches; it opens no port unless told to."""
    env = {"PATH": os.environ["PATH"], **more.pop("env", {})}
    return SpawnOrder(
        instance=instance,
        model="fake",
        generation=generation,
        argv=(*PYTHON, str(FAKE_WORKER), *(switches if "--port" in switches else ("--no-listen", *switches))),
        log=folder / f"fake-{generation}.log",
        env=env,
        **more,
    )


def survivors(instance: str) -> dict[int, str]:
    """Processes that carry the instance's marker (zombies carry nothing any more), with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"LLMUX_INSTANCE={instance}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def state(pid: int) -> str:
    """The state letter in /proc, or "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def zombies() -> list[int]:
    """Dead children of this process that nobody has waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] == "Z" and int(fields[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def wait_until(true: Callable[[], object], limit_s: float = LIMIT_S) -> float:
    """Seconds until it is true; fails after `limit_s`."""
    began = time.monotonic()
    while not true():
        waited_s = time.monotonic() - began
        assert waited_s < limit_s, f"still not true after {limit_s} s"
        time.sleep(pause_s(waited_s))
    return time.monotonic() - began


async def until(true: Callable[[], object], limit_s: float = LIMIT_S) -> float:
    """`wait_until` for coroutines."""
    began = time.monotonic()
    while not true():
        waited_s = time.monotonic() - began
        assert waited_s < limit_s, f"still not true after {limit_s} s"
        await asyncio.sleep(pause_s(waited_s))
    return time.monotonic() - began
