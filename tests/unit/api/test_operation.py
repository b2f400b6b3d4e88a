"""Operations: each says all that is needed to serve, describe and call it."""

from __future__ import annotations

import inspect
import json
import re

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from supervisor.api.routing import ENDPOINTS, scope_of
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.typed import Sent
from supervisor.gateway.operation import Group
from supervisor.schema.operation import schema_of
from tests.support.cases import cases

ALL = [pytest.param(each, id=f"{each.method} {each.path}") for each in ENDPOINTS]
INPUTS = {"api", "body", "query", "request"}


@cases("endpoint", ALL)
def test_a_function_takes_what_its_path_names(endpoint):
    places = set(re.findall(r"{(\w+)", endpoint.path))
    assert set(inspect.signature(endpoint.run).parameters) - INPUTS == places


@cases(
    ("path", "scope"),
    [
        ("/health", (None,)),
        ("/v1/health", (None,)),
        ("/ui", (None,)),
        ("/ui/js/main.js", (None,)),
        ("/ui\n", None),
        ("/metrics", ("metrics",)),
        ("/metrics\n", None),
        ("/v1/jobs/x", ("inference",)),
        ("/v1/admin/models/a/b/load", ("admin",)),
        ("/v1/admin/config", ("configure",)),
        ("/v1/admin/config/models/a/b", ("configure",)),
        ("/v1/admin/config/models/a\nb", ("configure",)),
        ("/v1/admin/config/models/a\n", ("configure",)),
        ("/v1/admin/config/", ("configure",)),
        ("/v1/admin/config/nothing\n", ("configure",)),
        ("/v1/admin/config\n", ("admin",)),
        ("/v1/admin", ("admin",)),
        ("/v1/admin/nothing\n", ("admin",)),
        ("/v1/administration", ("admin",)),
        ("/v1/chat/completions", None),
    ],
)
def test_scopes(path, scope):
    assert scope_of(path) == scope


def test_the_longer_path_comes_first():
    """A model may be called `a/load`: its view is not at the path of its load, and so the path of a load is one."""
    paths = [endpoint.path for endpoint in ENDPOINTS if endpoint.method == "GET"]
    assert paths.index("/v1/admin/models/{name:path}/logs") < paths.index("/v1/admin/models/{name:path}")
    assert paths.index("/v1/admin/requests/ended") < paths.index("/v1/admin/requests/{id}")


class Sum(msgspec.Struct):
    """A sum."""

    total: int


class Plus(Sent, tag_field="sign", tag="+"):
    first: int
    second: int = 1


class Minus(Sent, tag_field="sign", tag="-"):
    first: int


class TestFurtherFields:
    """Those of a body that may have some: the answer names them, and the function knows the whole body."""

    @pytest.fixture
    def client(self):
        group = Group("Sums", "For a test.", scope="inference")

        @group.operation("POST", "/sums/{name:path}")
        async def add(at: int, name: str, body: Plus | Minus, fields: dict[str, object], ignored: list[str]) -> Sum:
            """Add them."""
            if fields["sign"] == "-":
                ignored.append("sign")
            return Sum(at + body.first)

        @group.operation("POST", "/sums", answer=Sum)
        async def respond(at: int, body: Plus) -> Response:
            """Add them."""
            return JSONResponse({"total": at + body.first})

        group.model_endpoint("/slots", "What it does.", method="GET", answer=list[Sum])
        self.group = group
        return TestClient(Starlette(routes=group.routes(10)))

    @cases(
        ("path", "fields", "ignored"),
        [
            ("/sums/a", {"sign": "+", "first": 1}, None),
            ("/sums/a", {"sign": "+", "first": 1, "a b": 2}, "a?b"),
            ("/sums", {"sign": "+", "first": 1, "a": None, "c": 1}, "c"),
            ("/sums/a", {"sign": "-", "first": 1, "second": 2}, "second, sign"),
        ],
    )
    def test_are_named(self, client, path, fields, ignored):
        found = client.post(path, json=fields)
        assert (found.json(), found.headers.get("x-llmux-ignored")) == ({"total": 11}, ignored)

    @cases("fields", [{}, {"sign": "*"}, {"sign": "+"}, {"sign": "+", "first": "1"}])
    def test_refused(self, client, fields):
        with pytest.raises(InvalidRequestError) as raised:
            client.post("/sums/a", json=fields)
        assert raised.value.param in ("sign", "first")

    def test_described(self, client):
        first, second, slots = self.group.section().operations
        assert [each["title"] for each in first.request["anyOf"]] == ["Plus", "Minus"]
        assert second.request["additionalProperties"] is True
        assert (slots.method, slots.answer) == ("GET", {"type": "array", "items": schema_of(Sum)})

    def test_at_a_path(self, client):
        assert [self.group.at(path).path for path in ("/sums/a\nb", "/sums")] == ["/sums/{name:path}", "/sums"]
        assert self.group.at("/sum") is None


def test_a_new_operation_is_one_function():
    class Terms(msgspec.Struct):
        """Its terms."""

        first: int
        second: int = 1

    group = Group("Sums", "For a test.")

    async def add(api: object, name: str, body: Terms) -> Sum:
        """Add them.

        Not more.
        """
        return Sum(body.first + body.second)

    add.__annotations__ = {"name": str, "body": Terms, "return": Sum}
    group.operation("POST", "/v1/sums/{name:path}", errors=(404,))(add)
    (said,) = group.section().operations
    assert (said.name, said.summary, said.description) == ("POST /v1/sums/{name}", "Add them.", "Not more.")
    assert (said.scope, said.errors) == ("admin", (404,))
    assert json.loads(json.dumps(said.request))["required"] == ["first"]
    assert said.answer == schema_of(Sum)
