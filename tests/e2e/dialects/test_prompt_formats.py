"""Models with a `prompt_format`: what their workers get, and what clients of each API get back."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support import environments, tiny, tiny_language
from tests.support.daemon import fake, gguf, running
from tests.support.fake_worker import WORDS

TEXT = "".join(WORDS)
BOTH = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "GET /stats"]
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
IM = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    "generic": "Be brief.\n\nUser: Hello\nAssistant:",
    "mistral_template": "[INST] Be brief.\n\nHello [/INST]",
    "qwen3_template": CHATML,
    "gemma4_template": "<|turn>system\nBe brief.<turn|>\n<|turn>user\nHello<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    "chatml": CHATML,
    "alpaca": "Be brief.\n\n### Instruction:\nHello\n\n### Response:\n",
    "raw": "Be brief.\n\nHello",
}
TRANSLATION = (
    "<start_of_turn>user\nYou are a professional {0} ({1}) to English (en) translator. Your goal is to accurately convey the "
    "meaning and nuances of the original {0} text while adhering to English grammar, vocabulary, and cultural sensitivities.\n"
    "Produce only the English translation, without any additional explanations or commentary. Please translate the following "
    "{0} text into English:\n\n\n{2}<end_of_turn>\n<start_of_turn>model\n"
)
FORMATS = [*PROMPTS, "translategemma_template"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    environments.installed("transformers")
    bare = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(tiny_language.model(), bare, ignore=shutil.ignore_patterns("chat_template*"))
    described = json.loads((bare / "tokenizer_config.json").read_text())
    described.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(described))
    config = {
        "models": {
            **{name: fake(endpoints=BOTH, prompt_format=name) for name in FORMATS},
            "qwen": gguf(parallel=1, prompt_format="qwen3_template"),
            "foreign": gguf(parallel=1, prompt_format="qwen3_template", chat_template="{{ messages }}"),
            "chat": gguf(parallel=1, prompt_format="chatml"),
            "folder": {"runtime": "transformers", "threads": 1, "path": str(tiny_language.model())},
            "bare": {"runtime": "transformers", "threads": 1, "path": str(bare), "prompt_format": "qwen3_template"},
        },
        "virtual_models": {
            "kind": {"model": "alpaca", "system_prompt_prefix": "Be kind.", "defaults": {"stop": ["END"], "top_k": 3}},
            "calm": {"model": "qwen3_template", "defaults": {"chat_template_kwargs": {"enable_thinking": False}}},
            "fixed": {"model": "qwen3_template", "enable_thinking": False},
        },
    }
    with running(tmp_path_factory.mktemp("prompt-formats"), config) as daemon:
        yield daemon


def ask(site, path, model, **fields):
    told = site.post(path, json={"model": model, **fields})
    assert told.status_code == 200, told.text
    return told


def got(site, model):
    """What the scripted worker got last."""
    return site.get(f"/stats?model={model}").json()["last"]


def received(site, model, **fields):
    """What it got for a chat."""
    answer = ask(site, "/v1/chat/completions", model, **{"messages": HELLO, **fields}).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT}
    assert (answer["object"], answer["model"]) == ("chat.completion", model)
    return got(site, model)


def refused(told):
    assert told.status_code == 400, told.text
    error = told.json()["error"]
    return error["param"], error["code"]


class TestPrompts:
    """They reach the worker as the format says, at the path for texts."""

    @pytest.mark.parametrize("name", PROMPTS)
    def test_of_a_chat(self, site, name):
        found = received(site, name, temperature=0, stop=["END"])
        assert found["prompt"] == PROMPTS[name]
        assert (found["model"], found["temperature"], found["max_tokens"], found["stop"][0]) == (name, 0, None, "END")
        assert "messages" not in found

    def test_configured_parameters_come_before(self, site):
        found = received(site, "kind")
        assert found["prompt"] == "Be kind.\n\nBe brief.\n\n### Instruction:\nHello\n\n### Response:\n"
        assert (found["stop"], found["top_k"]) == (["END", "### Instruction:"], 3)

    @pytest.mark.parametrize(
        ("model", "wanted", "thinks"),
        [
            ("qwen3_template", None, True),
            ("qwen3_template", False, False),
            ("calm", None, False),
            ("calm", True, True),
            ("fixed", True, False),
        ],
    )
    def test_thinking(self, site, model, wanted, thinks):
        fields = {} if wanted is None else {"chat_template_kwargs": {"enable_thinking": wanted}}
        assert received(site, model, **fields)["prompt"] == CHATML + ("" if thinks else "<think>\n\n</think>\n\n")

    def test_a_large_text(self, site):
        """Of which only the outline is parsed on the way."""
        text = "Much to read. " * 30_000
        found = received(site, "chatml", messages=[{"role": "user", "content": text}])
        assert found["prompt"] == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    def test_what_has_no_place(self, site):
        fields = {"model": "alpaca", "messages": HELLO}
        told = site.post(
            "/v1/chat/completions", json={**fields, "tools": [{"type": "function", "function": {"name": "a"}}]}
        )
        assert refused(told) == ("tools", "unsupported_parameter")
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        fields["messages"] = [{"role": "user", "content": [picture]}]
        assert refused(site.post("/v1/chat/completions", json=fields))[1] == "modality_unsupported"

    def test_what_has_no_effect_is_named(self, site):
        told = ask(site, "/v1/chat/completions", "raw", messages=HELLO, verbosity="low")
        assert told.headers["x-llmux-ignored"] == "verbosity"


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


class TestAnswers:
    """Every API gets its own form of them, though the worker would serve its path."""

    def test_a_stream_of_a_chat(self, site):
        told = ask(site, "/v1/chat/completions", "chatml", messages=HELLO, stream=True)
        assert told.headers["content-type"].startswith("text/event-stream")
        found = events(told.text)
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in found if one["choices"]) == TEXT
        assert {one["object"] for one in found} == {"chat.completion.chunk"}
        assert {one["model"] for one in found} == {"chatml"}
        assert found[-2]["choices"][0]["finish_reason"] == "stop"
        assert found[-1]["usage"]["completion_tokens"] == 4
        assert told.text.endswith("data: [DONE]\n\n")

    def test_thoughts(self, site):
        texts = ["<thi", "nk>\nHm.\n</thin", "k>\n\nYo"]
        fields = {"messages": HELLO, "fake": {"texts": texts}}
        message = ask(site, "/v1/chat/completions", "qwen3_template", **fields).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Yo", "reasoning_content": "Hm."}
        found = events(ask(site, "/v1/chat/completions", "qwen3_template", **fields, stream=True).text)
        deltas = [one["choices"][0]["delta"] for one in found if one["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == "Yo"
        assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == "Hm."

    def test_messages(self, site):
        fields = {"messages": HELLO[1:], "system": "Be brief.", "max_tokens": 9}
        told = ask(site, "/v1/messages", "alpaca", **fields).json()
        assert told["content"] == [{"type": "text", "text": TEXT}]
        assert got(site, "alpaca")["prompt"] == PROMPTS["alpaca"]
        kinds = [one["type"] for one in events(ask(site, "/v1/messages", "alpaca", **fields, stream=True).text)]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

    def test_responses(self, site):
        told = ask(site, "/v1/responses", "alpaca", input="Hello", instructions="Be brief.").json()
        assert told["output"][-1]["content"][0]["text"] == TEXT
        assert got(site, "alpaca")["prompt"] == PROMPTS["alpaca"]

    def test_ollama(self, site):
        told = ask(site, "/api/chat", "alpaca", messages=HELLO, stream=False).json()
        assert told["message"]["content"] == TEXT
        assert got(site, "alpaca")["prompt"] == PROMPTS["alpaca"]

    def test_llm_pool(self, site):
        fields = {"input": "Hello", "instructions": "Be brief.", "decoding": {"max_tokens": 3, "stop": ["END"]}}
        assert ask(site, "/v1/responses", "chatml", **fields).json()["output_text"] == TEXT
        found = got(site, "chatml")
        assert (found["prompt"], found["max_tokens"], found["stop"]) == (CHATML, 3, ["END", *IM])
        text = ask(site, "/v1/responses", "chatml", input="Hello", decoding={}, stream=True).text
        assert [one["type"] for one in events(text)] == [
            "response.created",
            *["response.output_text.delta"] * len(WORDS),
            "response.metrics",
            "response.completed",
        ]

    def test_no_template_of_the_workers_is_used(self, site):
        told = site.post("/apply-template", json={"model": "chat", "messages": HELLO})
        assert refused(told) == ("model", "endpoint_not_supported")

    def test_counts(self, site):
        """Of the prompt as it is written here."""
        told = ask(site, "/v1/messages/count_tokens", "chatml", messages=HELLO[1:], system="Be brief.")
        assert told.json() == {"input_tokens": 1}
        assert (got(site, "chatml")["prompt"], got(site, "chatml")["max_tokens"]) == (CHATML, 1)


class TestLlmPool:
    """What its requests may choose."""

    @pytest.mark.parametrize("model", ["raw", "alpaca", "translategemma_template"])
    def test_single_turns(self, site, model):
        told = site.post("/v1/responses", json={"model": model, "messages": HELLO[1:], "target_lang_code": None})
        assert refused(told)[0] in ("messages", "target_lang_code")
        rows = {row["name"]: row["capabilities"] for row in site.get("/v1/admin/models").json()["data"]}
        assert rows[model]["multi_turn"] is False
        assert rows[model]["thinking_modes"] == ["disabled"]

    @pytest.mark.parametrize(("thinking", "thinks"), [("default", False), ("enabled", True), ("disabled", False)])
    def test_thinking_overrules_what_is_configured(self, site, thinking, thinks):
        fields = {"input": "Hello", "instructions": "Be brief.", "thinking": thinking}
        assert ask(site, "/v1/responses", "calm", **fields).json()["output_text"] == TEXT
        assert got(site, "calm")["prompt"] == CHATML + ("" if thinks else "<think>\n\n</think>\n\n")

    def test_a_known_source(self, site):
        fields = {"input": "Hallo", "source_lang_code": "nl", "target_lang_code": "en"}
        told = ask(site, "/v1/responses", "translategemma_template", **fields)
        assert told.json()["output_text"] == TEXT
        assert "x-llmux-ignored" not in told.headers
        assert got(site, "translategemma_template")["prompt"] == TRANSLATION.format("Dutch", "nl", "Hallo")

    @pytest.mark.parametrize("source", [{}, {"source_lang_code": "auto"}, {"source_lang_code": "mixed"}])
    def test_a_mixed_source(self, site, source):
        fields = {"input": [{"type": "text", "text": "Hallo. "}, {"type": "text", "text": "Salut."}], **source}
        ask(site, "/v1/responses", "translategemma_template", target_lang_code="en", **fields)
        text = "(Detect the language of each segment below, and translate all of them into English.)\n\nHallo. Salut."
        assert got(site, "translategemma_template")["prompt"] == TRANSLATION.format("German", "de", text)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"decoding": {}}, "target_lang_code"),
            ({"source_lang_code": "nl"}, "target_lang_code"),
            ({"target_lang_code": "xx"}, "target_lang_code"),
            ({"target_lang_code": "en", "source_lang_code": "xx"}, "source_lang_code"),
            ({"target_lang_code": "en", "instructions": "Be kind."}, "instructions"),
        ],
    )
    def test_translations_that_are_refused(self, site, fields, param):
        told = site.post("/v1/responses", json={"model": "translategemma_template", "input": "Hallo", **fields})
        assert refused(told)[0] == param

    def test_a_translation_as_a_chat(self, site):
        part = {"type": "text", "text": "Hallo", "source_lang_code": "nl", "target_lang_code": "en"}
        found = received(site, "translategemma_template", messages=[{"role": "user", "content": [part]}])
        assert found["prompt"] == TRANSLATION.format("Dutch", "nl", "Hallo")
        assert found["stop"] == ["<end_of_turn>", "<start_of_turn>"]


class TestLlamaCpp:
    """A real server, whose model brings a template of Qwen3's family."""

    def test_its_own_template_is_used_where_it_is_one_of_the_family(self, site):
        told = ask(site, "/v1/chat/completions", "qwen", messages=HELLO[1:], temperature=0).json()
        message = told["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"].strip()) == (tiny.ANSWER, tiny.THOUGHT.strip())
        assert ask(site, "/apply-template", "qwen", messages=HELLO[1:]).json()["prompt"]

    @pytest.mark.parametrize("enabled", [True, False])
    def test_both_prompts_are_the_same(self, site, enabled):
        """Which the model proves: it thinks and answers at the end of its own prompts alone."""
        fields = {"messages": HELLO, "temperature": 0, "chat_template_kwargs": {"enable_thinking": enabled}}
        own, written = (ask(site, "/v1/chat/completions", model, **fields).json() for model in ("qwen", "foreign"))
        messages = [one["choices"][0]["message"] for one in (own, written)]
        assert [message["content"] for message in messages] == [tiny.ANSWER] * 2
        assert [bool(message.get("reasoning_content")) for message in messages] == [enabled] * 2
        assert own["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"]

    def test_the_prompt_is_llmuxs_otherwise(self, site):
        """As many tokens as the expected prompt has."""
        tokens = ask(site, "/tokenize", "chat", content=CHATML, add_special=True, parse_special=True).json()["tokens"]
        told = ask(site, "/v1/chat/completions", "chat", messages=HELLO, temperature=0, max_tokens=40).json()
        assert told["usage"]["prompt_tokens"] == len(tokens)
        assert tiny.ANSWER in told["choices"][0]["message"]["content"]

    def test_a_stream_with_its_usage(self, site):
        fields = {"messages": HELLO, "temperature": 0, "max_tokens": 3, "stream": True}
        told = ask(site, "/v1/chat/completions", "chat", **fields, stream_options={"include_usage": True})
        found = events(told.text)
        assert found[-1]["usage"]["completion_tokens"] == 3
        assert "length" in [one["choices"][0]["finish_reason"] for one in found if one["choices"]]

    def test_a_stop_string(self, site):
        fields = {"messages": HELLO, "temperature": 0, "max_tokens": 40}
        whole = ask(site, "/v1/chat/completions", "chat", **fields).json()["choices"][0]["message"]["content"]
        word = tiny.ANSWER.split()[1]
        cut = ask(site, "/v1/chat/completions", "chat", **fields, stop=word).json()["choices"][0]
        assert cut["message"]["content"] == whole.partition(word)[0]
        assert cut["finish_reason"] == "stop"


class TestTransformers:
    """A folder without a chat template, whose worker refuses chats."""

    @pytest.mark.parametrize("enabled", [True, False])
    def test_it_answers_as_with_its_template(self, site, enabled):
        fields = {"messages": HELLO, "temperature": 0, "chat_template_kwargs": {"enable_thinking": enabled}}
        own, written = (ask(site, "/v1/chat/completions", model, **fields).json() for model in ("folder", "bare"))
        first, second = (one["choices"][0]["message"] for one in (own, written))
        assert first["content"] == second["content"] == tiny_language.ANSWER
        assert (first.get("reasoning_content") or "").strip() == (second.get("reasoning_content") or "").strip()
        assert bool(second.get("reasoning_content")) is enabled
        assert own["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"]

    def test_a_stream_of_messages(self, site):
        fields = {"messages": HELLO[1:], "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 50}}
        found = events(ask(site, "/v1/messages", "bare", **fields, stream=True).text)
        deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == tiny_language.ANSWER
        assert "".join(delta.get("thinking", "") for delta in deltas).strip() == tiny_language.THOUGHT
