"""Requests in flight: who is queued, who runs, and how an operator ends one."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from tests.support.daemon import wait_until
from tests.support.limits import LIMIT_S

LONG = {"model": "one", "messages": [], "fake": {"chunks": 40_000}}


class Client(threading.Thread):
    """One chat request in a thread; what became of it."""

    def __init__(self, site, request_id: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.site, self.request_id, self.fields = site, request_id, fields
        self.status: int | None = None
        self.text = ""
        self.broken = False
        self.start()

    def run(self) -> None:
        body = LONG | self.fields
        try:
            with (
                self.site.client(headers={"x-request-id": self.request_id}) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                self.status = response.status_code
                for piece in response.iter_text():
                    self.text += piece
        except httpx.RemoteProtocolError:
            self.broken = True


def listed(site, request_id: str) -> dict | None:
    data = site.get("/v1/admin/requests").json()["data"]
    return next((entry for entry in data if entry["request_id"] == request_id), None)


def cancel(site, entry: dict) -> httpx.Response:
    return httpx.delete(f"{site.url}/v1/admin/requests/{entry['id']}", trust_env=False, timeout=LIMIT_S)


class TestList:
    """Running and queued requests are there, with age and progress, and no others."""

    def test_shows_a_running_and_a_queued_one(self, site):
        site.post("/v1/admin/models/one/load")
        running = Client(site, "runs", stream=True)
        wait_until(lambda: running.text, what="the first streams")
        queued = Client(site, "waits", stream=False)
        entry = wait_until(lambda: listed(site, "waits"), what="the second is listed")
        assert tuple(entry[key] for key in ("state", "model", "path", "stream", "key", "bytes")) == (
            "queued",
            "one",
            "/v1/chat/completions",
            False,
            None,
            0,
        )
        entry = listed(site, "runs")
        assert (entry["state"], entry["stream"]) == ("running", True)
        assert entry["bytes"] > 0
        assert entry["age_s"] >= 0
        assert site.model("one")["queued"] == 1
        cancel(site, listed(site, "waits"))
        cancel(site, entry)
        queued.join(LIMIT_S)
        running.join(LIMIT_S)
        assert [e for e in site.get("/v1/admin/requests").json()["data"] if e["model"] == "one"] == []


class TestCancel:
    """A cancelled request ends at once, its client is told, and its worker is free again."""

    def test_a_running_stream_is_told_in_band(self, site):
        site.post("/v1/admin/models/one/load")
        client = Client(site, "stream", stream=True)
        wait_until(lambda: client.text, what="it streams")
        told = cancel(site, listed(site, "stream"))
        assert (told.status_code, told.json()["cancelled"]) == (200, True)
        client.join(LIMIT_S)
        last = client.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_cancelled"
        assert "[DONE]" not in client.text
        assert not client.broken
        wait_until(lambda: site.model("one")["in_flight"] == 0, what="the worker is free")
        assert site.chat("one").status_code == 200

    def test_a_queued_request_gets_an_error(self, site):
        site.post("/v1/admin/models/one/load")
        first = Client(site, "first", stream=True)
        wait_until(lambda: first.text, what="the first streams")
        second = Client(site, "second", stream=False)
        entry = wait_until(lambda: listed(site, "second"), what="the second is queued")
        assert entry["state"] == "queued"
        cancel(site, entry)
        second.join(LIMIT_S)
        assert second.status == 410
        assert json.loads(second.text)["error"]["code"] == "request_cancelled"
        assert listed(site, "first") is not None, "nobody else is touched"
        cancel(site, listed(site, "first"))
        first.join(LIMIT_S)

    def test_a_request_that_waits_for_its_answer_gets_an_error(self, site):
        site.post("/v1/admin/models/one/load")
        client = Client(site, "silent", stream=False, fake={"delay": 600})
        wait_until(lambda: (e := listed(site, "silent")) and e["state"] == "running", what="it runs")
        cancel(site, listed(site, "silent"))
        client.join(LIMIT_S)
        assert client.status == 410
        line = wait_until(
            lambda: [e for e in site.events("request.finished") if e["request_id"] == "silent"], what="its log line"
        )[0]
        assert (line["status"], line["error"]) == (410, "request_cancelled")

    def test_one_that_is_not_there(self, site):
        assert cancel(site, {"id": "0"}).status_code == 404
