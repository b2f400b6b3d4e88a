"""What an operator does over any API, and the reason that a daemon gives for it: one event, told as what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support import fake_servers, tiny
from tests.support.clients import Stream
from tests.support.daemon import Daemon, fake

UNLOADED = "unloaded by an operator"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reasons")
    llama = {
        "runtime": "llama_server",
        "binary": str(fake_servers.llama_server(folder)),
        "path": str(tiny.model()),
        "n_ctx": 2048,
    }
    daemon = Daemon(folder, {"models": {"chat": llama | {"vram_mib": 100}, "slow": fake("--start-delay", "60")}})
    try:
        yield daemon.start()
    finally:
        daemon.stop()


def admin(daemon: Daemon) -> None:
    daemon.post("/v1/admin/models/chat/unload")


def forced(daemon: Daemon) -> None:
    daemon.post("/v1/admin/models/chat/unload", params={"force": "true"})


def runner(daemon: Daemon) -> None:
    daemon.post("/v1/models/unload", json={"modelId": "chat"})


def llamacpp(daemon: Daemon) -> None:
    daemon.post("/models/unload", json={"model": "chat"})


def ollama(daemon: Daemon) -> None:
    daemon.post("/api/generate", json={"model": "chat", "keep_alive": 0})


def since(daemon: Daemon, before: int) -> list[tuple[str, str]]:
    return [(each["kind"], each["reason"]) for each in daemon.decisions("chat")[before:]]


class TestUnload:
    """An unload is an unload, whoever asks and with whatever settings the model was loaded."""

    @pytest.mark.parametrize("overrides", [None, {"n_ctx": 512}], ids=["as configured", "with overrides"])
    @pytest.mark.parametrize("unload", [admin, forced, runner, llamacpp, ollama])
    def test_reason(self, daemon, unload: Callable[[Daemon], None], overrides: dict[str, Any] | None):
        load = daemon.post("/v1/admin/models/chat/load", json={"overrides": overrides} if overrides else {})
        assert load.status_code == 200, load.text
        assert daemon.model("chat")["overrides"] == (overrides or {})
        before = len(daemon.decisions("chat"))
        unload(daemon)
        view = daemon.wait_state("chat", "stopped")
        assert (view["reason"], view["overrides"]) == (UNLOADED, {})
        assert since(daemon, before) == [("stop", UNLOADED)]

    def test_other_settings_are_told_as_such(self, daemon):
        daemon.post("/v1/admin/models/chat/load")
        before = len(daemon.decisions("chat"))
        assert daemon.post("/v1/admin/models/chat/load", json={"overrides": {"n_ctx": 512}}).status_code == 200
        assert ("stop", "an operator loads it with other settings") in since(daemon, before)
        assert daemon.model("chat")["reason"].startswith("loaded in")
        admin(daemon)

    def test_a_load_that_is_cancelled(self, daemon):
        waits = Stream(daemon, "slow")
        daemon.wait_state("slow", "starting")
        (load,) = [each for each in daemon.get("/v1/admin/loads").json()["data"] if each["state"] == "loading"]
        assert httpx.delete(f"{daemon.url}/v1/admin/loads/{load['id']}", trust_env=False).status_code == 200
        assert daemon.wait_state("slow", "stopped")["reason"] == "its load was cancelled by an operator"
        waits.join()
        assert waits.status == 503

    def test_a_load_whose_job_is_cancelled(self, daemon):
        """Nobody else waited for it. The model is left as by any client."""
        body = {"model": "slow", "messages": [{"role": "user", "content": "Hi"}]}
        job = daemon.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body}).json()["id"]
        daemon.wait_state("slow", "starting")
        assert httpx.delete(f"{daemon.url}/v1/jobs/{job}", trust_env=False).status_code == 200
        assert daemon.wait_state("slow", "stopped")["reason"] == "nobody waits for it any more"
        assert daemon.decisions("slow")[-1]["reason"] == "load cancelled: nobody waits for it any more"
