"""A real ExLlamaV3 on an NVIDIA GPU: loaded, answered, cancelled, its memory given back.

LLMUX_TEST_EXL3 names a model's folder; `llmux runtimes install exllamav3` makes the environment, which needs the CUDA toolkit.
LLMUX_RUNTIMES_DIR names the folder of environments, otherwise it is the usual one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.gpu import card as cards
from supervisor.catalog.loading.folders import runtimes_dir
from supervisor.host.environments import venvs
from tests.support.daemon import running

CARD = cards.first()
MODEL = os.environ.get("LLMUX_TEST_EXL3")
RUNTIMES = Path(os.environ.get("LLMUX_RUNTIMES_DIR") or runtimes_dir())
pytestmark = [
    pytest.mark.skipif(isinstance(CARD, str), reason=str(CARD)),
    pytest.mark.skipif(MODEL is None, reason="LLMUX_TEST_EXL3 names no EXL3 model's folder"),
    pytest.mark.skipif(
        venvs.installed("exllamav3", RUNTIMES) is None,
        reason=f"there is no ExLlamaV3 in {RUNTIMES}: llmux runtimes install exllamav3",
    ),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    model = {"runtime": "exllamav3", "path": MODEL, "cache_size": 4096, "cache_quant": 8}
    config = {"models": {"exl3": model}, "devices": "auto", "server": {"runtimes_dir": str(RUNTIMES)}}
    with running(tmp_path_factory.mktemp("exllamav3"), config) as started:
        yield started


def test_an_answer_within_its_estimate(daemon):
    answer = daemon.chat("exl3", text="Say hello.", max_tokens=32, temperature=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 1
    memory = daemon.model("exl3")["memory"]
    assert memory["measured_mib"] <= memory["estimate"]["mib"] * 1.3


def test_a_stream_that_is_left(daemon):
    body = {"model": "exl3", "stream": True, "messages": [{"role": "user", "content": "Count to a thousand."}]}
    with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    assert daemon.chat("exl3", text="Hello", max_tokens=2).status_code == 200


def test_its_memory_comes_back(daemon):
    daemon.chat("exl3", text="Hello", max_tokens=2)
    assert daemon.post("/v1/admin/models/exl3/unload").status_code < 300
    daemon.wait_state("exl3", "stopped")
