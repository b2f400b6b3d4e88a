"""Requests as structs: what is read, what is said of what doesn't fit, and which fields have no effect."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Raw

from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.body.typed import (
    Reader,
    Remedy,
    Sent,
    decoded_answer,
    encoded,
    expected,
    is_given,
    mistake_of,
    top,
    unparsed,
)
from supervisor.schema.operation import doc, schema_of
from tests.support.cases import cases


class Text(Sent, tag_field="type", tag="text"):
    text: str
    note: str | None = None


class Call(Sent, tag_field="type", tag="call"):
    name: str
    arguments: Raw = unparsed()


class Turn(Sent):
    role: Literal["user", "system"]
    content: str | list[Text | Call]


class ProgramRequest(Sent, kw_only=True):
    turns: Annotated[list[Turn], doc("What was said.", min_length=1)]
    many: Annotated[int, doc("How many.", ge=1, le=9)] = 1
    share: float | None = None
    rest: Raw = unparsed()


REMEDIES = (
    Remedy(r"turns\[\]\.content\[\]\.type", "{place}: no model takes {got!r} here; leave it out.", "unsupported"),
    Remedy("turns", "Send at least one turn.", "missing_parameter", "missing"),
)
read = Reader(ProgramRequest, *REMEDIES)


def fields(text: str) -> dict[str, Raw]:
    return msgspec.json.decode(text.encode(), type=dict[str, Raw])


def said(*content: str) -> dict[str, Raw]:
    return fields('{"turns": [{"role": "user", "content": [' + ",".join(content) + "]}]}")


class TestRead:
    """What fits."""

    def test_all_of_it(self):
        asked, ignored = read(
            said('{"type": "text", "text": "a"}', '{"name": "f", "type": "call", "arguments": { "x" :1.0}}')
        )
        assert ignored == []
        assert asked.turns[0].content == [Text(text="a"), Call(name="f", arguments=Raw(b'{ "x" :1.0}'))]

    def test_null_at_the_top_is_missing(self):
        asked, _ = read(
            fields('{"turns": [{"role": "user", "content": "a"}], "many": null, "rest": null, "other": null}')
        )
        assert (asked.many, is_given(asked.rest)) == (1, False)

    def test_unparsed_values_keep_their_bytes(self):
        asked, ignored = read(
            fields(
                '{"turns": [{"role": "user", "content": [{"type": "call", "name": "f", "x": 1, "arguments": { "b":1e2,"b":2 }}]}]}'
            )
        )
        assert ignored == ["turns[0].content[0].x"]
        assert bytes(asked.turns[0].content[0].arguments) == b'{ "b":1e2,"b":2 }'


class TestUnknown:
    """Fields that a type doesn't have."""

    def test_each_is_named(self):
        found = fields(
            '{"turns": [{"role": "user", "content": [{"type": "text", "text": "", "a": 1, "b": null}], "c": 2}], "d": 3}'
        )
        assert read(found)[1] == ["turns[0].content[0].a", "turns[0].c", "d"]

    @cases(("index", "names"), [("", ["turns.c"]), ("[]", ["turns[].c"]), ("[{}]", ["turns[0].c", "turns[1].c"])])
    def test_once_by_its_place(self, index, names):
        turn = '{"role": "user", "content": "a", "c": 1}'
        assert Reader(ProgramRequest, index=index)(fields(f'{{"turns": [{turn}, {turn}]}}'))[1] == names

    def test_of_an_only_type_that_is_not_named(self):
        """msgspec asks for it among several types only."""

        class Notes(Sent):
            notes: list[Text]

        notes, ignored = Reader(Notes)(fields('{"notes": [{"text": "a", "x": 1}]}'))
        assert (notes, ignored) == (Notes(notes=[Text(text="a")]), ["notes[0].x"])


class TestMistakes:
    """What is said of what doesn't fit."""

    @cases(
        ("body", "param", "message"),
        [
            ('{"turns": 1}', "turns", "turns: expected a list that isn't empty. What was said."),
            ('{"turns": []}', "turns", "turns: expected a list that isn't empty. What was said."),
            (
                '{"turns": [{"role": "x", "content": ""}]}',
                "turns[0].role",
                "turns[0].role: expected one of system, user.",
            ),
            (
                '{"turns": [{"role": "user"}]}',
                "turns[0].content",
                "turns[0].content: missing; expected a text or a list.",
            ),
            (
                '{"turns": [{"role": "user", "content": [{"type": "text"}], "x": 1}]}',
                "turns[0].content[0].text",
                "turns[0].content[0].text: missing; expected a text.",
            ),
            (
                '{"turns": [{"role": "user", "content": [{"type": 1}]}]}',
                "turns[0].content[0].type",
                "turns[0].content[0].type: expected one of text, call.",
            ),
            ('{"many": 1}', "turns", "Send at least one turn."),
            (
                '{"turns": [{"role": "user", "content": ""}], "many": 0}',
                "many",
                "many: expected a whole number from 1 to 9. How many.",
            ),
            (
                '{"turns": [{"role": "user", "content": ""}], "share": true}',
                "share",
                "share: expected a number or null.",
            ),
        ],
    )
    def test_it_is_named_with_what_was_expected(self, body, param, message):
        with pytest.raises(InvalidRequestError) as caught:
            read(fields(body))
        assert (caught.value.param, caught.value.message) == (param, message)

    def test_a_remedy_has_the_clients_word_and_its_own_code(self):
        with pytest.raises(InvalidRequestError, match=r"no model takes 'film' here") as caught:
            Reader(ProgramRequest, *REMEDIES, param=top)(said('{"type": "film"}'))
        assert (caught.value.param, caught.value.code) == ("turns", "unsupported")

    def test_the_field_that_is_not_utf_8(self):
        with pytest.raises(InvalidRequestError) as caught:
            read(
                msgspec.json.decode(b'{"many": 1, "turns": [{"role": "user", "content": "\xff"}]}', type=dict[str, Raw])
            )
        assert (caught.value.param, caught.value.code) == ("turns", "invalid_json")

    def test_values_in_too_many_others(self):
        with pytest.raises(InvalidRequestError) as caught:
            read({"turns": Raw(b"[" * 5000 + b"]" * 5000)})
        assert caught.value.code in {"invalid_json", "invalid_request"}


