"""llama.cpp's model management at the root, with the calls Open WebUI makes for that provider."""

from __future__ import annotations

import pytest

from supervisor.catalog.keys import Scope, new_key
from tests.e2e.admin.conftest import listening, loading
from tests.e2e.admin.conftest import site as site  # a fixture
from tests.support.daemon import fake, running, wait_until


def statuses(site) -> dict[str, str]:
    """As Open WebUI reads them: `data[].id`, `data[].status.value`."""
    data = site.get("/models").json()["data"]
    return {entry["id"]: entry["status"]["value"] for entry in data}


class TestOpenWebUi:
    """List, load, watch, chat, eject: the provider's whole round."""

    def test_its_round(self, site):
        site.post("/models/unload", json={"model": "quick"})
        wait_until(lambda: statuses(site)["quick"] == "unloaded", what="it begins unloaded")
        with listening(site, "/models/sse") as listener:
            assert site.post("/models/load", json={"model": "quick"}).json() == {"success": True}
            listener.wait("message", lambda e: (e["model"], e["data"]["status"]) == ("quick", "loaded"))
            assert statuses(site)["quick"] == "loaded"
            assert site.chat("quick").status_code == 200
            assert site.post("/models/unload", json={"model": "quick"}).json() == {"success": True}
            listener.wait(
                "message",
                lambda e: (e["model"], e["event"]) == ("quick", "status_change") and e["data"]["status"] == "unloaded",
            )
        changes = [e["data"]["status"] for e in listener.of("message") if e["model"] == "quick"]
        assert changes == ["unloaded", "loading", "loaded", "unloaded"]
        wait_until(lambda: statuses(site)["quick"] == "unloaded", what="it ends unloaded")

    def test_its_page_of_models_sends_a_field_for_another_server(self, site):
        site.post("/v1/admin/models/chat/load")
        ejected = site.post("/models/unload", json={"model": "quick", "instance_id": "quick"})
        assert ejected.json() == {"success": True}
        wait_until(lambda: statuses(site)["quick"] == "unloaded", what="it is unloaded")

    def test_virtual_models_of_one_model_share_its_state(self, site):
        site.post("/v1/admin/models/chat/load")
        found = statuses(site)
        assert (found["quick"], found["talk"]) == ("loaded", "loaded")
        assert "chat" not in found, "the list has the public names"

    def test_loading_is_said_while_it_loads(self, site):
        with loading(site):
            assert statuses(site)["slow"] == "loading"
        wait_until(lambda: statuses(site)["slow"] == "loaded", what="it is loaded")

    def test_a_failed_one_says_what_it_died_of(self, site):
        site.post("/models/load", json={"model": "broken"})
        wait_until(lambda: statuses(site)["broken"] == "failed", what="it failed")
        entry = next(e for e in site.get("/models").json()["data"] if e["id"] == "broken")
        assert (entry["status"]["failed"], entry["status"]["exit_code"]) == (True, 1)

    def test_the_openai_list_has_the_same_status(self, site):
        by_name = {entry["id"]: entry["status"]["value"] for entry in site.get("/v1/models").json()["data"]}
        assert statuses(site) == by_name

    @pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
    def test_what_it_refuses(self, site, path):
        assert site.post(path, json={"model": "nobody"}).status_code == 404
        assert site.post(path, json={}).status_code == 400
        assert site.get(path).status_code == 405


def test_looking_needs_inference_and_changing_needs_admin(tmp_path):
    user, user_entry = new_key("user", [Scope.INFERENCE])
    admin, admin_entry = new_key("admin", [Scope.ADMIN])
    (tmp_path / "keys.yaml").write_text(str([user_entry, admin_entry]).replace("'", '"'))
    config = {"models": {"a": fake()}, "server": {"api_keys": str(tmp_path / "keys.yaml")}}
    with running(tmp_path, config) as daemon:

        def status(method: str, path: str, secret: str) -> int:
            with daemon.client(headers={"authorization": f"Bearer {secret}"}) as client:
                return client.request(method, path, json={"model": "a"} if method == "POST" else None).status_code

        assert (status("GET", "/models", user), status("GET", "/models", admin)) == (200, 403)
        assert (status("POST", "/models/load", user), status("POST", "/models/load", admin)) == (403, 200)
        assert (status("GET", "/v1/admin/requests", user), status("GET", "/v1/admin/requests", admin)) == (403, 200)
        assert daemon.post("/models/unload", json={"model": "a"}).status_code == 401
