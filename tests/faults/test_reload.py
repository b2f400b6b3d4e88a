"""A configuration that is being written, is emptied, or takes away what is in use: the old one serves on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from supervisor.catalog.keys import new_key
from supervisor.daemon.configuration.reload import STILL_S
from tests.support import shell
from tests.support.clients import Stream
from tests.support.counts import SOAK
from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.held import frozen
from tests.support.limits import LIMIT_S

NAMES = [f"model-{number}" for number in range(8)]
WRITER = """
import json, sys, time
path, seconds, *texts = sys.argv[1:]
end, longest, turn = time.monotonic() + float(seconds), 0.0, 0
while time.monotonic() < end:
    turn += 1
    text = texts[turn % len(texts)]
    with open(path, "w") as file:
        last = time.monotonic()
        for at in range(0, len(text), len(text) // 12):
            file.write(text[at : at + len(text) // 12])
            file.flush()
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            time.sleep(0.02)
    longest = max(longest, time.monotonic() - last)
    time.sleep(1.5)
print(json.dumps({"longest_pause_s": longest, "times": turn}))
"""


@pytest.fixture
def daemon(tmp_path):
    with running(tmp_path, {"models": {name: fake() for name in NAMES}}) as daemon:
        yield daemon


def listed(daemon: Daemon) -> set[str]:
    return {entry["id"] for entry in daemon.get("/v1/models").json()["data"]}


def replace_file(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)


def llmux(daemon: Daemon, *words: str, url: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    where = ["--url", daemon.url] if url else []
    return shell.llmux(*words, *where, env=os.environ | env, timeout=LIMIT_S)


class TestAFileThatIsBeingWritten:
    """It counts once it holds still: no reload ever sees a part of it."""

    def rewritten(self, daemon: Daemon, seconds: float) -> tuple[list[set[str]], set[str], float]:
        """What was served while somebody wrote the file piece by piece, what the reloads named, the longest pause."""
        texts = [
            yaml.safe_dump(daemon.config | {"models": daemon.config["models"] | more}, sort_keys=False)
            for more in ({}, {"extra": fake()})
        ]
        command = [sys.executable, "-c", WRITER, str(daemon.config_path), str(seconds), *texts]
        served = list[set[str]]()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            while writer.poll() is None:
                daemon.signal(signal.SIGHUP)
                daemon.post("/v1/admin/reload")
                served.append(listed(daemon))
                assert daemon.chat(NAMES[-1]).status_code == 200
            assert writer.stdout is not None
            longest_pause_s = json.loads(writer.stdout.read())["longest_pause_s"]
        assert all("keeps writing" in event["problems"][0] for event in daemon.events("reload.refused"))
        differences = daemon.events("reload.finished")
        named = {name for about in differences for key in ("added", "removed", "changed") for name in about[key]}
        return served, named, longest_pause_s

    def test_is_never_read_in_part(self, daemon, measured):
        for _ in range(5):
            served, named, longest_pause_s = self.rewritten(daemon, 300.0 if SOAK else 8.0)
            measured(reloads=len(served), partial=sum(not models >= set(NAMES) for models in served))
            if longest_pause_s < STILL_S:  # otherwise the writer itself was held up by a busy machine
                break
        assert all(models >= set(NAMES) for models in served)
        assert named == {"extra"}, "some reload took effect, and none was about a model that stayed"

    def test_that_never_holds_still_changes_nothing(self, daemon):
        text = yaml.safe_dump(daemon.config | {"models": {"other": fake()}})
        script = "import sys\nwhile True: open(sys.argv[1], 'w').write(sys.argv[2])"
        with subprocess.Popen([sys.executable, "-c", script, str(daemon.config_path), text]) as writer:
            try:
                wait_until(lambda: "other" in daemon.config_path.read_text())
                answer = daemon.post("/v1/admin/reload")
            finally:
                writer.kill()
        assert answer.status_code == 400
        assert "something keeps writing to it" in answer.json()["error"]["detail"][0]
        assert listed(daemon) == set(NAMES)


class TestManyAtOnce:
    """Whoever asks is told of a reload that saw what he wrote, however many ask; those that wait are one."""

    def test_each_sees_its_own_change(self, daemon):
        writing = threading.Lock()

        def change(name: str) -> set[str]:
            with writing:
                daemon.config["models"][name] = fake()
                replace_file(daemon.config_path, yaml.safe_dump(daemon.config))
            daemon.signal(signal.SIGHUP)
            daemon.post("/v1/admin/reload").raise_for_status()
            return listed(daemon)

        names = [f"more-{number}" for number in range(40)]
        with ThreadPoolExecutor(8) as pool:
            for name, served in zip(names, pool.map(change, names), strict=True):
                assert name in served
        assert len(daemon.events("reload.finished")) < len(names), "80 asked"


class TestALostFile:
    """A reload after which no model or no key would be left is refused, until somebody insists."""

    @pytest.mark.parametrize("text", ["", "\n# nothing\n", "models: {}\n", "---\n...\n"])
    def test_no_models(self, daemon, text):
        worker = daemon.chat(NAMES[0]).status_code == 200 and daemon.model(NAMES[0])["worker"]["pid"]
        replace_file(daemon.config_path, text)
        answer = daemon.post("/v1/admin/reload")
        assert answer.status_code == 400
        (problem,) = answer.json()["error"]["detail"]
        assert problem == (
            f"{daemon.config_path}: no models are left of {len(NAMES)}; nothing was changed. "
            "If you mean it: llmux reload --force"
        )
        assert daemon.chat(NAMES[0]).status_code == 200
        assert daemon.model(NAMES[0])["worker"]["pid"] == worker

    def test_every_cause_is_refused_but_an_insisting_one(self, daemon):
        replace_file(daemon.config_path, "")
        daemon.signal(signal.SIGHUP)
        wait_until(lambda: daemon.events("reload.refused"))
        told = llmux(daemon, "reload")
        assert told.returncode == 2
        assert "no models are left" in told.stderr
        assert listed(daemon) == set(NAMES)
        forced = llmux(daemon, "reload", "--force", "--json")
        assert forced.returncode == 0, forced.stderr
        assert set(json.loads(forced.stdout)["removed"]) == set(NAMES)
        assert listed(daemon) == set()

    def test_the_watch_takes_what_is_written_next(self, tmp_path):
        with running(tmp_path, {"models": {"one": fake()}, "server": {"watch": True}}) as daemon:
            replace_file(daemon.config_path, "")
            wait_until(lambda: daemon.events("reload.refused"))
            assert daemon.chat("one").status_code == 200
            daemon.config["models"]["two"] = fake()
            replace_file(daemon.config_path, yaml.safe_dump(daemon.config))
            wait_until(lambda: daemon.chat("two").status_code == 200)
            assert len(daemon.events("reload.refused")) == 1, "told once, not at each look"

    @pytest.mark.parametrize("text", ["", "keys:\n", None])
    def test_no_keys(self, tmp_path, text):
        secret, entry = new_key("me", scopes=["inference", "admin"])
        mine = {"authorization": f"Bearer {secret}"}
        path = tmp_path / "api_keys.yaml"
        replace_file(path, yaml.safe_dump([entry]))
        with running(tmp_path, {"models": {"one": fake()}}) as daemon:
            if text is None:
                path.unlink()
            else:
                replace_file(path, text)
            answer = daemon.post("/v1/admin/reload", headers=mine)
            assert answer.status_code == 400
            assert f"{path}: no keys are left of 1" in answer.json()["error"]["detail"][0]
            assert daemon.get("/v1/models").status_code == 401, "not open"
            assert daemon.get("/v1/models", headers=mine).status_code == 200, "not locked"
            assert daemon.post("/v1/admin/reload?force=true", headers=mine).status_code == 200
            assert daemon.get("/v1/models").status_code == 200


class TestARevokedKey:
    """It stops working with the next reload, also where that is refused."""

    @pytest.mark.parametrize("damaged", ["llmux.yaml", "api_keys.yaml"])
    def test_though_the_reload_is_refused(self, tmp_path, damaged):
        (kept, entry), (leaked, other) = (new_key(name, scopes=["inference", "admin"]) for name in ("kept", "leaked"))
        keys = [entry, other]
        path = tmp_path / "api_keys.yaml"
        replace_file(path, yaml.safe_dump(keys))
        with running(tmp_path, {"models": {"one": fake()}}) as daemon:

            def status(secret: str) -> int:
                return daemon.get("/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code

            config = daemon.config_path.read_text()
            broken = {"name": "broken", "key": "short"}
            if damaged == "llmux.yaml":
                replace_file(daemon.config_path, config + "modelz: 3\n")
            told = llmux(daemon, "keys", "revoke", "leaked", "--config", str(daemon.config_path), url=False)
            assert told.returncode == 0, told.stderr
            if damaged == "api_keys.yaml":
                replace_file(path, yaml.safe_dump([entry | {"scopes": ["inference"]}, broken]))
            assert (status(kept), status(leaked)) == (200, 200)
            answer = daemon.post("/v1/admin/reload", headers={"authorization": f"Bearer {kept}"})
            assert answer.status_code == 400
            assert (status(kept), status(leaked)) == (200, 401)
            if damaged == "llmux.yaml":
                assert "what was revoked is in force all the same: leaked" in answer.json()["error"]["detail"][-1]
                (event,) = daemon.events("keys.revoked")
                assert event["keys"] == ["leaked"]

    def test_the_last_one_opens_nothing(self, tmp_path):
        secret, entry = new_key("me", scopes=["inference", "admin"])
        mine = {"authorization": f"Bearer {secret}"}
        path = tmp_path / "api_keys.yaml"
        replace_file(path, yaml.safe_dump([entry]))
        with running(tmp_path, {"models": {"one": fake()}}) as daemon:
            llmux(daemon, "keys", "revoke", "me", "--file", str(path), url=False)
            answer = daemon.post("/v1/admin/reload", headers=mine)
            assert answer.status_code == 400
            assert f"{path}: no keys are left of 1" in answer.json()["error"]["detail"][0]
            assert daemon.get("/v1/models", headers=mine).status_code == 401, "revoked"
            assert daemon.get("/v1/models").status_code == 401, "not open"
            forced = llmux(daemon, "reload", "--force", XDG_RUNTIME_DIR=str(tmp_path))
            assert forced.returncode == 0, forced.stderr
            assert daemon.get("/v1/models").status_code == 200


class TestDryRun:
    """What a reload would do, and whom it would cut, before it does."""

    def test_it_tells_everything_and_changes_nothing(self, daemon):
        gone, changed = NAMES[:2]
        streams = []
        for name in (gone, changed):
            stream = Stream(daemon, name, fake={"chunks": 40, "chunk_delay": 0.05})
            wait_until(lambda stream=stream: stream.chunks > 1)
            streams.append(stream)
        daemon.post(f"/v1/admin/models/{changed}/pin", json={"pin": True}).raise_for_status()
        with frozen(daemon.model(gone)["worker"]["pid"]), frozen(daemon.model(changed)["worker"]["pid"]):
            models = daemon.config["models"] | {changed: fake("--chunks", "3"), "fresh": fake()}
            del models[gone]
            fresh = daemon.config | {"models": models, "limits": {"drain_s": 50}}
            replace_file(daemon.config_path, yaml.safe_dump(fresh))
            views = {name: daemon.model(name) for name in (gone, changed)}
            told = llmux(daemon, "reload", "--dry-run", "--json")
            assert told.returncode == 1, told.stderr
            expected = {"in_flight": 1, "queued": 0, "drain_s": 50}
            preview = json.loads(told.stdout)
            assert preview == {
                "added": ["fresh"],
                "removed": [gone],
                "changed": [changed],
                "restarted": [changed],
                "stops": [
                    {"model": gone, "state": "ready", "pinned": False, **expected},
                    {"model": changed, "state": "ready", "pinned": True, **expected},
                ],
                "unchanged": len(NAMES) - 2,
                "settings": ["limits.drain_s"],
                "needs_restart": [],
                "warnings": [],
            }
            shown = llmux(daemon, "reload", "--dry-run")
            assert shown.returncode == 1
            assert f"stops:         {gone} (ready); 1 running request, cut after 50 s\n" in shown.stdout
            assert f"stops:         {changed} (ready, pinned); 1 running request" in shown.stdout
            assert listed(daemon) == set(NAMES)
            for name, before in views.items():
                now = daemon.model(name)
                assert (now["state"], now["worker"]["pid"]) == ("ready", before["worker"]["pid"])
            assert not daemon.events("reload.finished")
            assert daemon.post("/v1/admin/reload").json() == preview, "it then does exactly this"
        for stream in streams:
            stream.join()
            assert stream.ended_cleanly

    def test_without_running_requests_it_succeeds(self, daemon):
        assert daemon.chat(NAMES[0]).status_code == 200
        kept = {name: model for name, model in daemon.config["models"].items() if name != NAMES[0]}
        replace_file(daemon.config_path, yaml.safe_dump(daemon.config | {"models": kept}))
        told = llmux(daemon, "reload", "--dry-run")
        assert (told.returncode, told.stderr) == (0, "")
        assert f"stops:         {NAMES[0]} (ready)\n" in told.stdout
        assert listed(daemon) == set(NAMES)

    def test_mistakes_and_losses_are_told_alike(self, daemon):
        replace_file(daemon.config_path, "")
        assert llmux(daemon, "reload", "--dry-run").returncode == 2
        forced = daemon.post("/v1/admin/reload", json={"dry_run": True, "force": True})
        assert set(forced.json()["removed"]) == set(NAMES)
        replace_file(daemon.config_path, "models: 3\n")
        for flags in ("dry_run=1", "dry_run=true&force=1", "force=1"):
            answer = daemon.post(f"/v1/admin/reload?{flags}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_configuration")
        assert listed(daemon) == set(NAMES)

    @pytest.mark.parametrize("body", [{"dryrun": True}, {"dry_run": "yes"}, {"force": 1}, [True]])
    def test_a_misspelled_wish_reloads_nothing(self, daemon, body):
        replace_file(daemon.config_path, yaml.safe_dump(daemon.config | {"models": {"other": fake()}}))
        assert daemon.post("/v1/admin/reload", json=body).status_code == 400
        assert listed(daemon) == set(NAMES)

    def test_the_watch_still_sees_the_change(self, tmp_path):
        with running(tmp_path, {"models": {"one": fake()}, "server": {"watch": True}}) as daemon:
            daemon.config["models"]["two"] = fake()
            replace_file(daemon.config_path, yaml.safe_dump(daemon.config))
            deadline = time.monotonic() + LIMIT_S
            while "two" not in listed(daemon):
                daemon.post("/v1/admin/reload?dry_run=1").raise_for_status()
                assert time.monotonic() < deadline
