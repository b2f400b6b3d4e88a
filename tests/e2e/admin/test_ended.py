"""Requests that have ended: what an operator reads afterwards, and what a client waited for."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.core.admission.waiting import WaitKind
from tests.e2e.admin.conftest import loading
from tests.e2e.admin.test_requests import Client, cancel, listed
from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S


def ask(site, request_id: str, model: str = "blind", **fields: Any) -> None:
    client = Client(site, request_id, model=model, **({"fake": {}} | fields))
    client.join(LIMIT_S)


def ended(site, **asked: Any) -> list[dict[str, Any]]:
    answer = site.get("/v1/admin/requests/ended", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def one(site, request_id: str) -> dict[str, Any]:
    """The request once it has ended."""

    def found() -> dict[str, Any] | None:
        answer = site.get(f"/v1/admin/requests/{request_id}")
        return answer.json() if answer.status_code == 200 and answer.json()["state"] == "finished" else None

    return wait_until(found, what=f"{request_id} has ended")


def waited_ms(entry: dict[str, Any]) -> float:
    """For a worker: how long a body takes to read is the machine's business."""
    return sum(part["s"] for part in entry["wait"] if part["kind"] != "body") * 1000


def kinds(entry: dict[str, Any]) -> list[str]:
    return [part["kind"] for part in entry["wait"]]


class TestRecord:
    """It has the canonical record, and what only an operator asks for."""

    def test_a_stream(self, site):
        site.post("/v1/admin/models/one/load").raise_for_status()
        ask(site, "streamed", "one", stream=True, fake={"chunks": 3})
        entry = one(site, "streamed")
        line = next(e for e in site.events("request.finished") if e["request_id"] == "streamed")
        assert entry.items() >= {key: line[key] for key in ("model", "status", "error", "total_ms", "bytes")}.items()
        assert entry["stream"] is True
        assert 0 < entry["first_token_ms"] <= entry["total_ms"] + 1
        assert entry["error_message"] is None
        assert set(kinds(entry)) <= {"body"}, "a loaded model is not waited for"
        assert entry == one(site, entry["id"]), "both ids lead there"

    def test_tokens_a_second_are_a_streams(self, site):
        ask(site, "whole", "one", fake={"chunks": 3})
        assert (one(site, "whole")["completion_tokens"], one(site, "whole")["tokens_per_s"]) == (5, None)
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        site.post("/v1/chat/completions", json=body, headers={"x-request-id": "real"}).raise_for_status()
        entry = one(site, "real")
        took_s = (entry["total_ms"] - entry["first_token_ms"]) / 1000
        rate = entry["completion_tokens"] / took_s if took_s > 0 else None  # the loop's clock has milliseconds
        assert entry["tokens_per_s"] == (rate and pytest.approx(rate, rel=0.2))

    def test_one_that_was_refused_or_failed_at_the_worker(self, site):
        ask(site, "nobody", "no-such-model")
        refused = one(site, "nobody")
        assert (refused["id"], refused["status"], refused["error"]) == (None, 404, "model_not_found")
        assert "no-such-model" in refused["error_message"]
        ask(site, "told", "one", fake={"status": 500})
        assert (one(site, "told")["status"], one(site, "told")["error_message"]) == (500, "as told")


class TestList:
    """Newest first, and only what is asked for."""

    def test_order_and_filters(self, site):
        site.post("/v1/admin/models/one/load").raise_for_status()
        for number in range(3):
            ask(site, f"in-order-{number}", "one")
            one(site, f"in-order-{number}")
        ask(site, "in-order-3", "one", fake={"status": 500})
        one(site, "in-order-3")
        names = [entry["request_id"] for entry in ended(site, limit=4)]
        assert names == ["in-order-3", "in-order-2", "in-order-1", "in-order-0"]
        assert [e["request_id"] for e in ended(site, model="one", failed="true", limit=1)] == ["in-order-3"]
        assert [e["request_id"] for e in ended(site, model="one", failed="false", limit=1)] == ["in-order-2"]
        assert {e["model"] for e in ended(site, model="one")} == {"one"}
        assert ended(site, key="nobody's") == []

    @pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "1001"}, {"failed": "perhaps"}])
    def test_bad_queries_are_refused(self, site, query):
        assert site.get("/v1/admin/requests/ended", params=query).status_code == 400

    def test_one_that_was_never_there(self, site):
        answer = site.get("/v1/admin/requests/never-there")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
        assert "last 1000" in answer.json()["error"]["message"]


class TestWait:
    """The parts are what the scheduler did meanwhile, and add up to the wait."""

    def test_for_a_load(self, site):
        with loading(site):
            client = Client(site, "for-a-load", model="slow", stream=False, fake={})
            wait_until(lambda: listed(site, "for-a-load"), what="it is queued")
            entry = wait_until(
                lambda: (e := site.get("/v1/admin/requests/for-a-load").json())["awaits"] and e, what="it waits"
            )
            assert (entry["state"], entry["awaits"]["kind"]) == ("queued", WaitKind.LOAD.value)
            assert entry["awaits"]["what"] == "It waits for the model to load."
            assert entry["awaits"]["eta"]
        client.join(LIMIT_S)
        entry = one(site, "for-a-load")
        assert entry["awaits"] is None
        assert "load" in kinds(entry)
        assert waited_ms(entry) == pytest.approx(entry["queue_ms"], abs=20)
        assert "ready" in [decision["kind"] for decision in entry["decisions"]]

    def test_for_a_free_place(self, site):
        site.post("/v1/admin/models/one/load").raise_for_status()
        first = Client(site, "occupies", stream=True)
        wait_until(lambda: first.text, what="the first streams")
        second = Client(site, "for-a-place", stream=False, fake={})
        wait_until(lambda: (e := listed(site, "for-a-place")) and e["state"] == "queued", what="the second waits")
        cancel(site, listed(site, "occupies"))
        second.join(LIMIT_S)
        entry = one(site, "for-a-place")
        assert kinds(entry)[-1] == "place"
        assert waited_ms(entry) == pytest.approx(entry["queue_ms"], abs=20)
        occupying = one(site, "occupies")
        assert (occupying["error"], occupying["error_message"]) == (
            "request_cancelled",
            "The request was cancelled by an operator.",
        )

    def test_for_another_model_to_end_and_to_go(self, site):
        site.post("/v1/admin/models/big/load").raise_for_status()
        busy = Client(site, "is-long", model="big", stream=True, fake={"chunk_delay": 0.02, "chunks": 40_000})
        wait_until(lambda: busy.text, what="it streams")
        waiting = Client(site, "for-room", model="huge", stream=False, fake={})
        entry = wait_until(
            lambda: (e := site.get("/v1/admin/requests/for-room").json()).get("awaits") and e, what="it waits"
        )
        assert (entry["awaits"]["kind"], entry["awaits"]["eta_s"]) in {("drain", None), ("turn", None)}
        cancel(site, listed(site, "is-long"))
        waiting.join(LIMIT_S)
        entry = one(site, "for-room")
        assert kinds(entry)[-1] == "load"
        assert {"drain", "turn"} & set(kinds(entry))
        assert "big" in " ".join(part["what"] for part in entry["wait"])
        assert waited_ms(entry) == pytest.approx(entry["queue_ms"], abs=20)
        assert {("evicted", "big"), ("ready", "huge")} <= {(d["kind"], d["model"]) for d in entry["decisions"]}
