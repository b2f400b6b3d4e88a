"""What `chat` and `run` ask the model."""

from __future__ import annotations

import io

import pytest

from supervisor.cli.commands.chat import question


class TestQuestion:
    """Whatever bytes it is made of, it can be sent."""

    def test_on_stdin(self, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" caf\xe9\n"), "utf-8"))
        assert question((), as_json=False) == "caf\ufffd"

    @pytest.mark.parametrize("word", ["caf\udce9", "café"])
    def test_on_the_command_line(self, word):
        assert question((word, "x"), as_json=True).encode()
