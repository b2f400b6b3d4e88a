"""`llmux` with a fault that only a mistake in llmux, in a library or of the machine could cause.

Run as `python -m tests.support.faulty_daemon FAULT serve …`. Each fault is a function at the end, which is called before `main`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog
import uvicorn

from supervisor.cli.main import main
from supervisor.cli.serving import daemon, own_process
from supervisor.core.admission import admission
from supervisor.core.events import WorkerReady
from supervisor.core.memory.device_ledger import Holder
from supervisor.core.memory.ledger import Ledger
from supervisor.core.state import SchedulerState, Step
from supervisor.core.workers import reports, termination
from supervisor.daemon.handover import handover
from supervisor.daemon.handover.takeover import Takeover
from supervisor.engine.engine import Engine
from supervisor.fleet.fleet import Fleet
from supervisor.host.store import store

HANGS = {"met": "__init__", "half": "_receive", "prepared": "check", "serving": "adopt"}
"""What a hanging successor begins, and never ends, by the step that the old daemon waits for."""
LARGE = 64 * 1024  # bytes
_SIZED = (bytes, bytearray, str, msgspec.Raw)


# ----------------------------------------------------------------------------------------------------- of the troubled one


class Trouble(Exception):
    def __init__(self, where: str) -> None:
        super().__init__(f'in {where}\n{{"event": "forged"}}\r\x1b[2J\ud800')


class Clock:
    """The wall clock, as somebody sets it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._real, self._real_ns = time.time, time.time_ns

    def time(self) -> float:
        return self._real() + self.ahead_s

    def time_ns(self) -> int:
        return self._real_ns() + int(self.ahead_s * 1e9)


class Unending:
    def __del__(self) -> None:
        raise Trouble("an end")

    def __repr__(self) -> str:
        raise Trouble("a name")


def fail(where: str) -> None:
    raise Trouble(where)


async def fail_later() -> None:
    raise Trouble("a task")


def cause(path: str, clock: Clock) -> None:
    match path:
        case "/task":
            asyncio.get_running_loop().create_task(fail_later())
        case "/callback":
            asyncio.get_running_loop().call_soon(fail, "a callback")
        case "/coroutine":
            fail_later()  # never awaited
        case "/warning":
            warnings.warn("not\nlike this", UserWarning, stacklevel=1)
        case "/thread":
            threading.Thread(target=fail, args=("a thread",), name="a\nthread").start()
        case "/end":
            Unending()
        case "/block":
            while Path(os.environ["LLMUX_TEST_BLOCKED"]).exists():
                time.sleep(0.05)
        case "/an-hour-later":
            clock.ahead_s += 3600.0
        case "/an-hour-earlier":
            clock.ahead_s -= 3600.0
        case "/application":
            fail("an application")


# -------------------------------------------------------------------------------------------------- of the uncollected one


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
    """See `uncollected`."""
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


# ------------------------------------------------------------------------------------------------------------- the faults


def clumsy() -> None:
    """It makes a mistake when it has just handed over."""

    def stumble(_fleet: Fleet) -> None:
        raise RuntimeError("a mistake after the last step")

    Fleet.let_go = stumble


def cursed() -> None:
    """It makes a mistake over the model `cursed` each time that it is to be loaded, and over `hexed` when it gets ready."""
    sound_begin, sound_ready = Ledger.begin, reports.ready

    def begin(ledger: Ledger, holder: Holder, *more: object, **named: object) -> None:
        assert holder[0] != "cursed", "the stars are wrong"
        sound_begin(ledger, holder, *more, **named)

    def ready(state: SchedulerState, step: Step, event: WorkerReady) -> None:
        sound_ready(state, step, event)
        assert event.model != "hexed", "too late to be well"

    Ledger.begin = begin
    reports.ready = ready


