"""What happens, as it happens: the event stream and the workers' logs."""

from __future__ import annotations

import threading

from tests.e2e.admin.conftest import listening
from tests.support.daemon import fake, running, wait_until
from tests.support.held import frozen


class TestEvents:
    """Everything that happens is told, whole, in order, to whoever listens."""

    def test_show_a_load_and_its_decision(self, site):
        site.post("/v1/admin/models/slow/unload")
        with listening(site, "/v1/admin/events?types=decision,model") as listener:
            site.post("/v1/admin/models/slow/load")
            admitted = listener.wait("decision", lambda d: d["model"] == "slow" and d["kind"] == "admit")
            ready = listener.wait("model", lambda m: m["name"] == "slow" and m["state"] == "ready")
        states = [m["state"] for m in listener.of("model") if m["name"] == "slow"]
        assert list(dict.fromkeys(states))[:2] == ["starting", "ready"]
        assert "MiB" in admitted["reason"]
        assert site.model("slow").keys() == ready.keys()
        assert ready["worker"]["pid"] == site.model("slow")["worker"]["pid"]
        assert sorted(set(listener.ids)) == listener.ids
        assert listener.headers["content-type"].startswith("text/event-stream")
        assert listener.headers["x-accel-buffering"] == "no"

    def test_show_a_request_at_its_start_and_its_end(self, site):
        with listening(site, "/v1/admin/events?types=request") as listener:
            site.post(
                "/v1/chat/completions",
                json={"model": "quick", "messages": [{"role": "user", "content": "Hello"}]},
                headers={"x-request-id": "watched"},
            )
            started = listener.wait("request", lambda r: r["state"] == "started")
            finished = listener.wait("request", lambda r: r["state"] == "finished")
        assert (started["request_id"], started["model"], started["stream"]) == ("watched", "quick", False)
        assert ("watched", 200, started["id"]) == (finished["request_id"], finished["status"], finished["id"])
        assert finished["completion_tokens"] > 0
        assert {"request"} == {name for name, _ in listener.events}

    def test_show_memory_when_it_changes(self, site):
        site.post("/v1/admin/models/big/unload")
        with listening(site, "/v1/admin/events?types=memory") as listener:
            site.post("/v1/admin/models/big/load")
            listener.wait("memory", lambda m: any(x["model"] == "big" for x in m["devices"][0]["leases"]))

    def test_show_traffic_in_a_models_view(self, site):
        site.post("/v1/admin/models/one/load")
        with listening(site, "/v1/admin/events?types=model") as listener:
            asking = threading.Thread(target=site.chat, args=("one",))
            with frozen(site.model("one")["worker"]["pid"]):
                asking.start()
                listener.wait("model", lambda m: m["name"] == "one" and m["in_flight"] == 1)
            asking.join()
            wait_until(lambda: [m["in_flight"] for m in listener.of("model") if m["name"] == "one"][-1] == 0)

    def test_a_failed_model_is_an_alert(self, tmp_path):
        broken = fake("--exit-code", "1", "--log-text", "unknown argument: --nonsense")
        with running(tmp_path, {"models": {"broken": broken}}) as daemon:
            with listening(daemon, "/v1/admin/events?types=alert") as listener:
                daemon.post("/v1/admin/models/broken/load")
                alert = listener.wait("alert")
            assert (alert["code"], alert["model"]) == ("model.failed", "broken")

    def test_an_unknown_type_is_refused(self, site):
        told = site.get("/v1/admin/events", params={"types": "model,nonsense"})
        assert told.status_code == 400
        assert "decision" in told.json()["error"]["message"]

    def test_too_many_listeners_are_refused_and_those_that_leave_are_forgotten(self, site):
        with site.client() as client:
            streams = []
            while len(streams) < 80:
                response = client.send(client.build_request("GET", "/v1/admin/events?types=reload"), stream=True)
                if response.status_code == 503:
                    assert "retry-after" in response.headers
                    break
                streams.append(response)
            assert 0 < len(streams) <= 64
            for response in streams:
                response.close()
        wait_until(lambda: self._can_listen(site), what="the places are free again")

    @staticmethod
    def _can_listen(site) -> bool:
        with site.client() as client, client.stream("GET", "/v1/admin/events") as response:
            return response.status_code == 200

    def test_end_when_the_daemon_stops(self, tmp_path):
        with running(tmp_path, {"models": {"a": fake()}}) as daemon, listening(daemon, "/v1/admin/events") as listener:
            assert daemon.stop() == 0
            wait_until(lambda: listener.ended, what="the stream has ended")


