"""Tasks: a name that stands for a ladder of candidates. Real llama.cpp workers, and fakes for what has to go wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml

from tests.support.daemon import Daemon, fake, gguf, running, wait_until
from tests.support.held import held
from tests.support.shell import Shell

GATE = "slow-may-come-up"
LONG = "word " * 400


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / GATE).touch()
    (folder / "tasks.yaml").write_text(
        yaml.safe_dump({"from-file": {"candidates": ["broken", "quick"], "description": "of its own file"}})
    )
    config = {
        "models": {
            "chat": gguf(),
            "narrow": gguf(n_ctx=256, parallel=1),
            "slow": held(folder / GATE),
            "late": held(folder / GATE, keep_alive_s=3600),
            "new-1": held(folder / GATE),
            "new-2": held(folder / GATE),
            "fails-late": held(folder / GATE, "--exit-code", "1", "--log-text", "no such file: weights.bin"),
            "broken": fake("--exit-code", "1", "--log-text", "no such file: weights.bin"),
            "gone": fake("--hang-up"),
            "quick": fake(),
            "voice": fake(endpoints=["/v1/audio/speech"], type="tts"),
        },
        "virtual_models": {"seeded": {"model": "chat", "defaults": {"seed": 1, "temperature": 0}}},
        "tasks": {
            "warm": {"candidates": ["slow", "quick"]},
            "pinned": {"candidates": ["slow", "quick"], "pin_primary": True},
            "fits": {"candidates": ["narrow", {"model": "seeded", "force": {"max_tokens": 3}}], "pin_primary": True},
            "fails-late": {"candidates": ["fails-late", "quick"], "pin_primary": True},
            "hopeless": {"candidates": ["broken", "gone"]},
            "by-path": {"candidates": ["voice", "quick"]},
            "budgeted": {"candidates": ["late", "quick"], "pin_primary": True, "budget_s": 0.4},
        },
        "limits": {"crash_limit": 1, "keepalive_s": 0.2},
    }
    with running(folder, config) as daemon:
        yield daemon


@pytest.fixture
def gate(site: Daemon):
    """Until this file is there the model `slow` goes on starting."""
    path = site.folder / GATE
    path.unlink(missing_ok=True)
    yield path
    path.touch()


@pytest.fixture
def shell(site: Daemon, tmp_path) -> Shell:
    return Shell(tmp_path, site.url)


def load(site: Daemon, *names: str) -> None:
    for name in names:
        site.post(f"/v1/admin/models/{name}/load").raise_for_status()


def took_s(site: Daemon, name: str) -> float:
    """How long the model's load has taken so far."""
    newest = site.get("/v1/admin/loads").json()["data"][0]
    return (newest["took_s"] or 0.0) if newest["model"] == name else 0.0


def unload(site: Daemon, *names: str) -> None:
    for name in names:
        site.post(f"/v1/admin/models/{name}/unload?force=true").raise_for_status()


