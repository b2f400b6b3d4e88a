"""Starts `llmux` without importing it each time: a process that has imported everything, and forks.

Nine tenths of a start are imports. So each process of tests has one forker: a program of its own with one thread, no event
loop and nothing open. At each `start` it forks; the child gives up all that it has from the forker, and is then what
`python -m` would have made of it, but for /proc's cmdline, environ and exe, its memory, and what the variables in
`READ_EARLY` say to Python, its libraries and libc before `main` runs. At its end, Python's objects are not taken apart. A
test of one of these sets `Daemon.by_exec`.

The forker is the parent: a child that has ended is a zombie until `poll` or `wait` is called, as with `Popen`. When the
tests' process ends, however it does, the forker ends what is left and then itself.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

REPOSITORY = Path(__file__).parents[2]
LLMUX = ("-m", "supervisor.cli")
FAULTY = ("-m", "tests.support.faulty_daemon")
READ_EARLY = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "LANG",
    "LC_",
    "NO_COLOR",
    "FORCE_COLOR",
    "PROMETHEUS_",
    "prometheus_",
    "PYDANTIC_",
)
END_S = 10.0  # for a child that is left over, before it is killed
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_MESSAGE = 1 << 20


# what tests use


def can_start(program: tuple[str, ...], env: Mapping[str, str], streams: Mapping[str, object]) -> bool:
    """Else it takes an exec: for another program, variables that are read before it runs, or other arguments of `Popen`."""
    plain = streams.keys() <= {"stdin", "stdout", "stderr"} and subprocess.PIPE not in streams.values()
    return plain and (program == LLMUX or program[:2] == FAULTY) and _early(env) == _EARLY


def start(
    argv: Iterable[str], *, cwd: Path, env: Mapping[str, str], terminal: bool = False, **streams: FileDescriptorLike
) -> Forked:
    """`argv`: what follows `python`, which is `-m` and a module. `streams`: all of stdin, stdout and stderr.

    With `terminal` the terminal that stdin is becomes the process's own.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    order = {
        "argv": [*argv],
        "cwd": str(cwd),
        "env": dict(env),
        "umask": int(status["Umask"], 8),
        "limits": [resource.getrlimit(number) for number in LIMITS],
        "terminal": terminal,
    }
    global _forker
    with _lock:
        if _forker is None:
            _forker = _Client()
        (pid,), pidfd = _forker.ask(order, [_number(streams[name]) for name in ("stdin", "stdout", "stderr")])
    assert pidfd is not None
    return Forked(["python", *order["argv"]], pid, pidfd)


