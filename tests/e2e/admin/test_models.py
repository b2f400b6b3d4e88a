"""Models in the admin API: what they can do, how they are defined, and loads with other settings."""

from __future__ import annotations

import threading

import httpx
import pytest

from supervisor.host.distribution import version
from tests.e2e.admin.conftest import loading
from tests.support import tiny
from tests.support.daemon import wait_until
from tests.support.held import frozen


def refused(response: httpx.Response, status: int, code: str) -> dict:
    assert status == response.status_code, response.text
    error = response.json()["error"]
    assert code == error["code"], error
    return error


def props(site) -> dict:
    return site.get("/props", params={"model": "chat"}).json()


class TestView:
    """One model's view says all there is to know of it."""

    def test_capabilities_come_from_the_model(self, site):
        found = site.model("chat")["capabilities"]
        assert "POST /v1/chat/completions" in found.pop("endpoints")
        assert found.pop("thinking_modes") == ["default", "enabled", "disabled"]
        assert found.pop("documents") == ["text/plain", "application/pdf"]
        expected = {"modalities": ["text"], "tools": True, "thinking": True, "multi_turn": True, "context": 2048}
        assert expected == found

    def test_a_projector_gives_eyes(self, site):
        assert site.model("seer")["capabilities"]["modalities"] == ["text", "image"]

    def test_the_definition_is_the_effective_configuration_without_secrets(self, site):
        shown = site.model("chat")["definition"]
        assert (shown["n_ctx"], shown["parallel"], shown["cache_type_k"]) == (2048, 2, "f16")
        assert shown["env"] == {"SOME_TOKEN": "***", "PLAIN": "seen"}
        assert site.model("blind")["definition"]["cmd"][-2:] == ["--key-env", "***"]

    def test_constraints_name_type_and_range(self, site):
        constraints = site.model("chat")["load_constraints"]
        assert constraints["spec_draft_n_max"] == {"type": "integer", "minimum": 1, "maximum": 6}
        assert constraints["spec_draft_p_min"] == {"type": "number", "minimum": 0, "maximum": 1}
        assert not {"path", "binary", "mmproj", "extra_args", "env"} & constraints.keys()

    def test_a_replica_is_the_worker(self, site):
        site.post("/v1/admin/models/one/load")
        view = site.model("one")
        (replica,) = view["replicas"]
        assert view["worker"]["pid"] == replica["pid"]
        assert replica["state"] == "ready"

    def test_a_load_under_way_says_how_long_still(self, site):
        with loading(site):
            view = site.wait_state("slow", "starting")
        assert 0 <= view["eta_s"] < 60
        assert site.wait_state("slow", "ready")["eta_s"] is None

    def test_says_how_long_an_unload_lets_requests_run(self, site):
        assert site.model("chat")["drain_s"] == 30
        assert site.model("one")["drain_s"] == 2.5

    def test_the_list_shows_every_model(self, site):
        data = site.get("/v1/admin/models").json()["data"]
        assert set(site.config["models"]) == {view["name"] for view in data}
        assert all(view["capabilities"] is not None for view in data)


class TestInfo:
    """Which daemon it is, for an operator who looks at one of several."""

    def test_says_version_process_and_files(self, site):
        info = site.get("/v1/admin/info").json()
        assert info["version"] == version()
        assert (info["pid"], info["port"], info["watch"]) == (site.process.pid, site.port, False)
        assert 0 < info["uptime_s"] < site.get("/v1/admin/info").json()["uptime_s"]
        files = info["configuration"]
        assert files[0] == {"path": str(site.config_path), "exists": True, "kind": "configuration"}
        assert not any(file["exists"] for file in files[1:])


