"""Ports that others hold, take, or share: no request ever reaches a stranger."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.support.clients import Call, stats
from tests.support.daemon import fake, running, wait_until


class Impostor:
    """Answers 200 to everything on a port, and counts what was not a health check."""

    def __init__(self, port: int, *, share: bool = False) -> None:
        self.requests = 0
        self.health = 0
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if share else socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self._socket.listen(128)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while said := connection.recv(65536):
                if said.startswith(b"GET /health"):
                    self.health += 1
                else:
                    self.requests += 1
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def impostors():
    made: list[Impostor] = []
    yield made
    for impostor in made:
        impostor.close()


def late_at_first(folder: Path, name: str, *flags: str) -> dict[str, object]:
    """A model whose first worker takes a minute to open its port, and the next ones no time."""
    once = folder / f"{name}-was-late"
    text = f'if [ -e {once} ]; then exec "$@"; fi; touch {once}; exec "$@" --start-delay 60'
    model = fake(*flags)
    return {**model, "cmd": ["/bin/sh", "-c", text, "sh", *model["cmd"]]}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ports")
    models = {
        "plain": fake(),
        "late": late_at_first(folder, "late"),
        "sharing": late_at_first(folder, "sharing", "--reuseport"),
        "shared-later": fake("--reuseport"),
    }
    limits = {"backoff_first_s": 0.1, "backoff_max_s": 0.1, "readiness_interval_s": 0.2}
    with running(folder, {"models": models, "limits": limits}) as daemon:
        yield daemon


class Test13PortTaken:
    """Whoever takes, shares or answers on a worker's port is found out before a request reaches it."""

    def test_taken(self, daemon, impostors):
        """A port of the range that somebody else listens on is passed over."""
        first = daemon.config["server"]["worker_port_first"]
        impostors += [Impostor(port) for port in (first, first + 1, first + 2)]
        assert daemon.chat("plain").json()["model"] == "plain"
        assert daemon.model("plain")["worker"]["port"] == first + 3
        assert [impostor.requests + impostor.health for impostor in impostors] == [0, 0, 0]

    @pytest.mark.parametrize(("model", "share"), [("late", False), ("sharing", True)], ids=["impostor", "reuseport"])
    def test_answering_in_its_place(self, daemon, impostors, model, share, measured):
        """Who answers /health on a starting worker's port is found out; the worker starts again on another one."""
        call = Call(daemon, model)
        port = wait_until(lambda: (daemon.model(model)["worker"] or {}).get("port"))
        wait_until((daemon.folder / f"{model}-was-late").exists, what="else the next worker is late, too")
        impostors.append(Impostor(port, share=share))
        answer = call.result().response
        assert (answer.status_code, answer.json()["model"]) == (200, model)
        assert impostors[0].health > 0, "it was asked; otherwise this would test nothing"
        assert impostors[0].requests == 0
        assert daemon.model(model)["worker"]["port"] != port
        crash = next(decision for decision in daemon.decisions(model) if decision["kind"] == "crash")
        assert crash["reason"].startswith("port: ")
        for _ in range(20):
            assert daemon.chat(model).json()["model"] == model
        assert impostors[0].requests == 0
        measured(health_checks_answered=impostors[0].health, requests_misrouted=0, found=crash["reason"])

    def test_shared_later(self, daemon, impostors, measured):
        """A stranger who begins to share a ready worker's port is noticed with the next probe; the worker moves."""
        assert daemon.chat("shared-later").status_code == 200
        before = daemon.model("shared-later")["worker"]
        impostors.append(Impostor(before["port"], share=True))
        shared_at = time.monotonic()
        wait_until(
            lambda: not (now := daemon.model("shared-later"))["answering"] or now["worker"]["pid"] != before["pid"]
        )
        noticed_s = time.monotonic() - shared_at
        answers = [daemon.chat("shared-later") for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert impostors[0].requests == 0
        assert daemon.model("shared-later")["worker"]["port"] != before["port"]
        assert stats(daemon, "shared-later")["requests"] == 20
        measured(noticed_s=noticed_s)
