"""Names and words of strangers, where an operator looks; and paths that a model must not take from llmux."""

from __future__ import annotations

import json

import pytest

from supervisor.catalog import load
from supervisor.cli.commands import chat
from supervisor.errors import ConfigError

ESCAPES = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\r"


class TestTerminals:
    """Nothing a client or a model says moves the cursor, sets the clipboard, or writes a line of its own."""

    @pytest.mark.parametrize("name", [ESCAPES, "a\nrequest.finished", "a\u202eb", "a\u2028b"])
    def test_the_log_has_no_names_with_controls(self, target, name):
        before = len(target.log_text())
        for told in (target.post("/echo", json={"model": name}), target.post("/echo", params={"model": name}, json={})):
            assert told.status_code == 400
            assert told.json()["error"]["param"] == "model"
        assert target.events("request.finished"), "all its lines are out"
        assert json.dumps(name)[1:-1] not in target.log_text()[before:]

    def test_chat_shows_text(self, monkeypatch, capsys):
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        screen = chat._AnswerPrinter(thinking=True)
        screen.show("", f"one{ESCAPES}\ttwo\n")
        screen.end()
        assert "one]52;c;aGk=[2J31m\ttwo" in capsys.readouterr().out


class TestOwnPaths:
    """A model's endpoint neither hides one of ours nor opens it."""

    @pytest.mark.parametrize(
        "endpoint",
        ["GET /", "GET /health", "GET /metrics", "GET /ui/x", "/models/load", "GET /v1/models", "GET /v1/admin/models"],
    )
    def test_are_refused(self, tmp_path, endpoint):
        path = tmp_path / "llmux.yaml"
        path.write_text(json.dumps({"models": {"m": {"cmd": ["true", "${port}"], "endpoints": [endpoint]}}}))
        with pytest.raises(ConfigError, match="served by llmux itself"):
            load(path)

    @pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/uix", "GET /healthz", "/v1/modelsx"])
    def test_others_are_not(self, tmp_path, endpoint):
        path = tmp_path / "llmux.yaml"
        path.write_text(json.dumps({"models": {"m": {"cmd": ["true", "${port}"], "endpoints": [endpoint]}}}))
        load(path)
