"""Upgrades nobody notices: a new daemon takes over from the old one under load, and whoever is killed meanwhile, no process is left.

The old daemon is the one that `Daemon.process` is; the successor is known by the pid in the instance's lock.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import yaml

from tests.support import forker
from tests.support.clients import Call, Stream, code, starts, worker_tree
from tests.support.counts import times
from tests.support.daemon import REPOSITORY, Daemon, fake, gguf, wait_until
from tests.support.fake_http import serving
from tests.support.fake_remote import KEY, MODEL, StandIn
from tests.support.held import held
from tests.support.limits import LIMIT_S
from tests.support.media_server import PNG, data_url
from tests.support.ports import quiet_ports
from tests.support.shell import llmux
from tests.support.upgraded import Upgraded

SEED = int(os.environ.get("LLMUX_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
STREAMS = 20
SLOW = {"chunks": 60, "chunk_delay": 0.05}  # a stream that lasts longer than an upgrade


class Traffic(threading.Thread):
    """Asks a model again and again until told to stop, on one connection or on a new one each time."""

    def __init__(self, daemon: Daemon, model: str, *, keeps_alive: bool) -> None:
        super().__init__(daemon=True)
        self.answered = 0
        self.failed: list[str] = []
        self.ends = threading.Event()
        self._daemon, self._model, self._keeps_alive = daemon, model, keeps_alive
        self.start()

    def run(self) -> None:
        with self._daemon.client() as client:
            ask = client.post if self._keeps_alive else self._daemon.post
            while not self.ends.is_set():
                self._once(ask)

    def _once(self, ask: Callable[..., httpx.Response]) -> None:
        try:
            answer = ask(
                "/v1/chat/completions", json={"model": self._model, "messages": [{"role": "user", "content": "Hello"}]}
            )
            if answer.status_code != 200:
                self.failed.append(answer.text)
            self.answered += 1
        except httpx.HTTPError as error:
            self.failed.append(repr(error))

    def result(self) -> Traffic:
        self.ends.set()
        self.join(LIMIT_S)
        assert not self.is_alive()
        return self


@pytest.fixture
def make(tmp_path) -> Iterator[Any]:
    made: list[Upgraded] = []

    def start(models: dict[str, Any], *, by_exec: bool = False, **config: Any) -> Upgraded:
        daemon = Upgraded(tmp_path, {"models": models, **config.pop("config", {})}, **config)
        daemon.by_exec = by_exec
        made.append(daemon)
        daemon.start()
        return daemon

    yield start
    for daemon in made:
        daemon.end()


def worker(daemon: Daemon, name: str) -> tuple[int, int, int]:
    view = daemon.model(name)
    return view["worker"]["pid"], view["worker"]["shim_pid"], view["generation"]


def under_load(daemon: Upgraded, models: tuple[str, ...], upgrades: int) -> dict[str, int]:
    """Upgrade under streams and other traffic; what was broken, failed or reloaded."""
    for name in models:
        assert daemon.chat(name).status_code == 200
    before = {name: worker(daemon, name) for name in models}
    traffic = [Traffic(daemon, name, keeps_alive=kept) for name in models for kept in (True, True, False)]
    broken = 0
    for _ in range(upgrades):
        streams = [Stream(daemon, name, fake=SLOW) for name, _ in zip(itertools.cycle(models), range(STREAMS))]
        wait_until(lambda: all(stream.chunks for stream in streams), what="all streams run")
        daemon.upgrade()
        wait_until(lambda: all(call.answered for call in traffic))
        broken += sum(not (stream.result().ended_cleanly and stream.chunks == SLOW["chunks"]) for stream in streams)
    done = [call.result() for call in traffic]
    after = {name: worker(daemon, name) for name in models}
    return {
        "upgrades": upgrades,
        "streams_broken": broken,
        "requests": sum(call.answered for call in done),
        "requests_failed": sum(len(call.failed) for call in done),
        "reloaded": sum(before[name] != after[name] for name in models),
    }


class TestNobodyNotices:
    """No request fails, no stream breaks, no worker is reloaded."""

    def test_under_streams_and_requests(self, make, measured):
        daemon = make({"a": fake(), "b": fake("--fork")}, by_exec=True)
        found = under_load(daemon, ("a", "b"), times(2, 10))
        measured(**found)
        assert (found["streams_broken"], found["requests_failed"], found["reloaded"]) == (0, 0, 0), daemon.log_text()
        assert daemon.process.wait(LIMIT_S) == 0  # the old one ends by itself

    def test_a_real_model_goes_on_writing(self, make):
        daemon = make({"real": gguf()})
        assert daemon.chat("real").status_code == 200
        before = worker(daemon, "real")
        streams = [Stream(daemon, "real", max_tokens=200, ignore_eos=True) for _ in range(4)]
        wait_until(lambda: any(stream.chunks for stream in streams))
        daemon.upgrade()
        assert all(stream.result().ended_cleanly for stream in streams)
        assert worker(daemon, "real") == before
        assert daemon.chat("real").status_code == 200

    def test_who_waits_for_a_cold_model_is_served_by_the_new_one(self, make, tmp_path):
        """Loads under way end first; what is asked for meanwhile waits, also where keep-alives were sent already."""
        config = {"limits": {"keepalive_s": 0.1}}
        may_load = tmp_path / "may-load"
        daemon = make({"slow": held(may_load), "cold": fake()}, config=config)
        loading = Call(daemon, "slow")
        daemon.wait_state("slow", "starting")
        asked = threading.Thread(target=daemon.upgrade)
        asked.start()
        wait_until(lambda: "upgrade.began" in daemon.log_text())
        cold, plain = Stream(daemon, "cold"), Call(daemon, "cold")
        wait_until(lambda: ":" in cold.text, what="a keep-alive came")
        assert daemon.model("cold")["state"] == "stopped"
        may_load.touch()
        asked.join(LIMIT_S)
        assert loading.result().status == 200
        assert plain.result().status == 200, plain.error
        assert cold.result().ended_cleanly, cold.text
        assert cold.chunks == 5
        assert starts(daemon, "slow") == starts(daemon, "cold") == 1

    @pytest.mark.parametrize("name", ["cold", "task:any"])
    def test_a_prompt_whose_media_were_loaded_is_the_new_ones_as_it_came(self, make, tmp_path, name):
        (folder := tmp_path / "pictures").mkdir()
        (folder / "a.png").write_bytes(PNG)
        config = {"server": {"media": {"folder": str(folder)}}, "tasks": {"any": {"candidates": ["cold"]}}}
        may_load = tmp_path / "may-load"
        daemon = make({"slow": held(may_load), "cold": fake()}, config=config)
        loading = Call(daemon, "slow")
        daemon.wait_state("slow", "starting")
        asked = threading.Thread(target=daemon.upgrade)
        asked.start()
        wait_until(lambda: "upgrade.began" in daemon.log_text())
        part = {"type": "image_url", "image_url": {"url": f"file://{folder}/a.png"}}
        shown = Call(daemon, name, messages=[{"role": "user", "content": [part]}])
        wait_until(lambda: daemon.model("cold")["queued"] == 1)
        may_load.touch()
        asked.join(LIMIT_S)
        assert loading.result().status == 200
        assert shown.result().response.json()["received"]["messages"][0]["content"][0]["image_url"]["url"] == data_url(
            PNG, "image/png"
        )

    def test_responses_are_kept_and_those_in_the_background_go_on(self, make, tmp_path):
        """Also what a stream of the old one ends with when the new one serves already."""
        (done := tmp_path / "done").touch()
        hang, came = tmp_path / "hang", tmp_path / "came"
        daemon = make(
            {
                "a": fake("--goes-on-until", str(done), endpoints=["/v1/chat/completions"]),
                "b": fake("--hang-while", str(hang), "--ids-to", str(came), endpoints=["/v1/chat/completions"]),
            }
        )
        before = daemon.post("/v1/responses", json={"model": "a", "input": "Hi"}).json()["id"]
        done.unlink()
        hang.touch()
        with (
            daemon.client() as client,
            client.stream("POST", "/v1/responses", json={"model": "a", "input": "Hi", "stream": True}) as stream,
        ):
            lines = stream.iter_lines()
            begun = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))["response"]["id"]
            body = {"model": "b", "input": "Hi", "background": True}
            made = daemon.post("/v1/responses", json=body).json()["id"]
            wait_until(lambda: daemon.get(f"/v1/responses/{made}").json()["status"] == "in_progress")
            wait_until(came.exists)
            daemon.upgrade()
            hang.unlink()
            assert daemon.get(f"/v1/responses/{begun}").status_code == 404
            done.touch()
            assert "response.completed" in [*lines][-2]
        for name in (before, begun, made):
            wait_until(lambda name=name: daemon.get(f"/v1/responses/{name}").json().get("status") == "completed")

    def test_a_remote_goes_on_writing(self, make):
        with serving(StandIn()) as stand_in:
            about = {
                "runtime": "openai_remote",
                "base_url": stand_in.url,
                "upstream_model": MODEL,
                "api_key_env": "THEIR_KEY",
            }
            daemon = make({"theirs": about}, env={"THEIR_KEY": KEY})
            daemon.wait_state("theirs", "ready")
            stand_in.hold.clear()
            stream = Stream(daemon, "theirs", allow_remote=True)
            wait_until(lambda: stream.text)
            daemon.upgrade()
            stand_in.hold.set()
            assert stream.result().ended_cleanly, (stream.text, stream.error)
            daemon.wait_state("theirs", "ready")
            assert daemon.chat("theirs", allow_remote=True).status_code == 200

    def test_a_program_goes_on_writing(self, make, tmp_path):
        command = [sys.executable, "-I", "-S", str(REPOSITORY / "tests/support/fake_cli.py"), "text", str(tmp_path)]
        about = {"runtime": "claude_cli", "command": command, "output": "text", "upstream_model": "m"}
        daemon = make({"theirs": {**about, "allow_remote": True}})
        daemon.wait_state("theirs", "ready")
        stream = Stream(daemon, "theirs", messages=[{"role": "user", "content": f"wait {tmp_path}/go"}])
        wait_until(lambda: stream.text)
        worker = daemon.model("theirs")["worker"]["pid"]
        daemon.upgrade()
        daemon.wait_state("theirs", "ready")
        assert daemon.model("theirs")["worker"]["pid"] == worker
        assert daemon.chat("theirs").status_code == 200
        (tmp_path / "go").touch()
        assert stream.result().ended_cleanly, (stream.text, stream.error)

    def test_what_comes_on_an_old_connection_is_the_new_ones_to_authorise(self, make, tmp_path):
        keys = tmp_path / "keys.yaml"
        entries = [{"name": name, "key": f"sk-test-key-{name}", "scopes": [name]} for name in ("inference", "admin")]
        keys.write_text(yaml.safe_dump(entries))
        keys.chmod(0o600)
        config = {"server": {"api_keys": str(keys)}}
        daemon = make({"a": fake(), "later": fake()}, config=config)
        admin, user = ({"authorization": f"Bearer sk-test-key-{name}"} for name in ("admin", "inference"))
        body = {"model": "a", "messages": [{"role": "user", "content": "Hello"}]}
        with daemon.client() as client:
            assert client.post("/v1/chat/completions", json=body, headers=user).status_code == 200
            assert client.post("/v1/admin/upgrade", headers=user).status_code == 403
            keys.write_text(yaml.safe_dump([{**entries[0], "key": "sk-test-key-new-one"}, entries[1]]))
            answer = daemon.post("/v1/admin/upgrade", headers=admin)
            assert answer.status_code == 200, answer.text
            old = client.post("/v1/chat/completions", json=body, headers=user)
            assert (old.status_code, old.headers["connection"]) == (401, "close")
            new = client.post(
                "/v1/chat/completions", json=body, headers={"authorization": "Bearer sk-test-key-new-one"}
            )
            assert new.status_code == 200

    def test_what_ended_before_it_is_remembered_and_counted_once(self, make):
        daemon = make({"a": fake()})
        assert daemon.chat("a").status_code == 200
        daemon.upgrade()
        assert daemon.chat("a").status_code == 200
        ended = daemon.get("/v1/admin/requests/ended").json()["data"]
        assert [(one["model"], one["status"]) for one in ended] == [("a", 200)] * 2
        assert [row["requests"] for row in daemon.get("/v1/admin/usage").json()["data"]] == [2]

    def test_a_load_that_an_operator_waits_for(self, make, tmp_path):
        may_load = tmp_path / "may-load"
        daemon = make({"slow": held(may_load), "cold": fake()})
        Call(daemon, "slow")
        daemon.wait_state("slow", "starting")
        asked = threading.Thread(target=daemon.upgrade)
        asked.start()
        wait_until(lambda: "upgrade.began" in daemon.log_text())
        threading.Timer(1.0, may_load.touch).start()
        answer = daemon.post("/v1/admin/models/cold/load")
        assert (answer.status_code, answer.json()["state"]) == (200, "ready"), answer.text
        asked.join(LIMIT_S)
        assert daemon.model("cold")["state"] == "ready"

    def test_a_picture_keeps_its_address_until_the_last_daemon_ends(self, make):
        daemon = make({"chat": fake()})
        kept = daemon.state_dir / "pictures" / f"{'a' * 43}.png"
        kept.write_bytes(b"a picture")
        first = daemon.process
        daemon.upgrade()
        wait_until(lambda: first.poll() is not None, what="the first daemon has ended")
        answer = daemon.get(f"/v1/images/files/{kept.name}")
        assert (answer.content, answer.headers["content-type"]) == (b"a picture", "image/png")
        daemon.end()
        assert not kept.exists()

    def test_pins_and_overrides_stay(self, make):
        daemon = make({"a": fake(), "b": fake()})
        assert daemon.post("/v1/admin/models/a/load", json={"overrides": {"vram_mib": 150}}).status_code == 200
        assert daemon.post("/v1/admin/models/b/pin", json={"pin": True}).status_code == 200
        before = daemon.model("a"), worker(daemon, "a")
        daemon.upgrade()
        assert worker(daemon, "a") == before[1]
        assert daemon.model("a")["overrides"] == before[0]["overrides"]
        assert daemon.model("b")["pin"] is True

    def test_replicas_go_on_as_one_model(self, make):
        daemon = make({"pair": fake(replicas=2), "few": fake(replicas=2)})
        for name in ("pair", "few"):
            daemon.post(f"/v1/admin/models/{name}/load").raise_for_status()
            wait_until(lambda name=name: len(daemon.model(name)["replicas"]) == 2)
        wait_until(lambda: all(each["answering"] for each in daemon.model("few")["replicas"]))
        before = {name: [each["pid"] for each in daemon.model(name)["replicas"]] for name in ("pair", "few")}
        daemon.config["models"]["few"]["replicas"] = 1
        daemon.config_path.write_text(yaml.safe_dump(daemon.config))
        daemon.upgrade()
        assert [each["pid"] for each in daemon.model("pair")["replicas"]] == before["pair"]
        assert daemon.chat("pair").status_code == 200
        wait_until(lambda: [each["pid"] for each in daemon.model("few")["replicas"]] == before["few"][:1])

    def test_a_keep_alive_stays_in_force_and_an_unloaded_default_model_away(self, make):
        """Also that of a request which still runs at the hand-over."""
        limits = {"default_model": "home", "default_after_s": 0.5, "min_residency_s": 0}
        models = {"a": fake(keep_alive_s=5), "b": fake("--chunk-delay", "0.3", keep_alive_s=5), "home": fake()}
        daemon = make(models, config={"limits": limits})
        assert daemon.chat("a", x_keep_alive_s=900).status_code == 200
        daemon.wait_state("home", "ready")
        assert daemon.post("/v1/admin/models/home/unload").status_code == 200
        running = threading.Thread(target=daemon.chat, args=("b",), kwargs={"stream": True, "x_keep_alive_s": 900})
        running.start()
        wait_until(lambda: daemon.model("b")["in_flight"] == 1)
        daemon.upgrade()
        assert daemon.model("a")["unload_s"] > 600
        running.join(LIMIT_S)
        assert wait_until(lambda: daemon.model("b")["unload_s"]) > 600
        wait_until(lambda: daemon.model("b")["idle_s"] > 1)
        assert daemon.model("home")["state"] == "stopped"


class TestAfterwards:
    """The new daemon looks after the workers as if it had started them."""

    def test_all_is_gone_when_it_is_killed(self, make, measured):
        daemon = make({"a": fake("--fork", "2"), "b": fake("--daemonize", "--ignore-term", grace_s=0.2)})
        for name in "ab":
            daemon.chat(name)
        daemon.upgrade()
        daemon.process.wait(LIMIT_S)
        assert len(daemon.workers()) > 4
        os.kill(daemon.serving, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(lambda: not daemon.workers(), what="no orphans")
        measured(gone_s=time.monotonic() - killed_at)
        assert time.monotonic() - killed_at < 15

    def test_a_killed_shim_takes_its_tree_with_it(self, make):
        daemon = make({"a": fake("--daemonize", "2", "--ignore-term", grace_s=0.2)})
        daemon.chat("a")
        daemon.upgrade()
        daemon.process.wait(LIMIT_S)
        pid, shim, generation = worker(daemon, "a")
        os.kill(shim, signal.SIGKILL)
        daemon.wait_gone("a", pid)
        wait_until(lambda: not worker_tree(daemon, "a", generation), what="its tree is gone")
        assert daemon.chat("a").status_code == 200

    def test_unload_waits_for_requests_of_the_old_one(self, make, tmp_path):
        """They count as running; with their end the worker stops, by SIGTERM."""
        daemon = make({"a": fake()})
        daemon.chat("a")
        may_end = tmp_path / "may-end"
        stream = Stream(daemon, "a", fake={"goes_on_until": str(may_end)})
        wait_until(lambda: stream.chunks)
        daemon.upgrade()
        assert daemon.model("a")["in_flight"] == 1
        threading.Timer(1.0, may_end.touch).start()
        assert daemon.post("/v1/admin/models/a/unload").json()["state"] == "stopped"
        assert stream.result().ended_cleanly
        assert not daemon.workers()
        assert not [event for event in daemon.events("decision.made") if event["kind"] == "crash"]

    def test_again_while_the_first_one_still_has_requests(self, make, tmp_path):
        daemon = make({"a": fake()})
        daemon.chat("a")
        before = worker(daemon, "a")
        may_end = tmp_path / "may-end"
        stream = Stream(daemon, "a", fake={"goes_on_until": str(may_end)})
        wait_until(lambda: stream.chunks)
        pids = {daemon.upgrade() for _ in range(3)}
        assert len(pids) == 3
        assert (daemon.model("a")["in_flight"], worker(daemon, "a")) == (1, before)
        may_end.touch()
        assert stream.result().ended_cleanly
        wait_until(lambda: daemon.model("a")["in_flight"] == 0)
        daemon.process.wait(LIMIT_S)
        wait_until(lambda: daemon.successors() == [daemon.serving], what="only the last one is left")
        assert daemon.chat("a").status_code == 200

    def test_a_new_configuration_counts_as_a_reload(self, make, tmp_path):
        daemon = make({"same": fake(), "changed": fake(), "removed": fake()})
        for name in ("same", "changed", "removed"):
            daemon.chat(name)
        before = worker(daemon, "same"), worker(daemon, "changed")
        may_end = tmp_path / "may-end"
        stream = Stream(daemon, "removed", fake={"goes_on_until": str(may_end)})
        wait_until(lambda: stream.chunks)
        daemon.config["models"] = {"same": fake(), "changed": fake("--warmup", "0.1"), "added": fake()}
        daemon.config_path.write_text(yaml.safe_dump(daemon.config, sort_keys=False))
        daemon.upgrade()
        assert worker(daemon, "same") == before[0]
        assert daemon.chat("changed").status_code == daemon.chat("added").status_code == 200
        assert worker(daemon, "changed")[0] != before[1][0]
        assert daemon.chat("removed").status_code == 404
        may_end.touch()
        assert stream.result().ended_cleanly
        wait_until(lambda: not worker_tree(daemon, "removed", 1), what="the removed model's worker is gone")

    def test_extra_ports_are_as_the_new_configuration_says(self, make):
        first = quiet_ports(3)
        daemon = make({"a": fake()}, config={"server": {"ollama_port": first, "metrics_port": first + 1}})
        with httpx.Client(trust_env=False, timeout=LIMIT_S) as client:  # on connections that stay
            asked = [f"http://127.0.0.1:{first}/api/tags", f"http://127.0.0.1:{first + 1}/metrics"]
            assert [client.get(url).status_code for url in asked] == [200, 200]
            daemon.upgrade()
            assert [client.get(url).status_code for url in asked] == [200, 200]
            daemon.process.wait(LIMIT_S)
            assert [client.get(url).status_code for url in asked] == [200, 200]
            daemon.config["server"] |= {"ollama_port": first + 2}
            daemon.config_path.write_text(yaml.safe_dump(daemon.config, sort_keys=False))
            daemon.upgrade()
            assert client.get(f"http://127.0.0.1:{first + 2}/api/tags").status_code == 200
        wait_until(lambda: daemon.successors() == [daemon.serving], what="only the last one is left")
        assert httpx.get(asked[1], trust_env=False).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(asked[0], trust_env=False)


class TestWithoutSystemd:
    """`llmux serve --takeover`, started by anybody."""

    @contextlib.contextmanager
    def started(self, daemon: Upgraded) -> Iterator[forker.Forked]:
        """What it says is in the file `said`."""
        argv = [*forker.LLMUX, "serve", "--takeover", "--config", str(daemon.config_path)]
        with open(os.devnull, "w+") as nothing, (daemon.folder / "said").open("w") as said:
            streams = {"stdin": nothing, "stdout": nothing, "stderr": said}
            successor = forker.start(argv, cwd=REPOSITORY, env=os.environ, **streams)
        try:
            yield successor
        finally:
            successor.terminate()
            successor.wait(LIMIT_S)

    def test_takes_over_from_one_that_is_not_its_parent(self, make):
        daemon = make({"a": fake()})
        daemon.chat("a")
        before = worker(daemon, "a")
        with self.started(daemon) as successor:
            daemon.process.wait(LIMIT_S)
            assert (daemon.serving, worker(daemon, "a")) == (successor.pid, before)
        assert successor.returncode == 0
        assert not daemon.workers()

    def test_by_the_command(self, make):
        daemon = make({"a": fake()})
        daemon.chat("a")
        before = worker(daemon, "a")
        done = llmux("service", "upgrade", "--url", daemon.url, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        assert f"the new daemon serves (pid {daemon.serving})" in done.stdout
        assert worker(daemon, "a") == before
        daemon.config_path.write_text("models: 3\n")
        done = llmux("service", "upgrade", "--url", daemon.url, timeout=LIMIT_S)
        assert done.returncode == 1
        assert "this one goes on" in done.stderr
        assert worker(daemon, "a") == before

    def test_starts_as_usual_where_none_runs(self, make):
        daemon = make({"a": fake()})
        daemon.stop()
        with self.started(daemon) as successor:
            wait_until(lambda: daemon.serving == successor.pid)
            wait_until(lambda: _answers(daemon))
            assert daemon.chat("a").status_code == 200

    def test_one_at_a_time(self, make, tmp_path):
        may_load = tmp_path / "may-load"
        daemon = make({"slow": held(may_load)})
        Call(daemon, "slow")
        daemon.wait_state("slow", "starting")
        asked = threading.Thread(target=daemon.upgrade)
        asked.start()
        wait_until(lambda: "upgrade.began" in daemon.log_text())
        with self.started(daemon) as second:
            assert second.wait(LIMIT_S) != 0
        assert "Another upgrade is under way already." in (tmp_path / "said").read_text()
        refused = daemon.post("/v1/admin/upgrade")
        assert (refused.status_code, code(refused)) == (503, "upgrade_failed")
        may_load.touch()
        asked.join(LIMIT_S)


def _answers(daemon: Daemon) -> bool:
    try:
        return daemon.get("/health").status_code == 200
    except httpx.TransportError:
        return False


class TestTheOldOneStays:
    """A successor that can't start or can't read the state says so, and nothing has changed."""

    def refused(self, daemon: Upgraded) -> str:
        before = worker(daemon, "a")
        may_end = daemon.folder / "may-end"
        stream = Stream(daemon, "a", fake={"goes_on_until": str(may_end)})
        wait_until(lambda: stream.chunks)
        answer = daemon.post("/v1/admin/upgrade")
        assert (answer.status_code, code(answer)) == (503, "upgrade_failed"), answer.text
        may_end.touch()
        assert stream.result().ended_cleanly
        assert worker(daemon, "a") == before
        assert daemon.process.poll() is None
        assert not daemon.successors()
        assert daemon.chat("b").status_code == 200  # and plans again
        assert daemon.post("/v1/admin/models/b/unload").status_code == 200
        return answer.json()["error"]["message"] + str(answer.json()["error"].get("detail"))

    def test_broken_configuration(self, make):
        daemon = make({"a": fake(), "b": fake()})
        daemon.chat("a")
        good = daemon.config_path.read_text()
        daemon.config_path.write_text(good.replace("vram_mib: 100", "vram_mib: many"))
        assert "vram_mib" in self.refused(daemon)
        daemon.config_path.write_text(good)
        daemon.upgrade()  # and it can try again

    def test_unreadable_state(self, make):
        daemon = make({"a": fake(), "b": fake()})
        daemon.chat("a")
        path = daemon.state_dir / "state.sqlite3"
        path.rename(path.with_suffix(".kept"))
        path.mkdir()
        assert "state.sqlite3 can't be used" in self.refused(daemon)

    def test_another_address(self, make):
        daemon = make({"a": fake(), "b": fake()})
        daemon.chat("a")
        text = daemon.config_path.read_text()
        daemon.config_path.write_text(text.replace(f"port: {daemon.port}\n", f"port: {daemon.port + 40}\n"))
        assert "which only a restart can change" in self.refused(daemon)

    def test_an_extra_port_that_is_taken(self, make):
        daemon = make({"a": fake(), "b": fake()})
        daemon.chat("a")
        with socket.create_server(("127.0.0.1", 0)) as other:
            daemon.config["server"] |= {"ollama_port": other.getsockname()[1]}
            daemon.config_path.write_text(yaml.safe_dump(daemon.config, sort_keys=False))
            assert "(server.ollama_port): Address already in use" in self.refused(daemon)

    def test_a_successor_that_ends_meanwhile(self, make, tmp_path):
        may_load = tmp_path / "may-load"
        daemon = make({"slow": held(may_load), "a": fake(), "b": fake()})
        daemon.chat("a")
        before = worker(daemon, "a")
        Call(daemon, "slow")
        daemon.wait_state("slow", "starting")
        asked = Call(daemon, "a")
        asked.result()
        upgrade = threading.Thread(target=lambda: daemon.post("/v1/admin/upgrade"))
        upgrade.start()
        wait_until(lambda: "upgrade.began" in daemon.log_text())
        (successor,) = daemon.successors()
        os.kill(successor, signal.SIGKILL)
        may_load.touch()
        upgrade.join(LIMIT_S)
        assert worker(daemon, "a") == before
        assert daemon.chat("b").status_code == 200
        daemon.upgrade()


def test_told_to_systemd(tmp_path, make):
    """The old one names the new main process, which then says that it is ready; in this order."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(LIMIT_S)
        env = {"NOTIFY_SOCKET": str(address)}  # no watchdog: it would fill the socket while nobody reads
        daemon = make({"a": fake()}, env=env)
        pid = daemon.upgrade()
        told: list[tuple[str, str]] = []
        while told.count(("new", "READY=1")) == 0:
            lines = systemd.recv(4096).decode().split("\n")
            told += [("new" if ("old", f"MAINPID={pid}") in told else "old", line) for line in lines]
    assert told.index(("old", "READY=1")) < told.index(("old", f"MAINPID={pid}")) < told.index(("new", "READY=1"))
    assert ("old", "STOPPING=1") not in told