class TestTheRest:
    """Schemas, canonical fields, and workers' answers."""

    def test_a_schema_lets_other_fields_pass(self):
        schema = schema_of(ProgramRequest, is_answer=False)
        assert (schema["additionalProperties"], schema["properties"]["turns"]["items"]["additionalProperties"]) == (
            True,
            True,
        )
        assert "discriminator" not in str(schema)

    def test_canonical_fields_are_unparsed(self):
        assert encoded({"a": [1], "b": Raw(b"1.0")}) == {"a": Raw(b"[1]"), "b": Raw(b"1.0")}

    def test_a_worker_that_answers_something_else(self):
        decode = msgspec.json.Decoder(Turn).decode
        assert decoded_answer(decode, b'{"role": "user", "content": ""}', "turn") == Turn(role="user", content="")
        with pytest.raises(UpstreamError, match="The worker's answer is no turn"):
            decoded_answer(decode, b"{}", "turn")


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    top: int | None = None


class Partly(Sent):
    more: Closed | None = None


class TestClosed:
    """A struct within a request that has no other fields."""

    def test_another_field_is_refused_with_those_that_there_are(self):
        with pytest.raises(InvalidRequestError, match=r"^more\.tip: unknown; there is top\.$") as caught:
            Reader(Partly)(fields('{"more": {"tip": 1}, "other": 2}'))
        assert caught.value.param == "more.tip"

    def test_one_that_is_null_is_none(self):
        assert Reader(Partly)(fields('{"more": {"tip": null, "top": 1}, "other": 2}')) == (
            Partly(more=Closed(top=1)),
            ["other"],
        )

    def test_its_schema_says_so(self):
        schema = schema_of(Partly, is_answer=False)
        closed = schema["properties"]["more"]["anyOf"][0]
        assert schema["additionalProperties"] is True
        assert closed.get("additionalProperties") is not True  # older versions of msgspec say nothing


class Question(Sent, tag_field="role", tag="user"):
    content: list[Text]


class Reply(Sent, tag_field="role", tag="assistant"):
    content: list[Text | Call]


class Talk(Sent):
    turns: list[Question | Reply]
    notes: list[Text | Call | None] | None = None


class Shape(Sent):
    type: Literal["box"]
    size: int


class TestWhatIsMeant:
    """Words are about what the client meant, and of a length that fits a message."""

    @cases(("role", "words"), [("user", ["text"]), ("assistant", ["call", "text"])])
    def test_of_a_union_the_member_that_the_request_names(self, role, words):
        with pytest.raises(InvalidRequestError) as caught:
            Reader(Talk)(fields(f'{{"turns": [{{"role": "{role}", "content": [{{"type": "film"}}]}}]}}'))
        place, _, choices = caught.value.message.partition(": expected one of ")
        assert (place, sorted(choices.strip(".").split(", "))) == ("turns[0].content[0].type", words)

    @cases(
        ("note", "message"),
        [
            ('{"type": "text"}', "notes[0].text: missing; expected a text."),
            ('{"type": "call", "name": 1}', "notes[0].name: expected a text."),
            ('{"text": "a"}', "notes[0].type: missing; expected one of text, call."),
        ],
    )
    def test_of_a_union_within_another(self, note, message):
        with pytest.raises(InvalidRequestError) as caught:
            Reader(Talk)(fields(f'{{"turns": [], "notes": [{note}]}}'))
        assert caught.value.message == message

    def test_where_the_request_names_no_member_all_of_them(self):
        error = msgspec.ValidationError("Expected `int`, got `str` - at `$.size`")
        assert expected(*mistake_of(error, Shape, {"size": "a", "type": "ball"}).schemas) == "a whole number"

    def test_a_tag_that_can_not_be_read_is_none(self):
        with pytest.raises(InvalidRequestError) as caught:
            Reader(Talk)(fields('{"other": 1, "turns": [{"role": 1e999, "content": []}]}'))
        assert caught.value.param == "turns[0].role"

    def test_a_long_name_that_is_not_utf_8_is_not_repeated(self):
        raw = {
            "k" * 100_000: Raw(b'"\xff"'),
            "turns": Raw(b'[{"role":"user","content":[{"type":"text","text":"\xff"}]}]'),
        }
        with pytest.raises(InvalidRequestError) as caught:
            Reader(Talk)(raw)
        assert (caught.value.param, len(caught.value.message) < 200) == ("turns", True)
