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
MAPPED_ABOVE = 1024 * 1024  # bytes: larger blocks return to the system as soon as they are freed
TRIM_S = 5.0  # interval of returning other freed memory
ALARM_S = 1.0
THRESHOLDS = (5_000, 1, 600)  # of the collector
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def on_signals(
    act: Callable[[], object], *numbers: signal.Signals, within_s: Callable[[], float] | None = None
) -> None:
    """Call `act` in the loop at each of these signals. `within_s`: the process then ends within so many seconds.

    `add_signal_handler` is unsuitable: once its loop closes, a late signal would kill the process.
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
    """End this process after that time, even if it is stuck, and print where; its shims end the workers.

    This must work without running Python code: the loop may be stuck, and no thread may be available. It is never cancelled,
    because the interpreter's own end waits for threads, too.
    """
    with contextlib.suppress(RuntimeError):  # no thread available
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_S)  # the dump may wait for the reader of stderr


@contextlib.contextmanager
def signals_end() -> Iterator[None]:
    """After a clean end of the block, a later signal doesn't become the exit code."""
    ending = signal.SIG_IGN
    try:
        with contextlib.suppress(asyncio.CancelledError):  # a signal cancels the start
            yield
    except BaseException:
        ending = signal.SIG_DFL  # a signal may still end the process: printing the error may block on a stuck reader
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, ending)


def settle_garbage_collector() -> None:
    """Start the garbage collector. It never examines objects that exist now, and new ones less often than by default.

    Requests are freed by their reference counts. With the defaults the collector took an eighth of a busy daemon's time. It
    blocks the loop for 0.4 ms per thousand objects, and a waiting request has fifty: so the youngest generation is small, and
    a full collection comes after nine million new objects.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()


async def return_freed_memory() -> None:
    """Let glibc return the memory of freed bodies, until cancelled: by itself it keeps all free memory below a block in use."""
    with contextlib.suppress(AttributeError):  # another C library
        glibc = ctypes.CDLL(None)
        glibc.mallopt(M_MMAP_THRESHOLD, MAPPED_ABOVE)
        glibc.mallopt(M_TRIM_THRESHOLD, 4 * MAPPED_ABOVE)
        while True:
            await asyncio.sleep(TRIM_S)
            glibc.malloc_trim(0)  # takes 4 ms for 100 MiB, and next to nothing without free memory


def raise_descriptor_limit() -> None:
    """Raise the limit of open files as far as allowed: the usual 1024 are enough for 500 requests. Workers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def own_stderr() -> None:
    """Open our own stderr: during the takeover the old daemon reads ours, to report why the start failed."""
    descriptor = os.environ.pop(STDERR, None)
    if descriptor is not None:
        os.dup2(int(descriptor), 2)
        os.close(int(descriptor))
        reopen()
