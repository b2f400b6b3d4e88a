"""A restart on a socket of systemd's: who waits for a model comes again, what runs ends whole, new connections wait."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection

import pytest

from tests.support.activation import Activated, listening
from tests.support.clients import Stream
from tests.support.daemon import fake, wait_until
from tests.support.held import held
from tests.support.limits import LIMIT_S

TOLD = "llmux is shutting down; try again in a moment."
MESSAGES = {"model": "slow", "messages": [{"role": "user", "content": "Hello"}]}
CALLS = {
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": {**MESSAGES, "max_tokens": 5},
    "/api/chat": {**MESSAGES, "stream": False},
}


@pytest.fixture
def gate(tmp_path):
    """The file that `slow` waits for to start, and `quick` to end its streams."""
    return tmp_path / "gate"


@pytest.fixture
def listener():
    with listening("127.0.0.1") as listener:
        yield listener


@pytest.fixture
def daemon(tmp_path, gate, listener):
    models = {"slow": held(gate), "quick": fake("--goes-on-until", str(gate))}
    daemon = Activated(tmp_path, {"models": models, "limits": {"keepalive_s": 0.2}})
    yield daemon.activate(listener)
    gate.touch()
    daemon.stop()


def wait_for_queued(daemon, count):
    """So many requests wait for `slow`, by the daemon's own account: `quick` may have to wait for its load."""

    def are_there():
        found = daemon.get("/v1/admin/requests").json()["data"]
        return [(one["model"], one["state"]) for one in found].count(("slow", "queued")) == count

    wait_until(are_there)


class TestRestart:
    """Nobody hangs: who waits is refused at once, what runs is answered, and the next connection is the new daemon's."""

    def test_who_waits_is_told_when_to_come_again(self, daemon, gate):
        runs = Stream(daemon, "quick")
        wait_until(lambda: runs.chunks)
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(daemon.post, path, json=fields) for path, fields in CALLS.items()]
            begun = Stream(daemon, "slow")
            wait_for_queued(daemon, 4)
            wait_until(lambda: begun.text)  # the head of its answer, and a keep-alive
            daemon.signal(signal.SIGTERM)
            answers = [call.result(LIMIT_S) for call in calls]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in answers] == [(503, "5")] * 3
        openai, anthropic, ollama = (answer.json() for answer in answers)
        assert (openai["error"]["code"], openai["error"]["message"]) == ("shutting_down", TOLD)
        assert (anthropic["type"], anthropic["error"]["message"]) == ("error", TOLD)
        assert ollama == {"error": TOLD}
        assert '"code":"shutting_down"' in begun.result().text
        assert begun.error is None
        assert runs.is_alive(), "all of that while a stream still runs"
        gate.touch()
        assert runs.result().ended_cleanly
        assert daemon.process.wait(LIMIT_S) == 0

    def test_the_next_connection_waits_for_the_new_daemon(self, daemon, gate, listener):
        wait_until(lambda: daemon.get("/health").status_code == 200)
        assert daemon.stop() == 0
        gate.touch()
        with closing(HTTPConnection("127.0.0.1", daemon.port, timeout=LIMIT_S)) as client:
            client.request("POST", "/v1/chat/completions", json.dumps(MESSAGES))
            daemon.activate(listener)
            assert client.getresponse().status == 200
