"""The OpenAPI document: valid, complete, and nothing in it is invented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Mount, Route

from runtimes.endpoints import aliases_of
from runtimes.registry import REGISTRY
from supervisor import api
from supervisor.api import openapi, routing
from supervisor.dialects import DIALECTS, OPERATIONS, dialect_of
from supervisor.dialects.ollama import decode
from supervisor.host.distribution import version
from supervisor.server.auth import scope_for
from tests.support.application import ask, get, serving
from tests.support.cases import cases
from tests.support.openapi import DOCUMENT, errors, operations, resolved, strict

_CONVERTER = re.compile(r":\w+(?=})")
NAMES = {str(each) for each in operations()}
DECLARED = [
    pytest.param(section, operation, id=openapi.key_of(section, operation))
    for section in openapi.sections()
    for operation in section.operations
]


def of_runtimes() -> set[str]:
    """What workers serve, and what a dialect makes them serve."""
    found = set()
    for name in REGISTRY.names():
        for endpoint in REGISTRY.get(name).all_endpoints:
            found |= {f"{endpoint.method} {path}" for path in (endpoint.path, *aliases_of(endpoint.path))}
    return found | {f"POST {path}" for path in decode.TRANSLATIONS}


@pytest.fixture
async def served(tmp_path):
    async with serving(tmp_path) as running:
        yield running


class TestDocument:
    """What clients read."""

    def test_is_valid(self):
        assert [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []

    async def test_is_served(self, served):
        status, headers, body = await ask(served.port, get(b"/openapi.json"))
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(body) == json.loads(json.dumps(DOCUMENT))

    def test_has_the_version(self):
        assert DOCUMENT["info"]["version"] == version()

    def test_operation_ids_are_unique(self):
        ids = [each.said["operationId"] for each in operations()]
        assert sorted(set(ids)) == sorted(ids)

    def test_links_of_the_page_are_left_out(self):
        assert re.findall(r"\]\([^)]*\)", json.dumps(DOCUMENT)) == []

    def test_one_path_for_two_apis_has_what_both_say(self):
        said = DOCUMENT["paths"]["/v1/responses"]["post"]
        assert said["tags"] == ["Responses", "llm-pool"]
        body = said["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
        assert [each["$ref"].rpartition("/")[2] for each in body] == ["ResponseRequest", "LlmPoolRequest"]
        shapes = DOCUMENT["paths"]["/v1/models"]["get"]["responses"]["400"]["content"]["application/json"]["schema"]
        assert [each["$ref"].rpartition("/")[2] for each in shapes["anyOf"]] == ["Error", "AnthropicError"]


class TestCompleteness:
    """What is served is what is told."""

    async def test_every_route(self, served):
        routes = served.application._starlette.routes
        missing = set()
        for route in routes:
            if isinstance(route, Mount):
                missing |= {f"GET {route.path}/{{path}}"} - NAMES
            else:
                assert isinstance(route, Route)
                path = _CONVERTER.sub("", route.path)
                methods = (route.methods or set()) - ({"HEAD"} if "GET" in (route.methods or ()) else set())
                missing |= {f"{method} {path}" for method in methods} - NAMES
        assert missing == set()

    def test_every_endpoint_of_a_runtime(self):
        assert of_runtimes() - NAMES == set()

    async def test_nothing_is_invented(self, served):
        routes = [route for route in served.application._starlette.routes if isinstance(route, Route)]
        known = {f"{method} {_CONVERTER.sub('', route.path)}" for route in routes for method in route.methods or ()}
        mapped = {
            str(each)
            for each in operations()
            for dialect in DIALECTS
            if dialect.owns(each.path) and dialect.translation(each.method, each.path) is not None
        }
        assert NAMES - known - of_runtimes() - mapped - {"GET /ui/{path}"} == set()

    def test_every_module_of_operations_is_in_it(self):
        supervisor = Path(openapi.__file__).parents[1]
        modules = (supervisor / "dialects").rglob("*operations.py")
        names = {".".join(path.relative_to(supervisor.parent).with_suffix("").parts) for path in modules}
        assert names == set(OPERATIONS)
        groups = {module for module in vars(api).values() if hasattr(module, "GROUP")}
        assert {module.GROUP for module in groups} == set(routing.GROUPS)

    @cases("described", [*operations()], ids=str)
    def test_scopes(self, described):
        """The same key is needed as is said, and a client without one is told so."""
        dialects = [dialect for dialect in DIALECTS if dialect.owns(described.path)]
        assert described.said["x-llmux-scope"] in {scope_for(described.path, dialect) for dialect in dialects}
        is_open = described.said["x-llmux-scope"] is None
        assert (described.said["security"] == []) is is_open
        assert ("401" in described.said["responses"]) is not is_open


class TestExamples:
    """Each fits what is said of it."""

    @cases(("section", "operation"), DECLARED)
    def test_requests(self, section, operation):
        if operation.request is None or operation.example.body is None:
            assert operation.request is None or operation.is_body_optional, "it has an example of its body"
        else:
            assert errors(operation.request, operation.example.body) == []

    @cases(("section", "operation"), DECLARED)
    def test_answers(self, section, operation):
        answer = openapi.answer_of(openapi.key_of(section, operation), operation.example, openapi.recorded())
        if operation.answer is not None:
            assert answer is not None or operation.method == "HEAD", "python -m tools.api_examples"
            assert errors(strict(operation.answer), answer) == []

    @cases(("section", "operation"), DECLARED)
    def test_errors_have_the_shape_of_the_dialect(self, section, operation):
        path = operation.path.replace("{name}", "a")
        headers = [(name.encode(), value.encode()) for name, value in operation.example.headers.items()]
        dialect = dialect_of({"path": path, "headers": headers, "method": operation.method})
        fields = {"message": "It is wrong.", "type": "invalid_request_error", "param": None, "code": "wrong"}
        assert errors(strict(section.error), json.loads(dialect.error(fields, 400))) == []


def test_references_are_resolved():
    assert resolved({"$ref": "#/components/schemas/Error"})["title"] == "Error"
