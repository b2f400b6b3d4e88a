"""Pictures through the daemon, by a real pipeline: how far they are can be seen, and what nobody wants any more is not drawn."""

from __future__ import annotations

import os
import threading
import time

import httpx
import pytest
from PIL import ImageChops

from tests.e2e.admin.conftest import listening
from tests.support import environments, tiny_pictures
from tests.support.daemon import Daemon, running, wait_until
from tests.support.tiny_pictures import opened

PATH = "/v1/images/generations"
SMALL = {"model": "painter", "prompt": "a cat", "size": "64x64", "steps": 3, "seed": 1}
LONG = {**SMALL, "steps": 200, "n": 10}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    environments.installed("diffusers")
    painter = {"runtime": "diffusers", "path": str(tiny_pictures.model()), "threads": 1, "max_pixels": 1 << 16}
    with running(tmp_path_factory.mktemp("pictures"), {"models": {"painter": painter}}) as started:
        assert started.post(PATH, json=SMALL).status_code == 200  # loaded
        yield started


def submit(daemon: Daemon, **body: object) -> str:
    answer = daemon.post("/v1/jobs", json={"endpoint": PATH, "body": {**LONG, **body}})
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def job(daemon: Daemon, name: str) -> dict:
    return daemon.get(f"/v1/jobs/{name}").json()


def is_free(daemon: Daemon) -> bool:
    return daemon.model("painter")["in_flight"] == 0


def stepping(daemon: Daemon, name: str) -> dict:
    """A job that is being drawn."""
    return wait_until(
        lambda: (found := job(daemon, name))["progress"] and found["progress"]["step"] and found,
        what="the job's steps are told",
    )


class TestProgress:
    """Steps are told in jobs, in requests and as events; only those of requests that are made in steps."""

    def test_of_a_job_and_its_request_until_it_is_cancelled(self, daemon):
        name = submit(daemon)
        found = stepping(daemon, name)["progress"]
        assert found["steps"] == 2000
        wait_until(lambda: job(daemon, name)["progress"]["step"] > found["step"], what="it goes on")
        request = daemon.get(f"/v1/admin/requests/{found['request_id']}").json()
        assert request["progress"]["steps"] == 2000
        (listed,) = daemon.get("/v1/admin/requests").json()["data"]
        assert listed["progress"]["step"] >= request["progress"]["step"]
        assert daemon.post(f"/v1/jobs/{name}/cancel").json()["status"] == "cancelled"
        assert daemon.post(PATH, json=SMALL).status_code == 200  # its turn comes at once, not after 2000 steps
        ended = daemon.get(f"/v1/admin/requests/{found['request_id']}").json()
        assert (ended["state"], ended["progress"]) == ("finished", None)

    def test_as_events(self, daemon):
        with listening(daemon, "/v1/admin/events?types=progress") as listener:
            name = submit(daemon)
            first = listener.wait("progress", lambda told: told["step"] > 0)
            listener.wait("progress", lambda told: told["step"] > first["step"])
            daemon.post(f"/v1/jobs/{name}/cancel")
        assert (first["model"], first["steps"]) == ("painter", 2000)

    def test_in_the_events_of_a_job(self, daemon):
        name = submit(daemon)
        with httpx.stream("GET", f"{daemon.url}/v1/jobs/{name}/events", trust_env=False, timeout=60) as events:
            assert any('"steps":2000' in line for line in events.iter_lines())
        daemon.post(f"/v1/jobs/{name}/cancel")

    def test_a_job_that_is_left_alone_has_its_picture(self, daemon):
        name = submit(daemon, n=1, steps=3)
        wait_until(lambda: job(daemon, name)["status"] == "completed", what="the job ends")
        result = daemon.get(f"/v1/jobs/{name}/result").json()
        assert opened(result["data"][0]["b64_json"]).size == (64, 64)


class TestCancelling:
    """Nobody has to wait for a picture that nobody wants."""

    def test_by_an_operator(self, daemon):
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(daemon.post(PATH, json=LONG)))
        asking.start()
        (request,) = wait_until(
            lambda: [
                request
                for request in daemon.get("/v1/admin/requests").json()["data"]
                if request["progress"] is not None
            ],
            what="its steps are told",
        )
        with daemon.client() as client:
            assert client.delete(f"/v1/admin/requests/{request['id']}").json()["cancelled"]
        asking.join()
        assert answers[0].status_code >= 400
        wait_until(lambda: is_free(daemon), what="the model is free")
        assert daemon.post(PATH, json=SMALL).status_code == 200


