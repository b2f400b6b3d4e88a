"""The parent of one worker: starts it, and leaves no process of it behind. Standard library only; run by path.

`python -I -S shim.py LABEL` reads its launch order as one JSON line from stdin, so that neither keys nor paths are in any
argv (the label is for `ps`). It is the subreaper of the worker's tree: whatever a worker forks, detaches or double-forks
becomes its child, and the kernel's "no children" proves that all of it is gone.

The daemon holds the other end of stdin. The line `term` asks the tree to end (or runs the configured stop program);
`kill`, end of file, SIGTERM, the daemon's death and the exit of the leader each end everything. What the worker runs outside
its processes, such as a container, is ended by the daemon, or here if the daemon is dead.

A daemon that hands its workers over to a successor gives it stdin and stdout as they are, so one of the two always holds
the other end. Only the parent-death signal would end the tree with the old daemon: `keep SECONDS` disarms it for so long
(`{"kept": true}` says that it is), and `adopt PID` says whose death counts from then on. Without an `adopt` in time the
old daemon's death counts again.

Reports are JSON lines on stdout: `{"pid": 1}` once the program runs, or `{"failed": errno, "step": …, "text": …}`;
`{"exited": code}` for the leader (a negative code is a signal); `{"gone": true}` when no process of the tree is left. The
step is `setup` or `fork` where the machine refused something, `cwd` or `exec` where the order may be wrong.

Workers write directly to their log file: a pipe could block them, or be held open by a grandchild. The shim bounds the
file: it copies the last half to `LOG.1` and truncates it. Where no log can be written, on a full disk for one, the worker
runs without: `{"pid": 1, "unlogged": reason}`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False  # typing's would cost a tenth of this program's memory
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypedDict

    class Order(TypedDict):
        """The launch order. Paths are absolute; `env` is the worker's whole environment."""

        parent: int
        argv: list[str]
        env: dict[str, str]
        cwd: str | None
        log: str
        log_limit: int
        stop_argv: list[str] | None
        remains: str | None  # the note of a program that ends what the worker runs elsewhere: see remains.py
        cgroup: str | None


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IN_MODIFY = 0x2
IN_NONBLOCK_CLOEXEC = 0o2004000
OOM_SCORE_ADJ = b"500"  # out of memory, the kernel should kill a worker, not the daemon or the shim
REMAINS_S = 20  # as in remains.py
LOOK_MIN_MS = 1  # pauses between two looks at a growing log: short while it grows fast
LOOK_MAX_MS = 50

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def report(**fact: object) -> bool:
    """False: the daemon is gone; end of file on stdin says so too."""
    try:
        os.write(1, json.dumps(fact).encode() + b"\n")
    except BrokenPipeError:
        return False
    return True


