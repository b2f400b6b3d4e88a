"""Many at once for one cold model, a full queue, and clients that leave in every phase of a request."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections import Counter

import pytest

from tests.support.clients import code, starts, stats
from tests.support.counts import times
from tests.support.daemon import fake, running, wait_until

PHASES = {
    "silent": {"fake": {"delay": 600}},
    "silent-stream": {"fake": {"delay": 600}, "stream": True},
    "streaming": {"fake": {"chunk_delay": 600}, "stream": True},
}
CROWD = 500
QUEUE = 512


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = {
        "cold": fake("--start-delay", "1"),
        "slow": fake("--start-delay", "60", grace_s=0),
        "one": fake(target_inflight=1),
        **{f"fresh-{phase}": fake() for phase in PHASES},
    }
    config = {"models": models, "limits": {"queue_per_model": QUEUE, "queue_total": 2 * QUEUE, "loads_per_device": 8}}
    with running(tmp_path_factory.mktemp("admission"), config) as daemon:
        yield daemon


def request(daemon, model: str, **fields: object) -> bytes:
    body = json.dumps({"model": model, "messages": [], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{daemon.port}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(daemon, model: str) -> tuple[int, float]:
    """Status and seconds of one request on a connection of its own."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    try:
        writer.write(request(daemon, model))
        answer = await reader.read()
        return int(answer.split(b" ", 2)[1]), time.monotonic() - began
    finally:
        writer.close()


class Leaver:
    """A request whose client can leave."""

    def __init__(self, daemon, model: str, **fields: object) -> None:
        self.socket = socket.create_connection(("127.0.0.1", daemon.port))
        self.socket.sendall(request(daemon, model, **fields))

    def leave(self) -> float:
        self.socket.close()
        return time.monotonic()


class Test25CrowdForAColdModel:
    """A crowd starts one worker; whoever finds the queue full is refused at once."""

    async def test_crowd_for_a_cold_model(self, daemon, measured):
        """500 requests at once for a cold model: exactly one spawn, everybody is answered."""
        answers = await asyncio.gather(*(ask(daemon, "cold") for _ in range(CROWD)))
        assert Counter(status for status, _ in answers) == {200: CROWD}
        assert starts(daemon, "cold") == 1
        assert stats(daemon, "cold")["requests"] == CROWD
        measured(answered=CROWD, spawns=1, slowest_s=max(seconds for _, seconds in answers))

    async def test_full_queue(self, daemon, measured):
        """When the queue is full, everybody else gets 503 with Retry-After at once, and nobody queued is lost."""
        leavers = [Leaver(daemon, "slow") for _ in range(QUEUE)]
        wait_until(lambda: daemon.model("slow")["queued"] == QUEUE)
        calls = []
        with daemon.client() as client:
            body = {"model": "slow", "messages": []}
            for _ in range(times(40, 400)):
                began = time.monotonic()
                answer = client.post("/v1/chat/completions", json=body)
                calls.append(time.monotonic() - began)
                assert (answer.status_code, code(answer)) == (503, "queue_full")
                assert int(answer.headers["retry-after"]) >= 1
        assert daemon.model("slow")["queued"] == QUEUE
        assert statistics.median(calls) < 2, "at once: the load takes a minute"
        for leaver in leavers:
            leaver.leave()
        wait_until(
            lambda: daemon.model("slow")["state"] == "stopped",
            what="a load that nobody waits for any more is cancelled",
        )
        assert daemon.get("/health").json()["queued"] == 0
        measured(refused_median_ms=statistics.median(calls) * 1000, refused_max_ms=max(calls) * 1000)


class Test24ClientLeaves:
    """Whatever a request waits for, its client's disconnect removes it and cancels its upstream."""

    def test_while_loading(self, daemon, measured):
        """The load is cancelled, since nobody waits for it any more."""
        leaver = Leaver(daemon, "slow")
        wait_until(lambda: daemon.model("slow")["state"] == "starting")
        wait_until(lambda: daemon.model("slow")["worker"] and daemon.model("slow")["worker"]["pid"])
        left_at = leaver.leave()
        wait_until(lambda: daemon.model("slow")["state"] != "starting")
        noticed_s = time.monotonic() - left_at
        wait_until(lambda: daemon.model("slow")["state"] == "stopped")
        assert "nobody waits for it any more" in daemon.model("slow")["reason"]
        measured(load_cancelled_ms=noticed_s * 1000)

    def test_while_queued(self, daemon, measured):
        """It is taken out of the queue; its worker never hears of it."""
        assert daemon.chat("one").status_code == 200
        first = Leaver(daemon, "one", fake={"delay": 600})
        wait_until(lambda: daemon.model("one")["in_flight"] == 1)
        leaver = Leaver(daemon, "one")
        wait_until(lambda: daemon.model("one")["queued"] == 1)
        left_at = leaver.leave()
        wait_until(lambda: daemon.model("one")["queued"] == 0)
        noticed_s = time.monotonic() - left_at
        assert daemon.model("one")["in_flight"] == 1, "it left before the first one ended"
        first.leave()
        assert daemon.chat("one").status_code == 200
        assert stats(daemon, "one")["requests"] == 3
        measured(dequeued_ms=noticed_s * 1000)

    @pytest.mark.parametrize("phase", PHASES)
    def test_while_served(self, daemon, measured, phase):
        """The worker's connection is closed at once."""
        model = f"fresh-{phase}"
        leaver = Leaver(daemon, model, **PHASES[phase])
        wait_until(lambda: daemon.model(model)["in_flight"] == 1)
        wait_until(lambda: stats(daemon, model)["active"] == 1)
        assert daemon.model(model)["worker"]["connections"] == 1
        if phase == "streaming":
            assert b"200 OK" in leaver.socket.recv(100)
        left_at = leaver.leave()
        wait_until(lambda: daemon.model(model)["worker"]["connections"] == 0)
        noticed_s = time.monotonic() - left_at
        assert daemon.model(model)["in_flight"] == 0
        measured(upstream_closed_ms=noticed_s * 1000)
