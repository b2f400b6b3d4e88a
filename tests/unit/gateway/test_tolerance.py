"""A request that a worker refused is put right, by one rule for each habit of clients."""

from __future__ import annotations

import json

import msgspec
import pytest

from runtimes.endpoints import meaning_of
from supervisor.gateway.body.tolerance import put_right
from tests.support.cases import cases

CHAT, MESSAGES, EMBED = "/v1/chat/completions", "/v1/messages", "/v1/embeddings"


def changed(path, refusal="no", **fields):
    """What is changed, and what has no effect then."""
    raw = {key: msgspec.Raw(json.dumps(value).encode()) for key, value in fields.items()}
    changes, ignored = put_right(raw, meaning_of(path), refusal)
    return {key: None if value is None else json.loads(value) for key, value in changes.items()}, ignored


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def said(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def called(arguments):
    return said(None, tool_calls=[{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}])


RESULT = {"role": "tool", "tool_call_id": "a", "content": "1"}


class TestOrder:
    """The system speaks at the beginning, once."""

    @cases(
        ("given", "right"),
        [
            ([system("a"), system("b"), user("x")], [system("a\n\nb"), user("x")]),
            ([system("a"), {"role": "developer", "content": "b"}, user("x")], [system("a\n\nb"), user("x")]),
            ([user("x"), system("b")], [user("x\n\nb")]),
            ([user("x"), system("b"), said("y")], [user("x\n\nb"), said("y")]),
            ([user("x"), said("y"), system("b"), user("z")], [user("x"), said("y"), user("b\n\nz")]),
            ([user("x"), said("y"), system("b")], [user("x"), said("y"), user("b")]),
            (
                [user("x"), called("{}"), system("b"), RESULT, said("y")],
                [user("x"), called("{}"), RESULT, user("b"), said("y")],
            ),
            (
                [user("x"), system([{"type": "text", "text": "b"}]), user([{"type": "image_url", "image_url": {}}])],
                [user("x"), user([{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {}}])],
            ),
        ],
    )
    def test_chats(self, given, right):
        assert changed(CHAT, messages=given) == ({"messages": right}, [])

    def test_what_is_in_order_stays(self):
        assert changed(CHAT, messages=[system("a"), user("x"), said("y"), user("z")]) == ({}, [])
        assert changed(MESSAGES, system="a", messages=[user("x")]) == ({}, [])

    def test_anthropics_have_a_field_for_it(self):
        given = [system("b"), user([{"type": "tool_result", "tool_use_id": "t"}]), system("c")]
        right = [user([{"type": "tool_result", "tool_use_id": "t"}, {"type": "text", "text": "c"}])]
        assert changed(MESSAGES, system="a", messages=given) == ({"system": "a\n\nb", "messages": right}, [])

    @pytest.mark.parametrize("refusal", ["System role not supported", "only user and assistant, no system"])
    def test_a_template_without_a_system(self, refusal):
        assert changed(CHAT, refusal, messages=[system("a"), user("x")])[0] == {"messages": [user("a\n\nx")]}
        assert changed(CHAT, "out of memory", messages=[system("a"), user("x")])[0] == {}


class TestHabits:
    """Each as its API's makers take it."""

    def test_what_is_null_is_absent(self):
        assert changed(EMBED, input="a", encoding_format=None) == ({"encoding_format": None}, [])

    def test_no_arguments(self):
        assert changed(CHAT, messages=[user("x"), called(""), RESULT])[0] == {
            "messages": [user("x"), called("{}"), RESULT]
        }

    def test_a_picture_by_its_address_alone(self):
        given = [user([{"type": "image_url", "image_url": "data:image/png;base64,AA"}])]
        assert changed(CHAT, messages=given)[0]["messages"][0]["content"][0]["image_url"] == {
            "url": "data:image/png;base64,AA"
        }

    @pytest.mark.parametrize(("effort", "level"), [("minimal", "low"), ("xhigh", "high"), ("max", "high")])
    def test_levels(self, effort, level):
        assert changed(CHAT, messages=[user("x")], reasoning_effort=effort)[0] == {"reasoning_effort": level}

    def test_documents_that_are_objects(self):
        assert changed("/v1/rerank", query="a", documents=[{"text": "b"}, "c", {"x": 1}])[0] == {
            "documents": ["b", "c", {"x": 1}]
        }

    def test_texts_that_are_too_long_are_cut_where_the_request_says_so(self):
        refusal = (
            "input (200 tokens) is too large to process. increase the physical batch size (current batch size: 100)"
        )
        assert changed(EMBED, refusal, input=["x" * 1000, "y"], truncate=True)[0] == {"input": ["x" * 490, "y"]}
        assert changed(EMBED, refusal, input=["x" * 1000, "y"])[0] == {}


class TestSchemas:
    """Of tools."""

    def tool(self, parameters, **more):
        return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}

    def test_true_is_anything(self):
        schema = {"type": "object", "properties": {"a": True, "b": {"items": False}}, "additionalProperties": False}
        right = schema | {"properties": {"a": {}, "b": {"items": {"not": {}}}}}
        assert changed(CHAT, messages=[user("x")], tools=[self.tool(schema)])[0] == {"tools": [self.tool(right)]}

    def test_one_without_a_grammar_goes_on_without_its_bounds(self):
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?!x)"}}}
        changes, ignored = changed(CHAT, "failed to parse grammar", messages=[user("x")], tools=[self.tool(schema)])
        function = changes["tools"][0]["function"]
        assert function["parameters"] == {"type": "object", "properties": {"a": {}}}
        assert json.loads(function["description"].removeprefix("Parameters: ")) == schema
        assert ignored == ["tools[f]"]

    def test_what_can_be_done_is_done_once(self):
        free = self.tool({"type": "object", "properties": {}})
        assert changed(CHAT, "failed to parse grammar", messages=[user("x")], tools=[free]) == ({}, [])


@pytest.mark.parametrize(
    "fields", [{"messages": "x"}, {"messages": [1]}, {"tools": 3}, {"input": {}, "truncate": True}]
)
def test_what_is_no_request_stays(fields):
    assert changed(CHAT, "schema; (2 tokens) of 1", **fields) == ({}, [])


def test_what_cant_be_read_stays():
    assert put_right({"messages": msgspec.Raw(b"[" * 10_000)}, meaning_of(CHAT), "no") == ({}, [])
