"""The parent of one worker: starts it, and leaves no process of it behind. Run by path, with the standard library alone and
the two modules beside it, shim_log and shim_tree. Python keeps those compiled; in this file, which it compiles at each start,
they would cost each shim 0.3 MiB. They are imported at once, because an upgrade may replace them later.

`python -I -S shim.py LABEL` reads its launch order as one JSON line from stdin, so that neither keys nor paths are in any
argv (the label is for `ps`). It is the subreaper of the worker's tree: whatever a worker forks, detaches or double-forks
becomes its child, and the kernel's "no children" proves that all of it is gone.

The daemon holds the other end of stdin. The line `term` asks the tree to end (or runs the configured stop program);
`kill`, end of file, SIGTERM, the daemon's death and the exit of the leader each end everything. Anything that the worker runs
outside its processes, such as a container, is ended by the daemon, or here if the daemon is dead.

A daemon that hands its workers over passes stdin and stdout to its successor, so one of the two daemons always has the
other end. Only the parent-death signal would end the tree with the old daemon: `keep SECONDS` disarms it for so long
(`{"kept": true}` confirms it). After `adopt PID` the death of this process ends the tree. Without an `adopt` in time the old
daemon's death ends it again.

Reports are JSON lines on stdout: `{"pid": 1}` once the program runs, or `{"failed": errno, "step": …, "text": …}`;
`{"exited": code}` for the leader (a negative code is a signal); `{"gone": true}` when no process of the tree is left. The
step is `setup` or `fork` if the machine refused a resource, `cwd` or `exec` if the order may be wrong.

If no log can be written, for example on a full disk, the worker runs without: `{"pid": 1, "unlogged": reason}`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False  # typing's would cost a tenth of this program's memory
if TYPE_CHECKING:
    from typing import TypedDict

    from supervisor.host.process.shim_log import LOOK_MAX_MS, Log
    from supervisor.host.process.shim_tree import signal_tree

    class Order(TypedDict):
        """The launch order. Paths are absolute; `env` is the worker's whole environment."""

        parent: int
        argv: list[str]
        env: dict[str, str]
        cwd: str | None
        log: str
        log_limit: int
        stdio: list[int] | None  # descriptors to use as stdin, stdout and stderr instead of nothing and the log
        dies_first: bool  # out of memory, by the kernel
        stop_argv: list[str] | None
        leftovers: (
            str | None
        )  # the note of a program that ends what the worker runs elsewhere: see leftover_containers.py
        cgroup: str | None
else:
    sys.path.append(os.path.dirname(__file__))
    from shim_log import LOOK_MAX_MS, Log
    from shim_tree import signal_tree

    sys.path.pop()


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
OOM_SCORE_ADJ = b"500"  # out of memory, the kernel should kill a worker, not the daemon or the shim
LEFTOVERS_S = 20  # as in leftover_containers.py

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def report(**fact: object) -> bool:
    """Send a report. False: the daemon has ended; end of file on stdin shows that, too."""
    try:
        os.write(1, json.dumps(fact).encode() + b"\n")
    except BrokenPipeError:
        return False
    return True


