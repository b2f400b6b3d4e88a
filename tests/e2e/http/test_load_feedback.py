"""Load feedback: what a client that asks for it reads in its stream while its request waits for a model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.support import tiny
from tests.support.daemon import Daemon, fake, gguf, running, wait_until
from tests.support.held import held
from tests.support.limits import LIMIT_S

KEYS = {name: f"sk-{name}-0123456789" for name in ("plain", "told", "boss")}
GATE, WRONG = "slow-may-come-up", "broken-may-fail"
ASKED = {"X-Llmux-Load-Feedback": "true"}
CHATS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """`slow` and `broken` start when a file says so, `timed` always as slowly; `real` only fits where `busy` is not."""
    folder = tmp_path_factory.mktemp("feedback")
    (folder / "api_keys.yaml").write_text(
        yaml.safe_dump(
            [
                {"name": "plain", "key": KEYS["plain"]},
                {"name": "told", "key": KEYS["told"], "load_feedback": True},
                {"name": "boss", "key": KEYS["boss"], "scopes": ["admin", "inference"]},
            ]
        )
    )
    (folder / "api_keys.yaml").chmod(0o600)
    config = {
        "models": {
            "slow": held(folder / GATE),
            "broken": held(
                folder / WRONG, "--exit-code", "1", "--log-text", "unknown argument: --nonsense", endpoints=CHATS
            ),
            "timed": fake("--start-delay", "2"),
            "busy": fake("--goes-on-until", str(folder / "enough"), vram_mib=3990),
            "real": gguf(),
        },
        "virtual_models": {"public": {"model": "slow"}, "shown": {"model": "broken"}},
        "limits": {"min_residency_s": 0},
    }
    with running(folder, config) as daemon:
        yield daemon


def headers(key: str, more: dict[str, str] | None = None) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[key]}"} | (more or {})


class Stream(threading.Thread):
    """A chat request, read in a thread: its text so far."""

    def __init__(self, site: Daemon, model: str, key: str, more: dict[str, str] | None = None, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.site, self.headers = site, headers(key, more)
        self.body = {"model": model, "messages": HELLO, "stream": True} | fields
        self.text = ""
        self.start()

    def run(self) -> None:
        with self.site.client(headers=self.headers) as client:
            try:
                with client.stream("POST", "/v1/chat/completions", json=self.body) as response:
                    for piece in response.iter_text():
                        self.text += piece
            except httpx.RemoteProtocolError:
                pass

    @property
    def chunks(self) -> list[dict[str, Any]]:
        lines = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    @property
    def news(self) -> list[str]:
        deltas = [choice["delta"] for chunk in self.chunks for choice in chunk.get("choices", ())]
        return [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]

    def wait_news(self, words: str) -> str:
        return wait_until(
            lambda: next((line for line in self.news if words in line), None), what=f"{words}: {self.text}"
        )

    def end(self) -> str:
        self.join(LIMIT_S)
        assert not self.is_alive()
        return self.text


def test_all_are_told_where_the_server_says_so(tmp_path):
    config = {"models": {"timed": fake("--start-delay", "2")}, "server": {"load_feedback": True}}
    asked = {"model": "timed", "messages": HELLO, "stream": True}
    with running(tmp_path, config) as daemon:
        assert "Loading timed" in daemon.post("/v1/chat/completions", json=asked).text
        assert daemon.post("/v1/admin/models/timed/unload").status_code == 200
        silent = daemon.post("/v1/chat/completions", json=asked, headers={"X-Llmux-Load-Feedback": "false"})
        assert "Loading timed" not in silent.text


class TestWhoIsTold:
    """Only who asks, by the key or by the header, which overrules it; only in streams of chats."""

    def test_all_of_them(self, site):
        silent = {
            "off by default": Stream(site, "slow", "plain"),
            "the header overrules the key": Stream(site, "slow", "told", {"X-Llmux-Load-Feedback": "false"}),
            "no stream": Stream(site, "slow", "told", ASKED, stream=False),
        }
        told = [Stream(site, "slow", "told"), Stream(site, "public", "plain", {"X-Llmux-Load-Feedback": "1"})]
        assert told[0].wait_news("Loading slow") == "Loading slow: first load with these settings, no estimate yet.\n"
        assert told[1].wait_news("Loading") == "Loading public: first load with these settings, no estimate yet.\n"
        chunk = told[1].chunks[0]
        assert (chunk["object"], chunk["model"]) == ("chat.completion.chunk", "public")
        assert chunk["choices"][0]["delta"].keys() == {"reasoning_content"}, "nothing of the content, no role"
        assert [why for why, stream in silent.items() if stream.text] == []
        (site.folder / GATE).touch()
        for stream in (*told, *silent.values()):
            text = stream.end()
            assert "Hello" in text
            if stream.body["stream"]:
                assert text.endswith("data: [DONE]\n\n")
        assert [stream.news for stream in silent.values()] == [[], [], []]
        again = Stream(site, "slow", "told")
        assert "[DONE]" in again.end()
        assert again.news == [], "a loaded model has no news"

    def test_no_word_is_refused(self, site):
        refused = httpx.post(
            f"{site.url}/v1/chat/completions",
            json={"model": "slow", "messages": HELLO, "stream": True},
            headers=headers("plain", {"X-Llmux-Load-Feedback": "perhaps"}),
            trust_env=False,
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Llmux-Load-Feedback")


class TestEstimate:
    """It is the time that the last load took."""

    def test_second_load(self, site):
        Stream(site, "timed", "plain").end()
        measured_s = self.model(site)["load_s"]
        unload = f"{site.url}/v1/admin/models/timed/unload"
        httpx.post(unload, headers=headers("boss"), trust_env=False, timeout=LIMIT_S).raise_for_status()
        assert 1 <= self.estimate(site) <= measured_s, "a part of it is over already"

    def test_after_a_restart(self, site):
        measured_s = self.model(site)["load_s"]
        assert site.stop() == 0
        site.start()
        assert self.model(site)["load_s"] == measured_s
        assert 1 <= self.estimate(site) <= measured_s

    @staticmethod
    def estimate(site: Daemon) -> int:
        """What a client is told of the load."""
        stream = Stream(site, "timed", "told")
        line = stream.wait_news("Loading timed: about")
        stream.end()
        return int(re.fullmatch(r"Loading timed: about (\d+) s\.\n", line)[1])

    @staticmethod
    def model(site: Daemon) -> dict[str, Any]:
        return httpx.get(f"{site.url}/v1/admin/models/timed", headers=headers("boss"), trust_env=False).json()


class TestFailure:
    """After the first line a failure comes in-band, once, and there is no end of an answer."""

    def test_a_model_that_does_not_start(self, site):
        stream = Stream(site, "shown", "told")
        stream.wait_news("Loading shown")
        (site.folder / WRONG).touch()
        text = stream.end()
        assert "[DONE]" not in text
        assert [chunk["error"]["code"] for chunk in stream.chunks if "error" in chunk] == ["model_failed"]
        assert "shown does not start" in stream.chunks[-1]["error"]["message"]
        assert "broken" not in text, "the client knows it by its public name"

    @pytest.mark.parametrize("path", [*CHATS, "/v1/admin/models/shown/load"])
    def test_its_name_everywhere(self, site, path):
        (site.folder / WRONG).touch()
        with site.client(headers=headers("boss")) as client:
            prompt = {"input": "Hello"} if path == "/v1/responses" else {"messages": HELLO}
            fields = {} if "admin" in path else {"model": "shown", "max_tokens": 5, **prompt}
            told = client.post(path, json=fields)
        assert told.status_code == 503
        assert re.search("shown (does not start|was not loaded)", told.text)
        assert "broken" not in told.text

    def test_what_operators_type_takes_that_name(self, site):
        """`llmux why`, `logs` and `load` ask for these; what they show has the model's own name."""
        (site.folder / WRONG).touch()
        with site.client(headers=headers("boss")) as client:
            assert client.post("/v1/admin/models/shown/load").status_code == 503
            decisions = client.get("/v1/admin/decisions?model=shown").json()["data"]
            assert ("failed", "broken") in {(decision["kind"], decision["model"]) for decision in decisions}
            assert "unknown argument: --nonsense" in client.get("/v1/admin/models/shown/logs").text


