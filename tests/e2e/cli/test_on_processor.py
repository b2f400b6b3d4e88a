"""A llama.cpp for the processor on a machine with a GPU: its model runs in main memory, and everybody says so."""

from __future__ import annotations

import pytest

from tests.support import tiny
from tests.support.clients import Gpu
from tests.support.daemon import fake, running, wait_until
from tests.support.shell import Shell

NOTE = "computes on the processor, not on Fake 16 GiB (gpu0): its llama_server is built for the processor alone"


@pytest.fixture
def card(tmp_path) -> Gpu:
    return Gpu(tmp_path)


@pytest.fixture
def config(card) -> dict:
    embedded = {"path": str(tiny.model(name="tiny-chat")), "program": "embedded", "threads": 1}
    idle = fake(vram_mib=500)
    taker = fake(vram_mib=500, env=card.takes(400))
    server = {"runtimes_dir": str(tiny.runtimes_dir())}
    return {"devices": "auto", "models": {"chat": embedded, "idle": idle, "taker": taker}, "server": server}


def test_it_is_said_wherever_somebody_looks(tmp_path, card, config):
    with running(tmp_path, config, env=card.env) as daemon:
        assert daemon.chat("chat").status_code == 200
        model = daemon.model("chat")
        assert model["device"] == "host"
        assert NOTE in model["warnings"][0]
        gpu, host = daemon.get("/v1/admin/gpu-memory").json()["devices"]
        assert (gpu["leases"], [lease["model"] for lease in host["leases"]]) == ([], ["chat"])
        assert NOTE in daemon.log_text()
        shell = Shell(tmp_path, daemon.url, card.env)
        config_file = str(tmp_path / "llmux.yaml")
        for words in (["ps"], ["why", "chat"], ["config", "check", config_file], ["doctor", config_file]):
            told = shell(*words)
            assert NOTE in " ".join((told.stdout + told.stderr).split()), words


def test_a_ready_worker_that_takes_nothing_of_its_lease_is_an_alert(tmp_path, card, config):
    with running(tmp_path, config, env=card.env) as daemon:
        for name in ("idle", "taker"):
            assert daemon.chat(name).status_code == 200
        wait_until(lambda: daemon.events("alert.raised"), what="an alert")
        (alert,) = daemon.events("alert.raised")
        assert (alert["code"], alert["model"], alert["device"]) == ("memory.unused", "idle", "gpu0")
        assert alert["message"].startswith(
            "idle's worker is ready and has taken nothing of its 500 MiB on Fake 16 GiB (gpu0)"
        )
