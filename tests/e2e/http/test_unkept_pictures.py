"""A daemon that keeps no pictures: who wants their addresses is told before a worker has anything to do."""

from __future__ import annotations

import pytest

from tests.support.daemon import fake, running, wait_until

GENERATIONS, EDITS, VARIATIONS = PATHS = [f"/v1/images/{what}" for what in ("generations", "edits", "variations")]
FILES = {"image": ("a.png", b"a picture")}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """The worker sends back what it got."""
    config = {
        "models": {"painter": fake(type="image", endpoints=PATHS)},
        "virtual_models": {
            "linking": {"model": "painter", "defaults": {"response_format": "url"}},
            "showing": {"model": "painter", "force": {"response_format": "b64_json"}},
        },
        "limits": {"pictures_mib": 0},
    }
    with running(tmp_path_factory.mktemp("unkept"), config) as started:
        yield started


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (GENERATIONS, {"json": {"model": "painter", "prompt": "a cat", "response_format": "url"}}),
        (GENERATIONS, {"json": {"model": "linking", "prompt": "a cat"}}),
        (EDITS, {"data": {"model": "painter", "prompt": "a hat", "response_format": "url"}, "files": FILES}),
        (EDITS, {"data": {"model": "linking", "prompt": "a hat"}, "files": FILES}),
        (VARIATIONS, {"data": {"model": "painter", "response_format": "url"}, "files": FILES}),
        ("/images/variations", {"data": {"model": "painter", "response_format": "url"}, "files": FILES}),
    ],
    ids=["JSON", "JSON by default", "a form", "a form by default", "another form", "a bare path"],
)
def test_the_wish_is_refused_and_no_worker_started(daemon, path, sent):
    answer = daemon.post(path, **sent)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "limits.pictures_mib" in answer.json()["error"]["message"]
    assert daemon.workers() == []


def test_a_job_with_the_wish_fails_and_no_worker_started(daemon):
    body = {"model": "painter", "prompt": "a cat", "response_format": "url"}
    name = daemon.post("/v1/jobs", json={"endpoint": GENERATIONS, "body": body}).json()["id"]
    job = wait_until(
        lambda: (found := daemon.get(f"/v1/jobs/{name}").json())["status"] == "failed" and found, what="the job fails"
    )
    assert "limits.pictures_mib" in job["error"]["message"]
    assert daemon.workers() == []


@pytest.mark.parametrize(
    ("model", "wish"), [("showing", "url"), ("linking", "b64_json")], ids=["as configured", "as asked"]
)
def test_a_wish_for_pictures_reaches_the_worker(daemon, model, wish):
    answer = daemon.post(GENERATIONS, json={"model": model, "prompt": "a cat", "response_format": wish})
    assert answer.status_code == 200, answer.text
    assert answer.json()["response_format"] == "b64_json"
