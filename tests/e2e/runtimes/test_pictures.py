"""Pictures through the daemon, by a real pipeline: how far they are can be seen, and what nobody wants any more is not drawn."""

from __future__ import annotations

import threading

import httpx
import pytest

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
