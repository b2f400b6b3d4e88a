from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.base import CHAT_TEMPLATE, Endpoint, Thinking
from supervisor.catalog.models.rewrite import Rewrite
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.json_body import JsonBody, open_object
from tests.support.cases import cases

CHAT = "/v1/chat/completions"
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def applied(rewrite, body, path=CHAT):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return json.loads(rewritten(rewrite, raw, path))


def rewritten(rewrite, raw, path=CHAT):
    async def run():
        return await (await JsonBody.open(raw)).rewritten(rewrite, Endpoint(path))

    return asyncio.run(run())


def model_of(raw):
    body = asyncio.run(JsonBody.open(raw))
    if body.name is None:
        raise body.nameless({})
    return body.name, body.stream


class TestSwitches:
    """Which way a rewrite switches thinking whatever the client says."""

    OWN = Thinking({"reasoning": "high", "a": {"b": 1}}, {"reasoning": "none"})

    @pytest.mark.parametrize("thinking", [CHAT_TEMPLATE, OWN])
    def test_either_way(self, thinking):
        assert Rewrite.compile(thinking=thinking.enabled).switches(thinking) is True
        assert Rewrite.compile(thinking=thinking.disabled).switches(thinking) is False

    def test_neither(self):
        assert Rewrite.compile(force={"temperature": 0}).switches(CHAT_TEMPLATE) is None


class TestFields:
    """strip, then defaults, then force; the client beats defaults and force beats the client."""

    def test_order(self):
        rewrite = Rewrite.compile(
            strip=["a", "b", "gone"], defaults={"b": "default", "c": "default"}, force={"d": "forced"}
        )
        client = {"model": "m", "a": 1, "b": 1, "c": None, "d": 1, "e": 1}
        assert applied(rewrite, client) == {"model": "m", "b": "default", "c": None, "d": "forced", "e": 1}

    def test_untouched_values_stay_byte_for_byte(self):
        body = b'{ "model":"m", "n": 1.000e2, "s" : "\\u00e9\\/", "o": { "z" : [ 1 , 2 ] } }'
        assert (
            rewritten(Rewrite.compile(force={"k": 1}), body)
        ) == b'{"model":"m","n":1.000e2,"s":"\\u00e9\\/","o":{ "z" : [ 1 , 2 ] },"k":1}'

    def test_a_clients_own_defaults_come_first(self):
        rewrite = Rewrite.compile(
            strip=["gone"],
            defaults={"a": "model", "b": "model", "chat_template_kwargs": {"x": 1, "y": 1}},
            force={"c": 1},
        ).with_defaults({"a": "client", "gone": 1, "c": 2, "d": "client", "chat_template_kwargs": {"y": 2, "z": 2}})
        expected = {"a": "client", "b": "sent", "c": 1, "d": "client", "chat_template_kwargs": {"x": 1, "y": 2, "z": 3}}
        assert applied(rewrite, {"b": "sent", "chat_template_kwargs": {"z": 3}}) == expected
        assert applied(rewrite, {"b": "sent"}, "/v1/chat/completions/input_tokens") == {"b": "sent"}

    def test_objects_are_replaced_whole(self):
        rewrite = Rewrite.compile(force={"response_format": {"type": "json_object"}}, defaults={"stop": {"a": 1}})
        client = {"response_format": {"type": "json_schema", "json_schema": {}}, "stop": {"b": 2}}
        assert applied(rewrite, client) == {"response_format": {"type": "json_object"}, "stop": {"b": 2}}

    def test_chat_template_kwargs_merge_key_by_key(self):
        rewrite = Rewrite.compile(
            defaults={"chat_template_kwargs": {"a": "d", "b": "d"}},
            force={"chat_template_kwargs": {"c": "f"}},
            thinking=NO_THINKING,
        )
        client = {"chat_template_kwargs": {"a": "c", "c": "c", "enable_thinking": True}}
        merged = {"a": "c", "b": "d", "c": "f", "enable_thinking": False}
        assert {"chat_template_kwargs": merged} == applied(rewrite, client)
        assert (applied(rewrite, {"chat_template_kwargs": None})["chat_template_kwargs"]) == {
            "a": "d",
            "b": "d",
            "c": "f",
            "enable_thinking": False,
        }

    def test_merging_into_something_else(self):
        with pytest.raises(InvalidRequestError, match="must be an object") as caught:
            applied(Rewrite.compile(thinking=NO_THINKING), {"chat_template_kwargs": "x"})
        assert caught.value.param == "chat_template_kwargs"

    def test_upstream_model(self):
        rewrite = Rewrite.compile(upstream_model="/models/x")
        assert applied(rewrite, {"model": "m", "a": 1}, "/tokenize") == {"model": "/models/x", "a": 1}


