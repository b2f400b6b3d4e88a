"""Leases of partners in the admin API: asked for, kept by heartbeats, ended; also over a restart of the daemon."""

from __future__ import annotations

import os
import signal
import socket

import httpx
import pytest

from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S
from tests.support.trees import state

BUDGET_MIB = 4000


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    models = {"idle": fake(vram_mib=3000), "busy": fake("--chunks", "4000", "--chunk-delay", "0.05", vram_mib=3000)}
    with running(
        tmp_path_factory.mktemp("partners"), {"models": models, "limits": {"drain_s": 2, "min_residency_s": 0}}
    ) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def _nothing_left(site):
    yield
    if site.process.poll() is None:
        for lease in leases(site):
            delete(site, lease["id"])
        wait_until(lambda: not leases(site), what="no lease is left")


def ask(site: Daemon, mib: int, **more) -> httpx.Response:
    return site.post("/v1/admin/leases", json={"vram_mib": mib, "holder": "job", **more})


def take(site: Daemon, mib: int, **more) -> dict:
    answer = ask(site, mib, **more)
    assert answer.status_code == 201, answer.text
    return answer.json()


def leases(site: Daemon) -> list[dict]:
    return site.get("/v1/admin/leases").json()["data"]


def delete(site: Daemon, name: str) -> httpx.Response:
    return httpx.delete(f"{site.url}/v1/admin/leases/{name}", trust_env=False, timeout=LIMIT_S)


def renew(site: Daemon, name: str, **body) -> httpx.Response:
    return httpx.put(f"{site.url}/v1/admin/leases/{name}", json=body, trust_env=False, timeout=LIMIT_S)


class TestTake:
    """A lease is granted once its memory is free; idle models go for it."""

    def test_evicts_an_idle_model(self, site):
        site.post("/v1/admin/models/idle/load")
        lease = take(site, 3500)
        assert (lease["state"], lease["devices"], lease["vram_mib"]) == ("held", ["host"], 3500)
        assert lease["env"] == {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
        assert site.model("idle")["state"] == "stopped"
        (shown,) = site.get("/v1/admin/gpu-memory").json()["devices"][0]["leases"]
        assert (shown["model"], shown["partner"], shown["lease_mib"]) == (lease["id"], True, 3500)

    def test_models_say_who_has_the_memory(self, site):
        lease = take(site, 3500)
        refused = site.chat("idle")
        assert refused.status_code == 503
        assert f"{lease['id']} holds 3500 MiB" in refused.json()["error"]["message"]
        kinds = [decision["kind"] for decision in site.decisions(lease["id"])]
        assert "lease_granted" in kinds

    def test_metrics_know_it(self, site):
        lease = take(site, 1000)
        told = site.get("/metrics").text
        assert f'llmux_partner_lease_bytes{{device="host",lease="{lease["id"]}"}} 1.048576e+09' in told
        assert f'llmux_worker_lease_bytes{{device="host",model="{lease["id"]}"' not in told

    def test_another_lease_is_in_its_way(self, site):
        first = take(site, 3500)
        refused = ask(site, 3500)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "lease_unavailable"
        assert f"{first['id']} holds 3500 MiB" in refused.json()["error"]["message"]
        assert [lease["id"] for lease in leases(site)] == [first["id"]]

    def test_a_busy_model_is_in_its_way_unless_it_waits(self, site):
        body = {"model": "busy", "messages": [], "stream": True}
        with site.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as stream:
            pieces = stream.iter_raw()  # its end would close the connection
            next(pieces)
            assert ask(site, 3500).status_code == 409
            assert site.model("busy")["state"] == "ready"
            lease = take(site, 3500, wait=True)  # drain_s ends the request
        assert lease["state"] == "held"

    def test_who_hangs_up_while_waiting_leaves_nothing(self, site):
        take(site, 3500)
        body = b'{"vram_mib": 3500, "holder": "impatient", "wait": true}'
        head = f"POST /v1/admin/leases HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", site.port)) as connection:
            connection.sendall(head + body)
            wait_until(lambda: any(lease["state"] == "waiting" for lease in leases(site)), what="it waits")
        wait_until(lambda: len(leases(site)) == 1, what="it is forgotten")

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "vram_mib"),
            ({"vram_mib": 0}, "vram_mib"),
            ({"vram_mib": 99999}, "vram_mib"),
            ({"vram_mib": "much"}, "vram_mib"),
            ({"vram_mib": 1, "device": "gpu9"}, "device"),
            ({"vram_mib": 1, "device": 5}, "device"),
            ({"vram_mib": 1, "ttl_s": 1}, "ttl_s"),
            ({"vram_mib": 1, "holder": "a/b"}, "holder"),
            ({"vram_mib": 1, "wait": 1}, "wait"),
            ({"vram_mib": 1, "pid": True}, "pid"),
            ({"vram_mib": 1, "mib": 1}, "mib"),
        ],
    )
    def test_mistakes_are_named(self, site, body, param):
        refused = site.post("/v1/admin/leases", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


class TestKeep:
    """Heartbeats keep it; without them it ends, and its holder is told to stop."""

    def test_heartbeats_may_change_it(self, site):
        lease = take(site, 1000, ttl_s=600)
        renewed = renew(site, lease["id"], ttl_s=900).json()
        assert renewed["ttl_s"] == 900
        assert 890 < renewed["expires_s"] <= 900
        assert site.get(f"/v1/admin/leases/{lease['id']}").json()["ttl_s"] == 900

    def test_it_ends_without(self, site):
        lease = take(site, 3500, ttl_s=5)
        wait_until(lambda: not leases(site), what="it has ended")
        late = renew(site, lease["id"])
        assert (late.status_code, late.json()["error"]["code"]) == (404, "lease_ended")
        assert site.chat("idle").status_code == 200

    def test_its_holder_ends_it(self, site):
        lease = take(site, 3500)
        assert delete(site, lease["id"]).json() == {"id": lease["id"], "ended": True}
        wait_until(lambda: not leases(site), what="its memory is back")
        assert delete(site, lease["id"]).status_code == 404

    @pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
    def test_the_next_daemon_knows_it(self, site, how):
        lease = take(site, 3500, ttl_s=60)
        site.signal(how)
        site.process.wait(LIMIT_S)
        site.start()
        assert site.chat("idle").status_code == 503
        assert renew(site, lease["id"]).json()["state"] == "held"

    def test_a_successor_knows_it(self, site):
        lease = take(site, 3500, ttl_s=60)
        assert site.post("/v1/admin/upgrade").status_code == 200
        try:
            assert renew(site, lease["id"]).json()["state"] == "held"
            assert delete(site, lease["id"]).status_code == 200
        finally:
            pid = site.get("/v1/admin/info").json()["pid"]
            os.kill(pid, signal.SIGTERM)
            site.process.wait(LIMIT_S)
            wait_until(lambda: state(pid) in {"", "Z"}, what="the successor has ended")  # and nothing is locked
            site.start()
