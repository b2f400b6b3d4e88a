"""llm-pool's requests to a running daemon, with a real llama.cpp server, which serves OpenAI's Responses there itself."""

from __future__ import annotations

import json

import pytest

from tests.support import tiny
from tests.support.daemon import fake, gguf, running
from tests.support.fake_worker import WORDS

CHAT = ["/v1/chat/completions"]
SECRET = "sk-%s-0123456789"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    config = {
        "models": {
            "chat": gguf(parallel=2),
            "fake": fake(endpoints=CHAT),
            "blind": fake(endpoints=CHAT, modalities=["text"]),
            "endless": fake("--chunks=100000", "--chunk-delay=0.05", endpoints=CHAT),
            "broken": fake("--status=500", endpoints=CHAT),
            "elsewhere": fake(endpoints=["/v1/responses"]),
        },
        "virtual_models": {
            "quick": {"model": "chat", "enable_thinking": False},
            "short": {"model": "chat", "enable_thinking": False, "defaults": {"max_tokens": 2}},
        },
    }
    with running(tmp_path_factory.mktemp("llm-pool"), config) as daemon:
        yield daemon


def ask(site, model="chat", path="/v1/responses", **fields):
    if "messages" not in fields:
        fields.setdefault("input", "Hello")
    return site.post(path, json={"model": model, **fields})


def answered(site, model="chat", **fields):
    told = ask(site, model, **fields)
    assert told.status_code == 200, told.text
    return told.json()


def refused(told):
    assert told.status_code == 400, told.text
    error = told.json()["error"]
    return error["param"], error["code"]


def events(text):
    found = []
    for frame in text.strip().split("\n\n"):
        if frame.startswith("event: "):
            name, data = frame.removeprefix("event: ").split("\ndata: ")
            found.append((name, json.loads(data)))
            assert found[-1][1]["type"] == name
    return found


class TestLlamaCpp:
    """Its server would leave out what it doesn't know of these requests: the fields have their effect all the same."""

    def test_it_thinks_not(self, site):
        told = answered(site, thinking="disabled", decoding={"temperature": 0})
        assert (told["object"], told["model"], told["output_text"]) == ("response", "chat", tiny.ANSWER)
        assert told["output"] == [{"type": "output_text", "text": tiny.ANSWER}]

    def test_thoughts_are_no_text(self, site):
        thinking, not_thinking = (answered(site, thinking=mode) for mode in ("enabled", "disabled"))
        assert thinking["output_text"] == not_thinking["output_text"] == tiny.ANSWER
        tokens = [told["metrics"]["engine_output_tokens"] for told in (thinking, not_thinking)]
        assert tokens[0] > tokens[1]

    @pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
    def test_an_answer_is_no_longer_than_asked(self, site, path):
        told = ask(site, path=path, thinking="disabled", decoding={"max_tokens": 3}).json()
        assert told["metrics"]["engine_output_tokens"] == 3
        assert told["output_text"] != tiny.ANSWER
        assert tiny.ANSWER.startswith(told["output_text"])

    def test_several_turns(self, site):
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        one, several = answered(site, thinking="disabled"), answered(site, messages=messages, thinking="disabled")
        assert several["output_text"] == tiny.ANSWER
        assert several["metrics"]["engine_prompt_tokens"] > one["metrics"]["engine_prompt_tokens"]

    def test_omitted_parameters_are_the_configured_ones(self, site):
        assert answered(site, "short", decoding={})["metrics"]["engine_output_tokens"] == 2
        assert answered(site, "short", decoding={"max_tokens": 4})["metrics"]["engine_output_tokens"] == 4

    def test_what_has_no_effect_is_named(self, site):
        told = ask(site, decoding={"beam_size": 2, "top_k": 1, "repetition_penalty": 1.0}, user="me")
        assert told.headers["x-llmux-ignored"] == "user, decoding.beam_size"

    def test_times_lie_within_each_other(self, site):
        metrics = answered(site, decoding={})["metrics"]
        outer = [metrics[f"{name}_wall_ms"] for name in ("backend_inference", "engine_total", "pool_total")]
        assert sorted(outer) == outer
        assert 0 < metrics["gpu_generate_total_ms"] <= metrics["backend_inference_wall_ms"] + 1
        assert metrics["engine_tokens_per_second"] > 0

    def test_openais_requests_are_its_own(self, site):
        told = ask(site, temperature=0, store=False)
        assert told.json()["output"][-1]["type"] == "message"
        assert "output_text" not in told.json()
        assert "x-llmux-ignored" not in told.headers


