"""Input of the daemon's own routes: what fits a struct, and what is said of what doesn't."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct
from starlette.requests import Request

from supervisor.errors import InvalidRequestError, TooLargeError
from supervisor.gateway.body.parameters import body_of, json_object, query_of
from supervisor.schema.operation import doc
from tests.support.cases import cases


class ProgramRequest(Struct, forbid_unknown_fields=True):
    """What is asked."""

    many: Annotated[int, Meta(ge=1, le=1 << 22, description="How many.")]
    share: Annotated[Annotated[float, Meta(ge=0.5)] | None, doc("A share; 1 is all.")] = None
    way: Literal["asc", "desc"] | None = None
    whom: str | list[str] | None = None
    names: list[str] = []
    more: dict[Annotated[str, Meta(max_length=3)], Any] = {}
    sure: bool = False


class Looked(Struct):
    """A query."""

    many: Annotated[int, Meta(ge=1, le=9, description="How many.")] = 5
    sure: bool = False
    way: Literal["asc", "desc"] | None = None
    name: str | None = None


def request(body: bytes = b"", query: bytes = b"") -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-length", str(len(body)).encode())]
    return Request({"type": "http", "method": "POST", "headers": headers, "query_string": query}, receive)


class TestBody:
    """A body is a struct, or its client is told why not."""

    async def test_what_fits(self):
        found = await body_of(request(b'{"many": 2, "whom": ["a"], "more": {"a": {"b": null}}}'), ProgramRequest)
        assert found == ProgramRequest(2, whom=["a"], more={"a": {"b": None}})

    async def test_none_is_an_empty_object(self):
        class Optional(Struct):
            force: bool = False

        assert await body_of(request(b" \n"), Optional) == Optional()

    @cases(
        ("body", "param", "message"),
        [
            (b"", "many", "many: missing; expected a whole number from 1 to 4194304. How many."),
            (b'{"many": 0}', "many", "many: expected a whole number from 1 to 4194304. How many."),
            (b'{"many": true}', "many", "many: expected a whole number from 1 to 4194304. How many."),
            (b'{"many": 1, "share": 0}', "share", "share: expected a number from 0.5 or null. A share; 1 is all."),
            (b'{"many": 1, "way": "up"}', "way", "way: expected one of asc, desc or null."),
            (b'{"many": 1, "way": " - at `$.no`"}', "way", "way: expected one of asc, desc or null."),
            (b'{"many": 1, "whom": 1}', "whom", "whom: expected a text or a list of texts or null."),
            (b'{"many": 1, "names": [1]}', "names", "names: expected a list of texts."),
            (b'{"many": 1, "more": 1}', "more", "more: expected an object."),
            (b'{"many": 1, "more": {"long": 1}}', "more", "more: expected an object."),
            (b'{"many": 1, "sure": 1}', "sure", "sure: expected true or false."),
            (
                b'{"many": 1, "`x` - at `$.no`": 1}',
                "`x` - at `$.no`",
                "`x` - at `$.no`: unknown; there is many, share, way, whom, names, more, sure.",
            ),
            (b"[]", None, "The request body must be a JSON object."),
        ],
    )
    async def test_what_does_not(self, body, param, message):
        with pytest.raises(InvalidRequestError) as refused:
            await body_of(request(body), ProgramRequest)
        assert (refused.value.param, refused.value.message, refused.value.code) == (param, message, "invalid_request")

    @cases(
        ("body", "code"),
        [
            (b'{"many": 1, "many": 2}', "duplicate_key"),
            (b'{"many": 1, "more": {"a": 1, "a": 1}}', "duplicate_key"),
            (b'{"many": 1', "invalid_json"),
            (b'{"many": NaN}', "invalid_json"),
            (b'{"many": 1, "way": "\xff"}', "invalid_json"),
            (b'{"more": {"a": ' + b"[" * 5000, "invalid_json"),
        ],
    )
    async def test_no_json(self, body, code):
        for read in (body_of(request(body), ProgramRequest), json_object(request(body))):
            with pytest.raises(InvalidRequestError) as refused:
                await read
            assert refused.value.code == code

    async def test_too_large(self):
        with pytest.raises(TooLargeError, match="larger than 9 bytes"):
            await body_of(request(b'{"many": 1}'), ProgramRequest, 9)


class TestQuery:
    """A query is a struct of texts."""

    @cases(
        ("query", "found"),
        [
            (b"", Looked()),
            (b"many=9&sure=1&way=asc&name=a%2Fb&other=x", Looked(9, True, "asc", "a/b")),
            (b"many=1&many=02&sure=FALSE&name=null", Looked(2, False, None, "null")),
        ],
    )
    def test_what_fits(self, query, found):
        assert query_of(request(query=query), Looked) == found

    @cases(
        ("query", "message"),
        [
            (b"many=0", "many: expected a whole number from 1 to 9, got '0'."),
            (b"many=", "many: expected a whole number from 1 to 9, got ''."),
            (b"many=2.0", "many: expected a whole number from 1 to 9, got '2.0'."),
            (b"many=null", "many: expected a whole number from 1 to 9, got 'null'."),
            (b"way=null", "way: expected one of asc, desc, got 'null'."),
            (b"sure=yes", "sure: expected true or false, got 'yes'."),
            (b"way=up", "way: expected one of asc, desc, got 'up'."),
        ],
    )
    def test_what_does_not(self, query, message):
        with pytest.raises(InvalidRequestError) as refused:
            query_of(request(query=query), Looked)
        assert (refused.value.message, refused.value.param) == (message, query.partition(b"=")[0].decode())