class TestValue:
    """What one field says in the end, without changing anything."""

    @cases("body", [{}, {"a": 1}, {"a": None}], ids=["missing", "a number", "null"])
    @cases(
        "rewrite",
        [
            Rewrite(),
            Rewrite.compile(defaults={"a": 2}),
            Rewrite.compile(strip=["a"]),
            Rewrite.compile(strip=["a"], defaults={"a": 2}),
            Rewrite.compile(defaults={"a": 2}, force={"a": 3}),
        ],
        ids=["nothing", "a default", "stripped", "replaced", "forced"],
    )
    def test_as_in_the_changed_request(self, rewrite, body):
        value = rewrite.value("a", json.dumps(body["a"]).encode() if body else None)
        assert applied(rewrite, body) == ({} if value is None else {"a": json.loads(value)})


class TestPaths:
    """Nothing is applied where it makes no sense."""

    def test_identity(self):
        assert Rewrite.compile() == Rewrite()
        body = b'{ "model":"m" }'
        assert body is rewritten(Rewrite(), body)

    @cases(
        ("path", "fields", "prompt"),
        [
            (CHAT, True, True),
            ("/chat/completions", True, True),
            ("/v1/responses", True, True),
            ("/v1/messages", True, True),
            ("/v1/messages/count_tokens", False, True),
            ("/apply-template", False, True),
            ("/v1/completions", True, False),
            ("/v1/embeddings", True, False),
            ("/v1/audio/speech", True, False),
            ("/tokenize", False, False),
            ("/v1/audio/transcriptions", True, False),
            ("/v1/images/edits", True, False),
        ],
    )
    def test_table(self, path, fields, prompt):
        assert fields == Rewrite.compile(defaults={"a": 1}).touches(Endpoint(path))
        for rewrite in (Rewrite.compile(thinking=NO_THINKING), Rewrite.compile(system_prompt_prefix="P")):
            assert prompt == rewrite.touches(Endpoint(path))


class TestSystemPrompt:
    """The prefix goes before the first system or developer message, or becomes one."""

    PREFIX = Rewrite.compile(system_prompt_prefix='Say "P"')

    @cases(
        ("messages", "expected"),
        [
            ([], [{"role": "system", "content": 'Say "P"'}]),
            (
                [{"role": "user", "content": "u"}],
                [{"role": "system", "content": 'Say "P"'}, {"role": "user", "content": "u"}],
            ),
            (
                [{"role": "user", "content": "u"}, {"content": "é\n", "role": "developer", "name": "n"}],
                [{"role": "user", "content": "u"}, {"content": 'Say "P"\n\né\n', "role": "developer", "name": "n"}],
            ),
            (
                [{"role": "system", "content": [{"type": "text", "text": "s"}]}],
                [{"role": "system", "content": [{"type": "text", "text": 'Say "P"'}, {"type": "text", "text": "s"}]}],
            ),
            (
                [{"role": "system", "content": []}],
                [{"role": "system", "content": [{"type": "text", "text": 'Say "P"'}]}],
            ),
            ([{"role": "system"}], [{"role": "system", "content": 'Say "P"'}]),
            ([{"role": "system", "content": 1}], [{"role": "system", "content": 1}]),
            (
                [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}],
                [{"role": "system", "content": 'Say "P"\n\na'}, {"role": "system", "content": "b"}],
            ),
            ("no list", "no list"),
            ([1], [1]),
            (None, None),
        ],
    )
    def test_chat(self, messages, expected):
        assert {"messages": expected} == applied(self.PREFIX, {"messages": messages})

    def test_chat_without_messages(self):
        assert applied(self.PREFIX, {"a": 1}) == {"a": 1}

    def test_responses(self):
        assert applied(self.PREFIX, {}, "/v1/responses") == {"instructions": 'Say "P"'}
        assert applied(self.PREFIX, {"instructions": "i"}, "/v1/responses") == {"instructions": 'Say "P"\n\ni'}

    def test_messages(self):
        assert applied(self.PREFIX, {"system": None}, "/v1/messages") == {"system": 'Say "P"'}
        block = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}
        assert {"system": [{"type": "text", "text": 'Say "P"'}, block]} == (
            applied(self.PREFIX, {"system": [block]}, "/v1/messages")
        )

    @given(
        st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text()}))
    )
    def test_all_other_messages_stay(self, messages):
        assert messages == applied(self.PREFIX, {"messages": messages})["messages"][1:]