class TestStream:
    """Events as they come."""

    @pytest.mark.parametrize(("model", "text"), [("quick", tiny.ANSWER), ("fake", "".join(WORDS))])
    def test_its_events(self, site, model, text):
        told = ask(site, model, decoding={}, stream=True)
        assert told.headers["content-type"].startswith("text/event-stream")
        found = events(told.text)
        kinds = [kind for kind, _ in found]
        deltas = [event["delta"] for kind, event in found if kind == "response.output_text.delta"]
        middle = ["response.output_text.delta"] * len(deltas)
        assert kinds == ["response.created", *middle, "response.metrics", "response.completed"]
        assert len(deltas) > 1
        assert "".join(deltas) == found[-1][1]["response"]["output_text"] == text
        assert found[-1][1]["response"]["metrics"] == found[-2][1]["metrics"]
        assert found[0][1]["response"]["model"] == model

    def test_each_piece_comes_at_once_and_what_breaks_off_says_so(self, site):
        body = {"model": "endless", "input": "Hello", "decoding": {}, "stream": True}
        with site.client() as client, client.stream("POST", "/v1/responses", json=body) as told:
            pieces = told.iter_text()
            text = next(pieces)
            while "response.output_text.delta" not in text:
                text += next(pieces)
            site.post("/v1/admin/models/endless/unload?force=true").raise_for_status()
            text += "".join(pieces)
        kinds = [kind for kind, _ in events(text)]
        assert kinds[-1] == "error"
        assert "response.completed" not in kinds


class TestRefusals:
    """By the name of the field, in OpenAI's shape."""

    def test_an_image_for_a_model_that_sees_none(self, site):
        assert refused(ask(site, "blind", input=[IMAGE])) == ("messages", "modality_unsupported")
        assert refused(ask(site, "chat", input=[IMAGE]))[1] == "modality_unsupported"

    def test_an_image_for_one_that_may_see_it(self, site):
        assert answered(site, "fake", input=[{"type": "text", "text": "Look:"}, IMAGE])["output_text"] == "".join(WORDS)

    def test_an_address(self, site):
        image = {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}
        assert refused(ask(site, "fake", input=[image]))[1] == "remote_media_refused"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"decoding": {"min_p": 1}}, "decoding.min_p"),
            ({"decoding": {"max_tokens": "3"}}, "decoding.max_tokens"),
            ({"target_lang_code": "en"}, "target_lang_code"),
            ({"messages": [{"role": "user", "content": "a"}], "input": "b"}, "messages"),
        ],
    )
    def test_a_field(self, site, fields, param):
        assert refused(ask(site, **fields)) == (param, "invalid_request")

    def test_thinking_where_it_is_switched_off_or_can_not_be_switched(self, site):
        assert refused(ask(site, "quick", thinking="enabled")) == ("thinking", "thinking_unsupported")
        assert refused(ask(site, "fake", thinking="disabled")) == ("thinking", "thinking_unsupported")
        assert answered(site, "quick", thinking="disabled")["output_text"] == tiny.ANSWER

    def test_a_model_without_chats(self, site):
        assert refused(ask(site, "elsewhere", decoding={})) == ("model", "endpoint_not_supported")

    def test_of_the_worker(self, site):
        told = ask(site, "broken", decoding={})
        assert (told.status_code, told.json()["error"]["message"]) == (500, "as told")


