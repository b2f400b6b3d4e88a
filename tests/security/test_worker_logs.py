"""A worker's log can hold somebody's prompt: no client of the inference API ever gets a line of it, operators get all."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from supervisor.core.types import CrashClass
from tests.support.daemon import Daemon, fake, wait_until

SECRET = "my-diagnosis-is-lupus"
ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/messages"]
LAST_WORDS = {
    CrashClass.UNKNOWN: f"RuntimeError: prompt was {SECRET}",
    CrashClass.OUT_OF_MEMORY: f"CUDA out of memory while reading {SECRET}",
    CrashClass.GPU_LOST: f"CUDA error: illegal access in {SECRET}",
    CrashClass.PORT: f"{SECRET}: address already in use",
    CrashClass.NOT_INSTALLED: f"ModuleNotFoundError: No module named '{SECRET}'",
    CrashClass.BAD_ARGUMENTS: f"error: argument --system-prompt: {SECRET}",
}
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
}


def dies(kind: CrashClass, *flags: str) -> dict[str, object]:
    """A model whose worker says this and ends before it is ready."""
    return fake("--log-text", LAST_WORDS[kind], "--exit-code", "1", *flags, endpoints=ENDPOINTS)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Daemon]:
    """With four dialects: OpenAI's, Anthropic's, llama.cpp's, and one that is translated."""
    models = {kind.name.lower(): dies(kind) for kind in LAST_WORDS}
    models["late"] = dies(CrashClass.UNKNOWN, "--start-delay", "1")
    models["mid-stream"] = fake("--log-text", LAST_WORDS[CrashClass.UNKNOWN], "--die-after", "2", endpoints=ENDPOINTS)
    limits = {"crash_limit": 1, "keepalive_s": 0.1}
    daemon = Daemon(tmp_path_factory.mktemp("logs"), {"models": models, "limits": limits})
    daemon.program = ("-m", "tests.support.toy_dialect")
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


def ask_all(site: Daemon, model: str, *, stream: bool) -> list[httpx.Response]:
    """What every dialect says to a request for this model."""
    answers = [site.post(path, json={"model": model, "stream": stream, **body}) for path, body in ASKED.items()]
    return [*answers, site.post("/toy/say", json={"model": model, "say": "Hello", "live": stream})]


def views(site: Daemon, model: str) -> list[httpx.Response]:
    """What everybody may see of the model."""
    return [site.get(path) for path in ("/v1/models", f"/v1/models/{model}", "/models", "/metrics", "/health")]


def assert_silent(answers: list[httpx.Response]) -> None:
    for answer in answers:
        assert SECRET not in answer.text + str(answer.headers), answer.request.url


@pytest.mark.parametrize("kind", LAST_WORDS)
class TestBeforeItIsReady:
    """Whatever class its last words tell, clients get the class and what to do, operators the words."""

    def test_clients(self, site, kind):
        model = kind.name.lower()
        answers = ask_all(site, model, stream=False)
        assert {answer.status_code for answer in answers} == {503}
        assert_silent(answers + ask_all(site, model, stream=True) + views(site, model))
        error = answers[0].json()["error"]
        assert "detail" not in error
        assert "llmux" in error["message"] or "not installed" in error["message"], "what to do"

    def test_operators(self, site, kind):
        model = kind.name.lower()
        told = site.post(f"/v1/admin/models/{model}/load")
        assert told.status_code == 503
        assert any(SECRET in line for line in told.json()["error"]["detail"])
        crash = site.model(model)["crash"]
        assert crash["class"] == kind
        assert SECRET in crash["summary"]
        assert any(SECRET in line for line in crash["log_tail"])
        assert any(SECRET in decision["reason"] for decision in site.decisions(model))


class TestInBand:
    """A stream that has begun ends with an error in its dialect's shape and none of the worker's words."""

    def test_keepalives_were_sent(self, site):
        for path, body in ASKED.items():
            site.post("/v1/admin/models/late/unload")  # forgets that it failed
            answer = site.post(path, json={"model": "late", "stream": True, **body})
            assert (answer.status_code, "model_failed" in answer.text) == (200, True)
            assert_silent([answer])
        assert_silent(views(site, "late"))

    def test_mid_stream(self, site):
        for path in ("/v1/chat/completions", "/toy/say"):
            assert site.post("/v1/admin/models/mid-stream/load").status_code == 200
            body = {"model": "mid-stream", "stream": True, **ASKED["/v1/chat/completions"]}
            body = body if path != "/toy/say" else {"model": "mid-stream", "say": "Hello", "live": True}
            pieces: list[str] = []
            with site.client() as client, client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                pieces.extend(answer.iter_text())
            assert any("error" in piece or "sorry" in piece for piece in pieces)
            assert SECRET not in "".join(pieces)
            wait_until(lambda: site.model("mid-stream")["state"] == "failed")
            assert any(SECRET in line for line in site.model("mid-stream")["crash"]["log_tail"])
            assert_silent(ask_all(site, "mid-stream", stream=False) + views(site, "mid-stream"))

    def test_status_stream(self, site):
        """llama.cpp's own event stream about models."""
        with site.client() as client, client.stream("GET", "/models/sse") as stream:
            lines = stream.iter_lines()
            first = next(lines)
            assert json.loads(first.removeprefix("data: "))["event"] == "model_status"
            site.post("/models/load", json={"model": "late"})
            seen = [first]
            while '"failed"' not in seen[-1] or '"late"' not in seen[-1]:
                seen.append(next(lines))
        assert SECRET not in "".join(seen)
