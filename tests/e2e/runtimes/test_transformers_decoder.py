"""The decoder of the transformers runtime gives what transformers itself gives, with any number of requests at once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import runtimes
from tests.support import tiny_language
from tests.support.made_once import command_of


@pytest.fixture(scope="module")
def decoding():
    """Asks the program about a model; one interpreter answers all, since loading torch takes longer than they do."""
    command = command_of("decoding", "transformers", str(Path(runtimes.__file__).parent))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:

        def ask(folder: Path, what: str = "texts") -> Any:
            program.stdin.write(json.dumps([str(folder), what]) + "\n")
            program.stdin.flush()
            return json.loads(program.stdout.readline())

        yield ask
        program.stdin.close()


class TestSameAsGenerate:
    """Sequences of all lengths that join and leave, prompts read in pieces: nobody notices the others.

    The models are random, so every weight and every column of the caches counts: one has sliding windows, one linear
    attention, two have eyes.
    """

    @pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "qwen3_5", "qwen3_vl", "qwen3_5_vision"])
    def test_greedy(self, decoding, kind):
        found = decoding(tiny_language.model(kind, random=True))
        assert found["together"] == found["alone"]
        assert len({tuple(tokens) for tokens in found["alone"]}) == len(found["alone"])

    @pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5_vision"])
    def test_pictures_among_texts(self, decoding, kind):
        found = decoding(tiny_language.model(kind, random=True), "pictures")
        assert found["together"] == found["alone"]


class TestLeaving:
    """A sequence that nobody waits for is gone at once."""

    def test_it_is_looked_for_before_every_step(self, decoding):
        continued, read = decoding(tiny_language.model(random=True), "leave")
        assert continued == 6  # of five steps: the first one read the prompt, too
        assert read == 0


class TestFailing:
    """A job that fails hears of it, and is the only one that does."""

    def test_no_token_can_be_chosen(self, decoding):
        made, told = decoding(tiny_language.model(random=True), "fail")
        assert made == 8
        assert "probability tensor" in told
