"""Items become messages: who said what, what belongs together, and what no chat can say."""

from __future__ import annotations

import msgspec
import pytest

from supervisor.dialects.responses import RESPONSES
from supervisor.errors import InvalidRequestError
from tests.support.cases import cases


def translated(given, instructions=None):
    """The chat completion, and what is ignored."""
    fields = {"input": given, "instructions": instructions}
    canonical, answers = RESPONSES.translation("POST", "/v1/responses").request(
        {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    )
    return {name: msgspec.json.decode(value) for name, value in canonical.items()}, answers.ignored


def messages_of(*given):
    return translated(*given)[0]["messages"]


def user(content):
    return {"type": "message", "role": "user", "content": content}


def said(*texts):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": one} for one in texts]}


def thought(text, **keys):
    return {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        **keys,
    }


def call(name, **keys):
    return {"type": "function_call", "id": "fc", "call_id": f"call_{name}", "name": name, "arguments": "{}", **keys}


def result(name, output="done"):
    return {"type": "function_call_output", "call_id": f"call_{name}", "output": output}


def called(*names):
    return [{"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]


class TestMessages:
    """Texts, parts and roles."""

    def test_a_text(self):
        assert messages_of("Hi", "Be brief.") == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]

    @pytest.mark.parametrize("instructions", [None, ""])
    def test_without_instructions(self, instructions):
        assert messages_of([{"role": "user", "content": "Hi"}], instructions) == [{"role": "user", "content": "Hi"}]

    def test_what_the_system_says_first_is_one_message(self):
        given = [
            {"role": "developer", "content": "A"},
            {"role": "system", "content": [{"type": "input_text", "text": "B"}]},
        ]
        assert messages_of([*given, user("Hi"), {"role": "developer", "content": "C"}], "Be brief.") == [
            {"role": "system", "content": "Be brief.\n\nA\n\nB"},
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": "C"},
        ]

    def test_parts(self):
        parts = [
            {"type": "input_text", "text": "Look"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"},
            {"type": "input_image", "image_url": "data:image/png;base64,BBBB"},
            {"type": "input_audio", "input_audio": {"data": "CCCC", "format": "wav"}},
        ]
        assert messages_of([user(parts)]) == [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}},
                    {"type": "input_audio", "input_audio": {"data": "CCCC", "format": "wav"}},
                ],
            }
        ]

    def test_several_texts_stay_apart(self):
        """Joined without anything between them, words could become others."""
        content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert messages_of([said("a", "b")]) == [{"role": "assistant", "content": content}]

    def test_a_refusal_is_what_was_said(self):
        given = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
        assert messages_of([given]) == [{"role": "assistant", "content": "No."}]