def run(
    argv: Iterable[str], *, cwd: Path, env: Mapping[str, str], stdin: str | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with `capture_output` and `text`; its output goes to files."""
    with TemporaryFile("w+") as given, TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        given.write(stdin or "")
        given.seek(0)
        process = start(argv, cwd=cwd, env=env, stdin=given, stdout=stdout, stderr=stderr)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        for written in (stdout, stderr):
            written.seek(0)
        return subprocess.CompletedProcess(process.args, code, stdout.read(), stderr.read())


class Forked:
    """A child of the forker: what the tests use of `Popen`."""

    def __init__(self, args: list[str], pid: int, pidfd: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None
        self._pidfd = pidfd

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Negative: the signal that ended it. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not _has_ended(self._pidfd, timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with _lock:
                if self.returncode is None:  # else another thread waited, too
                    assert _forker is not None
                    (self.returncode,), _ = _forker.ask({"reap": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        if self.returncode is None:
            warnings.warn(f"process {self.pid} was never waited for", ResourceWarning, source=self, stacklevel=2)
        os.close(self._pidfd)


def _early(env: Mapping[str, str]) -> dict[str, str]:
    """What of an environment is used before `main` runs. The forker has the repository on its path anyway."""
    known = ("PYTHONPATH", str(REPOSITORY))
    return {name: value for name, value in env.items() if name.startswith(READ_EARLY) and (name, value) != known}


def _number(stream: FileDescriptorLike) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


def _has_ended(pidfd: int, timeout: float | None) -> bool:
    poller = select.poll()  # not `select`, which knows only the first 1024 descriptors
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if timeout is None else timeout * 1000))


class _Client:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("LLMUX_", *READ_EARLY))}
        self._said = TemporaryFile("w+")  # noqa: SIM115  # closed when the forker is
        with theirs:
            command = [sys.executable, "-m", "tests.support.forker", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=env | _EARLY,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                process_group=0,  # Ctrl-C isn't meant for it. A session of its own would make it a stray of the tests' workers
            )
        atexit.register(self._close)

    def ask(self, order: dict[str, Any], descriptors: Iterable[int] = ()) -> tuple[list[int], int | None]:
        answer, given = b"", []
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._socket, [json.dumps(order).encode()], list(descriptors))
            answer, given, _, _ = socket.recv_fds(self._socket, _MESSAGE, 1)
        if not answer:
            self._said.seek(0)
            raise AssertionError(f"the forker ended with {self._process.wait(END_S)}: {self._said.read()}")
        return json.loads(answer), (given[0] if given else None)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()
        self._said.close()


_EARLY = _early(os.environ)  # before a test has changed it
_forker: _Client | None = None
_lock = threading.RLock()


# the forker itself


def import_all() -> None:
    """What a daemon or command may import, but for what workers do, and the hub's client, which looks at variables then."""
    import runtimes.registry
    import supervisor

    found = pkgutil.walk_packages(supervisor.__path__, "supervisor.")
    adapters = (entry.partition(":")[0] for entry in runtimes.registry.REGISTRY._entries.values())
    others = (
        "uvloop",
        "uvicorn.lifespan.off",
        "encodings.idna",
        "encodings.utf_8_sig",
        "filelock",
        "httpx2",
        "httpcore2",
        "truststore",
    )
    for name in (*others, *(module.name for module in found), *adapters):
        if not name.endswith("__main__"):
            importlib.import_module(name)


def serve(asked: socket.socket) -> dict[str, Any] | None:
    """Fork and reap until the other side is gone. Returns an order in the child that is to follow it."""
    children: dict[int, int] = {}  # pid → pidfd
    opened = descriptors()
    while True:
        message, streams, _, _ = socket.recv_fds(asked, _MESSAGE, 3)
        if not message:
            _end(children)
            return None
        order = json.loads(message)
        if "reap" in order:
            os.close(children.pop(order["reap"]))
            asked.send(json.dumps([os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])]).encode())
            continue
        assert len(os.listdir("/proc/self/task")) == 1, threading.enumerate()
        assert descriptors() == opened | {*streams, *children.values()}  # no event loop, no driver
        pid = os.fork()
        if pid == 0:
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
            return order
        for descriptor in streams:
            os.close(descriptor)
        children[pid] = os.pidfd_open(pid)
        socket.send_fds(asked, [json.dumps([pid]).encode()], [children[pid]])


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").exists()}


def _end(children: dict[int, int]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pidfd in children.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
        deadline = time.monotonic() + END_S
        for pid, pidfd in list(children.items()):
            if _has_ended(pidfd, max(0.0, deadline - time.monotonic())):
                os.waitpid(pid, 0)
                del children[pid]


def _become(order: dict[str, Any], sources: list[random.Random]) -> None:
    """Give up what this process has from the forker: it is then as an exec would have made it.

    Handlers of signals are none of the forker's: it has those that Python and the imported modules set.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.setsid()
    if order["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    for number, limit in zip(LIMITS, order["limits"], strict=True):
        if resource.getrlimit(number) != tuple(limit):
            resource.setrlimit(number, tuple(limit))
    os.environ.clear()
    os.environ.update(order["env"])
    time.tzset()
    sys.orig_argv = [sys.executable, *order["argv"]]
    sys.argv = order["argv"][1:]
    if sys.stdout.isatty() and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=True)
    for source in sources:
        source.seed()  # else all children draw the same
    gc.enable()


def _code_of(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        return end.code or 0
    return 0


def _leave(code: int) -> NoReturn:
    """All that Python does at an end but taking its objects apart: that would copy all that is shared with the forker."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    gc.disable()
    with socket.socket(fileno=int(sys.argv[1])) as end:
        os.set_inheritable(end.fileno(), False)
        import_all()
        named = [value for module in sys.modules.values() for value in vars(module).values()]
        drawn_from = [value for value in named if isinstance(value, random.Random)]
        del named
        gc.collect()
        gc.freeze()  # no collection of a child writes to the pages that all share
        todo = serve(end)
        if todo is not None:
            end.detach()
    if todo is not None:
        _become(todo, drawn_from)
        # Here, at the bottom of the stack, an exception is the end of the process as usual.
        _leave(_code_of(todo["argv"][1]))
