"""Errors on Anthropic's paths, through a real daemon: before the answer and in the middle of its stream."""

from __future__ import annotations

import json

from tests.security.conftest import GATE
from tests.security.conftest import target as target  # a fixture
from tests.support.daemon import fake, running


def ask(target, model, **fields):
    return target.post("/v1/messages", json={"model": model, "max_tokens": 5, "messages": [], **fields})


def in_band(text):
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    return json.loads(data.removeprefix("data: "))


class TestAnswers:
    """Wherever an error comes from."""

    def test_from_us(self, target):
        told = ask(target, "nope")
        assert told.status_code == 404
        assert told.json()["type"] == "error"
        assert told.json()["error"]["type"] == "not_found_error"
        assert told.json()["error"]["code"] == "model_not_found"
        assert target.get("/v1/messages").json()["type"] == "error"
        assert target.post("/v1/messages", content=b"{").json()["error"]["code"] == "invalid_json"
        assert target.post("/v1/messages", content=bytes(2 << 20)).json()["error"]["type"] == "request_too_large"
        refused = target.post("/v1/messages", json={}, headers={"origin": "https://evil.example"})
        assert refused.json()["error"]["type"] == "permission_error"
        assert target.chat("nope").json()["error"]["type"] == "invalid_request_error"

    def test_from_the_worker(self, tmp_path):
        with running(tmp_path, {"models": {"lying": fake("--lie", endpoints=["/v1/messages"])}}) as daemon:
            told = ask(daemon, "lying")
            assert told.status_code == 500
            assert told.json()["type"] == "error"
            assert told.json()["error"]["type"] == "api_error"
            assert told.json()["error"]["message"]
            assert int(told.headers["content-length"]) == len(told.content)

    def test_in_band(self, target):
        """The head is spent on comments while the model loads; it never comes up."""
        body = {"model": "slow", "max_tokens": 5, "messages": [], "stream": True}
        with target.client() as client, client.stream("POST", "/v1/messages", json=body) as told:
            pieces = told.iter_text()
            text = next(pieces)
            (target.folder / GATE).touch()
            text += "".join(pieces)
        assert told.status_code == 200
        assert text.startswith(": keepalive")
        error = in_band(text)
        assert error["type"] == "error"
        assert error["error"]["type"] in {"overloaded_error", "api_error"}
        assert error["error"]["code"]