class TestRealClient:
    """OpenAI's own client reads a whole answer of a real llama.cpp after the news."""

    def test_waits_for_another_model(self, site):
        enough: Path = site.folder / "enough"
        running_ = Stream(site, "busy", "plain")
        wait_until(lambda: running_.text, what="busy streams")
        http = openai.DefaultHttpxClient(trust_env=False)
        lines, result = [], {}

        def ask(sdk: openai.OpenAI) -> None:
            with sdk.chat.completions.stream(model="real", messages=HELLO, extra_headers=ASKED) as stream:
                for event in stream:
                    if event.type == "chunk" and event.chunk.choices:
                        lines.append(event.chunk.choices[0].delta.model_dump().get("reasoning_content") or "")
                result["final"] = stream.get_final_completion()

        with openai.OpenAI(base_url=f"{site.url}/v1", api_key=KEYS["plain"], max_retries=0, http_client=http) as sdk:
            asking = threading.Thread(target=ask, args=(sdk,), daemon=True)
            asking.start()
            told = wait_until(lambda: "".join(lines), what="the first news")
            enough.touch()
            asking.join(LIMIT_S)
            running_.end()
        assert told.startswith("Loading real: waits for busy to end its requests, then its first load")
        message = result["final"].choices[0].message
        assert (message.role, message.content) == ("assistant", tiny.ANSWER)
        assert message.reasoning_content.startswith(told), "what the worker thinks comes after it"
        assert result["final"].choices[0].finish_reason == "stop"
