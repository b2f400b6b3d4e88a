"""A request for a response becomes one for a chat completion: each field is mapped, refused, or named as ignored."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.dialects.responses import RESPONSES
from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.body.condensed_json import CondensedJson
from tests.support.cases import cases

PLAIN = {"model": "m", "input": "Hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "Tell it.", "parameters": SCHEMA, "strict": True}
TIME = {"type": "function", "name": "time", "description": None, "parameters": None, "strict": None}
AS_CHAT = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA, "strict": True},
}
TIME_AS_CHAT = {"type": "function", "function": {"name": "time"}}


COUNT = "/v1/responses/input_tokens"


def translated(fields, path="/v1/responses"):
    translation = RESPONSES.translation("POST", path)
    canonical, answers = translation.request(
        {key: msgspec.Raw(json.dumps(value).encode()) for key, value in fields.items()}
    )
    return {key: json.loads(bytes(value)) for key, value in canonical.items()}, answers


def mapped(**fields):
    """What these fields add to a chat completion, and what is ignored of them."""
    canonical, answers = translated(PLAIN | fields)
    assert canonical.items() >= CHAT.items()
    return {key: value for key, value in canonical.items() if key not in CHAT}, answers.ignored


def refused(**fields):
    with pytest.raises(InvalidRequestError) as error:
        translated(PLAIN | fields)
    return error.value


def repeated(**fields):
    answer = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}
    return json.loads(translated(PLAIN | fields)[1].answer(json.dumps(answer).encode()))


class TestFields:
    """One by one."""

    def test_a_plain_one(self):
        assert mapped() == ({}, [])

    @cases(
        ("fields", "chat"),
        [
            ({"temperature": 0.5, "top_p": 0.9, "user": "me"}, {"temperature": 0.5, "top_p": 0.9, "user": "me"}),
            ({"max_output_tokens": 7}, {"max_tokens": 7}),
            ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
            ({"stream": False, "background": False, "store": False, "truncation": "disabled"}, {}),
            ({"stream_options": {"include_obfuscation": False}, "metadata": {"a": "b"}, "service_tier": "auto"}, {}),
            ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
            ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
            (
                {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                    }
                },
            ),
            ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
            (
                {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
                {"logprobs": True, "top_logprobs": 3},
            ),
        ],
    )
    def test_mapped(self, fields, chat):
        assert mapped(**fields) == (chat, [])

    @cases(
        ("effort", "told", "thinks"),
        [
            ("none", "none", False),
            ("minimal", "low", False),
            ("low", "low", True),
            ("medium", "medium", True),
            ("high", "high", True),
            ("xhigh", "xhigh", True),
        ],
    )
    def test_effort(self, effort, told, thinks):
        chat = {"reasoning_effort": told, "chat_template_kwargs": {"enable_thinking": thinks}}
        assert mapped(reasoning={"effort": effort}) == (chat, [])
        assert repeated(reasoning={"effort": effort})["reasoning"] == {"effort": effort, "summary": None}

    @cases(
        ("fields", "ignored"),
        [
            ({"reasoning": {"summary": "auto", "generate_summary": None}}, ["reasoning.summary"]),
            ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
            ({"include": ["reasoning.encrypted_content"]}, ["include[reasoning.encrypted_content]"]),
            ({"top_logprobs": 3}, ["top_logprobs"]),
            ({"stream_options": {"include_obfuscation": True}}, ["stream_options.include_obfuscation"]),
            ({"stream_options": {"include_obfuscation": False, "x": 1}}, ["stream_options.x"]),
            ({"store": True, "truncation": "auto"}, ["store", "truncation"]),
            ({"safety_identifier": "a", "prompt_cache_key": "b"}, ["safety_identifier", "prompt_cache_key"]),
            ({"max_tool_calls": 3, "service_tier": "flex"}, ["service_tier", "max_tool_calls"]),
            ({"stop": ["x"], "seed": 7, "messages": [], "unknown": None}, ["stop", "seed", "messages"]),
            ({"tools": [{"type": "web_search", "external_web_access": False}]}, ["tools[web_search]"]),
        ],
    )
    def test_ignored(self, fields, ignored):
        assert mapped(**fields) == ({}, ignored)

    def test_fields_within_others_that_are_ignored(self):
        tool = {"type": "function", "name": "f", "defer_loading": True, "strict": None}
        space = {"type": "namespace", "name": "n", "description": "Some.", "tools": [tool]}
        schema = {"type": "json_schema", "name": "s", "schema": {}, "color": "red"}
        fields = {
            "tools": [tool, space],
            "text": {"format": schema},
            "input": [{"role": "user", "content": "a", "x": 1}],
        }
        assert translated(PLAIN | fields)[1].ignored == [
            "input[0].x",
            "tools[0].defer_loading",
            "tools[1].description",
            "tools[1].tools[0].defer_loading",
            "text.format.color",
        ]

    @cases(
        ("fields", "param"),
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"conversation": {"id": "conv_1"}}, "conversation"),
            ({"background": True, "stream": True}, "background"),
            ({"prompt": {"id": "pmpt_1"}}, "prompt"),
            ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ],
    )
    def test_refused_with_what_to_do(self, fields, param):
        error = refused(**fields)
        assert (error.param, error.code) == (param, "unsupported_parameter")
        assert error.message.count(".") >= 1

    @cases(
        ("fields", "param"),
        [
            ({"input": []}, "input"),
            ({"input": None}, "input"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": "7"}, "max_output_tokens"),
            ({"stream": "yes"}, "stream"),
            ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
            ({"truncation": "middle"}, "truncation"),
            ({"reasoning": "high"}, "reasoning"),
            ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
            ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
            ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
            ({"include": "all"}, "include"),
            ({"metadata": 7}, "metadata"),
            ({"top_logprobs": -1}, "top_logprobs"),
        ],
    )
    def test_wrong(self, fields, param):
        assert (refused(**fields).param, refused(**fields).code) == (param, "invalid_request")

    def test_a_value_that_is_nested_too_deeply(self):
        with pytest.raises(InvalidRequestError) as error:
            RESPONSES.translation("POST", "/v1/responses").request(
                {"input": msgspec.Raw(b'"Hi"'), "service_tier": msgspec.Raw(b"[" * 10_000 + b"]" * 10_000)}
            )
        assert (error.value.code, error.value.param) == ("invalid_json", "service_tier")


class TestTools:
    """Functions, and the choice among them."""

    @pytest.mark.parametrize("choice", ["auto", "none", "required"])
    def test_functions(self, choice):
        chat = {"tools": [AS_CHAT, TIME_AS_CHAT], "tool_choice": choice}
        assert mapped(tools=[WEATHER, TIME], tool_choice=choice) == (chat, [])

    def test_one_at_a_time(self):
        assert mapped(tools=[TIME], parallel_tool_calls=False)[0]["parallel_tool_calls"] is False
        assert mapped(parallel_tool_calls=False) == ({}, []), "no tools, no calls"

    def test_one_function(self):
        """It is offered alone: llama.cpp's server takes a chat's choice of one for `auto`."""
        choice = {"type": "function", "name": "time"}
        chat = {"tools": [TIME_AS_CHAT], "tool_choice": "required"}
        assert mapped(tools=[WEATHER, TIME], tool_choice=choice) == (chat, [])
        assert refused(tools=[WEATHER], tool_choice=choice).param == "tool_choice.name"

    @pytest.mark.parametrize("mode", ["auto", "required"])
    def test_allowed_ones(self, mode):
        allowed = [{"type": "function", "name": "time"}, {"type": "web_search"}]
        choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
        assert mapped(tools=[WEATHER, TIME], tool_choice=choice) == ({"tools": [TIME_AS_CHAT], "tool_choice": mode}, [])

    @pytest.mark.parametrize(
        ("tool", "name"),
        [
            ({"type": "web_search"}, "web_search"),
            ({"type": "web_search_preview_2025_03_11"}, "web_search"),
            ({"type": "image_generation"}, "image_generation"),
            ({"type": "local_shell"}, "local_shell"),
        ],
    )
    def test_what_codex_offers_beside_its_functions_is_left_out(self, tool, name):
        chat = {"tools": [TIME_AS_CHAT], "tool_choice": "auto"}
        assert mapped(tools=[tool, TIME]) == (chat, [f"tools[{name}]"])
        assert f"tools[{name}] can't be called" in refused(tools=[tool], tool_choice="required").message

    @cases("kind", ["file_search", "code_interpreter", "computer", "mcp", "shell", None])
    def test_other_tools_are_refused(self, kind):
        error = refused(tools=[TIME, {"type": kind, "name": "x"}])
        assert (error.param, error.code) == ("tools[1]", "unsupported_parameter")

    def test_a_custom_tool_is_a_function_of_one_text(self):
        rules = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
        tool = {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": rules}
        asked, ignored = mapped(tools=[tool], tool_choice={"type": "custom", "name": "apply_patch"})
        ((function,), choice) = [each["function"] for each in asked["tools"]], asked["tool_choice"]
        assert (function["name"], function["description"], choice, ignored) == ("apply_patch", "Patch.", "required", [])
        assert function["parameters"]["required"] == ["input"]
        assert "start: /.+/" in function["parameters"]["properties"]["input"]["description"]

    def test_codex_brings_its_functions_as_an_item(self):
        inner = [{"type": "custom", "name": "exec"}, TIME]
        space = {"type": "namespace", "name": "functions", "tools": inner}
        given = [{"type": "additional_tools", "role": "developer", "tools": [space]}, {"role": "user", "content": "Hi"}]
        asked, ignored = mapped(input=given)
        assert [each["function"]["name"] for each in asked["tools"]] == ["exec", "time"]
        assert ignored == []

    @pytest.mark.parametrize("choice", ["required", {"type": "web_search"}])
    def test_a_choice_that_nothing_can_follow(self, choice):
        assert refused(tool_choice=choice).param == "tool_choice"

    @cases(
        ("fields", "param"),
        [
            ({"tools": {}}, "tools"),
            ({"tools": "all"}, "tools"),
            ({"tools": ["time"]}, "tools[0]"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
            ({"tools": [TIME], "tool_choice": "any"}, "tool_choice"),
            ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ],
    )
    def test_wrong(self, fields, param):
        assert (refused(**fields).param, refused(**fields).code) == (param, "invalid_request")

    def test_a_namespace_goes_with_its_functions_there_and_back(self):
        space = {"type": "namespace", "name": "crm", "description": "d", "tools": [TIME | {"defer_loading": True}]}
        canonical, answers = translated(PLAIN | {"tools": [space, TIME]})
        assert [tool["function"]["name"] for tool in canonical["tools"]] == ["crm__time", "time"]
        calls = [
            {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for name in ("crm__time", "time")
        ]
        choice = {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
        output = json.loads(answers.answer(json.dumps({"choices": [choice]}).encode()))["output"]
        assert [(item["name"], item.get("namespace")) for item in output] == [("time", "crm"), ("time", None)]


FIELDS = """model input instructions tools tool_choice parallel_tool_calls temperature top_p max_output_tokens stream
stream_options text reasoning include metadata store user safety_identifier prompt_cache_key service_tier truncation
top_logprobs max_tool_calls background previous_response_id conversation prompt context_management moderation
prompt_cache_retention client_metadata stop seed"""
NAMES = st.sampled_from(FIELDS.split()) | st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.sampled_from(["auto", "function", "low"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "name", "effort", "format"]), inner)
    ),
    max_leaves=6,
)


DEFAULTS = {
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}


class TestNothingIsLost:
    """Whatever a request has."""

    @given(NAMES, VALUES)
    def test_each_field_is_mapped_refused_repeated_or_ignored(self, name, value):
        """A field alone, so that nothing else can speak for it."""
        plain, plain_answers = translated(PLAIN)
        try:
            canonical, answers = translated({**PLAIN, name: value})
        except InvalidRequestError:
            return
        is_named = any(one == name or one.startswith((f"{name}.", f"{name}[")) for one in answers.ignored)
        has_effect = canonical != plain or answers.template.echo != plain_answers.template.echo
        is_empty = not any(one is not None for one in value.values()) if isinstance(value, dict) else not value
        assert has_effect or is_named or is_empty or value in DEFAULTS.get(name, ())


class TestRepeated:
    """What the response object repeats of its request."""

    def test_what_was_asked(self):
        fields = {
            "instructions": "Be brief.",
            "tools": [WEATHER, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
            "temperature": 0.5,
            "top_p": 0.9,
            "max_output_tokens": 7,
            "metadata": {"a": "b"},
            "user": "me",
            "truncation": "auto",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        }
        assert repeated(**fields).items() >= fields.items()

    async def test_what_a_large_body_has_elsewhere_is_not_told_in_parts(self):
        """Nor are the marks for it."""
        long = "A sentence. " * 100
        format_ = {"type": "json_schema", "name": "n", "strict": True, "schema": {"description": long}}
        tool = WEATHER | {"description": long, "parameters": {"enum": list(range(1000))}}
        fields = PLAIN | {"instructions": long, "tools": [tool], "text": {"format": format_}, "metadata": {"a": "b"}}
        condensed = await CondensedJson.of(json.dumps(fields).encode())
        cut = msgspec.json.decode(condensed.text, type=dict[str, msgspec.Raw])
        canonical, answers = RESPONSES.translation("POST", "/v1/responses").request(cut)
        echo = answers.template.echo
        assert (echo["instructions"], echo["tools"], echo["metadata"]) == (None, [], {"a": "b"})
        assert echo["text"]["format"] == format_ | {"schema": {}}
        whole = json.loads(await condensed.restored(msgspec.json.encode(canonical)))
        assert whole["messages"][0] == {"role": "system", "content": long}
        assert whole["tools"][0]["function"]["parameters"] == {"enum": list(range(1000))}


class TestCount:
    """The tokens of a request."""

    def test_what_is_counted(self):
        fields = {"model": "m", "input": "Hi", "tools": [TIME], "reasoning": {"effort": "low"}, "temperature": 1}
        canonical, answers = translated(fields, COUNT)
        assert canonical.items() >= (CHAT | {"tools": [TIME_AS_CHAT], "reasoning_effort": "low"}).items()
        assert answers.ignored == ["temperature"]
        assert RESPONSES.translation("POST", COUNT).path == "/v1/chat/completions/input_tokens"

    def test_the_answer(self):
        answers = translated(PLAIN, COUNT)[1]
        told = answers.answer(b'{"input_tokens": 12, "more": 1}')
        assert json.loads(told) == {"object": "response.input_tokens", "input_tokens": 12}
        for body in (b"", b"{}", b'{"input_tokens": "many"}', b"\xff"):
            with pytest.raises(UpstreamError):
                answers.answer(body)
        with pytest.raises(UpstreamError):
            answers.stream()


@pytest.mark.parametrize("path", ["/v1/responses", COUNT])
def test_other_methods_are_not_translated(path):
    assert RESPONSES.translation("GET", path) is None
