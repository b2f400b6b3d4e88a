"""What clients send that llama.cpp's server, or a model's chat template, refuses: it is put right, and what then has no effect named."""

from __future__ import annotations

import base64
import json

import pytest

from tests.support import tiny
from tests.support.daemon import gguf, running, wait_until

TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("The system speaks first.") }}{%- endif %}
{{- "<|im_start|>" + message.role + "\\n" + (message.content or "") + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" }}{%- endif %}
"""
SYSTEM = {"role": "system", "content": "Agents: none."}


def user(content):
    return {"role": "user", "content": content}


def calls(arguments, **more):
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    return [
        user("What time is it?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon", **more},
    ]


def tool(parameters):
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tolerance")
    (folder / "strict.jinja").write_text(TEMPLATE)
    config = {
        "models": {
            "chat": gguf(),
            "code": gguf(tiny.model(name="tiny-code", inserts=True)),
            "strict": gguf(chat_template_file=str(folder / "strict.jinja")),
            "embed": gguf(type="embedding"),
            "rank": gguf(rerank=True),
        }
    }
    with running(folder, config) as daemon:
        yield daemon


LATER = [
    SYSTEM,
    {"role": "developer", "content": "Be brief."},
    user("hi"),
    {"role": "assistant", "content": "x"},
    SYSTEM,
    user("y"),
]


class TestSystem:
    """What the system says later, or twice, where the template lets it speak first and once."""

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/v1/chat/completions", {"messages": LATER}),
            ("/v1/messages", {"max_tokens": 9, "system": "Be brief.", "messages": [user("hi"), SYSTEM]}),
            ("/v1/messages/count_tokens", {"system": "Be brief.", "messages": [user("hi"), SYSTEM]}),
            ("/v1/responses", {"input": LATER, "instructions": "Be brief."}),
            ("/api/chat", {"messages": LATER[:1] + LATER[2:], "stream": False}),
        ],
    )
    def test_is_said_by_the_user(self, site, path, fields):
        for _ in range(2):  # once refused, and once known to be
            told = site.post(path, json={"model": "strict", **fields})
            assert told.status_code == 200, told.text

    def test_a_stream(self, site):
        told = site.post("/v1/chat/completions", json={"model": "strict", "stream": True, "messages": LATER})
        assert tiny.ANSWER.split()[0] in told.text

    def test_a_request_that_its_template_takes_goes_as_it_came(self, site):
        messages = [SYSTEM, user("hi")]
        plain, strict = (
            site.post("/v1/chat/completions", json={"model": m, "messages": messages}) for m in ("chat", "strict")
        )
        assert plain.json()["choices"][0]["message"]["content"] == strict.json()["choices"][0]["message"]["content"]


class TestChat:
    """Small things that the real APIs take."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"messages": calls("")},
            {"messages": [user("hi")], "tools": [tool({"type": "object", "properties": {"x": True}})]},
            {
                "messages": [user("hi")],
                "tools": [tool({"type": "object", "properties": {"x": {"pattern": "(?<=a)b"}}})],
            },
            {
                "messages": [user("hi")],
                "tools": [tool({"type": "object", "properties": {"x": {"type": "integer", "maximum": 1e30}}})],
            },
            {"messages": calls(""), "user": "x" * 1_500_000},
            {"messages": [user("hi")], "reasoning_effort": "minimal", "temperature": None, "stop": None},
        ],
    )
    def test_is_answered(self, site, fields):
        told = site.post("/v1/chat/completions", json={"model": "chat", "max_tokens": 9, **fields})
        assert told.status_code == 200, told.text

    def test_a_tool_whose_bounds_no_grammar_has_is_named(self, site):
        tools = [tool({"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}})]
        told = site.post("/v1/chat/completions", json={"model": "chat", "messages": [user("hi")], "tools": tools})
        assert (told.status_code, told.headers.get("x-llmux-ignored")) == (200, "tools[look]")

    def test_what_can_not_be_put_right_is_the_workers_own_word(self, site):
        told = site.post(
            "/v1/chat/completions", json={"model": "chat", "messages": [{"role": ["user"], "content": "x"}]}
        )
        assert (told.status_code, told.json()["error"]["type"]) == (400, "invalid_request_error")

    @pytest.mark.parametrize("think", ["max", "high", False])
    def test_thinking_in_ollamas_words(self, site, think):
        told = site.post("/api/chat", json={"model": "chat", "stream": False, "think": think, "messages": [user("hi")]})
        assert told.status_code == 200, told.text


class TestTexts:
    """Embeddings and rankings."""

    def test_a_long_one_is_cut_as_ollama_does(self, site):
        long = "word " * 9000
        told = site.post("/api/embed", json={"model": "embed", "input": [long, "short"]})
        assert (told.status_code, len(told.json()["embeddings"])) == (200, 2), told.text
        told = site.post("/api/embed", json={"model": "embed", "input": long, "truncate": False})
        assert told.status_code == 400
        told = site.post("/v1/embeddings", json={"model": "embed", "input": long})
        assert told.json()["error"]["code"] == "context_length_exceeded"

    def test_what_is_null_is_absent(self, site):
        told = site.post("/v1/embeddings", json={"model": "embed", "input": "a", "encoding_format": None, "user": None})
        assert isinstance(told.json()["data"][0]["embedding"], list)

    @pytest.mark.parametrize("packed", [False, True])
    def test_dimensions(self, site, packed):
        form = {"encoding_format": "base64"} if packed else {}
        told = site.post("/v1/embeddings", json={"model": "embed", "input": "a", "dimensions": 8, **form})
        (row,) = told.json()["data"]
        assert (len(base64.b64decode(row["embedding"])) // 4 if packed else len(row["embedding"])) == 8

    @pytest.mark.parametrize("documents", [["a", "b"], [{"text": "a"}, {"text": "b"}]])
    def test_documents_come_back(self, site, documents):
        asked = {"model": "rank", "query": "a", "documents": documents, "return_documents": True}
        rows = site.post("/v1/rerank", json=asked).json()["results"]
        assert sorted(row["document"]["text"] for row in rows) == ["a", "b"]


class TestRaw:
    """Editors' completion: a prompt as it is, or with what comes after it."""

    def test_no_template(self, site):
        asked = {"model": "chat", "prompt": "Hello", "raw": True, "stream": False, "options": {"num_predict": 4}}
        bare, talk = (site.post("/api/generate", json={**asked, "raw": raw}).json() for raw in (True, False))
        assert bare["prompt_eval_count"] < talk["prompt_eval_count"]

    @pytest.mark.parametrize(
        ("path", "fields"), [("/api/generate", {"stream": False}), ("/v1/completions", {"max_tokens": 4})]
    )
    def test_a_model_that_can_not_insert(self, site, path, fields):
        told = site.post(path, json={"model": "chat", "prompt": "def f(", "suffix": "return", **fields})
        assert told.status_code == 400
        assert "does not support insert" in told.text

    def test_an_empty_suffix_is_none(self, site):
        told = site.post("/v1/completions", json={"model": "chat", "prompt": "a", "suffix": "", "max_tokens": 4})
        assert told.status_code == 200, told.text

    def test_all_of_it_is_counted(self, site):
        asked = {"model": "code", "prompt": "def f(", "suffix": "return", "max_tokens": 4, "stream": True}
        told = site.post("/v1/completions", json=asked)
        mine = told.headers["x-request-id"]
        rows = wait_until(lambda: [each for each in site.events("request.finished") if each["request_id"] == mine])
        assert rows[0]["completion_tokens"] == 4

    def test_a_model_that_can(self, site):
        asked = {"model": "code", "prompt": "def f(", "suffix": "return"}
        whole = site.post("/v1/completions", json={**asked, "max_tokens": 4}).json()
        assert (whole["object"], whole["usage"]["completion_tokens"]) == ("text_completion", 4)
        streamed = site.post("/v1/completions", json={**asked, "max_tokens": 4, "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")
        told = site.post("/api/generate", json={**asked, "stream": False, "options": {"num_predict": 4}}).json()
        assert (
            told["response"]
            == whole["choices"][0]["text"]
            == "".join(
                json.loads(line[6:])["choices"][0]["text"]
                for line in streamed.splitlines()
                if line.startswith("data: {")
            )
        )
        assert (told["done"], told["done_reason"], told["eval_count"]) == (True, "length", 4)


def test_codex(site):
    """What its requests hold: tools that items bring, calls of others' tools, and things that no model reads."""
    tools = [
        {"type": "custom", "name": "exec", "description": "Run it.", "format": {"type": "text"}},
        {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}},
    ]
    items = [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [{"type": "namespace", "name": "functions", "tools": tools}],
        },
        user("x"),
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "exec", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "a.txt"},
        {"type": "compaction", "encrypted_content": "abc"},
        {"type": "from_the_future", "what": 1},
        user("y"),
    ]
    told = site.post("/v1/responses", json={"model": "chat", "input": items, "store": False})
    assert told.status_code == 200, told.text
    ignored = told.headers["x-llmux-ignored"]
    assert "input[2]" in ignored or "web_search_call" in ignored
    assert "from_the_future" in ignored
