"""What a daemon remembers of requests, and of what each key used, after it was killed; bodies; alerts that go out."""

from __future__ import annotations

import contextlib
import csv
import http.server
import io
import json
import sqlite3
import sys
import threading
from datetime import datetime

import httpx
import pytest
import yaml

from tests.support.daemon import Daemon, fake, running, wait_until

ANNA, BERT, ADMIN = (f"sk-test-{name}-{'0' * 16}" for name in ("anna", "bert", "admin"))
USAGE = "/v1/admin/usage"


@pytest.fixture
def daemon(tmp_path):
    with running(tmp_path, {"models": {"a": fake(), "b": fake()}}) as daemon:
        yield daemon


def ended(daemon: Daemon) -> list[dict]:
    return daemon.get("/v1/admin/requests/ended").json()["data"]


def saved(daemon: Daemon) -> int:
    """How many requests are written: SQLite lets nobody else in, so by a copy."""
    copy = daemon.folder / "copy.sqlite3"
    for suffix in ("", "-wal"):
        source = daemon.state_dir / f"state.sqlite3{suffix}"
        copy.with_name(copy.name + suffix).write_bytes(source.read_bytes() if source.exists() else b"")
    try:
        with contextlib.closing(sqlite3.connect(copy)) as file:
            return file.execute("SELECT count(*) FROM requests").fetchone()[0]
    except sqlite3.DatabaseError:  # copied in the middle of a write
        return -1


class TestRequests:
    """The list goes on where it was."""

    def test_after_a_kill(self, daemon):
        for model in ("a", "b", "nobody"):
            daemon.chat(model)
        before = ended(daemon)
        wait_until(lambda: saved(daemon) == 3, what="they are written")
        daemon.kill()
        daemon.start()
        after = ended(daemon)
        assert [one["request_id"] for one in after] == [one["request_id"] for one in before]
        assert [one["at"] for one in after] == [one["at"] for one in before]
        assert [one["id"].split("-")[1] for one in after if one["id"]] == [one["id"] for one in before if one["id"]]
        one = daemon.get(f"/v1/admin/requests/{after[1]['id']}").json()
        assert (one["state"], one["model"], one["decisions"]) == ("finished", "b", [])
        assert daemon.get("/v1/admin/requests/ended", params={"failed": "true"}).json()["data"] == after[:1]
        assert daemon.chat("a").status_code == 200
        assert [one["model"] for one in ended(daemon)] == ["a", "nobody", "b", "a"]

    def test_after_an_end(self, daemon):
        daemon.chat("a")
        daemon.stop()
        daemon.start()
        assert [one["model"] for one in ended(daemon)] == ["a"]

    def test_what_is_no_request_is_left_out(self, daemon):
        daemon.chat("a")
        daemon.stop()
        with contextlib.closing(sqlite3.connect(daemon.state_dir / "state.sqlite3")) as file, file:
            rows = [
                "{",
                "[]",
                '{"view": 5}',
                '{"view": {"request_id": "x"}}',
                '{"model": 5, "view": {"request_id": 1, "at": 1.0}}',
                '{"view": {"request_id": "x", "at": NaN}}',
                "[" * 5000,
            ]
            file.executemany("INSERT INTO requests (view) VALUES (?)", [(row,) for row in rows])
        daemon.start()
        assert [one["model"] for one in ended(daemon)] == ["a"]


class TestUsage:
    """Each request counts once, for its key and its day."""

    @pytest.fixture
    def shared(self, tmp_path):
        entries = [{"name": name, "key": key} for name, key in (("anna", ANNA), ("=bert", BERT))]
        entries.append({"name": "admin", "key": ADMIN, "scopes": ["admin"]})
        (tmp_path / "api_keys.yaml").write_text(yaml.safe_dump(entries))
        (tmp_path / "api_keys.yaml").chmod(0o600)
        with running(tmp_path, {"models": {"a": fake(), "b": fake()}}) as daemon:
            yield daemon

    def ask(self, daemon, key, path, **more):
        return daemon.get(path, headers={"authorization": f"Bearer {key}"}, **more)

    def test_by_key_also_after_a_kill_and_as_csv(self, shared):
        def chat(key, model):
            body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
            return shared.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})

        for key, model in ((ANNA, "a"), (ANNA, "b"), (ANNA, "a"), (BERT, "a"), (BERT, "nobody")):
            chat(key, model)
        day = str(datetime.now().astimezone().date())

        def counted():
            data = self.ask(shared, ADMIN, USAGE).json()["data"]
            return {row["key"]: (row["day"], row["requests"], row["failed"], row["completion_tokens"]) for row in data}

        wanted = {"anna": (day, 3, 0, 15), "=bert": (day, 2, 1, 5)}
        wait_until(lambda: counted() == wanted)
        shared.kill()
        shared.start()
        assert counted() == wanted
        chat(ANNA, "a")
        wait_until(lambda: counted() == wanted | {"anna": (day, 4, 0, 20)})
        text = self.ask(shared, ADMIN, USAGE, params={"format": "csv", "by_model": "true"})
        assert text.headers["content-type"] == "text/csv; charset=utf-8"
        rows = [*csv.DictReader(io.StringIO(text.text, newline=""))]
        assert {(row["key"], row["model"]): row["requests"] for row in rows} == {
            ("anna", "a"): "3",
            ("anna", "b"): "1",
            ("'=bert", ""): "1",
            ("'=bert", "a"): "1",
        }
        only = self.ask(shared, ADMIN, USAGE, params={"key": "anna", "model": "b", "from": day, "to": day}).json()[
            "data"
        ]
        assert [(row["key"], row["requests"]) for row in only] == [("anna", 1)]
        assert self.ask(shared, ADMIN, USAGE, params={"to": "0001-01-01"}).json()["data"] == []

    def test_is_for_the_scope_admin(self, shared):
        assert self.ask(shared, ANNA, USAGE).status_code == 403

    @pytest.mark.parametrize(
        "query",
        [
            {"from": "yesterday"},
            {"to": "2026-13-01"},
            {"from": "2026-11-02", "to": "2026-11-01"},
            {"format": "xml"},
            {"by_model": "2"},
        ],
    )
    def test_what_it_does_not_take(self, daemon, query):
        assert daemon.get(USAGE, params=query).status_code == 400


