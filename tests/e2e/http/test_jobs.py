"""Jobs: requests whose clients don't wait, with real workers: results, failures, cancelling, restarts, and who sees what."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, fake, gguf, running, wait_until
from tests.support.shell import Shell
from tests.support.tiny import ANSWER

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
NOTHING_HELD = 'llmux_body_bytes{where="memory"} 0.0'
MODELS = {
    "chat": gguf(vram_mib=200),
    "slow": fake("--delay", "60"),
    "long": fake("--chunk-bytes", "1000000", "--chunks", "3"),
    "huge": fake("--chunk-bytes", "16000000", "--chunks", "2"),
    "broken": fake("--status", "500"),
    "crash": fake("--exit-code", "1", "--log-text", "unknown model architecture"),
    "ears": fake(endpoints=["/v1/audio/transcriptions"], type="asr"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("jobs"), {"models": MODELS}) as daemon:
        yield daemon


@pytest.fixture
def site(shared) -> Iterator[Daemon]:
    """A daemon without jobs; no test leaves it any."""
    yield shared
    with shared.client() as client:
        for each in client.get("/v1/jobs").json()["data"]:
            client.post(f"/v1/jobs/{each['id']}/cancel")
            client.delete(f"/v1/jobs/{each['id']}").raise_for_status()
    wait_until(lambda: not shared.get("/v1/admin/requests").json()["data"])
    assert not list((shared.state_dir / "jobs").iterdir())


def submit(
    site: Daemon, model: str = "chat", endpoint: str = CHAT, headers: dict[str, str] | None = None, **fields: Any
):
    body = {"model": model, **({"messages": MESSAGES} if endpoint == CHAT else {}), **fields}
    return site.post("/v1/jobs", json={"endpoint": endpoint, "body": body}, headers=headers or {})


def job(site: Daemon, job_id: str, **more: Any) -> dict[str, Any]:
    return site.get(f"/v1/jobs/{job_id}", **more).json()


def ended(site: Daemon, job_id: str) -> dict[str, Any]:
    return wait_until(lambda: (found := job(site, job_id))["ended_at"] and found, what=f"{job_id} ends")


def is_running(site: Daemon, job_id: str) -> bool:
    found = job(site, job_id)
    return found["status"] == "running" and (found["progress"] or {}).get("state") == "running"


def open_in(site: Daemon, folder: Path) -> set[Path]:
    """The files of this folder that the daemon has open."""
    found = set()
    for link in Path(f"/proc/{site.process.pid}/fd").iterdir():
        with suppress(OSError):
            found.add(link.readlink())
    return {path for path in found if path.parent == folder}


class TestMemory:
    """Answers count among the bodies until they are on disk."""

    def test_what_is_on_disk_counts_no_longer(self, site):
        taken = submit(site, "long").json()
        assert ended(site, taken["id"])["result_bytes"] > 2 << 20
        wait_until(lambda: NOTHING_HELD in site.get("/metrics").text)

    def test_a_result_is_sent_as_its_client_reads(self, site):
        """A client that has its head and reads no more: the file is still open."""
        taken = ended(site, submit(site, "huge").json()["id"])
        assert taken["result_bytes"] > 30 << 20
        folder = site.state_dir / "jobs"
        with site.client() as client, client.stream("GET", taken["result"]) as answer:
            assert answer.headers["content-length"] == str(taken["result_bytes"])
            assert open_in(site, folder) == {folder / f"{taken['id']}.result"}
        assert len(site.get(taken["result"]).content) == taken["result_bytes"]
        wait_until(lambda: not open_in(site, folder))

    def test_an_answer_that_never_fits(self, tmp_path):
        with running(tmp_path, {"models": MODELS, "limits": {"bodies_mib": 1, "body_mib": 1}}) as site:
            found = ended(site, submit(site, "long").json()["id"])
            assert (found["status"], found["tries"]) == ("failed", 1)
            assert "limits.body_mib" in found["error"]["message"]
            assert NOTHING_HELD in site.get("/metrics").text


class TestResult:
    def test_of_a_real_model(self, site):
        taken = submit(site, max_tokens=20)
        assert (taken.status_code, taken.json()["object"], taken.json()["model"]) == (202, "job", "chat")
        found = ended(site, taken.headers["location"].rpartition("/")[2])
        assert (found["status"], found["error"], found["tries"]) == ("completed", None, 1)
        result = site.get(found["result"])
        assert result.json()["choices"][0]["message"]["content"] == ANSWER
        assert (result.headers["content-type"], len(result.content)) == (
            "application/json; charset=utf-8",
            found["result_bytes"],
        )

    def test_of_an_api_that_streams_unless_told(self, site):
        found = ended(site, submit(site, "chat:latest", "/api/chat", messages=MESSAGES).json()["id"])
        assert (found["status"], found["content_type"]) == ("completed", "application/json")
        assert site.get(found["result"]).json()["done"] is True

    @pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/audio/transcriptions"])
    def test_a_file_goes_as_a_form(self, site, path):
        sound = "data:audio/wav;base64," + base64.b64encode(b"RIFF....").decode()
        found = ended(site, submit(site, "ears", path, file=sound, language="de").json()["id"])
        assert found["status"] == "completed"
        assert site.get(found["result"]).content.startswith(b"--"), "the form, which it sends back"

    def test_a_large_body_arrives_whole(self, site):
        taken = submit(site, messages=[{"role": "user", "content": "x" * 300_000 + " \u00e4"}], max_tokens=1).json()
        found = ended(site, taken["id"])
        assert found["error"]["code"] == "context_length_exceeded"

    def test_none_before_the_end(self, site):
        taken = submit(site, "slow").json()
        refused = site.get(f"/v1/jobs/{taken['id']}/result")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "job_not_completed")


class TestFailure:
    @pytest.mark.parametrize(("model", "status"), [("broken", "failed"), ("crash", "failed")])
    def test_it_tells_why(self, site, model, status):
        found = ended(site, submit(site, model).json()["id"])
        assert (found["status"], found["result"]) == (status, None)
        assert found["error"]["message"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({}, "endpoint"),
            ({"endpoint": 5, "body": {}}, "endpoint"),
            ({"endpoint": "/v1/admin/models", "body": {}}, "endpoint"),
            ({"endpoint": "/v1/jobs", "body": {}}, "endpoint"),
            ({"endpoint": "/v1/models/load", "body": {"modelId": "chat"}}, "endpoint"),
            ({"endpoint": "/v1/identity/shoot", "body": {}}, "endpoint"),
            ({"endpoint": CHAT}, "body"),
            ({"endpoint": CHAT, "body": []}, "body"),
            ({"endpoint": CHAT, "body": {"model": "chat", "stream": True}}, "body.stream"),
            ({"endpoint": CHAT, "body": {}, "when": "later"}, "when"),
            ({"endpoint": "/v1/responses", "body": {"model": "chat", "input": "a", "background": True}}, "body"),
            ({"endpoint": "/api/generate", "body": {"model": "chat", "keep_alive": 0}}, "body"),
        ],
    )
    def test_what_is_no_job_is_refused_at_once(self, site, fields, param):
        refused = site.post("/v1/jobs", json=fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    def test_an_unknown_model_is_refused_at_once(self, site):
        assert submit(site, "nobody").json()["error"]["code"] == "model_not_found"

    def test_a_file_that_is_none(self, site):
        taken = submit(site, "ears", "/v1/audio/transcriptions", file="data:audio/wav;base64,!").json()
        assert ended(site, taken["id"])["error"]["param"] == "file"

    def test_an_unknown_state(self, site):
        assert site.get("/v1/jobs", params={"status": "done"}).json()["error"]["param"] == "status"

    def test_an_unknown_job(self, site):
        assert site.get("/v1/jobs/job_0").json()["error"]["code"] == "job_not_found"


class TestWaiting:
    def test_so_many_run_and_so_many_wait(self, tmp_path):
        config = {"models": MODELS, "limits": {"jobs_running": 1, "jobs_waiting": 1}}
        with running(tmp_path, config) as site:
            first, second = (submit(site, "slow").json()["id"] for _ in range(2))
            third = submit(site, "slow")
            assert (third.status_code, third.json()["error"]["code"]) == (503, "queue_full")
            wait_until(lambda: is_running(site, first))
            assert job(site, second)["status"] == "queued"
            site.post(f"/v1/jobs/{first}/cancel")
            wait_until(lambda: is_running(site, second))

    def test_what_is_refused_for_now_is_tried_again(self, tmp_path):
        config = {"models": {"slow": fake("--delay", "2", target_inflight=1)}, "limits": {"queue_per_model": 1}}
        with running(tmp_path, config) as site:
            jobs = [submit(site, "slow").json()["id"] for _ in range(3)]
            found = [ended(site, each) for each in jobs]
            assert [each["status"] for each in found] == ["completed"] * 3
            assert max(each["tries"] for each in found) > 1

    def test_a_cancelled_one_leaves_its_worker(self, site):
        taken = submit(site, "slow").json()["id"]
        wait_until(lambda: is_running(site, taken))
        assert site.post(f"/v1/jobs/{taken}/cancel").json()["status"] == "cancelled"
        wait_until(lambda: not site.get("/v1/admin/requests").json()["data"])

    def test_events_until_it_is_over(self, site):
        taken = submit(site).json()["id"]
        with site.client() as client, client.stream("GET", f"/v1/jobs/{taken}/events") as events:
            told = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
        assert told[-1]["status"] == "completed"
        assert len({json.dumps(each) for each in told}) == len(told)


class TestRestart:
    @pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
    def test_what_ran_is_run_again(self, tmp_path, how):
        models = {"chat": gguf(vram_mib=200), "wait": fake("--hang-while", str(tmp_path / "hang"))}
        (tmp_path / "hang").touch()
        with running(tmp_path, {"models": models, "limits": {"drain_s": 0}}) as site:
            done, waits = submit(site).json()["id"], submit(site, "wait").json()["id"]
            before = ended(site, done)
            wait_until(lambda: is_running(site, waits))
            assert site.process is not None
            site.process.send_signal(how)
            site.process.wait(60)
            (tmp_path / "hang").unlink()
            site.start()
            assert job(site, done) == before
            assert site.get(f"/v1/jobs/{done}/result").json()["choices"][0]["message"]["content"] == ANSWER
            assert ended(site, waits)["status"] == "completed"


class TestKept:
    def test_not_longer_than_configured(self, tmp_path):
        with running(tmp_path, {"models": MODELS, "limits": {"jobs_keep_s": 1}}) as site:
            taken = submit(site).json()["id"]
            wait_until(lambda: site.get(f"/v1/jobs/{taken}").status_code == 404)
            assert not list((site.state_dir / "jobs").iterdir())

    def test_a_removed_one_is_gone_with_its_files(self, site):
        taken = submit(site).json()["id"]
        ended(site, taken)
        with site.client() as client:
            assert client.delete(f"/v1/jobs/{taken}").json() == {"id": taken, "object": "job", "deleted": True}
        assert site.get(f"/v1/jobs/{taken}").status_code == 404
        assert not list((site.state_dir / "jobs").iterdir())


KEYS = {name: f"sk-secret-of-{name}-0123456789" for name in ("ann", "bob", "op")}


class TestWhose:
    def test_only_its_own_and_for_an_admin_all(self, tmp_path):
        scopes = {"ann": "inference", "bob": "inference", "op": "inference, admin"}
        lines = [f"- {{name: {name}, key: {key}, scopes: [{scopes[name]}]}}\n" for name, key in KEYS.items()]
        (tmp_path / "keys.yaml").write_text("".join(lines))
        config = {"models": MODELS, "server": {"api_keys": str(tmp_path / "keys.yaml")}}
        with running(tmp_path, config) as site:
            ann, bob, op = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
            taken = submit(site, headers=ann).json()["id"]
            url = f"/v1/jobs/{taken}"
            wait_until(lambda: site.get(url, headers=ann).json()["status"] == "completed")
            assert [site.get(url, headers=who).status_code for who in (ann, bob, op)] == [200, 404, 200]
            assert [len(site.get("/v1/jobs", headers=who).json()["data"]) for who in (ann, bob, op)] == [1, 0, 1]
            assert site.get("/v1/jobs").status_code == 401
            assert "ann" in {each["key"] for each in site.get("/v1/admin/requests/ended", headers=op).json()["data"]}

    def test_a_later_key_of_the_same_name_is_another(self, tmp_path):
        keys = tmp_path / "keys.yaml"

        def made(*words: str) -> dict[str, str]:
            shell = Shell(tmp_path, site.url)
            done = shell("keys", *words, "--file", str(keys), "--json")
            assert done.returncode == 0, done.stderr
            assert shell("reload", LLMUX_API_KEY=KEYS["op"]).returncode == 0
            return {"authorization": f"Bearer {json.loads(done.stdout).get('key')}"}

        keys.write_text(f"- {{name: op, key: {KEYS['op']}, scopes: [admin]}}\n- {{name: ann, key: {KEYS['ann']}}}\n")
        with running(tmp_path, {"models": MODELS, "server": {"api_keys": str(keys)}}) as site:
            first = {"authorization": f"Bearer {KEYS['ann']}"}
            taken = submit(site, headers=first).json()["id"]
            url = f"/v1/jobs/{taken}"
            wait_until(lambda: site.get(url, headers=first).json()["status"] == "completed")
            said = site.post("/v1/responses", json={"model": "chat", "input": "Hi"}, headers=first).json()["id"]
            response = f"/v1/responses/{said}"
            assert site.get(response, headers=first).status_code == 200
            heir = made("add", "ann", "--replaces")
            assert [site.get(url, headers=who).status_code for who in (first, heir)] == [401, 200]
            assert [site.get(response, headers=who).status_code for who in (first, heir)] == [401, 200]
            made("revoke", "ann")
            stranger = made("add", "ann")
            assert [site.get(url, headers=who).status_code for who in (heir, stranger)] == [401, 404]
            assert site.get(response, headers=stranger).status_code == 404
            assert site.get("/v1/jobs", headers=stranger).json()["data"] == []

    def test_not_for_a_key_that_allows_it_no_longer(self, tmp_path):
        def write(scope: str) -> None:
            keys = tmp_path / "keys.yaml"
            scopes = {"ann": scope, "op": "inference, admin"}
            lines = [f"- {{name: {name}, key: {KEYS[name]}, scopes: [{each}]}}\n" for name, each in scopes.items()]
            keys.write_text("".join(lines))

        write("inference")
        (tmp_path / "hang").touch()
        models = {"wait": fake("--hang-while", str(tmp_path / "hang"))}
        config = {"models": models, "server": {"api_keys": str(tmp_path / "keys.yaml")}, "limits": {"drain_s": 0}}
        with running(tmp_path, config) as site:
            ann, op = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("ann", "op"))
            taken = submit(site, "wait", headers=ann).json()["id"]
            site.stop()
            write("admin")
            site.start()
            url = f"/v1/jobs/{taken}"
            found = wait_until(lambda: (told := site.get(url, headers=op).json())["ended_at"] and told)
            assert (found["status"], found["error"]["code"]) == ("failed", "invalid_api_key")
