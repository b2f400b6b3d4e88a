"""The decoder of the transformers runtime gives what transformers itself gives, with any number of requests at once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import runtimes
from tests import tiny_language

PROGRAM = tiny_language.GENERATOR.with_name("decoding.py")


def generated(folder: Path, *words: str) -> Any:
    command = [tiny_language.python(), "-I", PROGRAM, str(Path(runtimes.__file__).parent), folder, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestSameAsGenerate:
    """Sequences of all lengths that join and leave, prompts read in pieces: nobody notices the others.

    The models are random, so every weight and every column of the caches counts: one has sliding windows, one linear
    attention, two have eyes.
    """

    @pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "qwen3_5", "qwen3_vl", "qwen3_5_vision"])
    def test_greedy(self, kind):
        found = generated(tiny_language.model(kind, random=True))
        assert found["together"] == found["alone"]
        assert len({tuple(tokens) for tokens in found["alone"]}) == len(found["alone"])

    @pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5_vision"])
    def test_pictures_among_texts(self, kind):
        found = generated(tiny_language.model(kind, random=True), "picture")
        assert found["together"] == found["alone"]


class TestLeaving:
    """A sequence that nobody waits for is gone at once."""

    def test_it_is_looked_for_before_every_step(self):
        continued, read = generated(tiny_language.model(random=True), "leave")
        assert continued == 6  # of five steps: the first one read the prompt, too
        assert read == 0


class TestFailing:
    """A job that fails hears of it, and is the only one that does."""

    def test_no_token_can_be_chosen(self):
        made, told = generated(tiny_language.model(random=True), "fail")
        assert made == 8
        assert "probability tensor" in told
