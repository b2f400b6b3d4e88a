"""Chats that become prompts, and completions that become chats."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.catalog.models.prompt_format import FORMATS
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.prompts import Completions
from supervisor.gateway.prompts.answer import Chats, Thoughts
from supervisor.gateway.prompts.formats import LANGUAGES
from tests.support.cases import cases

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    SYSTEM,
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"},
]
GERMAN = {"type": "text", "text": " Guten Tag\n", "source_lang_code": "de", "target_lang_code": "pt_BR"}


def raw(fields):
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def asked(name, messages=CHAT, **fields):
    """The completion that is asked for, and what is ignored."""
    found, answers = Completions(FORMATS[name], "m").request(raw({"model": "m", "messages": messages, **fields}))
    return {key: msgspec.json.decode(value) for key, value in found.items()}, list(answers.ignored)


def prompt(name, messages=CHAT, **fields):
    return asked(name, messages, **fields)[0]["prompt"]


def refused(name, messages=CHAT, **fields):
    with pytest.raises(InvalidRequestError) as caught:
        asked(name, messages, **fields)
    return caught.value


def thinking(wanted):
    return {"chat_template_kwargs": {"enable_thinking": wanted}}


class TestPrompts:
    """What each format makes of one conversation."""

    @cases(
        ("name", "expected"),
        [
            ("generic", "Be brief.\n\nUser: Hi\nAssistant: Yo\nUser: Bye\nAssistant:"),
            ("mistral_template", "[INST] Be brief.\n\nHi [/INST] Yo</s>[INST] Bye [/INST]"),
            (
                "chatml",
                (
                    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                    "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
                ),
            ),
            (
                "alpaca",
                "Be brief.\n\n### Instruction:\nHi\n\n### Response:\nYo\n\n### Instruction:\nBye\n\n### Response:\n",
            ),
            ("raw", "Be brief.\n\nHi\n\nYo\n\nBye"),
        ],
    )
    def test_without_thoughts(self, name, expected):
        assert prompt(name) == expected

    @pytest.mark.parametrize(
        ("fields", "end"), [({}, ""), (thinking(True), ""), (thinking(False), "<think>\n\n</think>\n\n")]
    )
    def test_qwen3(self, fields, end):
        """As ChatML, without former thoughts; it thinks unless it is told not to."""
        messages = [*CHAT[:2], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYo"}, CHAT[3]]
        assert prompt("qwen3_template", messages, **fields) == prompt("chatml") + end

    def test_gemma4(self):
        """It thinks only if it is told to; texts are trimmed, and former thoughts left out."""
        former = {"role": "assistant", "content": "<|channel>thought\nHm.<channel|>Yo\n"}
        turns = "<|turn>user\nHi<turn|>\n<|turn>model\nYo<turn|>\n<|turn>user\nBye<turn|>\n<|turn>model\n"
        messages = [*CHAT[:2], former, CHAT[3]]
        quiet = f"<|turn>system\nBe brief.<turn|>\n{turns}<|channel>thought\n<channel|>"
        assert prompt("gemma4_template", messages) == quiet
        assert prompt("gemma4_template", messages, **thinking(False)) == quiet
        assert (
            prompt("gemma4_template", messages, **thinking(True))
            == f"<|turn>system\n<|think|>\nBe brief.<turn|>\n{turns}"
        )
        assert (
            prompt("gemma4_template", messages[1:], **thinking(True)) == f"<|turn>system\n<|think|>\n<turn|>\n{turns}"
        )

    def test_gemmas_marks_of_thoughts_are_shown(self):
        found, _ = asked("gemma4_template", **thinking(True))
        assert (found["skip_special_tokens"], found["preserved_tokens"]) == (False, ["<|channel>", "<channel|>"])
        assert "preserved_tokens" not in asked("gemma4_template")[0]

    def test_alpacas_own_introduction(self):
        assert prompt("alpaca", CHAT[1:2]) == (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nHi\n\n### Response:\n"
        )

    def test_parts_are_lines(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert prompt("raw", [{"role": "user", "content": parts}]) == "a\nb"

    @given(st.sampled_from([*FORMATS]), st.lists(st.text(min_size=1), min_size=1, max_size=5))
    def test_no_word_is_lost(self, name, texts):
        roles = ["user", "assistant"] * 3
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        if FORMATS[name].translates:
            messages = [{"role": "user", "content": [{**GERMAN, "text": texts[0]}]}]
            texts = texts[:1]
        found = prompt(name, messages)
        shown = (text for text in texts if not {"</think>", "<|channel>", "<channel|>"} & {text})
        assert all(text.strip() in found for text in shown)


class TestTranslateGemma:
    """Its structured request, as its own template renders it."""

    def test_a_known_source(self):
        assert prompt("translategemma_template", [{"role": "user", "content": [GERMAN]}]) == (
            "<start_of_turn>user\nYou are a professional German (de) to Portuguese (pt-BR) translator. Your goal is to "
            "accurately convey the meaning and nuances of the original German text while adhering to Portuguese grammar, "
            "vocabulary, and cultural sensitivities.\nProduce only the Portuguese translation, without any additional "
            "explanations or commentary. Please translate the following German text into Portuguese:\n\n\nGuten Tag"
            "<end_of_turn>\n<start_of_turn>model\n"
        )

    @cases("source", [None, "auto", "mixed", "AUTO", ""])
    @cases(("target", "stand_in"), [("nl", "English (en) to Dutch (nl)"), ("en-GB", "German (de) to English (en-GB)")])
    def test_an_unknown_source(self, source, target, stand_in):
        """Another language stands for it, and the model is told to look itself."""
        part = {**GERMAN, "source_lang_code": source, "target_lang_code": target}
        found = prompt("translategemma_template", [{"role": "user", "content": [part]}])
        assert f"You are a professional {stand_in} translator." in found
        before, _, text = found.partition(":\n\n\n")
        assert text.startswith("(Detect the language of each segment below, and translate all of them into ")
        assert text.endswith(")\n\nGuten Tag<end_of_turn>\n<start_of_turn>model\n")
        assert "Guten Tag" not in before

    @cases(
        ("messages", "param"),
        [
            ([{"role": "user", "content": "Hallo"}], "target_lang_code"),
            ([{"role": "user", "content": [{**GERMAN, "target_lang_code": "klingon"}]}], "target_lang_code"),
            ([{"role": "user", "content": [{**GERMAN, "source_lang_code": "de)\nx"}]}], "source_lang_code"),
            ([SYSTEM, {"role": "user", "content": [GERMAN]}], "messages"),
            ([{"role": "user", "content": [GERMAN]}] * 2, "messages"),
        ],
    )
    def test_what_it_refuses(self, messages, param):
        assert refused("translategemma_template", messages).param == param

    def test_languages_have_names(self):
        assert {"en", "zh", "fil", "za"} < LANGUAGES.keys()
        assert all(code.isalpha() and code.islower() and name[0].isupper() for code, name in LANGUAGES.items())


class TestFields:
    """Each is mapped, passed, refused by name, or named as ignored."""

    def test_stop_strings_are_merged(self):
        assert asked("alpaca", stop="END")[0]["stop"] == ["END", "### Instruction:"]
        assert asked("alpaca", stop=["a", "### Instruction:"])[0]["stop"] == ["a", "### Instruction:"]
        assert "stop" not in asked("raw", stop=None)[0]
        assert refused("raw", stop=[1]).param == "stop"

    def test_most_tokens(self):
        assert asked("raw")[0]["max_tokens"] is None
        assert asked("raw", max_tokens=3)[0]["max_tokens"] == 3
        assert asked("raw", max_tokens=3, max_completion_tokens=None)[0]["max_tokens"] == 3
        found, _ = asked("raw", max_tokens=3, max_completion_tokens=4)
        assert found["max_tokens"] == 4
        assert "max_completion_tokens" not in found

    def test_others_pass(self):
        passing = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "unheard_of": [1]}
        found, ignored = asked("raw", **passing)
        assert found == {"model": "m", "prompt": prompt("raw"), "max_tokens": None, **passing}
        assert ignored == []

    @cases(
        "fields",
        [
            {"tools": [{"type": "function"}]},
            {"tool_choice": "required"},
            {"response_format": {"type": "json_object"}},
            {"logprobs": True},
            {"audio": {"voice": "x"}},
            {"continue_final_message": True},
        ],
    )
    def test_what_has_no_place(self, fields):
        error = refused("chatml", **fields)
        assert [error.param] == [*fields]
        assert error.code == "unsupported_parameter"

    def test_what_asks_for_nothing(self):
        asking = {
            "tools": [],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "logprobs": False,
            "audio": None,
        }
        assert asked("chatml", **asking) == asked("chatml")

    def test_what_has_no_effect(self):
        for wanted, effort in ((True, "none"), (False, "high")):
            assert asked("qwen3_template", reasoning_effort=effort, **thinking(wanted))[1] == ["reasoning_effort"]
        assert asked("qwen3_template", reasoning_effort="high", **thinking(True))[1] == []
        _, ignored = asked("chatml", parallel_tool_calls=True, reasoning_effort="high", **thinking(True))
        assert ignored == ["parallel_tool_calls", "chat_template_kwargs.enable_thinking", "reasoning_effort"]
        named = {"role": "user", "name": "Ann", "content": [{**GERMAN, "cache_control": {}}]}
        assert asked("raw", [named])[1] == [
            "messages[0].content[0].cache_control",
            "messages[0].name",
            "messages[0].content.source_lang_code",
            "messages[0].content.target_lang_code",
        ]

    @pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), (None, True)])
    def test_an_effort(self, effort, thinks):
        assert prompt("qwen3_template", reasoning_effort=effort).endswith("assistant\n") is thinks

    @cases(
        ("messages", "param"),
        [
            ([], "messages"),
            ("Hi", "messages"),
            ([{"role": "robot", "content": "a"}], "messages[0].role"),
            ([{"role": "tool", "content": "a"}], "messages[0].role"),
            ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls"),
            ([{"role": "user", "content": None}], "messages[0].content"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
            ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ],
    )
    def test_messages(self, messages, param):
        assert refused("chatml", messages).param == param


COMPLETION = {
    "id": "c",
    "object": "text_completion",
    "created": 5,
    "model": "m",
    "usage": {"prompt_tokens": 1},
    "extra": 1,
}


def streamed(texts, name=None):
    """What a client gets of these pieces."""
    stream = Chats((), None if name is None else FORMATS[name]).stream()
    found = b""
    for text, reason in [*((text, None) for text in texts), ("", "stop")]:
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        found += stream.feed(b"data: " + json.dumps({**COMPLETION, "choices": [choice]}).encode() + b"\n\n")
    found += stream.feed(b"data: [DO") + stream.feed(b"NE]\n\n") + stream.end()
    *events, done = [frame.removeprefix("data: ") for frame in found.decode().split("\n\n")[:-1]]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def joined(events, field):
    return "".join(event["choices"][0]["delta"].get(field, "") for event in events)


class TestAnswers:
    """Completions as chats."""

    def test_a_whole_one(self):
        body = json.dumps(
            {**COMPLETION, "choices": [{"index": 0, "text": "Hi", "finish_reason": "stop", "logprobs": None}]}
        )
        told = json.loads(Chats((), None).answer(body.encode()))
        message = {"role": "assistant", "content": "Hi"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        assert told == {**COMPLETION, "object": "chat.completion", "choices": [choice]}

    @cases("body", [b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [1]}', b'{"choices": [{"text": 1}]}'])
    def test_what_is_none(self, body):
        with pytest.raises(UpstreamError):
            Chats((), None).answer(body)

    def test_a_stream(self):
        first, second, last = streamed(["Hi", " you"])
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"] == [
            {"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": "Hi"}}
        ]
        assert second["choices"] == [{"index": 0, "finish_reason": None, "delta": {"content": " you"}}]
        assert last["choices"] == [{"index": 0, "finish_reason": "stop", "delta": {}}]
        assert {name: last[name] for name in ("id", "created", "usage", "extra")} == {
            name: COMPLETION[name] for name in ("id", "created", "usage", "extra")
        }

    def test_the_usage_alone_and_an_error_pass(self):
        stream = Chats((), None).stream()
        told = stream.feed(b'data: {"choices": [], "usage": {"prompt_tokens": 2}}\n\ndata: {"error": {"message": "m"}}')
        told += stream.end()
        usage, error = (json.loads(frame[6:]) for frame in told.decode().split("\n\n")[:-1])
        assert usage == {"object": "chat.completion.chunk", "choices": [], "usage": {"prompt_tokens": 2}}
        assert error == {"error": {"message": "m"}}


class TestThoughts:
    """They are no part of the answer."""

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("qwen3_template", "<think>\nHm < ha.\n</think>\n\nYo <b>"),
            ("gemma4_template", "<|channel>thought\nHm < ha.\n<channel|>Yo <b>"),
        ],
    )
    @given(data=st.data())
    def test_wherever_pieces_end(self, name, text, data):
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        events = streamed(pieces, name)
        assert joined(events, "reasoning_content").strip() == "Hm < ha."
        assert joined(events, "content") == "Yo <b>"
        body = json.dumps({"choices": [{"text": text}]}).encode()
        message = json.loads(Chats((), FORMATS[name]).answer(body))["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Yo <b>", "reasoning_content": "Hm < ha."}

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("Yo", ("", "Yo")),
            ("<thin", ("", "<thin")),
            ("<think>cut off </thi", ("cut off </thi", "")),
            ("", ("", "")),
        ],
    )
    def test_ends(self, text, found):
        thoughts = Thoughts(("<think>", "</think>"))
        assert tuple(a + b for a, b in zip(thoughts.feed(text), thoughts.end(), strict=True)) == found

    def test_without_thinking_marks_are_text(self):
        assert joined(streamed(["<think>a</think>"]), "content") == "<think>a</think>"