class TestTurns:
    """What the assistant says before anybody else does is one message."""

    def test_thoughts_text_and_calls(self):
        given = [
            user("Go"),
            thought("Hm"),
            said("I will."),
            call("a"),
            call("b"),
            result("a"),
            result("b"),
            said("Done."),
        ]
        assert messages_of(given) == [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": "I will.", "reasoning_content": "Hm", "tool_calls": called("a", "b")},
            {"role": "tool", "tool_call_id": "call_a", "content": "done"},
            {"role": "tool", "tool_call_id": "call_b", "content": "done"},
            {"role": "assistant", "content": "Done."},
        ]

    def test_calls_after_results_are_another_turn(self):
        roles = [message["role"] for message in messages_of([call("a"), result("a"), call("b"), result("b")])]
        assert roles == ["assistant", "tool", "assistant", "tool"]

    def test_what_follows_a_text_is_another_turn_unless_it_is_a_call(self):
        given = [thought("1"), said("A"), thought("2"), said("B"), said("C"), call("c")]
        assert messages_of(given) == [
            {"role": "assistant", "content": "A", "reasoning_content": "1"},
            {"role": "assistant", "content": "B", "reasoning_content": "2"},
            {"role": "assistant", "content": "C", "tool_calls": called("c")},
        ]

    def test_nothing_comes_between_a_call_and_its_result(self):
        given = [thought("1"), call("a"), thought("2"), call("b"), said("Wait."), result("a"), result("b")]
        first, *others = messages_of(given)
        assert first == {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "1\n\n2",
            "tool_calls": called("a", "b"),
        }
        assert [message["role"] for message in others] == ["tool", "tool"]

    def test_a_call_alone_has_no_content(self):
        assert messages_of([call("a")])[0]["content"] is None

    def test_a_summary_stands_for_thoughts_that_are_missing(self):
        summary = [{"type": "summary_text", "text": "s"}]
        assert messages_of([thought("t", summary=summary), said("A")])[0]["reasoning_content"] == "t"
        assert messages_of([thought("t", content=None, summary=summary), said("A")])[0]["reasoning_content"] == "s"

    def test_thoughts_that_are_encrypted_or_led_to_nothing_are_left_out(self):
        secret = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
        assert messages_of([secret, said("A"), thought("t"), user("B")]) == [
            {"role": "assistant", "content": "A"},
            {"role": "user", "content": "B"},
        ]

    @pytest.mark.parametrize("next_item", [user("So?"), said("I see."), call("c"), None])
    def test_pictures_of_results_are_the_users(self, next_item):
        """They come behind all results of a turn, since nothing may stand between calls and results."""
        image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        text = {"type": "input_text", "text": "ok"}
        given = [call("a"), call("b"), result("a", [text, image]), result("b", [image])]
        _, first, second, shown, *rest = messages_of([*given, next_item] if next_item else given)
        assert [(each["role"], each["content"]) for each in (first, second)] == [("tool", "ok"), ("tool", "")]
        assert shown["role"] == "user"
        types = [part["type"] for part in shown["content"]]
        assert types == ["image_url", "image_url", *(["text"] if next_item == user("So?") else [])]
        assert [each["role"] for each in rest] == (["assistant"] if next_item in (said("I see."), call("c")) else [])

    def test_a_namespace_is_part_of_the_name(self):
        for space in ("crm", "crm__"):
            (message,) = messages_of([call("find", namespace=space)])
            assert message["tool_calls"][0]["function"]["name"] == "crm__find"


class TestIgnored:
    """Fields of items and parts that no chat has are named."""

    def test_none_of_those_that_openai_s_answers_have(self):
        part = {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}
        answer = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        given = [thought("t", status=None, encrypted_content=None), answer, call("a", status="completed"), result("a")]
        assert translated(given)[1] == []

    def test_all_others(self):
        parts = [{"type": "input_text", "text": "A", "color": "red"}]
        given = [
            {"role": "user", "name": "Ann", "content": parts, "phase": None},
            thought("t", encrypted_content="gAAAA"),
            call("a", caller="x"),
            {**result("a", [{"type": "text", "text": "B", "size": 1}]), "outcome": 1},
        ]
        assert translated(given)[1] == [
            "input[0].name",
            "input[0].content[0].color",
            "input[1].encrypted_content",
            "input[2].caller",
            "input[3].output[0].size",
            "input[3].outcome",
        ]


