"""The adapter of whisper.cpp: facts about a model, without a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtimes.registry import REGISTRY
from tests.support import fake_whisper_server, hearing

ADAPTER = REGISTRY.get("whisper_cpp")


@pytest.fixture
def keys(tmp_path):
    server = fake_whisper_server.fake(tmp_path)
    return {"runtime": "whisper_cpp", "path": str(hearing.ggml()), "binary": str(server), "threads": 1}


class TestConfiguration:
    """Known before anything is started."""

    def problems(self, keys, **changed):
        config = ADAPTER.config(**{**keys, **changed})
        return ADAPTER.check(config, runtimes_dir=Path("/nowhere"))

    def test_good(self, keys):
        assert self.problems(keys) == ()

    def test_no_program(self, keys, monkeypatch):
        monkeypatch.setenv("PATH", "")
        (problem,) = self.problems(keys, binary=None)
        assert problem.startswith("binary: whisper-server is not on PATH; build it from whisper.cpp's source")

    @pytest.mark.parametrize(
        ("data", "clue"),
        [
            (None, "there is no such file"),
            (b"lmgg", "is cut off"),
            (b"GGUF" + bytes(60), "is not a model of whisper.cpp"),
        ],
        ids=["missing", "short", "gguf"],
    )
    def test_no_model(self, keys, tmp_path, data, clue):
        path = tmp_path / "ggml-x.bin"
        if data is not None:
            path.write_bytes(data)
        (problem,) = self.problems(keys, path=str(path))
        assert clue in problem

    @pytest.mark.parametrize(
        ("word", "clue"),
        [("--port", "is set by llmux"), ("-m", "is set by llmux"), ("--beam-size", "has a key of its own, beam_size")],
    )
    def test_options(self, keys, word, clue):
        (problem,) = self.problems(keys, extra_args=[word])
        assert problem == f"extra_args: {word} {clue}"

    def test_the_program_has_all_options(self):
        theirs = (fake_whisper_server.OPTIONS / "whisper_server.txt").read_text().split()
        assert {*ADAPTER.config.own_options(), *ADAPTER.config.options()} <= {*theirs}
