"""Public names: the list of models, what stands behind a name, and what a virtual model does to requests."""

from __future__ import annotations

import re

import pytest


class TestListing:
    """GET /v1/models tells every public name, loaded or not."""

    def test_all_of_them(self, site):
        listing = site.get("/v1/models").json()
        assert listing["object"] == "list"
        names = [row["id"] for row in listing["data"]]
        assert names == ["thinker", "quick", "shaped", "unshaped", "embed", "rank", "plain", "broken"]
        assert {"model"} == {row["object"] for row in listing["data"]}

    def test_by_type(self, site):
        rows = site.get("/v1/models", params={"type": "embedding"}).json()["data"]
        assert [row["id"] for row in rows] == ["embed"]
        assert site.get("/v1/models?type=tts").json()["data"] == []
        told = site.get("/v1/models?type=embeddings")
        assert told.status_code == 400
        assert told.json()["error"]["param"] == "type"

    def test_one(self, site):
        listed = next(row for row in site.get("/v1/models").json()["data"] if row["id"] == "thinker")
        assert listed == site.get("/v1/models/thinker").json()
        assert listed["description"] == "Thinks first."
        assert site.get("/v1/models/chat").json()["id"] == "chat", "a model answers to its own name too"

    def test_unknown(self, site):
        told = site.get("/v1/models/thinkr")
        assert told.status_code == 404
        assert told.json()["error"]["code"] == "model_not_found"
        assert "thinker" in told.json()["error"]["message"]


class TestRouting:
    """A request goes to the model it names, if that serves the path."""

    def test_unknown_model(self, site):
        told = site.chat("quikc").json()["error"]
        assert (told["code"], told["param"]) == ("model_not_found", "model")
        assert "Did you mean 'quick'?" in told["message"]

    def test_wrong_kind_of_model(self, site):
        told = site.chat("embed")
        assert told.status_code == 400
        error = told.json()["error"]
        assert error["code"] == "endpoint_not_supported"
        assert "embed (embedding, llama_server) does not serve /v1/chat/completions" in error["message"]
        assert "thinker" in error["message"], "says which models do"

    def test_virtual_models_share_a_worker(self, site):
        site.chat("thinker").raise_for_status()
        before = site.model("chat")
        site.chat("quick").raise_for_status()
        site.chat("chat").raise_for_status()
        after = site.model("chat")
        assert (before["worker"]["pid"], before["generation"]) == (after["worker"]["pid"], after["generation"])
        assert after["virtual_models"] == ["thinker", "quick"]
        assert site.model("quick")["name"] == "chat", "the admin API knows a model by its public names too"


HELLO = [{"role": "user", "content": "Hello"}]
NAMED = re.compile(r'"model": ?("[^"]*")')


class TestNameInAnswers:
    """`model` in an answer, and in each event of a stream, is the name that was asked for."""

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "Hello", "max_tokens": 5}),
            ("/completion", {"prompt": "Hello", "n_predict": 5}),
            ("/v1/responses", {"input": "Hello"}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 50}),
        ],
        ids=["chat", "completions", "completion", "responses", "messages"],
    )
    def test_of_a_virtual_model(self, site, path, fields, stream):
        told = site.post(path, json={"model": "quick", "stream": stream, **fields})
        assert told.status_code == 200, told.text
        assert set(NAMED.findall(told.text)) == {'"quick"'}

    def test_of_a_worker_that_spaces_its_json(self, site):
        assert site.chat("unshaped").json()["model"] == "unshaped"
        assert set(NAMED.findall(site.chat("unshaped", stream=True).text)) == {'"unshaped"'}

    def test_where_only_the_query_names_it(self, site):
        told = site.post("/v1/chat/completions?model=quick", json={"messages": HELLO})
        assert told.json()["model"] == "quick"

    def test_a_models_own_name(self, site):
        told = site.chat("chat")
        assert told.json()["model"] == "chat"
        assert int(told.headers["content-length"]) == len(told.content), "as the worker sent it"


class TestRewrite:
    """What a virtual model's worker receives."""

    @pytest.fixture
    def received(self, site):
        def ask(model, **fields):
            return site.chat(model, **fields).raise_for_status().json()["received"]

        return ask

    def test_nothing_configured_changes_nothing(self, received):
        body = received("unshaped", logit_bias={"1": 2}, seed=7)
        messages = [{"role": "user", "content": "Hello"}]
        assert {"model": "unshaped", "messages": messages, "logit_bias": {"1": 2}, "seed": 7} == body

    def test_defaults_fill_in(self, received):
        body = received("shaped", top_k=3)
        assert (body["temperature"], body["top_k"]) == (0.5, 3)

    def test_force_and_strip(self, received):
        body = received("shaped", seed=7, logit_bias={"1": 2})
        assert body["seed"] == 42
        assert "logit_bias" not in body

    def test_thinking_and_defaults_merge_with_the_clients(self, received):
        body = received("shaped", chat_template_kwargs={"enable_thinking": True, "depth": 2})
        assert body["chat_template_kwargs"] == {"tone": "dry", "depth": 2, "enable_thinking": False}

    def test_system_prompt(self, site, received):
        system, user = received("shaped")["messages"]
        assert system == {"role": "system", "content": "Be brief."}
        assert user["role"] == "user"
        messages = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "Hello"}]
        body = {"model": "shaped", "messages": messages}
        received_messages = site.post("/v1/chat/completions", json=body).json()["received"]["messages"]
        assert received_messages[0]["content"] == "Be brief.\n\nRhyme."
        assert messages[1:] == received_messages[1:]
