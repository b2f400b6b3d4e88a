"""The demo answers what Open WebUI 0.12 sends for a first "Hello": the chat with its built-in tools, title, follow-ups, tags.

The four requests in tests/golden/clients were recorded; their texts are others of the same length, the model is the demo's.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from supervisor.cli.demo import tiny, write_demo
from tests.support.daemon import REPOSITORY, running

RECORDED = json.loads((REPOSITORY / "tests/golden/clients/open_webui_first_message.json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with running(folder, yaml.safe_load(write_demo(folder).read_text())) as daemon:
        yield daemon


def said(answer) -> str:
    """The content of a chat completion, whole or streamed."""
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        return answer.json()["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


class TestFirstMessage:
    """All four requests are answered, also at once, in the demo's default context."""

    def test_the_recording_is_as_large_as_it_was(self):
        assert len(json.dumps(RECORDED["chat"]["tools"])) > 25_000

    def test_all_at_once(self, demo):
        bodies = [*RECORDED.values(), RECORDED["chat"] | {"model": "Tiny-Other"}]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: demo.post("/v1/chat/completions", json=body), bodies))
        assert {said(answer) for answer in answers[:-1]} == {tiny.ANSWER}
        assert said(answers[-1]) == "Greetings from the other tiny model"

    def test_the_context_is_said(self, demo):
        view = demo.model("tiny-chat")
        assert view["sizing"]["text"] == "context 32768 (all it was trained with) in 4 slots"
        assert (view["definition"]["n_ctx"], view["capabilities"]["context"]) == (32768, 32768)
        (told,) = (event for event in demo.events("model.sized") if event["model"] == "tiny-chat")
        assert told["size"] == view["sizing"]["text"]

    def test_a_completion_of_any_prompt_is_the_answer(self, demo):
        for prompt in ("Say", "Once upon a time", "{", "1 2 3"):
            answer = demo.post("/v1/completions", json={"model": "tiny-chat", "prompt": prompt})
            assert answer.json()["choices"][0]["text"] == tiny.ANSWER

    def test_a_long_text_is_embedded(self, demo):
        answer = demo.post("/v1/embeddings", json={"model": "tiny-embed", "input": ["a page of text " * 300, "short"]})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] > 1000
        assert len(answer.json()["data"]) == 2