class TestOverrides:
    """Settings of a load: they take effect in the worker, and are gone after an unload."""

    def load(self, site, **overrides) -> httpx.Response:
        return site.post("/v1/admin/models/chat/load", json={"overrides": overrides})

    @pytest.fixture(autouse=True)
    def _leaves_none(self, site):
        yield
        site.post("/v1/admin/models/chat/unload", params={"force": "true"})

    def test_take_effect_and_are_gone_after_an_unload(self, site):
        view = self.load(site, n_ctx=1024, parallel=1).json()
        assert (view["state"], view["overrides"]) == ("ready", {"n_ctx": 1024, "parallel": 1})
        assert 1024 == view["definition"]["n_ctx"] == view["capabilities"]["context"]
        assert (props(site)["default_generation_settings"]["n_ctx"], props(site)["total_slots"]) == (1024, 1)
        site.post("/v1/admin/models/chat/unload")
        assert site.model("chat")["overrides"] == {}
        site.post("/v1/admin/models/chat/load")
        assert (props(site)["default_generation_settings"]["n_ctx"], props(site)["total_slots"]) == (2048, 2)

    def test_replace_a_running_worker_after_its_streams(self, site):
        before = site.post("/v1/admin/models/chat/load").json()["worker"]["pid"]
        known = site.decisions("chat")[-1]["seq"]
        body = {"model": "quick", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        body |= {"ignore_eos": True, "max_tokens": 1900}
        streamed: list[httpx.Response] = []
        loaded: list[httpx.Response] = []
        streaming = threading.Thread(target=lambda: streamed.append(site.post("/v1/chat/completions", json=body)))
        replacing = threading.Thread(target=lambda: loaded.append(self.load(site, n_ctx=1024)))
        with frozen(before):
            streaming.start()
            wait_until(lambda: site.model("chat")["in_flight"] == 1)
            replacing.start()
            site.wait_state("chat", "draining")
        streaming.join()
        replacing.join()
        assert streamed[0].text.endswith("data: [DONE]\n\n"), "the stream came to its own end"
        view = loaded[0].json()
        assert (view["definition"]["n_ctx"], view["worker"]["pid"] != before) == (1024, True)
        kinds = [decision["kind"] for decision in site.decisions("chat") if decision["seq"] > known]
        assert [kind for kind in kinds if kind not in {"stop", "wait"}] == ["drain", "admit", "ready"]

    def test_without_any_are_taken_back(self, site):
        self.load(site, n_ctx=1024)
        view = site.post("/v1/admin/models/chat/load", json={"overrides": {}}).json()
        assert (view["overrides"], view["definition"]["n_ctx"]) == ({}, 2048)
        assert props(site)["default_generation_settings"]["n_ctx"] == 2048

    def test_of_what_it_takes_count_for_the_next_load(self, site):
        site.post("/v1/admin/models/big/unload")
        view = site.post("/v1/admin/models/big/load", json={"overrides": {"vram_mib": 150}}).json()
        assert view["memory"]["lease_mib"] == 150
        site.post("/v1/admin/models/big/unload")
        assert site.model("big")["memory"]["estimate"]["mib"] == 2200

    def test_a_plain_load_keeps_them(self, site):
        self.load(site, n_ctx=1024)
        pid = site.model("chat")["worker"]["pid"]
        view = site.post("/v1/admin/models/chat/load").json()
        assert ({"n_ctx": 1024}, pid) == (view["overrides"], view["worker"]["pid"])

    def test_are_estimated_by_themselves(self, site):
        small = site.model("chat")["memory"]["estimate"]["mib"]
        assert self.load(site, n_ctx=16384).json()["memory"]["estimate"]["mib"] > small

    @pytest.mark.parametrize(
        ("overrides", "told"),
        [
            ({"spec_draft_n_max": 9}, "overrides.spec_draft_n_max: expected at most 6, got 9"),
            ({"spec_draft_p_min": 1.5}, "overrides.spec_draft_p_min: expected at most 1, got 1.5"),
            ({"n_ctx": "many"}, 'overrides.n_ctx: expected a whole number, got "many"'),
            ({"parallel": 0}, "overrides.parallel: expected at least 1, got 0"),
            ({"cache_type_k": "f7"}, 'overrides.cache_type_k: expected "f32", "f16"'),
            ({"n_ctxx": 1}, 'overrides.n_ctxx: can\'t be set for a load; did you mean "n_ctx"?'),
            ({"path": "/etc/passwd"}, "overrides.path: can't be set for a load"),
            ({"cache_type_v": "q8_0", "flash_attn": "off"}, "needs flash_attn on or auto"),
            ({"n_ctx": 400_000_000}, "With these overrides chat has no place here: takes"),
        ],
    )
    def test_that_can_not_be_are_refused_by_name_and_range(self, site, overrides, told):
        error = refused(self.load(site, **overrides), 400, "invalid_override")
        assert told in error["message"]
        assert site.model("chat")["state"] == "stopped"

    def test_all_mistakes_are_told_at_once(self, site):
        error = refused(self.load(site, n_ctx=-1, parallel=0, nonsense=1), 400, "invalid_override")
        assert len(error["detail"]) == 3

    def test_a_refused_one_leaves_the_running_worker_alone(self, site):
        pid = site.post("/v1/admin/models/chat/load").json()["worker"]["pid"]
        refused(self.load(site, parallel=0), 400, "invalid_override")
        assert pid == site.model("chat")["worker"]["pid"]

    @pytest.mark.parametrize("body", [b"{", b"[]", b'{"overrides": 3}', b'{"override": {}}'])
    def test_a_body_that_is_none_is_refused(self, site, body):
        assert site.post("/v1/admin/models/chat/load", content=body).status_code == 400

    def test_a_load_that_fails_says_why(self, site):
        error = refused(site.post("/v1/admin/models/broken/load"), 503, "load_failed")
        assert any("nonsense" in line for line in error["detail"])


class TestPin:
    """A pin is live: it keeps a model where it is until it is taken away."""

    def test_prevents_eviction(self, site):
        site.post("/v1/admin/models/big/load")
        assert site.post("/v1/admin/models/big/pin", json={"pin": True}).json()["pin"] is True
        refused(site.chat("huge"), 503, "insufficient_memory")
        assert site.model("big")["state"] == "ready"
        site.post("/v1/admin/models/big/pin", json={"pin": False})
        assert site.chat("huge").status_code == 200
        assert site.wait_state("big", "stopped")["state"] == "stopped"

    @pytest.mark.parametrize("body", [{}, {"pin": "yes"}, {"pin": True, "more": 1}])
    def test_says_what_it_takes(self, site, body):
        assert site.post("/v1/admin/models/big/pin", json=body).status_code == 400

    def test_an_unknown_model(self, site):
        refused(site.post("/v1/admin/models/bgi/pin", json={"pin": True}), 404, "model_not_found")


class TestModalities:
    """An image for a model that sees nothing is refused before the model is loaded for it."""

    IMAGE = "data:image/png;base64,iVBORw0KGgo="

    def chat(self, site, model: str, part: dict) -> httpx.Response:
        return site.post(
            "/v1/chat/completions", json={"model": model, "messages": [{"role": "user", "content": [part]}]}
        )

    def test_is_refused(self, site):
        site.post("/v1/admin/models/chat/unload")
        part = {"type": "image_url", "image_url": {"url": self.IMAGE}}
        error = refused(self.chat(site, "quick", part), 400, "modality_unsupported")
        assert error["message"] == "Could not process image: quick takes text, no images. Models that see: seer."
        assert site.model("chat")["state"] == "stopped"

    def test_is_refused_in_responses(self, site):
        part = {"type": "input_image", "image_url": self.IMAGE}
        body = {"model": "blind", "input": [{"role": "user", "content": [part]}]}
        refused(site.post("/v1/responses", json=body), 400, "modality_unsupported")

    def test_words_about_images_are_no_image(self, site):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"image_url": {}}}}}]
        assert site.chat("blind", text='"image_url"', tools=tools).status_code == 200

    def test_a_model_of_which_nothing_is_known_decides_itself(self, site):
        part = {"type": "image_url", "image_url": {"url": self.IMAGE}}
        assert self.chat(site, "slow", part).status_code == 200

    def test_a_model_that_sees_gets_it(self, site):
        picture = "data:image/png;base64," + PNG
        part = {"type": "image_url", "image_url": {"url": picture}}
        told = self.chat(site, "seer", part)
        assert "modality_unsupported" not in told.text
        wait_until(lambda: site.model("seer")["state"] == "ready", what="it was loaded for the picture")


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_memory_is_told_per_device_and_model(site):
    site.post("/v1/admin/models/chat/load")
    assert tiny.ANSWER in site.chat("quick").text
    wait_until(lambda: site.model("chat")["memory"]["measured_mib"], what="its memory was measured")
    view = site.get("/v1/admin/gpu-memory").json()
    (device,) = view["devices"]
    model = next(model for model in view["models"] if model["name"] == "chat")
    assert device["total_mib"] >= device["free_mib"] >= 0
    assert "outside_mib" in device
    assert {"mib", "source", "detail"} == model["estimate"].keys()
    assert model["estimate"]["source"] == "computed"
    assert model["measured_mib"] > 0
    assert model["lease_mib"] > 0
    assert device["id"] in model["need"]