class TestAddresses:
    """A picture may be had by address: without a key, for a while, and by nobody who wasn't told."""

    def ask(self, daemon: Daemon, **fields: object) -> dict:
        answer = daemon.post(PATH, json={**SMALL, "response_format": "url", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def test_it_is_the_picture(self, daemon):
        (item,) = self.ask(daemon)["data"]
        assert item.keys() == {"url", "seed"}
        assert item["url"].startswith(f"{daemon.url}/v1/images/files/")
        picture = httpx.get(item["url"], trust_env=False)
        assert picture.headers["content-type"] == "image/png"
        (same,) = daemon.post(PATH, json=SMALL).json()["data"]
        assert ImageChops.difference(opened(picture.content), opened(same["b64_json"])).getbbox() is None

    def test_each_of_several_in_its_format(self, daemon):
        answer = self.ask(daemon, n=2, output_format="webp")
        pictures = [httpx.get(item["url"], trust_env=False) for item in answer["data"]]
        assert [picture.headers["content-type"] for picture in pictures] == ["image/webp"] * 2
        assert pictures[0].content != pictures[1].content
        assert answer["usage"]["output_tokens"] == 32

    def test_of_a_form(self, daemon):
        data = {"model": "painter", "prompt": "a hat", "steps": "3", "response_format": "url"}
        files = {"image": ("a.png", tiny_pictures.png())}
        (item,) = daemon.post("/v1/images/edits", data=data, files=files).json()["data"]
        assert opened(httpx.get(item["url"], trust_env=False).content).size == (64, 64)

    def test_of_a_job_it_is_a_path(self, daemon):
        name = submit(daemon, n=1, steps=3, response_format="url")
        wait_until(lambda: job(daemon, name)["status"] == "completed", what="the job ends")
        (item,) = daemon.get(f"/v1/jobs/{name}/result").json()["data"]
        assert daemon.get(item["url"]).headers["content-type"] == "image/png"

    @pytest.mark.parametrize("name", ["none.png", "a" * 43 + ".png", "..%2F..%2Fllmux.yaml", "%2e%2e"])
    def test_other_names_are_not_found(self, daemon, name):
        assert daemon.get(f"/v1/images/files/{name}").status_code == 404


def max_age(daemon: Daemon, path: str) -> int:
    answer = daemon.get(path)
    assert answer.status_code == 200
    private, _, seconds = answer.headers["cache-control"].partition(", max-age=")
    assert private == "private"
    return int(seconds)


def test_addresses_end_with_their_time_and_with_the_daemon(tmp_path):
    """They are behind no key, begin as configured, and their files are gone when they should be."""
    environments.installed("diffusers")
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - name: one\n    key: sk-one-0123456789abcdef\n    scopes: [inference, admin]\n")
    painter = {"runtime": "diffusers", "path": str(tiny_pictures.model()), "threads": 1, "max_pixels": 1 << 16}
    config = {
        "models": {"painter": painter},
        "server": {"api_keys": str(keys), "public_url": "https://llm.example.org/ai"},
        "limits": {"pictures_keep_s": 60},
    }
    headers = {"authorization": "Bearer sk-one-0123456789abcdef"}
    body = {**SMALL, "response_format": "url"}
    with running(tmp_path, config) as daemon:
        (item,) = daemon.post(PATH, json=body, headers=headers).json()["data"]
        prefix, slash, name = item["url"].partition("/v1/images/files/")
        assert prefix == "https://llm.example.org/ai"
        path = slash + name
        assert 0 < max_age(daemon, path) <= 60
        assert daemon.get("/v1/models").status_code == 401
        (file,) = (daemon.state_dir / "pictures").iterdir()
        os.utime(file, (time.time() - 50,) * 2)
        assert max_age(daemon, path) <= 10  # no client shows it for longer
        os.utime(file, (0, 0))
        assert daemon.get(path).json()["error"]["code"] == "picture_not_found"
        daemon.post(PATH, json=body, headers=headers)
        assert file not in [*(daemon.state_dir / "pictures").iterdir()]
        daemon.stop()
        assert not [*(daemon.state_dir / "pictures").iterdir()]
