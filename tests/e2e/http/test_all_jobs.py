"""Jobs of all kinds as operators see them: `GET /v1/admin/jobs` and `llmux jobs`, with real workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.shell import Shell

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
SLOW = ("--start-delay", "60", "--log-text", "Loading shards:  40%|####      | 2/5")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Daemon]:
    models = {"plain": fake(), "slow": fake("--delay", "60"), "loading": fake(*SLOW)}
    with running(tmp_path_factory.mktemp("all-jobs"), {"models": models}) as daemon:
        yield daemon


def submit(site: Daemon, model: str) -> str:
    body = {"model": model, "messages": MESSAGES}
    return site.post("/v1/jobs", json={"endpoint": CHAT, "body": body}).json()["id"]


def begin(site: Daemon, *lines: str) -> str:
    """A batch of these lines."""
    content = "\n".join(lines).encode()
    file = site.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()["id"]
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    return site.post("/v1/batches", json=asked).json()["id"]


def line(model: str) -> str:
    body = {"model": model, "messages": MESSAGES}
    return json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})


def job(site: Daemon, job_id: str) -> dict[str, Any]:
    return site.get(f"/v1/admin/jobs/{job_id}").json()


def listed(site: Daemon, **query: Any) -> list[dict[str, Any]]:
    return site.get("/v1/admin/jobs", params=query).json()["data"]


def ended(site: Daemon, job_id: str) -> dict[str, Any]:
    return wait_until(lambda: (found := job(site, job_id))["ended_at"] and found, what=f"{job_id} ends")


def test_one_that_completed(site):
    for job_id in (submit(site, "plain"), begin(site, line("plain"))):
        found = ended(site, job_id)
        assert (found["state"], found["progress"], found["eta_s"], found["message"]) == ("completed", 1.0, None, None)
        assert site.get(found["details"]).status_code == 200
        assert site.get(found["result"]).status_code == 200
    (load,) = listed(site, kind="load", model="plain")
    assert (load["state"], load["progress"], load["message"][:9]) == ("completed", 1.0, "loaded in")


def test_a_batch_says_why_it_was_refused(site):
    found = ended(site, begin(site, "nonsense"))
    assert (found["state"], found["progress"]) == ("failed", None)
    assert found["message"] == site.get(found["details"]).json()["errors"]["data"][0]["message"]


def test_a_load_that_is_cancelled_says_so(site):
    """Also where its worker had said something."""
    job_id = submit(site, "loading")
    (load,) = wait_until(lambda: listed(site, kind="load", state="running", model="loading"))
    wait_until(
        lambda: "Loading shards" in (job(site, load["id"])["message"] or ""), what="its worker says how far it is"
    )
    cancelled = site.post(f"/v1/admin/jobs/{load['id']}/cancel").json()
    assert (cancelled["state"], cancelled["message"]) == ("cancelled", "load cancelled by an operator")
    site.post(f"/v1/admin/jobs/{job_id}/cancel").raise_for_status()  # else it asks for another load
    again = site.post(f"/v1/admin/jobs/{load['id']}/cancel")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "job_ended")


def test_lines_are_listed_only_when_asked_for(site):
    batch = begin(site, line("slow"))
    (found,) = wait_until(lambda: listed(site, kind="line", state="running"))
    assert found["details"] == f"/v1/batches/{batch}"
    assert found["id"] not in [each["id"] for each in listed(site)]
    site.post(f"/v1/admin/jobs/{batch}/cancel").raise_for_status()
    assert ended(site, batch)["state"] == "cancelled"
    assert site.get(f"/v1/admin/jobs/{found['id']}").status_code == 404


def test_those_that_run_come_first(site):
    older, newer = submit(site, "slow"), submit(site, "plain")
    wait_until(lambda: job(site, older)["state"] == "running", what=f"{older} runs")
    ended(site, newer)
    assert [each["id"] for each in listed(site, kind="inference", limit=2)] == [older, newer]
    site.post(f"/v1/admin/jobs/{older}/cancel").raise_for_status()


def test_has_more(site):
    answer = site.get("/v1/admin/jobs", params={"limit": 1}).json()
    assert (len(answer["data"]), answer["has_more"]) == (1, True)
    answer = site.get("/v1/admin/jobs").json()
    assert answer["has_more"] is False
    assert site.get("/v1/admin/jobs", params={"limit": len(answer["data"])}).json() == answer


def test_commands(site, tmp_path):
    llmux = Shell(tmp_path, site.url)
    quick, slow = submit(site, "plain"), submit(site, "slow")
    waited = llmux("jobs", "wait", quick)
    assert (waited.returncode, waited.stdout) == (0, f"{quick} is completed\n")
    shown = json.loads(llmux("jobs", "list", "--kind", "inference", "--limit", "2", "--json").stdout)
    assert [each["id"] for each in shown["data"]] == [slow, quick]
    assert llmux("jobs", "show", slow).stdout.startswith("id ")
    assert llmux("jobs", "cancel", slow).stdout == f"{slow} is cancelled.\n"
    assert llmux("jobs", "wait", slow).returncode == 1
    assert llmux("jobs", "cancel", slow).returncode != 0
    assert llmux("jobs", "wait", "nope").returncode == 4