class Shim:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.step = "setup"
        self.main_pid = 0
        self.stopper = 0
        self.poller = select.poll()
        self.log = Log(order["log"], order["log_limit"])
        self.wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.is_ending = False
        self.orphaned = False  # the daemon has ended; while it dies, its end of the pipe may still be open
        self.unfinished = b""  # of a command
        self.kept_until: float | None = None  # set iff no daemon's death counts now
        self.daemon = -1  # a pidfd of the daemon that adopted this worker
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self.end)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def end(self, *_: object) -> None:
        self.is_ending = self.orphaned = True

    def start(self, argv: list[str]) -> int:
        """Runs `argv` in a session of its own and returns its pid. Raises OSError when it can't be executed."""
        me = os.getpid()
        self.step = "fork"
        verdict, status_fd = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                self.exec_program(argv, me)
            except OSError as error:
                code, path = error.errno or errno.EINVAL, os.fsencode(error.filename or "")
                os.write(status_fd, b"%d %b %b" % (code, self.step.encode(), path))
            except ValueError:  # a NUL in a word or a variable
                os.write(status_fd, b"%d %b " % (errno.EINVAL, self.step.encode()))
            finally:
                os._exit(127)
        os.close(status_fd)
        data = os.read(verdict, 4096)  # end of file: exec closed it
        os.close(verdict)
        if data:
            os.waitpid(pid, 0)
            number, step, path = data.split(b" ", 2)
            self.step = step.decode()
            raise OSError(int(number), os.strerror(int(number)), os.fsdecode(path))
        return pid

    def exec_program(self, argv: list[str], parent: int) -> None:
        self.step = "setup"
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return  # the shim died before the death signal was set
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        if self.order["dies_first"]:
            try_write("/proc/self/oom_score_adj", OOM_SCORE_ADJ)
        if self.order["cgroup"]:
            try_write(self.order["cgroup"] + "/cgroup.procs", b"0")
        stdio = self.order["stdio"] or [os.open(os.devnull, os.O_RDONLY), self.log.fd, self.log.fd]
        for number, descriptor in enumerate(stdio):
            os.dup2(descriptor, number)
        for descriptor in self.order["stdio"] or ():
            os.set_inheritable(descriptor, False)
        self.step = "cwd"
        if self.order["cwd"]:
            os.chdir(self.order["cwd"])
        self.step = "exec"
        os.execvpe(argv[0], argv, self.order["env"])

    def serve(self) -> None:
        """Handle commands, reap, and bound the log, until the leader ends or the whole tree has to."""
        poller = self.poller
        poller.register(0, select.POLLIN)
        poller.register(self.wakeup, select.POLLIN)
        watching = self.log.inotify >= 0
        if watching:
            poller.register(self.log.inotify, select.POLLIN)
        timeout = None if watching else LOOK_MAX_MS
        while not self.is_ending and self.reap() and self.main_pid:
            ready = {fd for fd, _ in poller.poll(self.poll_timeout(timeout))}
            if self.wakeup in ready:
                drain(self.wakeup)
            if 0 in ready:
                self.listen(os.read(0, 4096))
            self.look_after_daemon(died=self.daemon in ready)
            if self.log.inotify in ready:
                drain(self.log.inotify)
                self.log.look()
                poller.unregister(self.log.inotify)  # not again before the pause is over
                watching, timeout = False, self.log.pause_ms
            elif not ready:
                self.log.look()
                timeout = self.log.pause_ms
                if self.log.inotify >= 0 and self.log.pause_ms == LOOK_MAX_MS:
                    poller.register(self.log.inotify, select.POLLIN)
                    watching, timeout = True, None

    def listen(self, data: bytes) -> None:
        if not data:
            self.end()
        *commands, self.unfinished = (self.unfinished + data).split(b"\n")
        for command in commands:
            word, _, argument = command.partition(b" ")
            self.run_command(word, argument)

    def run_command(self, command: bytes, argument: bytes) -> None:
        """Carry out a command; anything else is ignored."""
        if command == b"kill":
            self.is_ending = True
        elif command == b"term":
            self.ask_to_end()
        elif command == b"keep" and argument.replace(b".", b"", 1).isdigit():
            if self.kept_until is None:
                self.watch_daemon(False)
            self.kept_until = time.monotonic() + float(argument)
            report(kept=True)
        elif command == b"adopt" and argument.isdigit():
            self.adopt(int(argument))

    def ask_to_end(self) -> None:
        self.stopper = 0
        if self.order["stop_argv"]:
            try:  # noqa: SIM105  contextlib would cost memory, too
                self.stopper = self.start(self.order["stop_argv"])
            except OSError:
                pass
        if not self.stopper:
            signal_tree(signal.SIGTERM)

    def adopt(self, pid: int) -> None:
        """From now on the death of this process ends the tree, and that of another daemon doesn't."""
        try:
            daemon = os.pidfd_open(pid)
        except OSError:  # dead already
            self.end()
            return
        if self.kept_until is None:
            self.watch_daemon(False)
        if self.daemon >= 0:
            os.close(self.daemon)
        self.daemon, self.kept_until = daemon, None
        self.watch_daemon(True)

    def watch_daemon(self, watch: bool) -> None:
        """Watch for the daemon's death, or stop watching: by a signal where the daemon is the parent, else by its pidfd."""
        if self.daemon >= 0:
            self.poller.register(self.daemon, select.POLLIN) if watch else self.poller.unregister(self.daemon)
            return
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM if watch else 0)
        if watch and os.getppid() != self.order["parent"]:
            self.end()

    def poll_timeout(self, timeout: int | None) -> int | None:
        """The timeout for the next poll: `timeout`, but not beyond `kept_until`."""
        if self.kept_until is None:
            return timeout
        left = max(0, int((self.kept_until - time.monotonic()) * 1000) + 1)
        return left if timeout is None else min(left, timeout)

    def look_after_daemon(self, *, died: bool) -> None:
        if died:
            self.end()
        if self.kept_until is not None and time.monotonic() >= self.kept_until:
            self.kept_until = None  # nobody has adopted the worker
            self.watch_daemon(True)

    def reap(self) -> bool:
        """Reap dead children. False: no child is left, dead or alive, so the whole tree is gone."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            code = os.waitstatus_to_exitcode(status)
            if pid == self.main_pid:
                self.main_pid = 0
                report(exited=code)
            elif pid == self.stopper:
                self.stopper = 0
                if code != 0 and self.main_pid:
                    signal_tree(signal.SIGTERM)  # the stop program failed: ask in the usual way

    def kill_all(self) -> None:
        """Kill until no process is left; one that is stuck in the kernel may never end."""
        pause_s = 0.002
        while self.reap():
            if self.order["cgroup"]:
                try_write(self.order["cgroup"] + "/cgroup.kill", b"1")
            signal_tree(signal.SIGKILL)
            if select.select([self.wakeup], [], [], pause_s)[0]:
                drain(self.wakeup)
            else:
                pause_s = min(pause_s * 2, 0.25)

    def settle_leftovers(self) -> None:
        """End what the worker runs outside its processes, in place of a dead daemon: see leftover_containers.py."""
        path = self.order["leftovers"]
        if path is None:
            return
        try:
            with open(path, "rb") as file:
                noted = json.load(file)
            self.order["env"], self.order["cwd"] = noted["env"], noted["cwd"]
            self.stopper = self.start(noted["argv"])
        except (OSError, ValueError):
            return
        until = time.monotonic() + LEFTOVERS_S
        while self.reap() and self.stopper and time.monotonic() < until:
            select.select([self.wakeup], [], [], 0.25)
            drain(self.wakeup)
        if not self.stopper:
            os.unlink(path)
        self.kill_all()


def try_write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(data)
    except OSError:
        pass  # an extra measure that not every system has


def drain(fd: int) -> None:
    try:
        while os.read(fd, 65536):
            pass
    except BlockingIOError:
        pass


def read_order() -> tuple[Order, bytes] | None:
    """The launch order and the bytes after it, or None when the daemon is gone before it has sent all of the order."""
    data = b""
    while b"\n" not in data:
        part = os.read(0, 1 << 20)
        if not part:
            return None
        data += part
    line, _, rest = data.partition(b"\n")
    order: Order = json.loads(line)
    return order, rest


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    shim = None
    try:
        received = read_order()
        if received is None or os.getppid() != received[0]["parent"]:
            return
        order, rest = received
        shim = Shim(order)
        shim.main_pid = shim.start(order["argv"])
    except Exception as error:  # noqa: BLE001  the daemon reports any error
        step = shim.step if shim else "setup"
        report(failed=getattr(error, "errno", None) or errno.EINVAL, step=step, text=str(error))
        return
    order["env"] = order["env"] if order["stop_argv"] else {}
    if shim.log.trouble:
        report(pid=shim.main_pid, unlogged=shim.log.trouble)
    else:
        report(pid=shim.main_pid)
    if rest:
        shim.listen(rest)
    shim.serve()
    shim.kill_all()
    shim.log.look()
    if not report(gone=True) or shim.orphaned:
        shim.settle_leftovers()


if __name__ == "__main__":
    main()
    sys.exit(0)
