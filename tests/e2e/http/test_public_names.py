"""Public names: the list of models, what stands behind a name, and what a virtual model does to requests."""

from __future__ import annotations

import re
from datetime import datetime
from typing import ClassVar

import pytest

HELLO = [{"role": "user", "content": "Hello"}]


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

    def test_what_they_can_do(self, site):
        """Where OpenRouter's and vLLM's clients look for it, and all of it under `capabilities`."""
        rows = {row["id"]: row for row in site.get("/v1/models").json()["data"]}
        thinker, embed = rows["thinker"], rows["embed"]
        assert thinker["context_length"] == thinker["max_model_len"] == thinker["capabilities"]["context"] > 0
        assert thinker["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
        assert embed["architecture"]["output_modalities"] == ["embeddings"]
        assert (thinker["supported_parameters"], embed["supported_parameters"]) == (["tools", "tool_choice"], [])
        assert "POST /v1/chat/completions" in thinker["capabilities"]["endpoints"]
        assert "POST /v1/embeddings" in embed["capabilities"]["endpoints"]
        modes = {name: rows[name]["capabilities"]["thinking_modes"] for name in ("thinker", "quick", "embed", "plain")}
        own = site.get("/v1/models/chat").json()["capabilities"]
        assert modes == {"thinker": ["enabled"], "quick": ["disabled"], "embed": ["disabled"], "plain": ["default"]}
        assert own["thinking_modes"] == ["default", "enabled", "disabled"]
        admin = site.model("chat")["capabilities"]
        assert own == admin | {key: own[key] for key in ("output_modalities", "thinking_modes")}

    def test_unknown(self, site):
        told = site.get("/v1/models/thinkr")
        assert told.status_code == 404
        assert told.json()["error"]["code"] == "model_not_found"
        assert "thinker" in told.json()["error"]["message"]


class TestAnthropicsListing:
    """The same path for whoever sends `anthropic-version`: all chat models, in Anthropic's words."""

    VERSION: ClassVar = {"anthropic-version": "2023-06-01"}

    def ask(self, site, path="/v1/models", **query):
        return site.get(path, params=query, headers=self.VERSION)

    def test_all_of_them(self, site):
        told = self.ask(site)
        page = told.json()
        assert [row["id"] for row in page["data"]] == ["thinker", "quick", "shaped", "unshaped", "plain", "broken"]
        assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "thinker", "broken")
        first = page["data"][0]
        assert (first["type"], first["display_name"]) == ("model", "thinker")
        assert datetime.fromisoformat(first["created_at"]).tzinfo is not None
        assert first == self.ask(site, "/v1/models/thinker").json()
        assert told.headers["request-id"] == told.headers["x-request-id"]

    def test_pages(self, site):
        first = self.ask(site, limit=1).json()
        assert ([row["id"] for row in first["data"]], first["has_more"]) == (["thinker"], True)
        last = self.ask(site, limit=1, after_id="plain").json()
        assert ([row["id"] for row in last["data"]], last["has_more"]) == (["broken"], False)
        back = self.ask(site, limit=1, before_id="quick").json()
        assert ([row["id"] for row in back["data"]], back["has_more"]) == (["thinker"], False)
        assert self.ask(site, after_id="broken").json()["data"] == []

    def test_mistakes(self, site):
        told = self.ask(site, limit=0)
        assert (told.status_code, told.json()["type"]) == (400, "error")
        told = self.ask(site, "/v1/models/thinkr")
        assert (told.status_code, told.json()["error"]["type"]) == (404, "not_found_error")
        assert told.headers["request-id"].startswith("req_")

    def test_its_messages_have_the_id_too(self, site):
        for name, status in (("quick", 200), ("nobody", 404)):
            told = site.post("/v1/messages", json={"model": name, "max_tokens": 5, "messages": HELLO})
            assert told.status_code == status
            assert told.headers["request-id"] == told.headers["x-request-id"]
        assert "request-id" not in site.chat("quick").headers


class TestRouting:
    """A request goes to the model it names, if that serves the path."""

    def test_unknown_model(self, site):
        told = site.chat("quikc").json()["error"]
        assert (told["code"], told["param"]) == ("model_not_found", "model")
        assert "Did you mean 'quick'?" in told["message"]

    @pytest.mark.parametrize("name", [{}, {"model": None}], ids=["missing", "null"])
    def test_no_name_where_one_model_serves_the_path(self, site, name):
        def ask(path, **fields):
            return site.post(path, json=name | fields).json()

        assert ask("/v1/embeddings", input="x")["model"] == "embed"
        assert ask("/v1/rerank", query="x", documents=["y"])["model"] == "rank"
        assert ask("/v2/rerank", query="x", documents=["y"])["model"] == "rank"
        assert ask("/v1/messages/count_tokens", messages=HELLO)["input_tokens"] > 0
        assert ask("/v1/messages", max_tokens=50, messages=HELLO)["model"] == "chat", "whose worker speaks it"
        assert ask("/v1/chat/completions", messages=HELLO)["error"]["code"] == "missing_model"
        assert ask("/v1/responses", input="Hello")["error"]["code"] == "missing_model"

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
