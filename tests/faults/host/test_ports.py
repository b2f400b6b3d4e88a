"""Ports are leased once, checked before, and watched afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import closing

import pytest

from supervisor.errors import UnavailableError
from supervisor.host.process import ports
from supervisor.host.process.ports import Ownership, PortRange, exposed, listeners, listens_on, owner_check
from tests.support.ports import quiet_ports
from tests.support.trees import FAKE_WORKER, PYTHON, wait_until


@pytest.fixture
def first():
    """A range of ten ports that no process uses, or used in the last minute."""
    return quiet_ports(10, clean=True)


@pytest.fixture(params=["netlink", "table"])
def source(request, monkeypatch):
    """Both ways to ask the kernel."""
    if request.param == "table":

        def refuse(family):
            raise OSError("no sock_diag")

        monkeypatch.setattr(ports, "_ask_kernel", refuse)


@pytest.fixture
def port(first):
    return PortRange(first, first + 9).lease("test")


@pytest.fixture
def workers():
    started = []

    def start(port: int, *switches: str) -> subprocess.Popen[bytes]:
        command = [*PYTHON, str(FAKE_WORKER), "--port", str(port), *switches]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def listener(port: int, host: str = "127.0.0.1", *, share: bool = False) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if share:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind((host, port))
    found.listen()
    return found


class TestLease:
    """Each holder gets a free port of its own."""

    def test_never_twice(self, first):
        given = PortRange(first, first + 9)
        held = [given.lease(i) for i in range(10)]
        assert sorted(held) == list(range(first, first + 10))
        with pytest.raises(UnavailableError, match=f"no free port in {first}-{first + 9}"):
            given.lease("one more")

    def test_a_released_port_comes_last(self, first):
        given = PortRange(first, first + 2)
        released = given.lease("a")
        given.release("a")
        assert [given.lease("b"), given.lease("c"), given.lease("d")] == [first + 1, first + 2, released]

    def test_release_is_harmless_when_repeated(self, first):
        given = PortRange(first, first)
        given.lease("a")
        for _ in range(3):
            given.release("a")
        assert given.lease("b") == first

    @pytest.mark.parametrize(
        ("host", "share"), [("127.0.0.1", False), ("127.0.0.1", True), ("0.0.0.0", True), ("127.0.0.2", False)]
    )
    def test_a_port_with_a_listener_is_skipped(self, first, source, host, share):
        with closing(listener(first, host, share=share)):
            assert PortRange(first, first + 1).lease("a") == first + 1

    def test_a_port_that_is_bound_but_silent_is_skipped(self, first):
        with closing(socket.socket()) as silent:
            silent.bind(("127.0.0.1", first))
            assert PortRange(first, first + 1).lease("a") == first + 1

    def test_a_port_in_time_wait_is_taken_only_when_there_is_no_better(self, first):
        with closing(socket.socket()) as server, closing(socket.socket()) as client:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", first))
            server.listen()
            client.connect(("127.0.0.1", first))
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first keeps TIME_WAIT
            client.recv(1)
        given = PortRange(first, first + 1)
        assert [given.lease("a"), given.lease("b")] == [first + 1, first]

    def test_nonsense(self):
        with pytest.raises(ValueError, match="not a range"):
            PortRange(9000, 8000)


class Test13PortTaken:
    """The real listeners on a worker's port."""

    def test_nobody_yet(self, source, port):
        assert listeners(port) == frozenset()
        assert owner_check(port, [os.getpid()]) is Ownership.NO_LISTENER

    def test_the_worker(self, source, port, workers):
        worker = workers(port)
        wait_until(lambda: listeners(port))
        assert owner_check(port, [1, worker.pid, 999_999_999]) is Ownership.OURS
        assert listens_on([worker.pid, 999_999_999]) == (port,)

    def test_a_child_of_the_worker(self, source, port, workers):
        worker = workers(port)
        wait_until(lambda: listeners(port))
        assert owner_check(port, [os.getpid(), worker.pid]) is Ownership.OURS

    def test_an_impostor(self, source, port, workers):
        """The other server answers /health, too."""
        worker, impostor = workers(port, "--start-delay", "60"), workers(port)
        wait_until(lambda: listeners(port))
        assert owner_check(port, [worker.pid]) is Ownership.FOREIGN
        assert owner_check(port, [impostor.pid]) is Ownership.OURS

    def test_a_port_shared_in_silence(self, source, port, workers):
        worker, other = workers(port, "--reuseport"), workers(port, "--reuseport")
        wait_until(lambda: len(listeners(port)) == 2)
        assert owner_check(port, [worker.pid]) is Ownership.SHARED
        assert owner_check(port, [worker.pid, other.pid]) is Ownership.OURS

    def test_both_address_families_count(self, source, port, workers):
        worker = workers(port)
        wait_until(lambda: listeners(port))
        try:
            second = listener(port, "::1")
        except OSError:
            pytest.skip("no IPv6 here")
        with closing(second):
            assert owner_check(port, [worker.pid]) is Ownership.SHARED

    def test_who_can_reach_it(self, source, port):
        """Loopback is this machine alone, also as an IPv6 address."""
        assert exposed(port) == ()
        with closing(listener(port, "127.0.0.1")), closing(listener(port, "127.0.0.2")):
            assert exposed(port) == ()
        with closing(listener(port, "0.0.0.0")):
            assert exposed(port) == ("0.0.0.0",)
        for address, reached in (("::ffff:127.0.0.1", ()), ("::1", ()), ("::", ("::",))):
            try:
                listening = listener(port, address)
            except OSError:
                pytest.skip("no IPv6 here")
            with closing(listening):
                assert exposed(port) == reached
