"""How long models stay, as users see it: keep-alives, holds, default models."""

from __future__ import annotations

import pytest

from tests.support.daemon import fake, running, wait_until

LARGE = {"vram_mib": 2200}  # two of them don't fit together


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    config = {
        "models": {
            "brief": fake(keep_alive_s=0.2),
            "minute": fake(keep_alive_s=60),
            "typed": fake(type="image", modalities=["text", "image"]),
            "seer": fake(modalities=["text", "image"]),
            "eyes": fake(type="vision"),
            "chat": fake(),
            "own": fake(keep_alive_s="forever"),
            "voice": fake(type="tts"),
            "bulk": fake(hold_s=600, keep_alive_s="forever", **LARGE),
            "rival": fake(keep_alive_s="forever", **LARGE),
            "urgent": fake(type="asr", **LARGE),
        },
        "limits": {"keep_alive": "by_type", "min_residency_s": 0, "queue_wait_s": 2},
    }
    with running(tmp_path_factory.mktemp("staying"), config) as daemon:
        yield daemon


class TestKeepAlive:
    """The longest in force counts: that of a request, and that of its model or, without one, of its type."""

    def test_by_type(self, site):
        shown = {name: site.model(name)["keep_alive_s"] for name in ("typed", "seer", "eyes", "chat", "own", "voice")}
        assert shown == {"typed": 900, "seer": 300, "eyes": 60, "chat": 300, "own": None, "voice": None}

    def test_an_idle_model_is_unloaded(self, site):
        assert site.chat("brief").status_code == 200
        wait_until(lambda: site.model("brief")["state"] == "stopped")
        assert site.model("brief")["reason"] == "idle for 0 s (keep_alive_s)"

    def test_a_request_keeps_it_longer(self, site):
        answer = site.chat("brief", x_keep_alive_s=1000)
        assert answer.status_code == 200
        assert "x_keep_alive_s" not in answer.json()["received"]
        assert 900 < wait_until(lambda: site.model("brief")["unload_s"]) <= 1000
        assert site.chat("brief").status_code == 200
        assert 800 < wait_until(lambda: site.model("brief")["unload_s"]) <= 1000

    def test_never_shorter(self, site):
        assert site.chat("minute", x_keep_alive_s=0.1).status_code == 200
        assert wait_until(lambda: site.model("minute")["unload_s"]) > 10

    def test_a_pin_suspends_it(self, site):
        assert site.chat("minute").status_code == 200
        site.post("/v1/admin/models/minute/pin", json={"pin": True}).raise_for_status()
        assert site.model("minute")["unload_s"] is None
        site.post("/v1/admin/models/minute/pin", json={"pin": False}).raise_for_status()
        assert site.model("minute")["unload_s"] is not None

    @pytest.mark.parametrize("said", [-1, 86_401, "soon", True, [60], {"s": 60}, 1e400])
    def test_anything_else_than_seconds_is_refused(self, site, said):
        body = '{"model": "chat", "messages": [], "x_keep_alive_s": %s}'
        text = "1e400" if said == 1e400 else str(said).lower().replace("'", '"')
        text = '"soon"' if said == "soon" else text
        answer = site.post("/v1/chat/completions", content=body % text, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text

    def test_in_a_form(self, site):
        name = "brief"
        sent = {"model": name, "x_keep_alive_s": "2000"}
        answer = site.post("/v1/audio/transcriptions", data=sent, files={"file": b"sound"})
        assert answer.status_code == 200, answer.text
        assert b"x_keep_alive_s" not in answer.content
        assert wait_until(lambda: site.model(name)["unload_s"]) > 1500


class TestHold:
    """A model with `hold_s` keeps its place between the items of a bulk pass."""

    def test_against_its_equals_only(self, site):
        assert site.chat("bulk").status_code == 200
        assert site.model("bulk")["held_s"] > 500
        assert site.chat("rival").json()["error"]["code"] == "queue_timeout"
        assert "held for its next request" in site.decisions("rival")[-1]["reason"]
        assert site.model("bulk")["state"] == "ready"
        assert site.chat("urgent").status_code == 200
        assert site.model("bulk")["state"] == "stopped"

    def test_an_operator_unloads_it(self, site):
        assert site.post("/v1/admin/models/urgent/unload").status_code == 200
        assert site.chat("bulk").status_code == 200
        assert site.post("/v1/admin/models/bulk/unload").status_code == 200
        assert site.chat("rival").status_code == 200


class TestDefaultModel:
    """It comes back when no other model was used for a while, unless an operator unloaded it."""

    def test_returns(self, tmp_path):
        config = {
            "models": {"home": fake(**LARGE), "other": fake(**LARGE)},
            "virtual_models": {"assistant": {"model": "home"}},
            "limits": {"min_residency_s": 0, "default_model": "assistant", "default_after_s": 0.5},
        }
        with running(tmp_path, config) as daemon:
            daemon.wait_state("home", "ready")  # nothing was asked for since the start
            assert daemon.chat("other").status_code == 200
            assert daemon.model("home")["state"] == "stopped"
            daemon.wait_state("home", "ready")
            assert daemon.model("other")["state"] == "stopped"
            assert "return" in [decision["kind"] for decision in daemon.decisions("home")]
            assert daemon.post("/v1/admin/models/home/unload").status_code == 200
            seen = len(daemon.decisions("home"))
            assert daemon.chat("other").status_code == 200
            wait_until(lambda: (daemon.model("other")["idle_s"] or 0) > 2)
            assert (daemon.model("home")["state"], len(daemon.decisions("home"))) == ("stopped", seen)
