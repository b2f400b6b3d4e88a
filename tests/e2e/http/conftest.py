"""The daemon that most of these tests share: real llama.cpp workers and fake ones, all of which fit together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import tiny
from tests.support.daemon import Daemon, fake, gguf, running

FAKE_ENDPOINTS = [
    "/v1/chat/completions",
    "/v1/audio/transcriptions",
    "/echo",
    "GET /stats",
    "GET /env",
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """No keys; models `chat`, `embed`, `rank` on llama.cpp, `fake` (its port is guarded by a key) and `plain` (it isn't)."""
    chat_defaults = {"temperature": 0.5, "top_k": 7, "chat_template_kwargs": {"tone": "dry", "depth": 1}}
    config = {
        "models": {
            "chat": gguf(parallel=4),
            "embed": gguf(tiny.model(name="tiny-embed", seed=2), type="embedding"),
            "rank": gguf(tiny.model(name="tiny-rank", seed=3), rerank=True),
            "fake": fake("--key-env", "LLMUX_WORKER_KEY", auth="bearer", thinking=True, endpoints=FAKE_ENDPOINTS),
            "plain": fake(endpoints=FAKE_ENDPOINTS),
            "broken": fake(
                "--exit-code", "1", "--log-text", "first words\\nno such file: weights.bin", endpoints=FAKE_ENDPOINTS
            ),
        },
        "virtual_models": {
            "thinker": {"model": "chat", "enable_thinking": True, "description": "Thinks first."},
            "quick": {"model": "chat", "enable_thinking": False},
            "shaped": {
                "model": "fake",
                "enable_thinking": False,
                "system_prompt_prefix": "Be brief.",
                "defaults": chat_defaults,
                "force": {"seed": 42},
                "strip": ["logit_bias"],
            },
            "unshaped": {"model": "fake"},
        },
        "limits": {"body_mib": 2, "header_kib": 16, "crash_limit": 1},
    }
    with running(tmp_path_factory.mktemp("site"), config) as daemon:
        yield daemon
