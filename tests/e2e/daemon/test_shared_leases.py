"""Two real daemons on one device, and a real Redis in which they agree: whatever happens, they never take more than there is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.redis_server import RedisServer, needs_redis

pytestmark = needs_redis
BUDGET_MIB, MODEL_MIB = 3000, 2000


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path).start()
    server.ask("SET", "llmux:leases", "1")  # it has been there for long
    yield server
    server.stop()


def alone(folder: Path) -> dict[str, object]:
    """A model whose worker leaves the file `twice` where another one lives."""
    text = f'exec 9>>{folder}/lives; flock -n 9 || {{ touch {folder}/twice; exit 1; }}; exec "$@"'
    model = fake(vram_mib=MODEL_MIB)
    return {**model, "cmd": ["/bin/sh", "-c", text, "sh", *model["cmd"]]}


def daemon(folder, redis: RedisServer):
    folder.mkdir()
    return running(
        folder,
        {
            "devices": [{"kind": "host", "budget_mib": BUDGET_MIB, "margin_mib": 0}],
            "models": {"m": alone(folder.parent)},
            "server": {"leases": redis.url, "leases_ttl_s": 45},
            "limits": {"queue_wait_s": 600},
        },
    )


@pytest.fixture
def both(tmp_path, redis):
    with daemon(tmp_path / "one", redis) as one, daemon(tmp_path / "two", redis) as two:
        for site in (one, two):
            wait_until(lambda site=site: not device(site)["blocked"], what="the store was asked")
        yield one, two
    assert not (tmp_path / "twice").exists(), "never two workers at a time"


def device(site: Daemon) -> dict:
    return site.get("/v1/admin/gpu-memory").json()["devices"][0]


def leased(redis: RedisServer) -> int:
    """What the store has, in MiB."""
    import socket

    answer = redis.ask("HVALS", f"llmux:leases:host:{socket.gethostname()}").split(b"\r\n")
    return sum(int(part.split()[0]) for part in answer if b" " in part)


def serves(site: Daemon) -> bool:
    return site.chat("m").status_code == 200


class TestTwo:
    """One at a time has the memory that is there once."""

    def test_what_one_has_the_other_can_not_have(self, both, redis):
        one, two = both
        assert serves(one)
        wait_until(lambda: device(two)["others_mib"] == MODEL_MIB, what="the other one knows")
        refused = two.chat("m")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "insufficient_memory"
        assert one.post("/v1/admin/models/m/unload").status_code == 200
        wait_until(lambda: serves(two), what="its memory was given back")
        assert leased(redis) == MODEL_MIB

    def test_a_partner_of_one_is_in_the_way_of_the_other(self, both):
        one, two = both
        lease = one.post("/v1/admin/leases", json={"vram_mib": MODEL_MIB}).json()
        wait_until(lambda: device(two)["others_mib"] == MODEL_MIB, what="the other one knows")
        assert not serves(two)
        assert two.post("/v1/admin/leases", json={"vram_mib": MODEL_MIB}).status_code == 409
        asked = threading.Thread(
            target=two.post, args=("/v1/admin/leases",), kwargs={"json": {"vram_mib": MODEL_MIB, "wait": True}}
        )
        asked.start()
        with one.client() as client:
            client.delete(f"/v1/admin/leases/{lease['id']}")
        asked.join()
        assert two.get("/v1/admin/leases").json()["data"][0]["state"] == "held"

    def test_both_at_once(self, both, tmp_path):
        """Each wants it again and again, and gives it back as soon as it had it."""
        had = {site.port: 0 for site in both}
        over = threading.Event()

        def swap(site: Daemon) -> None:
            while not over.is_set():
                if serves(site):
                    had[site.port] += 1
                    site.post("/v1/admin/models/m/unload")

        threads = [threading.Thread(target=swap, args=(site,)) for site in both]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: min(had.values()) >= 3, what="each had it three times")
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert (tmp_path / "lives").exists()


class TestKilled:
    """What a daemon had that was killed is for others once its lease has ended."""

    def test_its_lease_lasts_until_it_ends(self, both, redis):
        one, two = both
        assert serves(one)
        one.kill()
        wait_until(lambda: not one.workers(), what="its workers are dead")
        wait_until(lambda: device(two)["others_mib"] == MODEL_MIB, what="the other one knows")
        assert not serves(two)
        redis.ask("DEL", next(iter(keys(redis))))  # as it does by itself after 45 s
        wait_until(lambda: serves(two), what="it has it")

    def test_its_next_daemon_gives_it_back(self, both, redis):
        one, two = both
        assert serves(one)
        one.kill()
        one.start()
        wait_until(lambda: leased(redis) == 0, what="it is given back")
        wait_until(lambda: serves(two), what="the other one has it")


def keys(redis: RedisServer) -> list[str]:
    return [line.decode() for line in redis.ask("KEYS", "llmux:leases:*").split(b"\r\n") if line.startswith(b"llmux:")]


class TestAway:
    """Without Redis only what was leased before goes on; it recovers by itself."""

    def test_nothing_new_begins(self, both, redis):
        one, two = both
        assert serves(one)
        redis.stop()
        wait_until(lambda: "can't be reached" in (device(two)["blocked"] or ""), what="it is noticed")
        assert serves(one)
        answers: list[int] = []
        asked = threading.Thread(target=lambda: answers.append(two.chat("m").status_code))
        asked.start()
        refused = two.post("/v1/admin/leases", json={"vram_mib": 100})
        assert "can't be reached" in refused.json()["error"]["message"]
        assert refused.status_code == 409
        wait_until(lambda: two.model("m")["queued"] == 1, what="a request waits")
        assert two.model("m")["state"] == "stopped"
        redis.start()  # empty
        wait_until(lambda: leased(redis) == MODEL_MIB, what="what runs is leased again")
        asked.join()
        assert sum(site.model("m")["state"] == "ready" for site in both) == 1

    def test_it_is_said_when_the_daemon_begins_without(self, tmp_path, redis):
        redis.stop()
        with daemon(tmp_path / "alone", redis) as site:
            wait_until(lambda: "can't be reached" in (device(site)["blocked"] or ""), what="it is noticed")
            began = time.monotonic()
            redis.start()
            wait_until(lambda: serves(site), what="it recovers")
            assert time.monotonic() > began
