"""The daemon's own process: its signals, memory, descriptors and stderr."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator

from supervisor.cli.serving.log_setup import reopen
from supervisor.daemon.handover.handover import STDERR

DESCRIPTORS = 65536  # each request takes two: the client's connection and the worker's
MAPPED_ABOVE = 1024 * 1024  # bytes: what is larger than this goes back to the system as soon as it is freed
TRIM_S = 5.0  # between looks for what else was freed
ALARM_S = 1.0
THRESHOLDS = (5_000, 1, 600)  # of the collector
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def on_signals(
    act: Callable[[], object], *numbers: signal.Signals, within_s: Callable[[], float] | None = None
) -> None:
    """Call `act` in the loop at each of these signals. `within_s`: in so many seconds this process ends at the latest.

    Not by `add_signal_handler`: when the loop closes, the signals would kill the process again, at its very end.
    """
    loop = asyncio.get_running_loop()

    def take(*_: object) -> None:
        if within_s is not None:
            _end_within(within_s())
        if not loop.is_closed():
            loop.call_soon_threadsafe(act)

    for number in numbers:
        signal.signal(number, take)


def _end_within(seconds: float) -> None:
    """End this process after that time, even if it is stuck, and show where; its shims end the workers.

    No Python code may be needed: the loop may stand still, and there may be no thread left. Never undone: the interpreter's
    own end waits for threads, too.
    """
    with contextlib.suppress(RuntimeError):  # no thread left
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_S)  # that may wait for whoever reads stderr


@contextlib.contextmanager
def signals_end() -> Iterator[None]:
    """After a clean end in the block, no later signal becomes the exit code."""
    ending = signal.SIG_IGN
    try:
        with contextlib.suppress(asyncio.CancelledError):  # by a signal, while it starts
            yield
    except BaseException:
        ending = signal.SIG_DFL  # the error is still to be printed, perhaps for a reader that is stuck
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, ending)


def settle_garbage_collector() -> None:
    """Start the garbage collector. Objects that exist now are never looked through, new ones less often than by default.

    Requests are freed by their reference counts. With the defaults the collector took an eighth of a busy daemon's time. It
    holds the loop for 0.4 ms per thousand objects, and a waiting request has fifty: the young are few, and all are looked
    through after nine million new ones.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


async def return_freed_memory() -> None:
    """Have glibc give back what bodies took, until cancelled: by itself it keeps all that lies below a piece still in use."""
    with contextlib.suppress(AttributeError):  # another C library
        glibc = ctypes.CDLL(None)
        glibc.mallopt(M_MMAP_THRESHOLD, MAPPED_ABOVE)
        glibc.mallopt(M_TRIM_THRESHOLD, 4 * MAPPED_ABOVE)
        while True:
            await asyncio.sleep(TRIM_S)
            glibc.malloc_trim(0)  # next to nothing where there is nothing to give back, else 4 ms for 100 MiB


def raise_descriptor_limit() -> None:
    """Raise the limit of open files as far as allowed: the usual 1024 are enough for 500 requests. Workers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def own_stderr() -> None:
    """Open stderr for ourselves: so far the old daemon read it, to report why we can't start."""
    descriptor = os.environ.pop(STDERR, None)
    if descriptor is not None:
        os.dup2(int(descriptor), 2)
        os.close(int(descriptor))
        reopen()
