"""Models behind a program that a worker runs for each request: through a real daemon, with a scripted program."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S

PROGRAM = Path(__file__).parents[2] / "support" / "fake_cli.py"
YES = {"allow_remote": True}


class Site:
    """A daemon, and the folder where its programs say what they were given."""

    def __init__(self, daemon: Daemon, seen: Path) -> None:
        self.daemon, self.seen = daemon, seen

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.seen.glob("*.json")]

    def pids(self) -> set[int]:
        return {int(path.stem) for path in self.seen.glob("*.json")}

    def child(self) -> int:
        return int(wait_until(lambda: (path := self.seen / "child").exists() and path.read_text()))

    def forget(self) -> None:
        for path in self.seen.iterdir():
            path.unlink()

    def chat(self, model: str, text: str, **fields: Any):
        return self.daemon.chat(model, text=text, **fields)

    def folders(self) -> list[Path]:
        """Those of requests, in which programs ran."""
        return [folder for note in self.notes() if (folder := Path(note["cwd"]).parent).exists()]


def program(seen: Path, style: str = "text", **keys: object) -> dict[str, object]:
    command = [sys.executable, "-I", "-S", str(PROGRAM), style, str(seen), "--model", "${model}"]
    about = {"runtime": "claude_cli", "command": command, "output": style, "upstream_model": "theirs"}
    return {**about, "allow_remote": True, **keys}


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def all_gone(site: Site) -> bool:
    return all(map(gone, site.pids()))


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def said(text: str) -> str:
    choices = [json.loads(event)["choices"] for event in events(text) if event != "[DONE]"]
    return "".join(each["delta"].get("content", "") for found in choices for each in found)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Site]:
    folder, seen = tmp_path_factory.mktemp("programs"), tmp_path_factory.mktemp("seen")
    models = {
        "claude:sonnet": program(seen, allow_remote=False),
        "plain": program(seen, system_args=["${system_file}"], pass_env=["THEIR_KEY"], env={"MORE": "1"}),
        "bare": program(seen, system_args=[]),
        "json": program(seen, "claude_json"),
        "stream": program(seen, "claude_stream_json"),
        "short": program(seen, timeout_s=1.0),
        "small": program(seen, output_mib=1),
        "single": program(seen, parallel=1),
        "broken": fake("--exit-code", "1"),
    }
    tasks = {"ladder": {"candidates": ["broken", "claude:sonnet"], "allow_remote": True}}
    config = {"models": models, "tasks": tasks, "limits": {"crash_limit": 1}}
    with running(folder, config, env={"THEIR_KEY": "key-1", "OTHER_KEY": "key-2"}) as daemon:
        yield Site(daemon, seen)


@pytest.fixture
def site(shared) -> Site:
    shared.forget()
    return shared


class TestPermission:
    """It is a remote: a request must say that it may leave."""

    def test_refused(self, site):
        answer = site.chat("claude:sonnet", "Hello")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "remote_not_allowed")
        assert site.notes() == []

    def test_allowed(self, site):
        assert site.chat("claude:sonnet", "Hello", **YES).status_code == 200

    def test_the_guard_against_cloud_fallbacks(self, site):
        assert site.chat("task:ladder", "Hello").headers["x-llmux-model"] == "claude:sonnet"
        with site.daemon.client() as client:
            client.put("/api/v1/config", json={"allowCloudFallback": False}).raise_for_status()
            assert site.chat("task:ladder", "Hello").status_code == 503
            client.put("/api/v1/config", json={"allowCloudFallback": True}).raise_for_status()

    def test_what_operators_see(self, site):
        told = site.daemon.model("plain")
        assert (told["remote"], told["device"], told["memory"]["lease_mib"]) == (True, "remote", None)
        assert told["worker"]["upstream_model"] == "theirs"
        assert Path(f"/proc/{told['worker']['pid']}").exists()


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
def test_counts_are_refused(site, path):
    """They would cost a whole answer."""
    fields = {"input": "Hi"} if "responses" in path else {"messages": [{"role": "user", "content": "Hi"}]}
    told = site.daemon.post(path, json={"model": "plain", **fields})
    assert (told.status_code, told.json()["error"]["code"]) == (400, "endpoint_not_supported")
    assert "max_tokens" in told.json()["error"]["message"]
    assert site.notes() == []


class TestAnswers:
    """Text and JSON of the program become chat completions, in every dialect."""

    @pytest.mark.parametrize("model", ["plain", "json", "stream"])
    def test_whole(self, site, model):
        answer = site.chat(model, "Hello, wörld").json()
        assert answer["object"] == "chat.completion"
        assert answer["model"] == model
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "You said: Hello, wörld", "refusal": None}
        assert choice["finish_reason"] == "stop"

    @pytest.mark.parametrize("model", ["json", "stream"])
    def test_usage(self, site, model):
        usage = site.chat(model, "Hello").json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 4, 14)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}

    @pytest.mark.parametrize("model", ["plain", "json", "stream"])
    def test_stream(self, site, model):
        answer = site.chat(model, "Hello", stream=True, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert said(answer.text) == "You said: Hello"
        *_, finish, usage, end = events(answer.text)
        assert (json.loads(finish)["choices"][0]["finish_reason"], end) == ("stop", "[DONE]")
        assert (json.loads(usage)["usage"] is None) == (model == "plain")

    @pytest.mark.parametrize("model", ["plain", "stream"])
    def test_a_stream_comes_as_it_is_printed(self, site, model, tmp_path):
        body = {"model": model, "stream": True, "messages": [{"role": "user", "content": f"wait {tmp_path}/go"}]}
        with site.daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert "You said" in next(line for line in lines if "You" in line)
            assert not all_gone(site)
            (tmp_path / "go").touch()
            assert list(lines)[-2:] == ["data: [DONE]", ""]

    def test_other_dialects(self, site):
        messages = [{"role": "user", "content": "Hello"}]
        with site.daemon.client() as client:
            answer = client.post("/v1/messages", json={"model": "stream", "max_tokens": 5, "messages": messages}).json()
            assert answer["content"][0]["text"] == "You said: Hello"
            answer = client.post("/v1/responses", json={"model": "stream", "input": "Hello"}).json()
            assert answer["output"][-1]["content"][0]["text"] == "You said: Hello"
            answer = client.post("/api/chat", json={"model": "plain", "stream": False, "messages": messages}).json()
            assert answer["message"]["content"] == "You said: Hello"


class TestPrompt:
    """The program gets the prompt by stdin, in a folder and an environment of its own."""

    def test_a_conversation(self, site):
        turns = [("system", "Be brief."), ("user", "One"), ("assistant", "Two"), ("user", "Three")]
        messages = [{"role": role, "content": text} for role, text in turns]
        site.daemon.post("/v1/chat/completions", json={"model": "plain", "messages": messages}).raise_for_status()
        (note,) = site.notes()
        assert "<user>\nOne\n</user>\n<assistant>\nTwo\n</assistant>\n<user>\nThree\n</user>" in note["prompt"]
        assert "Be brief." not in note["prompt"]
        assert list(note["files"].values()) == ["Be brief."]
        assert note["options"][:2] == ["--model", "theirs"]

    def test_a_system_prompt_without_a_way_to_give_it(self, site):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        site.daemon.post("/v1/chat/completions", json={"model": "bare", "messages": messages}).raise_for_status()
        assert site.notes()[0]["prompt"] == "Be brief.\n\nHello"

    def test_its_folder(self, site):
        site.chat("plain", "Hello").raise_for_status()
        (note,) = site.notes()
        assert (note["here"], note["mode"]) == ([], "0o700")
        wait_until(lambda: not Path(note["cwd"]).parent.exists())

    def test_its_environment(self, site):
        site.chat("plain", "Hello").raise_for_status()
        env = site.notes()[0]["env"]
        assert (env["THEIR_KEY"], env["MORE"], env["PATH"]) == ("key-1", "1", os.environ["PATH"])
        assert "OTHER_KEY" not in env

    def test_a_long_prompt(self, site):
        text = "word " * 400_000
        answer = site.chat("plain", f"{text}\nHello")
        assert len(answer.json()["choices"][0]["message"]["content"]) > len(text)


class TestFields:
    """Nothing is lost silently."""

    def test_ignored(self, site):
        answer = site.chat("plain", "Hello", temperature=0, max_tokens=3, stop=None, **{"a\r\nb": 1})
        assert answer.status_code == 200
        names = ["temperature", "max_tokens", "a??b"]
        assert answer.headers["x-llmux-ignored"].split(", ") == names
        wait_until(lambda: site.daemon.events("request.finished")[-1].get("ignored") == names)

    def test_ignored_in_another_dialect(self, site):
        body = {"model": "plain", "input": "Hello", "temperature": 0.5}
        answer = site.daemon.post("/v1/responses", json=body)
        assert "temperature" in answer.headers["x-llmux-ignored"].split(", ")

    @pytest.mark.parametrize(
        ("path", "fields", "names"),
        [
            ("/v1/responses", {"input": "Hello", "max_output_tokens": 9}, ["max_output_tokens"]),
            ("/api/chat", {"options": {"num_gpu": 1, "num_predict": 9}}, ["options.num_gpu", "options.num_predict"]),
            ("/v1/messages", {"max_tokens": 9, "top_k": 1, "stop_sequences": ["x"]}, ["top_k", "max_tokens", "stop_sequences"]),
        ],
    )  # fmt: skip
    def test_ignored_by_the_clients_names(self, site, path, fields, names):
        body = {"model": "plain", "stream": False, "messages": [{"role": "user", "content": "Hello"}], **fields}
        body.pop("messages" if path == "/v1/responses" else "", None)
        answer = site.daemon.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-llmux-ignored"].split(", ") == names

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tools", [{"type": "function", "function": {"name": "f"}}]),
            ("n", 2),
            ("response_format", {"type": "json_object"}),
        ],
    )
    def test_refused(self, site, name, value):
        answer = site.chat("plain", "Hello", **{name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert site.notes() == []

    def test_pictures(self, site):
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
        body = {"model": "plain", "messages": [{"role": "user", "content": parts}]}
        answer = site.daemon.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "modality_unsupported")


class TestFailures:
    """The client learns that it failed, and nothing of the program's words, which may be somebody's."""

    @pytest.mark.parametrize("wish", ["exit 3", "die"])
    def test_a_program_that_fails(self, site, wish):
        answer = site.chat("plain", wish)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert "secret" not in answer.text

    def test_its_last_words_are_in_the_log(self, site):
        site.chat("plain", "exit 3")
        log = "/v1/admin/models/plain/logs"
        text = wait_until(lambda: "secret" in (found := site.daemon.get(log).text) and found)
        assert "it exited with 3" in text

    @pytest.mark.parametrize("model", ["json", "stream"])
    @pytest.mark.parametrize("wish", ["nonsense", "fail"])
    def test_what_is_no_answer(self, site, model, wish):
        for stream in (False, True):
            answer = site.chat(model, wish, stream=stream)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
            assert "secret" not in answer.text

    def test_a_program_that_is_not_there(self, tmp_path):
        path = tmp_path / "program"
        path.write_text("#!/bin/sh\necho Hello\n")
        path.chmod(0o755)
        about = {"runtime": "claude_cli", "command": [str(path)], "output": "text", "upstream_model": "m"}
        with running(tmp_path, {"models": {"m": {**about, "allow_remote": True}}}) as daemon:
            assert daemon.chat("m").json()["choices"][0]["message"]["content"] == "Hello"
            path.unlink()
            assert daemon.chat("m").json()["error"]["code"] == "upstream_error"
            assert str(path) in wait_until(lambda: daemon.get("/v1/admin/models/m/logs").text)

    def test_a_variable_that_is_not_set(self, tmp_path):
        with running(tmp_path, {"models": {"m": program(tmp_path, pass_env=["NO_SUCH_KEY"])}}) as daemon:
            assert "NO_SUCH_KEY" in daemon.wait_state("m", "failed")["reason"]


class TestNobodyWaits:
    """A job and a response in the background behave as with a worker."""

    @staticmethod
    def job(site: Site, text: str, model: str = "plain", headers: dict[str, str] | None = None, **fields: Any):
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        made = site.daemon.post(
            "/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body}, headers=headers or {}
        )
        assert made.status_code == 202, made.text
        return made.json()["id"]

    @staticmethod
    def background(site: Site, text: str, model: str = "plain", **fields: Any) -> str:
        body = {"model": model, "input": text, "background": True, **fields}
        made = site.daemon.post("/v1/responses", json=body)
        assert (made.status_code, made.json()["status"]) == (200, "queued"), made.text
        return made.json()["id"]

    @staticmethod
    def over(site: Site, path: str) -> dict[str, Any]:
        return wait_until(
            lambda: (
                (found := site.daemon.get(path).json())["status"] not in {"queued", "running", "in_progress"} and found
            )
        )

    @pytest.mark.parametrize(
        ("headers", "fields"), [({}, YES), ({"X-Allow-Remote": "true"}, {})], ids=["field", "header"]
    )
    def test_permission(self, site, headers, fields):
        """Of the request that makes it."""
        job = self.over(site, f"/v1/jobs/{self.job(site, 'Hello', 'claude:sonnet', headers, **fields)}")
        assert (job["status"], job["error"]) == ("completed", None)
        assert site.daemon.get(job["result"]).json()["choices"][0]["message"]["content"]

    def test_refused(self, site):
        job = self.over(site, f"/v1/jobs/{self.job(site, 'Hello', 'claude:sonnet')}")
        assert (job["status"], job["error"]["code"]) == ("failed", "remote_not_allowed")
        found = self.over(site, f"/v1/responses/{self.background(site, 'Hello', 'claude:sonnet')}")
        assert (found["status"], found["error"]["code"]) == ("failed", "remote_not_allowed")
        assert site.notes() == []

    def test_a_response(self, site):
        found = self.over(site, f"/v1/responses/{self.background(site, 'Hello', 'claude:sonnet', **YES)}")
        assert found["status"] == "completed"
        assert found["output"][0]["content"][0]["text"]

    @pytest.mark.parametrize("wish", ["exit 3", "die"])
    def test_a_program_that_fails(self, site, wish):
        job = self.over(site, f"/v1/jobs/{self.job(site, wish)}")
        assert (job["status"], job["error"]["code"]) == ("failed", "upstream_error")
        found = self.over(site, f"/v1/responses/{self.background(site, wish)}")
        assert (found["status"], found["error"]["code"]) == ("failed", "upstream_error")
        assert "secret" not in f"{job}{found}"

    @pytest.mark.parametrize("kind", ["jobs", "responses"])
    def test_cancelled(self, site, kind):
        """Nothing of its program is left."""
        begin = self.job if kind == "jobs" else self.background
        name = begin(site, "linger hang")
        child = site.child()
        assert site.daemon.post(f"/v1/{kind}/{name}/cancel").json()["status"] == "cancelled"
        wait_until(lambda: all_gone(site) and gone(child))

    def test_over_a_restart(self, tmp_path):
        (seen := tmp_path / "seen").mkdir()
        go_on = tmp_path / "go"
        with running(tmp_path, {"models": {"plain": program(seen)}, "limits": {"drain_s": 0}}) as daemon:
            site = Site(daemon, seen)
            waits = self.job(site, f"wait {go_on}"), self.background(site, f"wait {go_on}")
            wait_until(lambda: len(site.pids()) == 2)
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait(LIMIT_S)
            go_on.touch()
            daemon.start()
            assert self.over(site, f"/v1/jobs/{waits[0]}")["status"] == "completed"
            assert self.over(site, f"/v1/responses/{waits[1]}")["status"] == "completed"
            wait_until(lambda: len(site.pids()) == 4 and all_gone(site))


class TestBounds:
    """Time, output and processes; nothing outlives its request."""

    def test_time(self, site):
        answer = site.chat("short", "linger hang")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        wait_until(lambda: all_gone(site) and gone(site.child()))

    def test_its_time_alone_counts(self, tmp_path):
        """It may be silent for longer than other workers."""
        about = program(tmp_path, command=["sh", "-c", "echo so; sleep 2; echo far"])
        limits = {"first_byte_s": 0.5, "stream_idle_s": 0.5}
        with running(tmp_path, {"models": {"m": about}, "limits": limits}) as daemon, ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(daemon.chat, "m", stream=stream) for stream in (False, True)]
            assert all("far" in each.result(LIMIT_S).text for each in asked)

    def test_time_within_a_stream(self, site):
        answer = site.chat("short", "hang", stream=True)
        assert "so far" in said("\n".join(answer.text.splitlines()[:2]))
        assert json.loads(events(answer.text)[-1])["error"]["code"] == "upstream_timeout"
        wait_until(lambda: all_gone(site))

    @pytest.mark.parametrize("where", ["stdout", "stderr"])
    def test_output(self, site, where):
        answer = site.chat("small", f"flood {where}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_too_large")
        assert "1 MiB" in answer.json()["error"]["message"]
        wait_until(lambda: all_gone(site))

    def test_processes(self, site, tmp_path):
        texts = [f"wait {tmp_path}/{number}" for number in range(3)]
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(site.chat, "single", text) for text in texts]
            wait_until(lambda: site.daemon.model("single")["queued"] == 2)
            assert len(wait_until(site.notes)) == 1
            for number in range(3):
                (tmp_path / str(number)).touch()
            assert [each.result(LIMIT_S).status_code for each in asked] == [200] * 3

    def test_children_that_linger(self, site):
        assert site.chat("plain", "linger").json()["choices"][0]["message"]["content"] == f"left {site.child()}"
        wait_until(lambda: gone(site.child()))

    def test_children_that_linger_beside_another_answer(self, site, tmp_path):
        """Whose they are can't be seen any more: they go when nobody's can be there."""
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(site.chat, "plain", f"wait {tmp_path}/go")
            wait_until(site.notes)
            answer = site.chat("plain", "linger")
            lingers = not gone(site.child())
            (tmp_path / "go").touch()
            assert (answer.status_code, other.result(LIMIT_S).status_code, lingers) == (200, 200, True)
        wait_until(lambda: gone(site.child()))

    def test_it_is_asked_to_end_first(self, tmp_path):
        code = f"trap 'touch {tmp_path}/asked; exit' TERM; echo so far; while :; do sleep 0.05; done"
        about = program(tmp_path, command=["sh", "-c", code], timeout_s=0.5)
        with running(tmp_path, {"models": {"m": about}}) as daemon:
            assert daemon.chat("m").status_code == 504
            wait_until((tmp_path / "asked").exists)

    def test_out_of_memory_it_dies_before_the_daemon(self, tmp_path):
        about = program(tmp_path, command=["cat", "/proc/self/oom_score_adj"])
        with running(tmp_path, {"models": {"m": about}}) as daemon:
            assert int(daemon.chat("m").json()["choices"][0]["message"]["content"]) >= 500

    def test_a_client_that_leaves(self, site):
        body = {"model": "plain", "stream": True, "messages": [{"role": "user", "content": "hang"}]}
        with site.daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()  # a name keeps it: without one it ends at once, and the connection with it
            assert "so far" in said(next(line for line in lines if not line.startswith(":")))  # after keep-alives
            assert not all_gone(site)
        wait_until(lambda: all_gone(site))
        wait_until(lambda: not site.folders())

    def test_an_unload(self, site):
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(site.chat, "plain", "linger hang")
            child = site.child()
            site.daemon.post("/v1/admin/models/plain/unload?force=true").raise_for_status()
            assert asked.result(LIMIT_S).status_code in (502, 503)
        assert all_gone(site)
        assert gone(child)
        assert site.chat("plain", "Hello").status_code == 200


class TestWorkerDeath:
    """Killed with -9, it takes its programs along, and there is another."""

    def test_no_orphans(self, tmp_path):
        (seen := tmp_path / "seen").mkdir()
        with running(tmp_path, {"models": {"m": program(seen)}}) as daemon, ThreadPoolExecutor(1) as threads:
            site = Site(daemon, seen)
            for which in ("pid", "shim_pid"):
                asked = threads.submit(site.chat, "m", "linger hang")
                child = site.child()
                os.kill(daemon.model("m")["worker"][which], signal.SIGKILL)
                assert asked.result(LIMIT_S).json()["error"]["code"] == "upstream_error"
                wait_until(lambda: all_gone(site) and gone(child))
                assert site.chat("m", "Hello").status_code == 200
                assert site.folders() == []
                site.forget()


class TestDaemonDeath:
    """Killed with -9 or stopped, the daemon leaves no process; what is left on disk goes with the next start."""

    def test_no_orphans(self, tmp_path):
        seen = tmp_path / "seen"
        seen.mkdir()
        with running(tmp_path, {"models": {"m": program(seen)}, "limits": {"drain_s": 0.1}}) as daemon:
            site = Site(daemon, seen)
            for end in (daemon.kill, daemon.stop):
                with ThreadPoolExecutor(1) as threads:
                    asked = threads.submit(site.chat, "m", "linger hang")
                    child = site.child()
                    assert not gone(child)
                    end()
                    wait_until(lambda: all_gone(site) and gone(child))
                    asked.exception(LIMIT_S)
                daemon.start()
                daemon.wait_state("m", "ready")
                assert site.folders() == []
                site.forget()