def hanging() -> None:
    """Its successors stop themselves at the step that `$HANGS_AT` names, and it waits for none of them for long.

    They are of a newer version, which has its state in another schema.
    """

    def hanging_in(method: Callable[..., Any]) -> Callable[..., Any]:
        def hang(*words: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return method(*words)

        return hang

    step = os.environ["HANGS_AT"]
    if handover.OPTION in sys.argv:
        store.MIGRATIONS = (*store.MIGRATIONS, "")
        if step == "start":
            os.kill(os.getpid(), signal.SIGSTOP)
        name = HANGS[step]
        setattr(Takeover, name, hanging_in(getattr(Takeover, name)))
    elif step == "start":
        handover.START_S = 2.0
    elif "HURRIES" in os.environ:
        handover.MEET_S = handover.ANSWER_S = 2.0


def hasty() -> None:
    """It looks at slow clients and gives memory back ten times as soon."""
    admission.LOOK_S /= 10
    own_process.TRIM_S /= 10


def immortal() -> None:
    """Its machine can't kill the model `immortal`: the pidfds of its processes fire when the file LLMUX_TEST_MORTAL is there.

    A process in an uninterruptible sleep of its driver is such a one. Nothing can make one on purpose.
    """
    sound_open, sound_send = os.pidfd_open, signal.pidfd_send_signal
    mortal, spared = Path(os.environ["LLMUX_TEST_MORTAL"]), set[int]()
    own = Path("/proc/self/cmdline").read_bytes()

    def pidfd_open(pid: int, flags: int = 0) -> int:
        for _ in range(5000):  # until it runs its program: before, it has this process's environment
            if Path(f"/proc/{pid}/cmdline").read_bytes() != own:
                break
            time.sleep(0.001)
        if b"LLMUX_WORKER=immortal:" not in Path(f"/proc/{pid}/environ").read_bytes():
            return sound_open(pid, flags)
        silent, end = os.pipe()
        spared.add(silent)
        threading.Thread(target=fire, args=(sound_open(pid), end), daemon=True).start()
        return silent

    def fire(real: int, end: int) -> None:
        select.select([real], [], [])
        while not mortal.exists():
            time.sleep(0.02)
        os.close(real)
        os.close(end)

    def send(pidfd: int, number: int, *more: object) -> None:
        if pidfd not in spared:
            sound_send(pidfd, number, *more)

    os.pidfd_open, signal.pidfd_send_signal = pidfd_open, send


def stuck() -> None:
    """It is stuck in one place, which `LLMUX_TEST_STUCK` names, when it is told to end.

    What it may take of its own for its end is a third, so that tests don't wait.
    """
    daemon.OWN_STOP_S /= 3
    shutdown = Engine.shutdown

    def wait(*_: object) -> None:
        threading.Event().wait()

    async def end(engine: Engine) -> None:
        asyncio.get_running_loop().run_in_executor(None, wait)
        await shutdown(engine)

    match os.environ["LLMUX_TEST_STUCK"]:
        case "state":  # it never hears that a worker has ended
            termination.exited = lambda *_: None
        case "loop":
            Engine.shutdown = wait
        case "thread":  # the interpreter waits for it at its end
            Engine.shutdown = end


def troubled() -> None:
    """Things go wrong in the way of its application: `cause` says at which paths. Its stderr alone is its log."""
    clock = Clock()

    class Config(uvicorn.Config):
        def __init__(self, app: Any, **settings: Any) -> None:
            async def application(scope: Any, receive: Any, send: Any) -> None:
                if scope["path"] == "/trouble/eternity":
                    structlog.get_logger().info("forever begins")
                    await asyncio.Event().wait()
                elif scope["path"].startswith("/trouble"):
                    cause(scope["path"].removeprefix("/trouble"), clock)
                else:
                    await app(scope, receive, send)

            super().__init__(application, **settings)

    uvicorn.Config = Config
    time.time, time.time_ns = clock.time, clock.time_ns
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it says to people is no log


def uncollected() -> None:
    """Its collector of garbage never runs by itself, and it gives memory back ten times as soon.

    SIGUSR2 has it collect, and write into the folder that GARBAGE_REPORTS names, as `<pid>.json`, how many MiB it took before
    (`rss_mib`), and what the collection found that is no smaller than `LARGE`: each as a line that names its holders (`found`).
    Whatever a request held must be gone with its last reference, so this list is to be empty.
    """
    gc.enable = lambda: None
    own_process.TRIM_S /= 10
    signal.signal(signal.SIGUSR2, report)


FAULTS = {fault.__name__: fault for fault in (clumsy, cursed, hanging, hasty, immortal, stuck, troubled, uncollected)}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
