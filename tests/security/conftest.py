"""The daemon that these tests attack: without keys, with small limits, and workers that send back what they get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon import Daemon, fake, running
from tests.support.held import held

ENDPOINTS = ["/v1/chat/completions", "/v1/messages", "/echo", "GET /stats"]
GATE = "slow-may-fail"  # until this file is there, `slow` is loading


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("target")
    config = {
        "models": {
            "plain": fake(endpoints=ENDPOINTS),
            "idle": fake(endpoints=ENDPOINTS),
            "slow": held(folder / GATE, "--exit-code", "1", endpoints=ENDPOINTS),
        },
        "server": {"allowed_origins": ["https://chat.example.org"]},
        "limits": {"body_mib": 1, "keepalive_s": 0.2, "crash_limit": 1},
    }
    with running(folder, config) as daemon:
        daemon.post("/v1/admin/models/plain/load").raise_for_status()
        yield daemon