def chosen(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-llmux-model"], answer.headers["x-llmux-reason"]


class TestChoice:
    """Whoever is loaded answers, or the primary."""

    def test_a_warm_one_before_a_cold_primary(self, site):
        unload(site, "slow")
        load(site, "quick")
        answer = site.chat("task:warm")
        assert chosen(answer) == ("quick", "warm")
        assert answer.json()["model"] == "task:warm"
        assert site.model("slow")["state"] == "stopped"

    def test_by_its_bare_name(self, site):
        """Where no model has it: `fails-late` is a model as well."""
        load(site, "quick")
        answer = site.chat("hopeless-or-not")
        assert answer.status_code == 404
        answer = site.chat("warm")
        assert chosen(answer)[0] in {"quick", "slow"}
        assert answer.json()["model"] == "warm"
        assert "x-llmux-model" not in site.chat("quick").headers
        assert site.get("/v1/admin/models/fails-late").json()["name"] == "fails-late"

    def test_a_warm_primary(self, site):
        load(site, "slow", "quick")
        assert chosen(site.chat("task:warm")) == ("slow", "primary")

    def test_the_primary_when_all_are_cold(self, site):
        unload(site, "slow", "quick")
        assert chosen(site.chat("task:warm")) == ("slow", "primary")
        assert site.model("quick")["state"] == "stopped"

    def test_a_pinned_primary_is_loaded_all_the_same(self, site):
        unload(site, "slow")
        load(site, "quick")
        assert chosen(site.chat("task:pinned")) == ("slow", "primary")

    def test_who_does_not_serve_the_path_is_passed_over(self, site):
        unload(site, "quick")
        assert chosen(site.chat("task:by-path")) == ("quick", "fallback after endpoint_not_supported of voice")

    def test_plain_names_say_nothing_of_it(self, site):
        assert "x-llmux-model" not in site.chat("quick").headers


class TestFallback:
    """The next one answers where one can't, as long as nothing of an answer was sent."""

    def test_after_a_failed_load(self, site):
        unload(site, "quick")
        answer = site.chat("task:from-file")
        model, reason = chosen(answer)
        assert model == "quick"
        assert reason in {"fallback after load_failed of broken", "fallback after model_failed of broken"}

    def test_a_stream_that_has_begun_with_a_keep_alive(self, site, gate):
        """Its head can't say any more who answers, but somebody does."""
        body = {"model": "task:fails-late", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        with site.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert "x-llmux-model" not in response.headers
            gate.touch()
            text = response.read().decode()
        assert text.startswith(": keepalive")
        assert '"model": "task:fails-late"' in text.replace('":"', '": "')
        assert text.rstrip().endswith("data: [DONE]")

    def test_a_prompt_that_is_too_long(self, site):
        load(site, "chat")
        answer = site.chat("task:fits", text=LONG)
        assert chosen(answer) == ("seeded", "fallback after context_length_exceeded of narrow")
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert chosen(site.chat("task:fits", text="Hi", max_tokens=1)) == ("narrow", "primary")

    def test_a_prompt_that_is_too_long_for_a_stream(self, site):
        body = {"messages": [{"role": "user", "content": LONG}], "stream": True}
        answer = site.post("/v1/chat/completions", json={"model": "task:fits", **body})
        assert chosen(answer) == ("seeded", "fallback after context_length_exceeded of narrow")
        events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        assert {json.loads(line.removeprefix("data: "))["model"] for line in events} == {"task:fits"}
        assert answer.text.rstrip().endswith("data: [DONE]")

    def test_a_worker_that_broke_off_is_not_asked_elsewhere(self, site):
        """The request may have reached it."""
        answer = site.chat("task:hopeless")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert [line.partition(":")[0] for line in answer.json()["error"].get("detail", [])] in (["broken"], [])


class TestLimits:
    """A client's limits count one request, however many candidates were asked."""

    def test_one_request_each(self, tmp_path):
        config = {
            "models": {"broken": fake("--exit-code", "1"), "narrow": gguf(n_ctx=256, parallel=1), "wide": gguf()},
            "tasks": {"t": {"candidates": ["broken", "narrow", "wide"], "pin_primary": True}},
            "clients": {"default": {"request_rate": "2/h"}},
            "limits": {"crash_limit": 1},
        }
        with running(tmp_path, config) as daemon, daemon.client(headers={"x-tenant-id": "t"}) as client:
            body = {"model": "task:t", "max_tokens": 1, "messages": [{"role": "user", "content": LONG}]}
            answers = [client.post("/v1/chat/completions", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers.get("x-llmux-model") for answer in answers] == ["wide", "wide", None]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]


class TestBudgets:
    """What can't be answered in time is refused at once; what ran out of it while it waited, then."""

    def test_too_small_at_once(self, site, gate):
        gate.touch()
        load(site, "late")
        unload(site, "late")
        load_s = site.model("late")["load_s"]
        answer = site.chat("late", x_timeout_s=load_s / 2)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (504, "budget_too_small")
        assert error["expected_s"] == pytest.approx(load_s, abs=0.006)
        assert answer.headers["x-should-retry"] == "false"
        assert site.model("late")["state"] == "stopped"

    @pytest.mark.parametrize(
        ("model", "ask"),
        [("new-1", {"headers": {"x-timeout": "0.4"}}), ("new-2", {"json": {"x_timeout_s": 0.4}})],
    )
    def test_over_while_it_waits(self, site, gate, model, ask):
        """Nothing was promised: its load was never measured."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **ask.get("json", {})}
        answer = site.post("/v1/chat/completions", json=body, headers=ask.get("headers"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "budget_exceeded")
        assert answer.headers["x-should-retry"] == "false"

    def test_the_load_goes_on_for_others(self, site, gate):
        unload(site, "slow")
        with ThreadPoolExecutor(1) as pool:
            patient = pool.submit(site.chat, "slow")
            wait_until(lambda: site.model("slow")["queued"] == 1)
            assert site.chat("slow", x_timeout_s=0.4).status_code == 504
            gate.touch()
            assert patient.result().status_code == 200

    def test_a_warm_candidate_within_the_tasks_budget(self, site, gate):
        load(site, "quick")
        unload(site, "late")
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load, site, "late")
            wait_until(lambda: took_s(site, "late") > 0.6, what="it takes longer than the task's budget")
            gate.touch()
            loading.result()
        unload(site, "late")
        assert chosen(site.chat("task:budgeted")) == ("quick", "fallback after budget_too_small of late")

    @pytest.mark.parametrize("bad", ["soon", "0", "-1", "86401", "nan"])
    def test_no_such_time(self, site, bad):
        answer = site.post("/v1/chat/completions", json={"model": "quick", "messages": []}, headers={"x-timeout": bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x_timeout_s")
        assert site.chat("quick", x_timeout_s=[1]).status_code == 400

    def test_no_worker_sees_it(self, site):
        answer = site.chat("chat", x_timeout_s=100, max_tokens=1)
        assert answer.status_code == 200


class TestReload:
    """A changed tasks.yaml counts after a reload."""

    def test_a_new_task(self, site):
        path = site.folder / "tasks.yaml"
        before = path.read_text()
        path.write_text(f"{before}new: {{candidates: [quick]}}\n")
        try:
            told = site.post("/v1/admin/reload").json()
            assert (told["added"], told["restarted"], told["stops"]) == (["task:new"], [], [])
            assert chosen(site.chat("task:new")) == ("quick", "primary")
        finally:
            path.write_text(before)
            assert site.post("/v1/admin/reload").json()["removed"] == ["task:new"]
        assert site.chat("task:new").status_code == 404


class TestSeen:
    """Tasks are listed, told of, and explained."""

    def test_in_the_list_of_models(self, site):
        rows = {row["id"]: row for row in site.get("/v1/models").json()["data"]}
        assert {"task:warm", "task:from-file"} <= rows.keys()
        assert rows["task:from-file"]["description"] == "of its own file"

    def test_in_the_admin_api(self, site):
        load(site, "quick")
        unload(site, "slow")
        names = [task["name"] for task in site.get("/v1/admin/tasks").json()["data"]]
        assert names[0] == "task:warm"
        assert names[-1] == "task:from-file"
        told = site.get("/v1/admin/tasks/task:warm").json()
        assert (told["chosen"], told["reason"]) == ("quick", "warm")
        assert told["why"] == "quick is ready, and slow, which would come first, is not."
        assert [candidate["warm"] for candidate in told["candidates"]] == [False, True]
        assert site.get("/v1/admin/tasks/quick").json()["error"]["code"] == "model_not_found"

    def test_why(self, site, shell):
        load(site, "quick")
        unload(site, "slow")
        told = shell("why", "task:warm").stdout
        assert "task:warm would go to quick." in told
        assert json.loads(shell("why", "task:warm", "--json").stdout)["chosen"] == "quick"

    def test_an_unknown_one(self, site):
        error = site.chat("task:wram").json()["error"]
        assert "Did you mean 'task:warm'?" in error["message"]