class TestDecisions:
    """`?after=` continues where the last answer ended."""

    def test_after_a_number(self, site):
        site.post("/v1/admin/models/one/load")
        known = site.get("/v1/admin/decisions", params={"limit": 1}).json()["data"][-1]["seq"]
        site.post("/v1/admin/models/one/unload")
        site.post("/v1/admin/models/one/load")
        newer = site.get("/v1/admin/decisions", params={"after": known, "model": "one"}).json()["data"]
        assert {"one"} == {decision["model"] for decision in newer}
        assert [decision["kind"] for decision in newer] == ["stop", "admit", "ready"]
        last = newer[-1]["seq"]
        assert site.get("/v1/admin/decisions", params={"after": last, "model": "one"}).json()["data"] == []

    def test_a_number_that_is_none(self, site):
        assert site.get("/v1/admin/decisions", params={"after": "yesterday"}).status_code == 400


class TestLogs:
    """A worker's log: its end as text, or followed as it grows."""

    def test_tail(self, site):
        site.chat("one")
        told = site.get("/v1/admin/models/one/logs", params={"lines": 1})
        assert told.headers["content-type"].startswith("text/plain")
        assert len(told.text.splitlines()) == 1
        assert "fake worker" in site.get("/v1/admin/models/one/logs", params={"lines": 10_000}).text

    def test_of_a_model_that_never_ran_is_empty(self, tmp_path):
        with running(tmp_path, {"models": {"a": fake()}}) as daemon:
            told = daemon.get("/v1/admin/models/a/logs")
            assert (told.status_code, told.text) == (200, "")

    def test_a_virtual_model_shows_its_models_log(self, site):
        site.post("/v1/admin/models/chat/load")
        assert site.get("/v1/admin/models/quick/logs").text == site.get("/v1/admin/models/chat/logs").text != ""

    def test_follow_gives_what_is_there_and_what_comes(self, site):
        site.post("/v1/admin/models/one/load")
        with listening(site, "/v1/admin/models/one/logs?follow=true&lines=2") as listener:
            there = len(listener.events)
            assert there <= 2
            site.chat("one")
            listener.wait("message", lambda line: "POST /v1/chat/completions" in line)

    def test_follow_goes_on_through_a_restart(self, site):
        site.post("/v1/admin/models/one/load")
        with listening(site, "/v1/admin/models/one/logs?follow=true&lines=0") as listener:
            site.post("/v1/admin/models/one/unload")
            pid = site.post("/v1/admin/models/one/load").json()["worker"]["pid"]
            listener.wait("message", lambda line: line == f"fake worker {pid} starting")

    def test_the_number_of_lines_has_a_range(self, site):
        assert site.get("/v1/admin/models/one/logs", params={"lines": 100_000}).status_code == 400


class TestHistory:
    """The last half hour as equally long series."""

    def test_counts_tokens_and_samples_memory(self, site):
        site.post("/v1/admin/models/chat/load")
        site.chat("quick")

        def written():
            found = site.get("/v1/admin/history").json()
            return found if sum(found["series"]["tokens_per_s"]) > 0 else None

        history = wait_until(written, what="the answer's tokens are in")
        series = history["series"]
        assert history["interval_s"] == 2
        assert {"memory_used_mib:host", "memory_free_mib:host", "tokens_per_s", "queued", "in_flight", "swaps"} <= set(
            series
        )
        assert len({len(values) for values in series.values()}) == 1
        assert any(value for value in series["worker_memory_mib:host/chat"])

    def test_counts_swaps(self, site):
        before = sum(site.get("/v1/admin/history").json()["series"]["swaps"])
        threads = [threading.Thread(target=site.chat, args=(name,)) for name in ("big", "huge", "big")]
        for thread in threads:
            thread.start()
            thread.join()
        assert sum(site.get("/v1/admin/history").json()["series"]["swaps"]) > before
