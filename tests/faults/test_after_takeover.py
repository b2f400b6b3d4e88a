"""A daemon that was succeeded keeps nobody from starting anew, however long its own clients stay."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.faults.test_takeover import Upgraded
from tests.support.daemon import Daemon, fake, wait_until
from tests.support.limits import LIMIT_S


def test_a_successor_that_died_is_replaced_while_the_old_daemon_sees_its_clients_out(tmp_path):
    old = Upgraded(tmp_path, {"models": {"chat": fake()}}).start()
    anew = Daemon(tmp_path, old.config)
    anew.port = old.port
    try:
        with old.client() as client:  # this connection stays open
            client.get("/health").raise_for_status()
            os.kill(old.upgrade(), signal.SIGKILL)
            wait_until(lambda: not old.successors(), what="the successor is dead")
            anew.start()
            assert old.process is not None
            assert old.process.poll() is None
            assert anew.chat("chat").status_code == 200
    finally:
        anew.stop()
        old.end()


class Clumsy(Upgraded):
    program = ("-m", "tests.support.faulty_daemon", "clumsy")


def test_a_mistake_after_the_last_step_ends_nobody(tmp_path):
    """The successor has everything by then: nothing may be undone."""
    old = Clumsy(tmp_path, {"models": {"chat": fake()}}).start()
    try:
        assert old.chat("chat").status_code == 200
        worker = old.model("chat")["worker"]["pid"]
        assert old.upgrade() in old.successors()
        assert old.chat("chat").status_code == 200
        assert old.model("chat")["worker"]["pid"] == worker
        assert "a mistake after the last step" in old.log_text()
    finally:
        old.end()


def test_batches_go_on(tmp_path):
    """The successor goes on with a batch: no line that is done is sent again, and none is lost."""
    hang = tmp_path / "hang"
    hang.touch()
    came = tmp_path / "came"
    models = {"chat": fake("--ids-to", str(came)), "wait": fake("--hang-while", str(hang))}
    chat = "/v1/chat/completions"
    old = Upgraded(tmp_path, {"models": models}).start()

    def line(name: str) -> str:
        body = {"model": name.partition("-")[0], "messages": [{"role": "user", "content": "Hello"}]}
        return json.dumps({"custom_id": name, "method": "POST", "url": chat, "body": body})

    def found() -> dict[str, Any]:
        return old.get(f"/v1/batches/{batch}").json()

    try:
        names = [f"{model}-{at}" for at in range(5) for model in ("wait", "chat")]
        sent = "\n".join(map(line, names)).encode()
        file = old.post("/v1/files", data={"purpose": "batch"}, files={"file": sent}).json()["id"]
        asked = {"input_file_id": file, "endpoint": chat, "completion_window": "24h"}
        batch = old.post("/v1/batches", json=asked).json()["id"]
        wait_until(lambda: found()["request_counts"] == {"total": 10, "completed": 5, "failed": 0})
        old.upgrade()
        hang.unlink()
        wait_until(lambda: found()["status"] == "completed")
        lines = old.get(f"/v1/files/{found()['output_file_id']}/content").text.splitlines()
        assert sorted(json.loads(each)["custom_id"] for each in lines) == sorted(names)
        assert len(came.read_text().split()) == 5
        assert old.post("/v1/files", data={"purpose": "batch"}, files={"file": sent}).status_code == 200
    finally:
        old.end()


def test_files_come_to_the_successor(tmp_path):
    """Over a connection that the old daemon still has: small ones at once, large ones with the next connection."""
    old = Upgraded(tmp_path, {"models": {"chat": fake()}, "limits": {"body_mib": 1}}).start()

    def upload(client: httpx.Client, size: int) -> httpx.Response:
        return client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x" * size})

    try:
        with old.client() as one, old.client() as other:
            for client in (one, other):
                client.get("/health").raise_for_status()
            old.upgrade()
            small, refused, large = upload(one, 1000), upload(other, 3 << 20), upload(other, 3 << 20)
            assert (small.status_code, refused.status_code, large.status_code) == (200, 503, 200)
            assert refused.headers["retry-after"] == "1"
            kept = {each["bytes"] for each in old.get("/v1/files").json()["data"]}
            assert kept == {1000, 3 << 20}
    finally:
        old.end()


def test_jobs_go_on(tmp_path):
    """What ran is run again by the successor, what waited waits there, and what is made meanwhile is lost by nobody."""
    hang = tmp_path / "hang"
    hang.touch()
    came = tmp_path / "came"
    models = {"chat": fake(), "wait": fake("--hang-while", str(hang), "--ids-to", str(came))}
    old = Upgraded(tmp_path, {"models": models, "limits": {"jobs_running": 2}}).start()

    def submit(model: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
        told = old.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body})
        assert told.status_code == 202, told.text
        return told.json()["id"]

    def state(job: str) -> str:
        return old.get(f"/v1/jobs/{job}").json()["status"]

    try:
        done = submit("chat")
        wait_until(lambda: state(done) == "completed")
        held = [submit("wait") for _ in range(2)]
        wait_until(lambda: {state(job) for job in held} == {"running"})
        wait_until(lambda: came.exists() and len(came.read_text().split()) == 2)
        queued = submit("chat")
        with ThreadPoolExecutor(3) as pool, old.client() as client:
            watching = pool.submit(client.get, f"/v1/jobs/{held[0]}/events")
            made = [pool.submit(submit, "chat") for _ in range(10)]
            old.upgrade()
            hang.unlink()
            jobs = [done, *held, queued, *(each.result() for each in made)]
            assert watching.result(LIMIT_S).status_code == 200, "it ends with the old daemon"
        wait_until(lambda: {state(job) for job in jobs} == {"completed"})
        assert all(old.get(f"/v1/jobs/{job}/result").status_code == 200 for job in jobs)
        assert {path.suffix for path in (old.state_dir / "jobs").iterdir()} == {".result"}
    finally:
        old.end()