def processes() -> list[tuple[int, int, int, bytes]]:
    """(pid, parent, process group, start time) of every process; zombies too."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    fields = file.read(4096).rpartition(b")")[2].split()
            except OSError:
                continue
            found.append((int(name), int(fields[1]), int(fields[2]), fields[19]))
    return found


def signal_tree(signum: int) -> None:
    """Sends `signum` once to every descendant.

    Children (zombies too) are unreaped, so neither their pids nor their groups can have been reused, and no fork can outrun
    a signal to a group. Deeper descendants are held by a pidfd and recognised by their start time.
    """
    me, my_group = os.getpid(), os.getpgrp()
    table = processes()
    groups = {group for _, parent, group, _ in table if parent == me and group != my_group}
    for group in groups:
        send(os.killpg, group, signum)
    below = {me}
    grown = True
    while grown:
        more = {pid for pid, parent, _, _ in table if parent in below} - below
        below |= more
        grown = bool(more)
    for pid, parent, group, started in table:
        if pid == me or pid not in below or group in groups:
            continue
        if parent == me:
            send(os.kill, pid, signum)
        else:
            signal_same(pid, started, signum)


def send(how: Callable[[int, int], None], target: int, signum: int) -> None:
    try:  # noqa: SIM105  as above
        how(target, signum)
    except OSError:
        pass  # dead, or it changed its user: the daemon reports that as unkillable


def signal_same(pid: int, started: bytes, signum: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            if file.read(4096).rpartition(b")")[2].split()[19] == started:
                signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        pass
    finally:
        os.close(pidfd)


class Log:
    """The worker's bounded log file. Woken by inotify, so that a quiet worker costs nothing."""

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.trouble = ""  # why nothing is logged
        try:
            self.fd = begin_log(path)
        except OSError as error:
            self.trouble = str(error)
            self.fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.size = 0
        self.pause_ms = LOOK_MIN_MS
        self.inotify = libc.inotify_init1(IN_NONBLOCK_CLOEXEC)
        if self.inotify >= 0:
            libc.inotify_add_watch(self.inotify, os.fsencode(path), IN_MODIFY)

    def look(self) -> None:
        """Shortens a log over its limit and sets `pause_ms` by how fast it grows."""
        size = os.fstat(self.fd).st_size
        fast = size - self.size > self.limit // 16
        self.pause_ms = LOOK_MIN_MS if fast else min(self.pause_ms * 2, LOOK_MAX_MS)
        if size > self.limit:
            self.keep_last_half(size)
            size = 0
        self.size = size

    def keep_last_half(self, size: int) -> None:
        try:
            kept = os.open(self.path + ".1", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                start = size - self.limit // 2
                while sent := os.sendfile(kept, self.fd, start, size - start):  # a signal cuts it short
                    start += sent
            finally:
                os.close(kept)
        except OSError:
            pass  # on a full disk truncating is even more urgent
        os.ftruncate(self.fd, 0)


def begin_log(path: str) -> int:
    """A descriptor of a new log; the last one stays readable as `LOG.1`. Raises OSError where nothing can be written."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):  # somebody removed it
        before = os.umask(0o077)
        os.makedirs(folder, exist_ok=True)
        os.umask(before)
    if os.path.exists(path):
        os.replace(path, path + ".1")
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"\n")  # a full disk often takes a file, but nothing in it
        os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    try:  # noqa: SIM105  as above
        fcntl.flock(fd, fcntl.LOCK_SH)  # shows that whoever inherits it belongs to the worker: see reap.py
    except OSError:
        pass  # a file system without locks
    return fd


class Shim:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.step = "setup"
        self.leader = 0
        self.stopper = 0
        self.poller = select.poll()
        self.log = Log(order["log"], order["log_limit"])
        self.wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.told_to_end = False
        self.orphaned = False  # no daemon is there any more; while it dies, its end of the pipe may still be open
        self.unfinished = b""  # of a command
        self.kept_until: float | None = None  # set iff the parent's death doesn't count now, and nobody else's does
        self.daemon = -1  # a pidfd of the daemon that adopted this worker
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self.end)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def end(self, *_: object) -> None:
        self.told_to_end = self.orphaned = True

    def start(self, argv: list[str]) -> int:
        """Runs `argv` in a session of its own and returns its pid. Raises OSError when it can't be executed."""
        me = os.getpid()
        self.step = "fork"
        verdict, tell = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                self.become(argv, me)
            except OSError as error:
                code, path = error.errno or errno.EINVAL, os.fsencode(error.filename or "")
                os.write(tell, b"%d %b %b" % (code, self.step.encode(), path))
            except ValueError:  # a NUL in a word or a variable
                os.write(tell, b"%d %b " % (errno.EINVAL, self.step.encode()))
            finally:
                os._exit(127)
        os.close(tell)
        said = os.read(verdict, 4096)  # end of file: exec closed it
        os.close(verdict)
        if said:
            os.waitpid(pid, 0)
            number, step, path = said.split(b" ", 2)
            self.step = step.decode()
            raise OSError(int(number), os.strerror(int(number)), os.fsdecode(path))
        return pid

    def become(self, argv: list[str], parent: int) -> None:
        self.step = "setup"
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return  # it died before the death signal was set
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        try_write("/proc/self/oom_score_adj", OOM_SCORE_ADJ)
        if self.order["cgroup"]:
            try_write(self.order["cgroup"] + "/cgroup.procs", b"0")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self.log.fd, 1)
        os.dup2(self.log.fd, 2)
        self.step = "cwd"
        if self.order["cwd"]:
            os.chdir(self.order["cwd"])
        self.step = "exec"
        os.execvpe(argv[0], argv, self.order["env"])

    def serve(self) -> None:
        """Obeys, reaps and bounds the log until the leader ends or everything has to."""
        poller = self.poller
        poller.register(0, select.POLLIN)
        poller.register(self.wakeup, select.POLLIN)
        watching = self.log.inotify >= 0
        if watching:
            poller.register(self.log.inotify, select.POLLIN)
        timeout = None if watching else LOOK_MAX_MS
        while not self.told_to_end and self.reap() and self.leader:
            ready = {fd for fd, _ in poller.poll(self.at_most(timeout))}
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

    def listen(self, said: bytes) -> None:
        if not said:
            self.end()
        *commands, self.unfinished = (self.unfinished + said).split(b"\n")
        for command in commands:
            word, _, argument = command.partition(b" ")
            self.obey(word, argument)

    def obey(self, command: bytes, argument: bytes) -> None:
        """What is no command is passed over."""
        if command == b"kill":
            self.told_to_end = True
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
            try:  # noqa: SIM105  as above
                self.stopper = self.start(self.order["stop_argv"])
            except OSError:
                pass
        if not self.stopper:
            signal_tree(signal.SIGTERM)

    def adopt(self, pid: int) -> None:
        """The death of this process ends everything from now on, that of another daemon does not."""
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
        """Whether the daemon's death counts: as a signal where it is the parent, else by its pidfd."""
        if self.daemon >= 0:
            self.poller.register(self.daemon, select.POLLIN) if watch else self.poller.unregister(self.daemon)
            return
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM if watch else 0)
        if watch and os.getppid() != self.order["parent"]:
            self.end()

    def at_most(self, timeout: int | None) -> int | None:
        """How long to wait: not beyond the time that the parent's death doesn't count."""
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
        """Collects the dead. False when no child is left, dead or alive: the whole tree is gone."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            code = os.waitstatus_to_exitcode(status)
            if pid == self.leader:
                self.leader = 0
                report(exited=code)
            elif pid == self.stopper:
                self.stopper = 0
                if code != 0 and self.leader:
                    signal_tree(signal.SIGTERM)  # the stop program failed: ask in the usual way

    def kill_all(self) -> None:
        """Until nothing is left, which may be never for a process stuck in the kernel."""
        pause_s = 0.002
        while self.reap():
            if self.order["cgroup"]:
                try_write(self.order["cgroup"] + "/cgroup.kill", b"1")
            signal_tree(signal.SIGKILL)
            if select.select([self.wakeup], [], [], pause_s)[0]:
                drain(self.wakeup)
            else:
                pause_s = min(pause_s * 2, 0.25)

    def settle_remains(self) -> None:
        """What remains.py does, for a dead daemon: end what the worker runs outside its processes."""
        path = self.order["remains"]
        if path is None:
            return
        try:
            with open(path, "rb") as file:
                noted = json.load(file)
            self.order["env"], self.order["cwd"] = noted["env"], noted["cwd"]
            self.stopper = self.start(noted["argv"])
        except (OSError, ValueError):
            return
        until = time.monotonic() + REMAINS_S
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
    """The launch order and what was said after it, or None when the daemon is gone before it has sent all of it."""
    said = b""
    while b"\n" not in said:
        part = os.read(0, 1 << 20)
        if not part:
            return None
        said += part
    line, _, rest = said.partition(b"\n")
    order: Order = json.loads(line)
    return order, rest


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    shim = None
    try:
        said = read_order()
        if said is None or os.getppid() != said[0]["parent"]:
            return
        order, rest = said
        shim = Shim(order)
        shim.leader = shim.start(order["argv"])
    except Exception as error:  # noqa: BLE001  the daemon tells people, whatever it is
        step = shim.step if shim else "setup"
        report(failed=getattr(error, "errno", None) or errno.EINVAL, step=step, text=str(error))
        return
    order["env"] = order["env"] if order["stop_argv"] else {}
    if shim.log.trouble:
        report(pid=shim.leader, unlogged=shim.log.trouble)
    else:
        report(pid=shim.leader)
    if rest:
        shim.listen(rest)
    shim.serve()
    shim.kill_all()
    shim.log.look()
    if not report(gone=True) or shim.orphaned:
        shim.settle_remains()


if __name__ == "__main__":
    main()
    sys.exit(0)
