"""Files and batches with real workers: answers, mistakes, limits, restarts, cancelling, expiry, and who sees what."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import tiny
from tests.support.daemon import Daemon, fake, gguf, running, wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
MODELS = {
    "chat": gguf(vram_mib=200),
    "embed": gguf(tiny.model(name="tiny-embed", seed=2), type="embedding", vram_mib=200),
    "plain": fake(),
    "slow": fake("--delay", "60"),
    "broken": fake("--status", "500"),
}
MIB = 1 << 20
OVER = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Daemon]:
    limits = {"body_mib": 1, "files_mib": 2, "batch_lines": 50, "jobs_mib": 8}
    with running(tmp_path_factory.mktemp("batches"), {"models": MODELS, "limits": limits}) as daemon:
        yield daemon


def line(custom_id: object, model: str = "chat", url: str = CHAT, **more: Any) -> str:
    body = {"model": model, "max_tokens": 4, "messages": MESSAGES} if url == CHAT else {"model": model}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body | more})


def upload(site: Daemon, lines: Sequence[str] | bytes, **keys: Any) -> httpx.Response:
    content = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
    return site.post("/v1/files", **(form | keys))


def begin(site: Daemon, lines: Sequence[str] | bytes, endpoint: str = CHAT, window: str = "24h", **keys: Any) -> str:
    file = upload(site, lines, **keys).json()["id"]
    asked = {"input_file_id": file, "endpoint": endpoint, "completion_window": window}
    answer = site.post("/v1/batches", json=asked, **keys)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "validating"
    return answer.json()["id"]


def batch(site: Daemon, batch_id: str, **keys: Any) -> dict[str, Any]:
    return site.get(f"/v1/batches/{batch_id}", **keys).json()


def ended(site: Daemon, batch_id: str, **keys: Any) -> dict[str, Any]:
    return wait_until(
        lambda: (found := batch(site, batch_id, **keys))["status"] in OVER and found, what=f"{batch_id} ends"
    )


def content(site: Daemon, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of an output by their custom ids, none of which is there twice."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in site.get(f"/v1/files/{file_id}/content").text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    assert len({each["id"] for each in lines}) == len(lines)
    return found


def counts(found: dict[str, Any]) -> tuple[int, int, int]:
    said = found["request_counts"]
    return said["total"], said["completed"], said["failed"]


def in_flight(site: Daemon) -> list[dict[str, Any]]:
    return site.get("/v1/admin/requests").json()["data"]


class TestResult:
    def test_each_line_is_answered_or_has_an_error(self, site):
        lines = [*(line(f"ok-{number}") for number in range(12)), "", line("bad", "broken"), line("named-ä\n")]
        lines[0] = "\ufeff" + lines[0]
        found = ended(site, begin(site, lines))
        assert (found["status"], counts(found)) == ("completed", (14, 13, 1))
        answers, errors = content(site, found["output_file_id"]), content(site, found["error_file_id"])
        assert {*answers} == {*(f"ok-{number}" for number in range(12)), "named-ä\n"}
        response = answers["ok-3"]["response"]
        assert (response["status_code"], answers["ok-3"]["error"]) == (200, None)
        assert response["body"]["object"] == "chat.completion"
        assert response["request_id"].startswith("req_")
        assert {*errors} == {"bad"}
        assert errors["bad"]["response"]["status_code"] == 500
        assert errors["bad"]["response"]["body"]["error"]["message"]

    @pytest.mark.parametrize(
        ("endpoint", "model", "fields", "kind"),
        [
            ("/v1/completions", "chat", {"prompt": "Say", "max_tokens": 4}, "text_completion"),
            ("/v1/embeddings", "embed", {"input": "one"}, "list"),
            ("/v1/responses", "chat", {"input": "Hello"}, "response"),
        ],
    )
    def test_other_endpoints(self, site, endpoint, model, fields, kind):
        found = ended(site, begin(site, [line("a", model, endpoint, **fields)], endpoint))
        answers = content(site, found["output_file_id"])
        assert (found["status"], answers["a"]["response"]["body"]["object"]) == ("completed", kind)

    def test_counts_only_grow(self, site):
        taken = begin(site, [line(f"{number}") for number in range(40)])
        seen = []
        while (found := batch(site, taken))["status"] not in OVER:
            seen.append(counts(found))
        assert counts(found) == (40, 40, 0)
        assert seen == sorted(seen)

    def test_they_go_last(self, site):
        ended(site, begin(site, [line("a", "plain")]))
        ended(site, begin(site, [line("b", "plain")], headers={"x-priority": "low"}))
        told = site.get("/v1/admin/requests/ended").json()["data"]
        assert {80, 100} <= {each["priority"] for each in told if each["model"] == "plain"}

    def test_nothing_of_it_stays_among_the_jobs(self, site):
        ended(site, begin(site, [line("a"), line("b", "broken")]))
        wait_until(lambda: not site.get("/v1/jobs").json()["data"])
        assert not list((site.state_dir / "jobs").iterdir())


class TestRefused:
    @pytest.mark.parametrize(
        ("text", "code", "param"),
        [
            ("{", "invalid_json_line", None),
            ("[]", "invalid_json_line", None),
            ("\udcff", "invalid_json_line", None),
            (line("first"), "duplicate_custom_id", "custom_id"),
            (line(7), "invalid_custom_id", "custom_id"),
            (line(""), "invalid_custom_id", "custom_id"),
            (line("b", url="/v1/embeddings"), "invalid_url", "url"),
            (line("b").replace("POST", "GET"), "invalid_method", "method"),
            (line("b", "nobody"), "model_not_found", "model"),
            (line("b", stream=True), "invalid_request", "body.stream"),
            (line("b").replace('"body"', '"corpus"'), "invalid_request", "corpus"),
            (json.dumps({"custom_id": "b", "method": "POST", "url": CHAT}), "invalid_request", "body"),
            (line("b", padding="x" * MIB), "request_too_large", None),
        ],
    )
    def test_a_bad_line_refuses_the_file(self, site, text, code, param):
        lines = [line("first"), text, line("last")]
        found = ended(site, begin(site, "\n".join(lines).encode("utf-8", "surrogateescape")))
        assert (found["status"], found["output_file_id"], found["error_file_id"]) == ("failed", None, None)
        [error] = found["errors"]["data"]
        assert (error["code"], error["param"], error["line"]) == (code, param, 2)
        assert error["message"]

    def test_all_mistakes_are_told(self, site):
        found = ended(site, begin(site, ["{", line("a"), line("a"), line("b", "nobody")]))
        assert [each["line"] for each in found["errors"]["data"]] == [1, 3, 4]

    @pytest.mark.parametrize(("lines", "code"), [([""], "empty_file"), (["{}"] * 51, "too_many_requests")])
    def test_too_few_and_too_many(self, site, lines, code):
        lines = [line(f"{at}") if text else text for at, text in enumerate(lines)]
        [error] = ended(site, begin(site, lines))["errors"]["data"]
        assert error["code"] == code

    @pytest.mark.parametrize(
        ("changed", "param"),
        [
            ({"endpoint": "/v1/moderations"}, "endpoint"),
            ({"endpoint": "/v1/jobs"}, "endpoint"),
            ({"endpoint": None}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "31d"}, "completion_window"),
            ({"input_file_id": 5}, "input_file_id"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": {"a": "x" * 513}}, "metadata"),
            ({"output_expires_after": {}}, "output_expires_after"),
        ],
    )
    def test_what_is_no_batch(self, site, changed, param):
        file = upload(site, [line("a")]).json()["id"]
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        refused = site.post("/v1/batches", json=asked | changed)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)

    def test_an_endpoint_names_those_that_work(self, site):
        asked = {"input_file_id": "file-0", "endpoint": "/v1/nothing", "completion_window": "24h"}
        refused = site.post("/v1/batches", json=asked).json()["error"]["message"]
        assert re.findall(r"/v1/[a-z/]+", refused) == [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses"]

    def test_what_is_not_there(self, site):
        asked = {"input_file_id": "file-0", "endpoint": CHAT, "completion_window": "24h"}
        refused = [
            site.post("/v1/batches", json=asked),
            site.get("/v1/batches/batch_0"),
            site.post("/v1/batches/batch_0/cancel"),
            site.get("/v1/files/file-0"),
            site.get("/v1/files/file-0/content"),
        ]
        assert [each.status_code for each in refused] == [404] * 5
        assert {each.json()["error"]["code"] for each in refused} == {"file_not_found", "batch_not_found"}

    def test_an_output_is_no_input(self, site):
        found = ended(site, begin(site, [line("a")]))
        asked = {"input_file_id": found["output_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        assert site.post("/v1/batches", json=asked).json()["error"]["param"] == "input_file_id"

    @pytest.mark.parametrize(
        ("form", "param"),
        [
            ({"data": {"purpose": "fine-tune"}}, "purpose"),
            ({"data": {}}, "purpose"),
            ({"data": {"purpose": "batch", "expires_after[seconds]": "5"}}, "expires_after[seconds]"),
            ({"files": {"other": b"x"}}, "other"),
            ({"files": {"file": (None, b"", "text/plain"), "purpose": (None, b"x" * 600)}, "data": None}, None),
            ({"files": None, "data": None, "json": {}}, None),
        ],
    )
    def test_what_is_no_upload(self, site, form, param):
        refused = upload(site, [line("a")], **form)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


class TestFiles:
    def test_they_come_back_as_they_were(self, site):
        sent = bytes(range(256)) * 3000
        file = upload(site, sent).json()
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(sent), "in.jsonl", "batch")
        assert site.get(f"/v1/files/{file['id']}").json() == file
        assert site.get(f"/v1/files/{file['id']}/content").content == sent
        with site.client() as client:
            assert client.delete(f"/v1/files/{file['id']}").json()["deleted"] is True
        assert site.get(f"/v1/files/{file['id']}").status_code == 404
        assert not (site.state_dir / "files" / file["id"]).exists()

    @pytest.mark.parametrize("is_announced", [True, False])
    def test_none_that_is_too_large(self, site, is_announced):
        before = {*(site.state_dir / "files").iterdir()}
        form = httpx.Request("POST", site.url, data={"purpose": "batch"}, files={"file": ("a", bytes(3 * MIB))})
        body = form.read()
        pieces = body if is_announced else (body[at : at + MIB] for at in range(0, len(body), MIB))
        headers = {"content-type": form.headers["content-type"]}
        refused = site.post("/v1/files", content=pieces, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert "limits.files_mib" in refused.json()["error"]["message"]
        assert {*(site.state_dir / "files").iterdir()} == before

    def test_no_more_than_the_disk_has_room_for(self, site):
        kept = []
        with site.client() as client:
            while (answer := upload(site, bytes(2 * MIB - 1000))).status_code == 200:
                kept.append(answer.json()["id"])
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
            assert 0 < sum(path.stat().st_size for path in (site.state_dir / "files").iterdir()) <= 8 * MIB
            for each in kept:
                client.delete(f"/v1/files/{each}")
        assert upload(site, [line("a")]).status_code == 200

    def test_pages(self, site):
        ids = [upload(site, [line(f"{number}")]).json()["id"] for number in range(3)]
        listed = site.get("/v1/files", params={"limit": 2, "purpose": "batch"}).json()
        assert ([each["id"] for each in listed["data"]], listed["has_more"]) == ([ids[2], ids[1]], True)
        rest = site.get("/v1/files", params={"limit": 1, "after": listed["last_id"]}).json()
        assert [each["id"] for each in rest["data"]] == ids[:1]
        oldest = site.get("/v1/files", params={"order": "asc"}).json()["data"]
        assert [each["id"] for each in oldest][-3:] == ids
        assert site.get("/v1/files", params={"after": "file-0"}).status_code == 400

    def test_not_deleted_under_a_batch(self, site):
        taken = begin(site, [line("a", "slow")])
        file = batch(site, taken)["input_file_id"]
        with site.client() as client:
            refused = client.delete(f"/v1/files/{file}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_in_use")
            assert client.get(f"/v1/files/{file}").json()["expires_at"] is None
            client.post(f"/v1/batches/{taken}/cancel")
            ended(site, taken)
            assert client.delete(f"/v1/files/{file}").status_code == 200

    def test_an_upload_is_never_held(self, tmp_path):
        """The most that the daemon took: not by the size of the file more."""

        def peak_mib() -> int:
            assert site.process is not None
            status = Path(f"/proc/{site.process.pid}/status").read_text()
            return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024

        with running(tmp_path, {"models": {"plain": fake()}}) as site:
            upload(site, b"x" * MIB)
            before = peak_mib()
            sent = (b"x" * 1000 + b"\n") * 100_000
            file = upload(site, sent).json()
            assert file["bytes"] == len(sent) > 90 * MIB
            taken = site.post(
                "/v1/batches", json={"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
            ).json()["id"]
            assert len(ended(site, taken)["errors"]["data"]) == 100
            with site.client() as client, client.stream("GET", f"/v1/files/{file['id']}/content") as answer:
                assert sum(map(len, answer.iter_raw())) == len(sent)
            assert peak_mib() - before < 30


class TestCancelling:
    def test_what_is_done_stays(self, site):
        taken = begin(
            site, [*(line(f"done-{at}", "plain") for at in range(3)), *(line(f"{at}", "slow") for at in range(9))]
        )
        wait_until(lambda: counts(batch(site, taken))[1] == 3 and in_flight(site))
        with site.client() as client:
            told = client.post(f"/v1/batches/{taken}/cancel").json()
            assert told["status"] in {"cancelling", "cancelled"}
            found = ended(site, taken)
            assert (found["status"], counts(found)) == ("cancelled", (12, 3, 0))
            assert {*content(site, found["output_file_id"])} == {f"done-{at}" for at in range(3)}
            assert client.post(f"/v1/batches/{taken}/cancel").json()["status"] == "cancelled"
        wait_until(lambda: not in_flight(site) and not site.get("/v1/jobs").json()["data"])

    def test_not_what_has_ended(self, site):
        taken = begin(site, [line("a")])
        ended(site, taken)
        refused = site.post(f"/v1/batches/{taken}/cancel")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "batch_ended")

    def test_one_line_alone(self, site):
        taken = begin(site, [line("a", "slow"), line("b")])
        wait_until(lambda: counts(batch(site, taken))[1] == 1)
        [job] = wait_until(lambda: site.get("/v1/jobs", params={"status": "running"}).json()["data"])
        site.post(f"/v1/jobs/{job['id']}/cancel")
        found = ended(site, taken)
        assert (found["status"], counts(found)) == ("completed", (2, 1, 1))
        assert content(site, found["error_file_id"])["a"]["error"]["code"] == "request_cancelled"


class TestWindow:
    def test_what_is_not_done_has_expired(self, site):
        late = {f"late-{at}" for at in range(20)}
        taken = begin(site, [line("a", "plain"), *(line(name, "slow") for name in late)], window="3s")
        found = ended(site, taken)
        assert (found["status"], found["expired_at"] is not None) == ("expired", True)
        answers, errors = content(site, found["output_file_id"]), content(site, found["error_file_id"])
        assert counts(found) == (21, len(answers), len(errors))
        assert {*answers, *errors} == {"a", *late}
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
        assert late <= {*errors}
        wait_until(lambda: not in_flight(site))


class TestPlaces:
    def test_a_job_never_waits_for_a_batch(self, tmp_path):
        with running(tmp_path, {"models": MODELS, "limits": {"jobs_running": 2}}) as site:
            taken = begin(site, [line(f"{at}", "slow") for at in range(10)])
            wait_until(lambda: in_flight(site))
            job = {"endpoint": CHAT, "body": {"model": "plain", "messages": MESSAGES}}
            mine = [site.post("/v1/jobs", json=job).json()["id"] for _ in range(3)]
            for each in mine:
                wait_until(lambda name=each: site.get(f"/v1/jobs/{name}").json()["status"] == "completed")
            assert counts(batch(site, taken)) == (10, 0, 0)
            assert len(in_flight(site)) == 1

    def test_so_many_batches(self, tmp_path):
        with running(tmp_path, {"models": MODELS, "limits": {"jobs_waiting": 1}}) as site:
            begin(site, [line("a", "slow")])
            file = upload(site, [line("b")]).json()["id"]
            refused = site.post(
                "/v1/batches", json={"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")


class TestRestart:
    @pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
    def test_no_line_is_answered_twice(self, tmp_path, how):
        hang, ids = tmp_path / "hang", tmp_path / "ids"
        hang.touch()
        models = {
            "chat": gguf(vram_mib=200),
            "plain": fake("--ids-to", str(ids)),
            "wait": fake("--hang-while", str(hang)),
        }
        names = [f"{model}-{at}" for at in range(8) for model in ("plain", "chat", "wait")]
        with running(tmp_path, {"models": models, "limits": {"drain_s": 0, "jobs_running": 12}}) as site:
            taken = begin(site, [line(name, name.partition("-")[0]) for name in names])
            wait_until(lambda: counts(batch(site, taken)) == (24, 16, 0))
            assert site.process is not None
            site.process.send_signal(how)
            site.process.wait(60)
            hang.unlink()
            site.start()
            assert counts(batch(site, taken))[:2] >= (24, 16)
            found = ended(site, taken)
            assert (found["status"], counts(found)) == ("completed", (24, 24, 0))
            assert {*content(site, found["output_file_id"])} == {*names}
            assert len(ids.read_text().split()) == 8
            told = site.get("/v1/admin/requests/ended").json()["data"]
            assert sum("-" not in one["id"] for one in told) == 8, "this daemon's own"

    def test_what_has_ended_is_found(self, tmp_path):
        with running(tmp_path, {"models": MODELS}) as site:
            done, refused = (ended(site, begin(site, [text])) for text in (line("a"), "{"))
            answers = content(site, done["output_file_id"])
            site.kill()
            site.start()
            assert [batch(site, each["id"]) for each in (done, refused)] == [done, refused]
            assert content(site, done["output_file_id"]) == answers
            listed = site.get("/v1/batches", params={"limit": 1}).json()
            assert (listed["data"], listed["has_more"]) == ([refused], True)
            rest = site.get("/v1/batches", params={"after": refused["id"]}).json()
            assert (rest["data"], rest["has_more"]) == ([done], False)


class TestKept:
    def test_not_longer_than_configured(self, tmp_path):
        with running(tmp_path, {"models": MODELS, "limits": {"jobs_keep_s": 2}}) as site:
            taken = begin(site, [line("a"), line("b", "broken")])
            wait_until(lambda: site.get(f"/v1/batches/{taken}").status_code == 404)
            assert site.get("/v1/files").json()["data"] == []
            assert not list((site.state_dir / "files").iterdir())


KEYS = {name: f"sk-secret-of-{name}-0123456789" for name in ("ann", "bob", "op")}


class TestWhose:
    def test_only_its_own_and_for_an_admin_all(self, tmp_path):
        scopes = {"ann": "inference", "bob": "inference", "op": "inference, admin"}
        lines = [f"- {{name: {name}, key: {key}, scopes: [{scopes[name]}]}}\n" for name, key in KEYS.items()]
        (tmp_path / "keys.yaml").write_text("".join(lines))
        config = {"models": MODELS, "server": {"api_keys": str(tmp_path / "keys.yaml")}}
        with running(tmp_path, config) as site:
            ann, bob, op = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
            taken = begin(site, [line("a")], headers=ann)
            found = ended(site, taken, headers=ann)
            for path in (
                f"/v1/batches/{taken}",
                f"/v1/files/{found['input_file_id']}",
                f"/v1/files/{found['output_file_id']}/content",
            ):
                assert [site.get(path, headers=who).status_code for who in (ann, bob, op)] == [200, 404, 200]
            assert [len(site.get("/v1/batches", headers=who).json()["data"]) for who in (ann, bob, op)] == [1, 0, 1]
            assert [len(site.get("/v1/files", headers=who).json()["data"]) for who in (ann, bob, op)] == [2, 0, 2]
            asked = {"input_file_id": found["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
            assert site.post("/v1/batches", json=asked, headers=bob).status_code == 404
            assert site.post(f"/v1/batches/{taken}/cancel", headers=bob).status_code == 404
            with site.client() as client:
                assert client.delete(f"/v1/files/{found['input_file_id']}", headers=bob).status_code == 404
            assert site.get("/v1/files").status_code == 401
            assert upload(site, [line("a")]).status_code == 401
            told = site.get("/v1/admin/requests/ended", headers=op).json()["data"]
            assert {each["key"] for each in told} == {"ann"}