@pytest.mark.parametrize("victim", ["old", "new"])
def test_killed_at_random_points(make, measured, victim):
    """kill -9 of either: the other serves on, or every tree is gone soon after; never an orphan."""
    chance = random.Random(SEED + len(victim))
    daemon = make(
        {
            "a": fake("--fork"),
            "b": fake("--daemonize", "--ignore-term", grace_s=0.2),
            "slow": fake("--start-delay", "0.2"),
        }
    )
    gone, served = [], 0
    for _ in range(times(4, 60)):
        for name in "ab":
            daemon.chat(name)
        Stream(daemon, "a", fake=SLOW)
        if chance.random() < 0.5:
            Call(daemon, "slow")
        upgrade = threading.Thread(target=_try, args=(daemon,))
        upgrade.start()
        wait_until(lambda: daemon.successors() or not upgrade.is_alive())
        time.sleep(chance.uniform(0.0, 1.5))
        old, new = daemon.process.pid, daemon.successors()
        with contextlib.suppress(ProcessLookupError):
            os.kill(old if victim == "old" else new[0], signal.SIGKILL)
        killed_at = time.monotonic()
        upgrade.join(LIMIT_S)
        if victim == "old":
            daemon.process.wait()
        wait_until(lambda: not daemon.workers() or _serves(daemon), what=f"served or gone (LLMUX_SEED={SEED})")
        if _serves(daemon):
            served += 1
        else:
            wait_until(lambda: not daemon.workers(), what="no orphans")
            gone.append(time.monotonic() - killed_at)
        daemon.end()
        daemon.start()
    measured(seed=SEED, victim=victim, served=served, gone=len(gone), gone_max_s=max(gone, default=0.0))
    assert max(gone, default=0.0) < 15


def _try(daemon: Daemon) -> None:
    with contextlib.suppress(httpx.HTTPError):
        daemon.post("/v1/admin/upgrade")


def _serves(daemon: Daemon) -> bool:
    try:
        return daemon.chat("a").status_code == 200
    except httpx.HTTPError:
        return False
