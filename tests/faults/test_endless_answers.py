"""Answers that never end, where llmux keeps something of them: each is bounded, and breaks off as others do."""

from __future__ import annotations

import json
import threading
from typing import Self

import pytest

from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.faulty_daemon import rss_mib

CHAT = "/v1/chat/completions"
PIECE = 64 * 1024
BODY_MIB = 2
GROWTH_MIB = 20.0  # what is kept is told once more at the end
EXTENSION_FIELDS = [{"role": "user", "content": "Hi"}]
CALL = {"tool_calls": [{"index": 0, "function": {"name": "weather", "arguments": "x" * PIECE}}]}
ASKED: dict[str, tuple[str, dict[str, object]]] = {
    "a response": ("/v1/responses", {"model": "endless", "input": "Hi", "store": False}),
    "a response that is kept": ("/v1/responses", {"model": "endless", "input": "Hi"}),
    "a response in the background": ("/v1/responses", {"model": "endless", "input": "Hi", "background": True}),
    "llm-pool": ("/v1/responses", {"model": "endless", "messages": EXTENSION_FIELDS}),
    "a call for Ollama": ("/api/chat", {"model": "calling", "messages": EXTENSION_FIELDS}),
    "a call in a response": ("/v1/responses", {"model": "calling", "input": "Hi"}),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    config = {
        "models": {"plain": fake(endpoints=[CHAT])},
        "virtual_models": {
            "endless": {"model": "plain", "force": {"fake": {"chunks": 4000, "chunk_bytes": PIECE}}},
            "calling": {"model": "plain", "force": {"fake": {"deltas": [CALL] * 60}}},
            "long": {"model": "plain", "force": {"fake": {"chunks": 100, "chunk_bytes": PIECE}}},
        },
        "limits": {"body_mib": BODY_MIB, "jobs_mib": 100},
    }
    with running(tmp_path_factory.mktemp("endless"), config) as started:
        assert started.chat("plain").status_code == 200
        yield started


class Watched(threading.Thread):
    """The most that the daemon takes."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon=True)
        assert daemon.process is not None
        self.pid = daemon.process.pid
        self.before_mib = self.most_mib = rss_mib(self.pid)
        self.ends = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.set()
        self.join()

    def run(self) -> None:
        while not self.ends.wait(0.02):
            self.most_mib = max(self.most_mib, rss_mib(self.pid))


@pytest.mark.parametrize("api", ASKED)
def test_a_stream_breaks_off(daemon, api, measured):
    path, body = ASKED[api]
    with Watched(daemon) as watched, daemon.client() as client:
        last = b""
        with client.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200
            for piece in answer.iter_raw():
                last = (last + piece)[-PIECE:]
    measured(before_mib=watched.before_mib, most_mib=watched.most_mib)
    assert watched.most_mib - watched.before_mib < GROWTH_MIB
    told = json.loads([line for line in last.splitlines() if line][-1].removeprefix(b"data: "))
    if api == "a response in the background":
        assert (told["type"], told["response"]["error"]["code"]) == ("response.failed", "upstream_too_large")
    elif path == "/api/chat":
        assert "limits.body_mib" in told["error"]
    else:
        assert (told["type"], told["code"]) == ("error", "upstream_too_large")


def test_a_job_fails(daemon, measured):
    with Watched(daemon) as watched:
        made = daemon.post("/v1/jobs", json={"endpoint": CHAT, "body": {"model": "long", "messages": EXTENSION_FIELDS}})
        job = f"/v1/jobs/{made.json()['id']}"
        wait_until(lambda: daemon.get(job).json()["status"] not in {"queued", "running"})
    measured(before_mib=watched.before_mib, most_mib=watched.most_mib)
    told = daemon.get(job).json()
    assert (told["status"], told["error"]["code"]) == ("failed", "upstream_too_large")
    assert watched.most_mib - watched.before_mib < GROWTH_MIB


def test_a_whole_answer_that_is_translated_is_refused(daemon):
    told = daemon.post("/v1/messages", json={"model": "long", "messages": EXTENSION_FIELDS, "max_tokens": 9})
    assert told.status_code == 502
    assert "limits.body_mib" in told.json()["error"]["message"]
