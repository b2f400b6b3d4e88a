"""A restart of the unit: requests that wait for a model wait on, for the next llmux. systemd is played by a socket."""

from __future__ import annotations

import json
import os
import socket
import struct

import pytest

from tests.support.activation import Activated, Systemd, listening
from tests.support.clients import Call, Stream
from tests.support.daemon import fake, wait_until
from tests.support.held import held
from tests.support.limits import LIMIT_S

SYSTEMCTL = """#!/bin/sh
[ "$*" = "--user list-jobs --no-legend --plain llmux.service" ] && cat "$JOBS"
"""


class Unit:
    """A unit with a socket, whose daemon can be restarted or stopped as by systemd."""

    def __init__(self, folder, config):
        self.systemd = Systemd(folder)
        self.listener = listening("127.0.0.1")
        self.jobs = folder / "jobs"
        programs = folder / "bin"
        programs.mkdir()
        (programs / "systemctl").write_text(SYSTEMCTL)
        (programs / "systemctl").chmod(0o755)
        env = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "JOBS": str(self.jobs),
            "NOTIFY_SOCKET": str(folder / "notify"),
            "LLMUX_UNIT": "llmux.service",
        }
        self.daemon = Activated(folder, config, env)
        self.start()

    def start(self):
        stored = {name: list(kept) for name, kept in self.systemd.stored.items()}
        self.daemon.activate(self.listener, stored=stored)
        self.systemd.expect("READY=1")
        assert not self.systemd.stored, "systemd would hold the connections open for ever"

    def leave(self, job):
        """systemd's SIGTERM, for a job of this kind."""
        self.jobs.write_text(f"7 llmux.service {job} running\n")
        self.daemon.process.terminate()
        self.systemd.expect("STOPPING=1")

    def ended(self, job):
        if job == "restart":
            self.systemd.expect("BARRIER=1")
        assert self.daemon.process.wait(LIMIT_S) == 0

    def close(self):
        self.jobs.write_text("")
        self.daemon.stop()
        self.listener.close()
        self.systemd.socket.close()


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def unit(tmp_path, gate):
    quick = fake("--goes-on-until", str(gate))
    unit = Unit(tmp_path, {"models": {"slow": held(gate), "quick": quick}, "limits": {"keepalive_s": 0.2}})
    yield unit
    gate.touch()
    unit.close()


def waiting(unit, count):
    """So many requests wait for `slow`, by the daemon's own account: `quick` may have to wait for its load."""

    def are_there():
        found = unit.daemon.get("/v1/admin/requests").json()["data"]
        return [(one["model"], one["state"]) for one in found].count(("slow", "queued")) == count

    wait_until(are_there)


class TestRestart:
    """Nobody who waits for a model notices it."""

    def test_who_waits_is_answered_by_the_next_one(self, unit, gate):
        runs = Stream(unit.daemon, "quick")
        wait_until(lambda: runs.chunks)
        plain, stream = Call(unit.daemon, "slow", text="long " * 500_000), Stream(unit.daemon, "slow")
        waiting(unit, 2)
        wait_until(lambda: stream.text)  # the head of its answer, and a keep-alive
        unit.leave("restart")
        wait_until(lambda: len(unit.systemd.stored) == 2 or unit.systemd.look())
        late = Call(unit.daemon, "quick")
        wait_until(lambda: len(unit.systemd.stored) == 3 or unit.systemd.look())
        gate.touch()
        assert runs.result().ended_cleanly, "what runs ends here"
        gate.unlink()
        unit.ended("restart")
        unit.start()
        waiting(unit, 2)
        gate.touch()
        assert [call.result().status for call in (plain, late)] == [200, 200]
        (message,) = plain.response.json()["received"]["messages"]
        assert len(message["content"]) == 2_500_000, "all of its body was kept"
        assert stream.result().ended_cleanly
        assert stream.status == 200

    def test_a_stream_that_has_begun_ends_with_the_error_after_two_restarts(self, unit):
        stream, plain = Stream(unit.daemon, "slow"), Call(unit.daemon, "slow")
        wait_until(lambda: stream.text)
        waiting(unit, 2)
        unit.leave("restart")
        unit.ended("restart")
        unit.start()
        waiting(unit, 2)
        unit.leave("restart")
        unit.ended("restart")
        del unit.daemon.config["models"]["slow"]
        unit.start()
        assert plain.result().status == 404
        assert '"code":"model_not_found"' in stream.result().text
        assert stream.error is None

    def test_a_stop_refuses_who_waits(self, unit):
        call = Call(unit.daemon, "slow")
        waiting(unit, 1)
        unit.leave("stop")
        assert (call.result().status, call.response.json()["error"]["code"]) == (503, "shutting_down")
        unit.ended("stop")
        assert not unit.systemd.stored

    def test_what_systemd_does_not_take_is_refused(self, unit):
        plain, stream = Call(unit.daemon, "slow"), Stream(unit.daemon, "slow")
        waiting(unit, 2)
        wait_until(lambda: stream.text)
        unit.jobs.write_text("7 llmux.service restart running\n")
        unit.systemd.fill()
        unit.daemon.process.terminate()
        assert (plain.result().status, plain.response.json()["error"]["code"]) == (503, "shutting_down")
        assert '"code":"shutting_down"' in stream.result().text
        assert stream.error is None
        assert unit.daemon.process.wait(LIMIT_S) == 0

    def test_a_connection_that_was_to_end_ends(self, unit, gate):
        with socket.create_connection(("127.0.0.1", unit.daemon.port)) as client:
            client.settimeout(LIMIT_S)
            body = json.dumps({"model": "slow", "messages": []}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            client.sendall(head % len(body) + body)
            waiting(unit, 1)
            unit.leave("restart")
            unit.ended("restart")
            unit.start()
            gate.touch()
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert b"\r\nconnection: close\r\n" in answer

    def test_a_limit_of_connections_is_for_clients(self, unit, gate):
        calls = [Call(unit.daemon, "slow") for _ in range(8)]
        waiting(unit, 8)
        unit.leave("restart")
        unit.ended("restart")
        unit.daemon.config["limits"]["connections_per_client"] = 4
        unit.start()
        waiting(unit, 8)
        gate.touch()
        assert {call.result().status for call in calls} == {200}

    def test_who_left_meanwhile_is_forgotten(self, unit):
        with socket.create_connection(("127.0.0.1", unit.daemon.port)) as client:
            body = json.dumps({"model": "slow", "messages": []}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.sendall(head + body)
            waiting(unit, 1)
            unit.leave("restart")
            unit.ended("restart")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        assert len(unit.systemd.stored) == 1
        unit.start()
        waiting(unit, 0)
        wait_until(lambda: unit.daemon.events("request.finished")[1:], what="the next one took it, and noticed")
        assert unit.daemon.events("request.finished")[-1]["error"] == "client_gone"
