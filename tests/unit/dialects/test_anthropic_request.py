"""Requests to `/v1/messages` become chat completions; no field is lost on the way."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.base import Endpoint
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.dialects import chat
from supervisor.dialects.anthropic import ANTHROPIC
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.json_body import JsonBody
from tests.support.cases import cases

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hello"}]
PIXEL = "iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def mapped(path=PATH, **fields):
    """The canonical request, and the fields without effect."""
    request = {"model": "m", "max_tokens": 5, "messages": HELLO} | fields
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in request.items()}
    canonical, answers = ANTHROPIC.translation("POST", path).request(raw)
    return {name: json.loads(bytes(value)) for name, value in canonical.items()}, list(answers.ignored)


def refused(path=PATH, **fields):
    with pytest.raises(InvalidRequestError) as told:
        mapped(path, **fields)
    return told.value


def messages(*turns):
    return mapped(messages=list(turns))[0]["messages"]


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(said, **fields):
    return {"type": "text", "text": said, **fields}


def result(content=None, **fields):
    return {"type": "tool_result", "tool_use_id": "toolu_1", **fields} | (
        {} if content is None else {"content": content}
    )


def picture(**source):
    return {"type": "image", "source": source or {"type": "base64", "media_type": "image/png", "data": PIXEL}}


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
SEEN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}


class TestPaths:
    """Only what can be mapped is."""

    def test_canonical_paths(self):
        assert ANTHROPIC.translation("POST", PATH).path == chat.PATH
        assert ANTHROPIC.translation("POST", COUNT).path == f"{chat.PATH}/input_tokens"

    @pytest.mark.parametrize(("method", "path"), [("GET", PATH), ("POST", f"{PATH}/batches"), ("GET", "/v1/models")])
    def test_others_are_not_mapped(self, method, path):
        assert ANTHROPIC.translation(method, path) is None


class TestConversation:
    """Content blocks become messages."""

    def test_texts(self):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, user(text("c"))]
        assert messages(*turns) == [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]

    def test_turns_of_one_role_are_one(self):
        assert messages(*HELLO, user(text("b")), assistant(text("c")), assistant(text("d"))) == [
            {"role": "user", "content": [text("Hello"), text("b")]},
            {"role": "assistant", "content": "c\nd"},
        ]

    @pytest.mark.parametrize("system", ["Be brief.", [text("Be brief.", **CACHED)]])
    def test_the_system_prompt_comes_first(self, system):
        assert mapped(system=system)[0]["messages"] == [{"role": "system", "content": "Be brief."}, *HELLO]

    def test_system_blocks_are_joined(self):
        assert mapped(system=[text("a"), text("b")])[0]["messages"][0]["content"] == "a\n\nb"

    @pytest.mark.parametrize("system", ["", [], None])
    def test_an_empty_system_prompt_is_none(self, system):
        assert mapped(system=system)[0]["messages"] == HELLO

    def test_pictures(self):
        url = "data:image/png;base64,AAAA"
        turn = user(picture(), text("What is it?"), picture(type="url", url=url))
        assert messages(turn) == [
            user(SEEN, text("What is it?"), {"type": "image_url", "image_url": {"url": url}}),
        ]

    def test_calls(self):
        (told,) = messages(assistant(text("Let me see."), CALL, CALL | {"id": "toolu_2", "input": {}}))
        assert told["content"] == "Let me see."
        assert [call["id"] for call in told["tool_calls"]] == ["toolu_1", "toolu_2"]
        assert {"type", "id", "function"} == told["tool_calls"][0].keys()
        assert told["tool_calls"][0]["function"]["name"] == "weather"
        assert [json.loads(call["function"]["arguments"]) for call in told["tool_calls"]] == [{"city": "Bern"}, {}]

    def test_a_turn_of_calls_has_no_text(self):
        assert messages(assistant(CALL))[0]["content"] is None

    def test_results_come_before_the_rest(self):
        turn = user(text("And?"), result("sunny"), result([text("21"), text("22")], tool_use_id="toolu_2"))
        assert messages(turn) == [
            {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "toolu_2", "content": "21\n22"},
            {"role": "user", "content": "And?"},
        ]

    def test_a_result_alone_leaves_no_turn_of_the_user(self):
        assert messages(user(result())) == [{"role": "tool", "tool_call_id": "toolu_1", "content": ""}]

    def test_an_error_of_a_tool_is_said(self):
        assert messages(user(result("no such city", is_error=True)))[0]["content"] == "Error: no such city"

    def test_pictures_of_a_result_are_the_users(self):
        assert messages(user(text("So?"), result([picture(), text("a map")]))) == [
            {"role": "tool", "tool_call_id": "toolu_1", "content": "a map"},
            user(SEEN, text("So?")),
        ]

    def test_thoughts_stay_with_their_turn(self):
        """As within a loop of tool calls, where models go on from them. What is encrypted nobody here can read."""
        turn = assistant(THOUGHT, {"type": "redacted_thinking", "data": "x"}, text("Yes."))
        assert messages(turn) == [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
        assert mapped(messages=[turn, *HELLO])[1] == ["messages.content.data"]
        assert messages(assistant(THOUGHT, CALL))[0]["reasoning_content"] == "Hm."

    def test_a_thought_has_a_text(self):
        assert refused(messages=[assistant({"type": "thinking", "signature": "x"})]).param == "messages"

    def test_caching_has_no_effect_anywhere(self):
        turns = [user(text("a", **CACHED), picture() | CACHED), assistant(CALL | CACHED), user(result("b", **CACHED))]
        canonical, ignored = mapped(messages=turns, tools=[WEATHER | CACHED])
        assert "cache_control" not in json.dumps(canonical)
        assert ignored == []

    @cases(
        ("turn", "named"),
        [
            (user({"type": "document", "source": {"type": "text", "data": "x"}}), "document"),
            (user(result([{"type": "search_result", "source": "x", "title": "x", "content": []}])), "search_result"),
            (assistant({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}), "server_tool_use"),
            (user(CALL), "tool_use"),
            (assistant(picture()), "image"),
            (user(picture(type="file", file_id="x")), "file"),
            (user(picture(type="base64", media_type="text/html", data="x")), "media_type"),
            (user({"type": "image"}), "source"),
            (user({"type": "text"}), "text"),
            (user({"type": "tool_result", "content": "x"}), "tool_use_id"),
            (assistant(CALL | {"input": [1]}), "input"),
            (assistant(CALL | {"id": None}), "id"),
            ({"role": "robot", "content": "x"}, "robot"),
            ({"role": "user", "content": 5}, "content"),
            ({"role": "user"}, "content"),
        ],
    )
    def test_what_cannot_be_mapped_is_refused_by_name(self, turn, named):
        told = refused(messages=[turn])
        assert told.param == "messages"
        assert named in told.message

    @cases(
        ("fields", "code"),
        [
            ({"messages": [user({"type": "document"})]}, "unsupported_parameter"),
            ({"messages": [user(result([{"type": "search_result"}]))]}, "unsupported_parameter"),
            ({"messages": [user(picture(type="file"))]}, "unsupported_parameter"),
            ({"system": [picture()]}, "unsupported_parameter"),
            ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "unsupported_parameter"),
            ({"output_config": {"format": {"type": "xml"}}}, "unsupported_parameter"),
            ({"messages": None}, "missing_parameter"),
            ({"max_tokens": None}, "missing_parameter"),
            ({"messages": [user({"type": 5})]}, "invalid_request"),
            ({"thinking": {"type": "hard"}}, "invalid_request"),
        ],
    )
    def test_codes_tell_them_from_mistakes(self, fields, code):
        assert refused(**fields).code == code

    def test_the_input_of_a_call_keeps_its_bytes(self):
        """Also beside a field that nobody knows."""
        block = b'{"input": { "x" :1.0, "x": 2e1,"y":"\\u00e9\\/" }, "caller": 1, "type": "tool_use", "id": "a", "name": "f"}'
        turns = msgspec.Raw(b'[{"role": "assistant", "content": [%b]}]' % block)
        canonical, _ = ANTHROPIC.translation("POST", COUNT).request({"messages": turns})
        (message,) = json.loads(bytes(canonical["messages"]))
        assert message["tool_calls"][0]["function"]["arguments"] == '{ "x" :1.0, "x": 2e1,"y":"\\u00e9\\/" }'

    def test_a_system_prompt_has_only_text(self):
        assert refused(system=[picture()]).param == "system"


class TestParameters:
    """Top-level fields."""

    def test_same_and_renamed_ones(self):
        canonical, ignored = mapped(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END"])
        assert canonical == {
            "model": "m",
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "stop": ["END"],
            "messages": HELLO,
        }
        assert ignored == []

    def test_null_is_nothing(self):
        canonical, ignored = mapped(
            temperature=None,
            tools=None,
            thinking=None,
            container=None,
            metadata=None,
            stop_sequences=[],
            mcp_servers=[],
        )
        assert canonical.keys() == {"model", "max_tokens", "messages"}
        assert ignored == []

    def test_a_stream_is_asked_for_its_usage(self):
        canonical, _ = mapped(stream=True)
        assert canonical["stream"] is True
        assert canonical["stream_options"] == {"include_usage": True}
        assert not {"stream", "stream_options"} & mapped(stream=False)[0].keys()

    @cases("limit", [None, 0, -1, 1.5, "5", True])
    def test_a_limit_must_be_there(self, limit):
        assert refused(max_tokens=limit).param == "max_tokens"

    def test_a_count_needs_no_limit(self):
        canonical, ignored = mapped(COUNT, max_tokens=None, stream=True, system="s", tools=[WEATHER])
        assert canonical.keys() == {"model", "messages", "tools"}
        assert ignored == ["stream"]

    def test_messages_must_be_there(self):
        assert refused(messages=None).param == "messages"

    def test_there_must_be_a_message(self):
        assert refused(messages=[]).param == "messages"

    def test_tools(self):
        canonical, ignored = mapped(
            tools=[WEATHER, WEATHER | {"type": "custom", "strict": True, "defer_loading": True}]
        )
        function = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
        assert canonical["tools"] == [
            {"type": "function", "function": function},
            {"type": "function", "function": function | {"strict": True}},
        ]
        assert ignored == ["tools.defer_loading"]

    def test_no_tools_are_no_field(self):
        assert "tools" not in mapped(tools=[])[0]

    @pytest.mark.parametrize("kind", ["web_search_20250305", "code_execution_20250825", "mcp_toolset", "bash"])
    def test_anthropics_own_tools_are_refused_by_name(self, kind):
        told = refused(tools=[{"type": kind, "name": "x"}])
        assert told.param == "tools"
        assert kind in told.message

    @pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818", "computer_20250124"])
    def test_tools_that_clients_run_are_functions(self, kind):
        (tool,) = mapped(tools=[{"type": kind, "name": "x", "display_width_px": 100}])[0]["tools"]
        assert tool["function"]["name"] == "x"
        assert tool["function"]["parameters"]["properties"]

    def test_what_the_system_says_later(self):
        asked = mapped(messages=[{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}])[0]
        assert asked["messages"][-1] == {"role": "system", "content": "Be brief."}

    @pytest.mark.parametrize("tool", [{"name": "x"}, {"input_schema": {}}, 5])
    def test_a_tool_that_is_none(self, tool):
        assert refused(tools=[tool]).param == "tools"

    @pytest.mark.parametrize(
        ("choice", "canonical"),
        [
            ({"type": "auto"}, "auto"),
            ({"type": "any"}, "required"),
            ({"type": "none"}, "none"),
        ],
    )
    def test_tool_choice(self, choice, canonical):
        told, _ = mapped(tools=[WEATHER], tool_choice=choice)
        assert told["tool_choice"] == canonical
        assert "parallel_tool_calls" not in told

    def test_a_tool_that_must_be_called_is_offered_alone(self):
        """llmux's canonical API has a choice for that, but llama.cpp's server takes it for `auto`."""
        time = {"name": "time", "input_schema": {}}
        told, ignored = mapped(tools=[time, WEATHER], tool_choice={"type": "tool", "name": "weather"})
        assert ([tool["function"]["name"] for tool in told["tools"]], told["tool_choice"]) == (["weather"], "required")
        assert ignored == []
        assert refused(tools=[time], tool_choice={"type": "tool", "name": "weather"}).param == "tool_choice"

    def test_one_call_at_a_time(self):
        told, _ = mapped(tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
        assert (told["tool_choice"], told["parallel_tool_calls"]) == ("required", False)

    @pytest.mark.parametrize("choice", [{"type": "tool"}, {"type": "best"}, {}, "auto"])
    def test_a_choice_that_is_none(self, choice):
        assert refused(tool_choice=choice).param == "tool_choice"

    @pytest.mark.parametrize(
        ("thinking", "is_on", "without_effect"),
        [
            ({"type": "enabled", "budget_tokens": 1024}, True, ["thinking.budget_tokens"]),
            ({"type": "adaptive"}, True, []),
            ({"type": "disabled"}, False, []),
        ],
    )
    def test_thinking(self, thinking, is_on, without_effect):
        canonical, ignored = mapped(thinking=thinking)
        assert canonical["chat_template_kwargs"] == {"enable_thinking": is_on}
        assert ignored == without_effect

    def test_another_kind_of_thinking(self):
        assert refused(thinking={"type": "hard"}).param == "thinking"

    @pytest.mark.parametrize(
        "fields",
        [
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        ],
    )
    def test_a_schema(self, fields):
        assert mapped(**fields)[0]["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        }

    def test_effort_has_no_effect(self):
        canonical, ignored = mapped(output_config={"effort": "low", "format": None})
        assert "response_format" not in canonical
        assert ignored == ["output_config.effort"]

    @pytest.mark.parametrize("format_", [{"type": "xml"}, {"type": "json_schema"}])
    def test_another_format(self, format_):
        assert refused(output_config={"format": format_}).param == "output_config"

    def test_the_user(self):
        canonical, ignored = mapped(metadata={"user_id": "me", "plan": "x"})
        assert canonical["user"] == "me"
        assert ignored == ["metadata.plan"]

    @pytest.mark.parametrize(
        "fields",
        [
            {"container": "c"},
            {"mcp_servers": [{"type": "url", "url": "https://example.org", "name": "x"}]},
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        ],
    )
    def test_what_no_worker_can_do_is_refused_by_name(self, fields):
        told = refused(**fields)
        assert [told.param] == list(fields)
        assert told.code == "unsupported_parameter"

    def test_thoughts_are_left_to_chat_templates(self):
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
        assert mapped(context_management={"edits": edits})[1] == ["context_management"]


PLACES = {
    "model": "model",
    "max_tokens": "max_tokens",
    "messages": "messages",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "system": "messages",
    "stop_sequences": "stop",
    "stream": "stream",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "thinking": "chat_template_kwargs",
    "metadata": "user",
    "output_config": "response_format",
    "output_format": "response_format",
}
"""Where each field is found again."""
VALUES = {
    "temperature": 0.1,
    "top_p": 0.2,
    "top_k": 3,
    "system": "Be brief.",
    "stop_sequences": ["a"],
    "stream": True,
    "tools": [WEATHER],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"},
    "metadata": {"user_id": "u"},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "output_format": {"type": "json_schema", "schema": {}},
    "container": "x",
    "mcp_servers": [{}],
    "context_management": {"edits": [{"type": "compact_20260112"}]},
    "service_tier": "auto",
    "cache_control": {"type": "ephemeral"},
    "inference_geo": "us",
}
UNKNOWN = st.dictionaries(
    st.from_regex(r"[a-w][a-z_]{0,20}", fullmatch=True), st.booleans() | st.integers(), max_size=4
)


class TestNothingIsLost:
    """Each field of a request is mapped, refused, or named as one without effect."""

    @given(st.sets(st.sampled_from(sorted(VALUES))), UNKNOWN)
    def test_each_field_is_accounted_for(self, names, unknown):
        request = {name: value for name, value in unknown.items() if name not in VALUES | PLACES}
        request |= {name: VALUES[name] for name in names}
        if refusals := {"container", "mcp_servers", "context_management"} & names:
            assert refused(**request).param in refusals
            return
        canonical, ignored = mapped(**request)
        for name in request:
            assert (PLACES.get(name) in canonical) != (name in ignored), name
        assert canonical.keys() <= set(PLACES.values()) | {"stream_options"}

    def test_fields_of_turns_and_blocks(self):
        """Those that are null say nothing, and a thought's signature is nothing that a worker could check."""
        odd = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL, "dpi": 72}}
        turns = [
            user(text("a", citations=None, tone="kind"), text("b", tone="kind"), odd) | {"name": "Ada"},
            assistant(THOUGHT, CALL | {"caller": {"type": "direct"}}),
            user(result([text("c", lang="en")]), text("d", content=[5])),
        ]
        assert mapped(messages=turns, system=[text("s", title="t")])[1] == [
            "messages.content.tone",
            "messages.content.source.dpi",
            "messages.name",
            "messages.content.caller",
            "messages.content.content.lang",
            "messages.content.content",
            "system.title",
        ]

    def test_a_beginning_of_the_answer(self):
        assert mapped(messages=[*HELLO, assistant(text("{"))])[1] == ["prefill"]

    @cases("end", ["", '"', "\\", '\\"', "é\n", "=", ":", "\u2028", "\x01"])
    def test_long_texts_of_a_large_body_come_through(self, end):
        """Only their beginnings are seen on the way, in the input of a call as elsewhere."""
        whole = 'say "hi" \\ ' * 30_000 + end
        numbers = list(range(3000))
        call = CALL | {"input": {"text": whole, "plain": "A" * 500 + end, "k" * 300 + end: [whole], "n": numbers}}
        turns = [user(text(whole)), assistant(text(whole), text(":b"), call), user(result(whole, is_error=True))]
        request = {"model": "m", "max_tokens": 5, "system": [text(whole), text('"b"')], "messages": turns}

        async def sent(indent):
            body = await JsonBody.open(json.dumps(request, ensure_ascii=indent is None, indent=indent).encode())
            body, _ = body.translated(ANTHROPIC.translation("POST", PATH))
            await body.check("m", None, Endpoint(chat.PATH))
            return json.loads(bytes(await body.rewritten(Rewrite(), Endpoint(chat.PATH))))

        for indent in (None, 1):
            system, asked, answered, told = asyncio.run(sent(indent))["messages"]
            assert system["content"] == f'{whole}\n\n"b"'
            assert asked["content"] == whole
            assert answered["content"] == f"{whole}\n:b"
            assert json.loads(answered["tool_calls"][0]["function"]["arguments"]) == call["input"]
            assert told["content"] == f"Error: {whole}"