class TestOthers:
    """Items of programs that do more than chat."""

    @pytest.mark.parametrize("kind", ["web_search_call", "compaction", "mcp_call", "one_of_tomorrow"])
    def test_what_no_chat_has_is_left_out(self, kind):
        given = [user("Hi"), {"type": kind, "id": "x", "action": {"type": "search"}}, said("A"), user("B")]
        canonical, ignored = translated(given)
        assert [message["role"] for message in canonical["messages"]] == ["user", "assistant", "user"]
        assert ignored == [f"input[{kind}]"]

    def test_what_is_left_out_keeps_its_place(self):
        """So errors and ignored fields behind it have theirs."""
        tools = [{"type": "web_search"}, {"type": "function", "name": "f", "x": 1}]
        given = [{"type": "compaction"}, {"type": "additional_tools", "tools": tools}, {**user("Hi"), "y": 1}]
        ignored = ["input[compaction]", "tools[web_search]", "input[1].tools[1].x", "input[2].y"]
        assert translated(given)[1] == ignored
        with pytest.raises(InvalidRequestError) as refused:
            translated([*given, user(7)])
        assert refused.value.param == "input[3].content"

    def test_a_null_says_nothing(self):
        assert messages_of([None, user("Hi")]) == [{"role": "user", "content": "Hi"}]

    def test_a_custom_tools_call_is_one_of_a_function(self):
        call = {"type": "custom_tool_call", "call_id": "a", "name": "exec", "input": 'echo "1"\n'}
        _, given, told = messages_of(
            [user("Hi"), call, {"type": "custom_tool_call_output", "call_id": "a", "output": "1"}]
        )
        function = {"name": "exec", "arguments": '{"input":"echo \\"1\\"\\n"}'}
        assert given["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
        assert told == {"role": "tool", "tool_call_id": "a", "content": "1"}

    @pytest.mark.parametrize("arguments", ["", " "])
    def test_no_arguments_are_none(self, arguments):
        (message,) = messages_of([call("find", arguments=arguments)])
        assert message["tool_calls"][0]["function"]["arguments"] == "{}"

    def test_tools_that_items_bring(self):
        tools = [{"type": "function", "name": "f"}]
        given = [{"type": "additional_tools", "role": "developer", "tools": tools}, user("Hi")]
        canonical, ignored = translated(given)
        assert canonical["messages"] == [{"role": "user", "content": "Hi"}]
        assert canonical["tools"] == [{"type": "function", "function": {"name": "f"}}]
        assert ignored == []


class TestRefusals:
    """By the place of what can't be said, with what to do instead."""

    @cases(
        ("item", "param", "words"),
        [
            ({"type": "item_reference", "id": "msg_1"}, "input[1]", "Send the item itself"),
            ({"id": "msg_1"}, "input[1]", "Send the item itself"),
            (user([{"type": "input_file", "file_id": "f"}]), "input[1].content[0]", "input_text"),
            (user([{"type": "input_image", "file_id": "f"}]), "input[1].content[0].file_id", "base64"),
            (user([{"type": "video"}]), "input[1].content[0]", "input_image"),
            (user([{"text": "Hi"}]), "input[1].content[0]", "input_text"),
            (result("a", [{"type": "input_file"}]), "input[1].output[0]", "input_text"),
        ],
    )
    def test_what_no_chat_can_say(self, item, param, words):
        with pytest.raises(InvalidRequestError) as refused:
            messages_of([user("Hi"), item])
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
        assert words in refused.value.message

    @cases(
        ("given", "param"),
        [
            (7, "input"),
            ({"role": "user"}, "input"),
            (["Hi"], "input[0]"),
            ([{"role": "user"}], "input[0].content"),
            ([{"role": "robot", "content": "Hi"}], "input[0].role"),
            ([{"role": "user", "content": ["Hi"]}], "input[0].content[0]"),
            ([user([{"type": "input_text"}])], "input[0].content[0].text"),
            ([user([{"type": "input_image"}])], "input[0].content[0].image_url"),
            ([user([{"type": "input_audio", "input_audio": "AAAA"}])], "input[0].content[0].input_audio"),
            ([call("")], "input[0].name"),
            ([call("a", arguments={})], "input[0].arguments"),
            ([call("a", call_id=None)], "input[0].call_id"),
            ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
            ([result("a", {"x": 1})], "input[0].output"),
            ([thought("a", content=[{"text": 1}])], "input[0].content[0].text"),
        ],
    )
    def test_what_is_none(self, given, param):
        with pytest.raises(InvalidRequestError) as refused:
            messages_of(given)
        assert (refused.value.param, refused.value.code) == (param, "invalid_request")

    def test_instructions_are_a_text(self):
        with pytest.raises(InvalidRequestError) as refused:
            messages_of("Hi", ["Be brief."])
        assert refused.value.param == "instructions"