class TestBodies:
    """Only where the operator said so."""

    def test_of_one_model_and_until_it_is_switched_off(self, daemon):
        config = daemon.config  # with which it starts again
        config["models"]["a"]["keep_bodies"] = True
        daemon.config_path.write_text(yaml.safe_dump(config))
        difference = daemon.post("/v1/admin/reload").json()
        assert (difference["changed"], difference["restarted"]) == (["a"], [])
        for model in ("a", "b"):
            daemon.chat(model, text=f"Hello {model}", stream=model == "a", api_key="hush-hush")
        other, kept = (one["id"] for one in ended(daemon))

        def body(number):
            return daemon.get(f"/v1/admin/requests/{number}/body")

        found = wait_until(lambda: (answer := body(kept)).status_code == 200 and answer.json())
        assert json.loads(found["request"])["messages"] == [{"role": "user", "content": "Hello a"}]
        assert (found["answer_type"], "data: [DONE]" in found["answer"]) == ("text/event-stream", True)
        assert "hush" not in found["request"]
        refused = body(other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "body_not_found")
        wait_until(lambda: saved(daemon) == 2, what="they are written")
        daemon.kill()
        daemon.start()
        assert body(ended(daemon)[1]["id"]).json() == found
        config["models"]["a"]["keep_bodies"] = False
        daemon.config_path.write_text(yaml.safe_dump(config))
        daemon.post("/v1/admin/reload").raise_for_status()
        wait_until(lambda: not [path for path in (daemon.state_dir / "bodies").rglob("*") if path.is_file()])


class TestAlerts:
    """They go to a webhook and to a command."""

    @pytest.fixture
    def heard(self):
        """What a webhook gets, and its address. It answers 500 to the first."""
        found: list[dict] = []

        class Answer(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                found.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(500 if len(found) == 1 else 204)
                self.send_header("content-length", "0")
                self.end_headers()

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield found, f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()
        server.server_close()
        thread.join()

    def test_of_a_model_that_fails_arrives_by_both(self, heard, tmp_path):
        found, address = heard
        note = tmp_path / "note.txt"
        script = f"import os; open({str(note)!r}, 'a').write(os.environ['LLMUX_ALERT'] + '\\n' + os.environ['LLMUX_ALERT_CODE'] + '\\n' + os.environ.get('SECRET_TOKEN', 'clean'))"
        config = {
            "models": {"broken": fake("--exit-code", "1")},
            "limits": {"crash_limit": 1},
            "server": {"alerts": {"webhook": address, "command": [sys.executable, "-c", script]}},
        }
        with running(tmp_path, config, env={"SECRET_TOKEN": "hush"}) as daemon:
            daemon.chat("broken")
            wait_until(lambda: len(found) == 2, what="it is sent again after a failure")
            assert found[0] == found[1]
            assert (found[1]["code"], found[1]["model"]) == ("model.failed", "broken")
            wait_until(lambda: note.exists() and note.read_text().endswith("clean"))
            alert, code, _ = note.read_text().splitlines()
            assert (json.loads(alert), code) == (found[1], "model.failed")
            assert daemon.post("/v1/admin/alerts/test").json() == {"webhook": None, "command": None}
            assert found[-1]["code"] == "alert.test"

    def test_what_goes_wrong_is_said(self, tmp_path):
        sleeper = f"import time, pathlib; pathlib.Path({str(tmp_path / 'began')!r}).touch(); time.sleep(600)"
        alerts = {"webhook": "http://127.0.0.1:9/none", "command": ["/bin/false"]}
        with running(tmp_path, {"models": {"a": fake()}, "server": {"alerts": alerts}}) as daemon:
            answer = daemon.post("/v1/admin/alerts/test").json()
            assert answer["webhook"].startswith("webhook: ")
            assert answer["command"].startswith("command: it ended with 1")
            config = yaml.safe_load(daemon.config_path.read_text())
            config["server"]["alerts"] = {"webhook": "http://[::1"}
            daemon.config_path.write_text(yaml.safe_dump(config))
            daemon.post("/v1/admin/reload")
            assert daemon.post("/v1/admin/alerts/test").json()["webhook"].startswith("webhook: ")
            config["server"]["alerts"] = {"command": [sys.executable, "-c", sleeper]}
            daemon.config_path.write_text(yaml.safe_dump(config))
            assert daemon.post("/v1/admin/reload").json()["settings"] == ["server.alerts"]
            threading.Thread(target=lambda: _asked(daemon), daemon=True).start()
            wait_until((tmp_path / "began").exists)
            daemon.kill()
            wait_until(lambda: not daemon.workers(), what="the command ended with the daemon")
            daemon.start()

    def test_nothing_is_configured(self, daemon):
        assert daemon.post("/v1/admin/alerts/test").status_code == 400


def _asked(daemon: Daemon) -> None:
    """The daemon is killed before it answers."""
    with contextlib.suppress(httpx.TransportError):
        daemon.post("/v1/admin/alerts/test")