class TestOpening:
    """Bodies we parse are JSON objects with each key once, or the error says where they aren't."""

    BAD = (
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b'{"model": "m", }', r"not valid JSON: .*byte 15"),
        (b'{"model": "m"', "not valid JSON: Input data was truncated"),
        (b"[1]", "must be a JSON object"),
        (b'{"model": "m", "x": ' + b"[" * 80_000, "nested too deeply"),
        (b'{"model": "m", "model": "n"}', "same key twice"),
        (b'{"model": "m", "a\\u0022": 1, "b\\u0022": 2, "x": 1, "x": 2}', "same key twice"),
        (b'{"model": "m", "a\\"": 1, "x": "\\"", "x": 2}', "same key twice"),
    )

    @cases(("body", "message"), BAD)
    def test_refused_by_both(self, body, message):
        with pytest.raises(InvalidRequestError, match=message):
            open_object(body)
        with pytest.raises(InvalidRequestError, match=message):
            model_of(body)

    @cases(
        ("body", "param", "message"),
        [
            (b'{"stream": true}', "model", "is missing"),
            (b'{"model": 3}', "model", "must be a string"),
            (b'{"model": null}', "model", "is missing"),
            (b'{"model": "m", "stream": "yes"}', "stream", "must be true or false"),
            (b'{"model": "\xff"}', None, "not valid JSON"),
            (b'{"model": "m", "a": 1, "a": 1, "model": "m"}', None, "same key twice"),
            (b'{"model": "m", "mod\\u0065l": "n"}', None, "same key twice"),
        ],
    )
    def test_model_of_refuses(self, body, param, message):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            model_of(body)
        assert param == caught.value.param

    @cases(
        ("body", "expected"),
        [
            (b'{"model": "m"}', ("m", False)),
            (b'{"stream": true, "model": "m\\u00e9"}', ("mé", True)),
            (b'{"stream": null, "model": "m"}', ("m", False)),
            (b'{"metadata": {"model": "x"}, "model": "m"}', ("m", False)),
            (b'{"a": "' + b"x" * 100_000 + b'", "model": "m"}', ("m", False)),
        ],
    )
    def test_model_of(self, body, expected):
        assert expected == model_of(body)

    def test_large_bodies_are_looked_at_for_duplicates_too(self):
        with pytest.raises(InvalidRequestError, match="same key twice"):
            model_of(b'{"model": "m", "a": "' + b"x" * 100_000 + b'", "a": 1}')

    JSON = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )

    @given(
        st.lists(st.tuples(st.text(max_size=2), JSON), max_size=5),
        st.sampled_from([None, 1, 3]),
        st.booleans(),
    )
    def test_duplicates_are_found_whatever_the_layout(self, pairs, indent, ascii_only):
        inner = ",".join(
            f" {json.dumps(key, ensure_ascii=ascii_only)} :\n{json.dumps(value, indent=indent, ensure_ascii=ascii_only)}\t"
            for key, value in pairs
        )
        body = f" {{{inner}}} ".encode()
        if len({key for key, _ in pairs}) == len(pairs):
            assert [key for key, _ in pairs] == list(open_object(body))
        else:
            with pytest.raises(InvalidRequestError, match="same key twice"):
                open_object(body)


class TestForms:
    """A form's fields follow the same rules as an object's, as text."""

    PATH = "/v1/audio/transcriptions"

    def test_order_of_work(self):
        rewrite = Rewrite.compile(
            upstream_model="whisper-1",
            strip=["prompt", "tags"],
            defaults={"language": "de", "temperature": 0, "prompt": "mine", "timestamp_granularities[]": ["word"]},
            force={"response_format": "json", "n": [1, 2], "vad": True, "gone": None, "options": {"a": 1}},
        )
        sent = {"file", "model", "prompt", "tags[]", "language", "response_format", "gone", "timestamp_granularities[]"}
        assert rewrite.form_fields(sent, Endpoint(self.PATH)) == {
            "model": ("whisper-1",),
            "prompt": ("mine",),
            "tags[]": (),
            "temperature": ("0",),
            "response_format": ("json",),
            "n": ("1", "2"),
            "vad": ("true",),
            "gone": (),
            "options": ('{"a":1}',),
        }

    def test_nothing_to_do(self):
        assert Rewrite.compile(defaults={"language": "de"}).form_fields({"language"}, Endpoint(self.PATH)) == {}
        assert Rewrite.compile(force={"language": "de"}).form_fields({"file"}, Endpoint("/tokenize")) == {}
        assert Rewrite.compile(upstream_model="m").form_fields((), Endpoint("/v1/files")) == {"model": ("m",)}
