"""Real `llmux` commands, in pipes and on a pseudo-terminal, against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, fake, gguf, running
from tests.support.held import held
from tests.support.shell import Shell

GATE = "slow-may-come-up"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """No keys; one real model with virtual names, and fakes: slow to start, slow to speak, broken."""
    folder = tmp_path_factory.mktemp("site")
    (folder / GATE).touch()
    config = {
        "models": {
            "chat": gguf(),
            "slow": held(folder / GATE),
            "talker": fake("--chunks", "400", "--chunk-delay", "0.05"),
            "broken": fake("--exit-code", "1", "--log-text", "no such file: weights.bin"),
        },
        "limits": {"crash_limit": 1},  # given up at once
        "virtual_models": {
            "thinker": {"model": "chat", "enable_thinking": True},
            "quick": {"model": "chat", "enable_thinking": False},
        },
    }
    with running(folder, config) as daemon:
        yield daemon


@pytest.fixture
def shell(site: Daemon, tmp_path: Path) -> Shell:
    """Commands that ask the shared daemon."""
    return Shell(tmp_path, site.url)


@pytest.fixture
def gate(site: Daemon) -> Iterator[Path]:
    """Until this file is there the model `slow` goes on starting. It is unloaded, whatever an earlier test left."""
    assert site.post("/v1/admin/models/slow/unload").is_success
    site.wait_state("slow", "stopped")
    path = site.folder / GATE
    path.unlink()
    yield path
    path.touch()


@pytest.fixture
def alone(tmp_path: Path) -> Shell:
    """Commands in an empty home, with no daemon where they look."""
    return Shell(tmp_path, "http://127.0.0.1:1")