class TestCapabilities:
    """What a request may choose stands in the list of models."""

    def test_of_models(self, site):
        rows = {row["name"]: row["capabilities"] for row in site.get("/v1/admin/models").json()["data"]}
        assert rows["chat"]["thinking_modes"] == ["default", "enabled", "disabled"]
        assert (rows["chat"]["modalities"], rows["chat"]["multi_turn"]) == (["text"], True)
        assert rows["fake"]["thinking_modes"] == ["default"]


class TestLoads:
    """Overrides by the names that they have there."""

    def test_its_names_are_taken(self, site):
        path = "/v1/admin/models/chat/load"
        told = site.post(path, json={"overrides": {"llama_server_n_ctx": 1024}})
        assert told.json()["overrides"] == {"n_ctx": 1024}, told.text
        refused = site.post(path, json={"overrides": {"llama_server_spec_type": "draft", "vllm_max_model_len": 9}})
        assert refused.status_code == 400
        assert "overrides.vllm_max_model_len: can't be set" in refused.text
        assert "draft-simple needs draft_model" in refused.text
        assert site.post(path, json={"overrides": {}}).json()["overrides"] == {}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm-pool-keys")
    keys = [{"name": name, "key": SECRET % name, "responses": name} for name in ("openai", "llm-pool")]
    (folder / "keys.yaml").write_text(json.dumps(keys))
    (folder / "keys.yaml").chmod(0o600)
    models = {"fake": fake(endpoints=CHAT), "chat": gguf()}
    with running(folder, {"models": models, "server": {"api_keys": str(folder / "keys.yaml")}}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    config = {"models": {"fake": fake(endpoints=CHAT), "other": fake(endpoints=CHAT)}}
    with running(tmp_path_factory.mktemp("pool"), config | {"server": {"responses": "llm-pool"}}) as daemon:
        yield daemon


class TestInstallation:
    """`server.responses: llm-pool`: all is answered as there."""

    def test_the_smallest_request(self, pool):
        told = answered(pool, "fake")
        assert told["output"] == [{"type": "output_text", "text": told["output_text"]}]
        assert pool.get(f"/v1/responses/{told['id']}").status_code == 404, "nothing is kept"

    def test_only_loaded_models_are_listed(self, pool):
        def names(query=""):
            return [row["id"] for row in pool.get(f"/v1/models{query}").json()["data"]]

        answered(pool, "fake")
        assert names() == names("?loaded=1") == ["fake"]
        assert names("?loaded=0") == ["fake", "other"]
        assert pool.get("/v1/models?loaded=maybe").status_code == 400

    def test_elsewhere_all_are(self, site):
        ask(site, "fake")
        listed = {
            query: {row["id"] for row in site.get(f"/v1/models{query}").json()["data"]} for query in ("", "?loaded=1")
        }
        assert listed[""] > listed["?loaded=1"] >= {"fake"}


class TestKeys:
    """A key can say that all of its requests are llm-pool's."""

    @pytest.mark.parametrize("model", ["fake", "chat"])
    def test_the_shape_of_an_answer(self, keyed, model):
        def told(name, **fields):
            headers = {"authorization": f"Bearer {SECRET % name}"}
            return keyed.post(
                "/v1/responses", json={"model": model, "input": "Hello", **fields}, headers=headers
            ).json()

        assert [item["type"] for item in told("llm-pool")["output"]] == ["output_text"]
        assert told("llm-pool", background=True)["output_text"]
        ours = told("openai")
        assert ours["output"][-1]["content"][-1]["type"] == "output_text"
        assert (
            ours["metrics"].keys()
            == told("llm-pool")["metrics"].keys()
            == told("openai", decoding={})["metrics"].keys()
        )
        assert "output_text" in told("openai", decoding={})
