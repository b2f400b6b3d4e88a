"""`GET /openapi.json`: all operations of llmux, as an OpenAPI 3.1 document.

The first request for the document builds it from the dialects' and the daemon's own operations, once per process; no other
request pays for that. The document has every path that a configuration may serve. An inference path answers only while
a configured model has it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from runtimes.endpoints import aliases_of
from supervisor.dialects import OPERATIONS
from supervisor.host.distribution import version
from supervisor.schema.operation import JSON, Example, Operation, Parameter, Schema, Section, plain, schema_of

EXAMPLES: Final = Path(__file__).with_name("examples.json")
"""The recorded answers to the examples: `python -m tools.api_examples` writes them."""
COMMON_ERRORS: Final = (400, 401, 403)
RUN_ERRORS: Final = (404, 410, 413, 429, 502, 503, 504)
RETRIES: Final = frozenset({409, 429, 503, 504})  # statuses with a `retry-after` header
_PLACE: Final = re.compile(r"{(\w+)}")
_DESCRIPTION: Final = (
    "One address for every model: requests wait while their model is loaded. A path of inference is served while a configured "
    "model has it; a model of the runtime `command` may have paths of its own, which are not listed here. Without keys in the "
    "configuration, every local client may do everything."
)
_HEADERS: Final[Mapping[str, tuple[str, Schema]]] = {
    "x-request-id": (
        "The client's own id, if it has at most 128 plain characters, else a new one.",
        {"type": "string"},
    ),
    "x-llmux-ignored": ("Fields and headers of the request that had no effect.", {"type": "string"}),
    "retry-after": ("When to try again, in seconds.", {"type": "integer", "minimum": 1, "maximum": 120}),
}

_NAME: Final = schema_of(Annotated[str, Meta(max_length=64, pattern="^[!-~]*$")])
_REQUEST_HEADERS: Final = (
    Parameter(
        "X-Priority",
        "How urgent it is; lower goes first.",
        schema_of(Annotated[str, Meta(pattern="^(high|normal|low|[0-9]{1,2}|100)?$")]),
        "header",
    ),
    Parameter("X-Tenant-ID", "Who asks.", _NAME, "header"),
    Parameter(
        "X-Timeout",
        "Within how many seconds the answer must come.",
        schema_of(Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}$")]),
        "header",
    ),
    Parameter("X-Allow-Remote", "May the request leave this machine?", schema_of(Literal["true", "false"]), "header"),
    Parameter(
        "X-Cache-Mode",
        "What it may use of prompts that a worker has kept.",
        schema_of(Literal["auto", "prefix", "none"]),
        "header",
    ),
    Parameter(
        "X-Cache-Tag",
        "Use only what requests with the same tag have left.",
        _NAME,
        "header",
    ),
)
"""Headers of requests to models that control llmux."""

Json = dict[str, Any]


@cache
def sections() -> tuple[Section, ...]:
    """The parts of the document: the dialects' own lists, then the daemon's groups of operations. Imports their modules."""
    modules = [importlib.import_module(name) for name in OPERATIONS]
    dialects = (module.GROUP.section() if hasattr(module, "GROUP") else module.SECTION for module in modules)
    groups = importlib.import_module("supervisor.api.routing").GROUPS  # a late import: it imports this module
    return (*dialects, *(group.section() for group in groups))


def recorded() -> Json:
    """The demo's recorded answers to the examples, by the operations' `key_of`. Reads a file."""
    found: Json = msgspec.json.decode(EXAMPLES.read_bytes())
    return found


def key_of(section: Section, operation: Operation) -> str:
    """An operation's unique name."""
    return f"{section.name}: {operation.name}"


@cache
def encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> Json:
    """The OpenAPI document, built anew."""
    examples = recorded()
    schemas: Json = {}
    responses: Json = {}
    paths: dict[str, Json] = {}
    for section in sections():
        _with_references(section.error, schemas)
        for operation in section.operations:
            made = _operation_object(operation, section, schemas, responses, examples)
            for path in (operation.path, *_aliases(operation)):
                methods = paths.setdefault(path, {})
                method = operation.method.lower()
                alias = path != operation.path
                one = made | {"operationId": _operation_id(operation.method, path)}
                if alias:
                    one["description"] = f"The same as `{operation.name}`."
                methods[method] = _merge_operations(methods[method], one) if method in methods else one
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llmux",
            "version": version(),
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": section.name, "description": plain(section.about)} for section in sections()],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": responses,
            "parameters": {each.name: _parameter_object(each) for each in _REQUEST_HEADERS},
            "headers": {
                name: {"description": about, "schema": dict(schema)} for name, (about, schema) in _HEADERS.items()
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "A key of the configuration."},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
    }


def _aliases(operation: Operation) -> Iterator[str]:
    """The operation's other paths, except paths with an operation of their own."""
    own = {each.name for section in sections() for each in section.operations}
    known = aliases_of(operation.path) if operation.is_run else ()
    return (path for path in (*operation.aliases, *known) if f"{operation.method} {path}" not in own)


def _operation_object(
    operation: Operation, section: Section, schemas: Json, responses: Json, examples: Mapping[str, Any]
) -> Json:
    found: Json = {
        "tags": [section.name],
        "summary": plain(operation.summary),
        "description": plain(operation.description) or plain(operation.summary),
        "x-llmux-scope": operation.scope,
        "security": [] if operation.scope is None else [{"bearer": []}, {"x-api-key": []}],
    }
    if parameters := [*_parameter_objects(operation)]:
        found["parameters"] = parameters
    if operation.request is not None:
        content: Json = {"schema": _with_references(operation.request, schemas)}
        if operation.example.body is not None:
            content["example"] = operation.example.body
        found["requestBody"] = {
            "required": not operation.is_body_optional,
            "content": {operation.request_type: content},
        }
    example = answer_of(key_of(section, operation), operation.example, examples)
    good = (operation.status, *operation.other_statuses)
    answers: Json = {str(status): _success_response(operation, status, schemas, example) for status in good}
    for status in _error_statuses(operation):
        answers[str(status)] = _error_reference(status, section, schemas, responses)
    if operation.is_run:
        answers["default"] = _error_reference(None, section, schemas, responses)
    found["responses"] = answers
    return found


def _parameter_objects(operation: Operation) -> Iterator[Json]:
    for name in _PLACE.findall(operation.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    yield from map(_parameter_object, operation.parameters)
    if operation.is_run:
        yield from ({"$ref": f"#/components/parameters/{each.name}"} for each in _REQUEST_HEADERS)


def _parameter_object(parameter: Parameter) -> Json:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.required,
        "description": plain(parameter.description),
        "schema": dict(parameter.schema),
    }


def _success_response(operation: Operation, status: int, schemas: Json, example: Any) -> Json:
    """The response to a successful request."""
    found: Json = {
        "description": HTTPStatus(status).phrase,
        "headers": _header_references("x-request-id", "x-llmux-ignored"),
    }
    content: Json = {}
    if operation.answer is not None:
        content[operation.answer_type] = {"schema": _with_references(operation.answer, schemas)}
    elif operation.answer_type != JSON:
        content[operation.answer_type] = {"schema": {} if operation.answer_type == "*/*" else {"type": "string"}}
    if content and example is not None:
        content[operation.answer_type]["example"] = example
    for kind in filter(None, (operation.stream_type, *operation.other_types)):
        content.setdefault(kind, {"schema": {"type": "string"}})
    return found | ({"content": content} if content else {})


def answer_of(name: str, example: Example, recorded: Mapping[str, Any]) -> Any:
    """The answer of an example; None without one."""
    return example.answer if example.answer is not None else recorded.get(name)


def _error_statuses(operation: Operation) -> list[int]:
    found = {*COMMON_ERRORS, *operation.errors} - (set() if operation.scope is not None else {401})
    if operation.is_run:
        found.update(RUN_ERRORS)
    if operation.request is not None:
        found.add(413)
    return sorted(found - {operation.status, *operation.other_statuses})


def _error_reference(status: int | None, section: Section, schemas: Json, responses: Json) -> Json:
    """A reference to the error response for this status, in the section's format."""
    shape = section.error["title"]
    name = f"{shape}.{status or 'other'}"
    if name not in responses:
        names = ("x-request-id", *(("retry-after",) if status in RETRIES else ()))
        responses[name] = {
            "description": "Another error, as the worker says it." if status is None else HTTPStatus(status).phrase,
            "headers": _header_references(*names),
            "content": {JSON: {"schema": _with_references(section.error, schemas)}},
        }
    return {"$ref": f"#/components/responses/{name}"}


def _header_references(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _with_references(schema: Any, schemas: Json) -> Any:
    """The schema with references in place of titled schemas, which go into `schemas`. Descriptions lose their links."""
    if isinstance(schema, list | tuple):
        return [_with_references(each, schemas) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    title = schema.get("title")
    if isinstance(title, str) and title in schemas:
        return {"$ref": f"#/components/schemas/{title}"}
    if isinstance(title, str):
        schemas[title] = {}  # ends the recursion of a schema that contains itself
    found = {
        key: plain(value) if key == "description" and isinstance(value, str) else _with_references(value, schemas)
        for key, value in schema.items()
    }
    if not isinstance(title, str):
        return found
    schemas[title] = found
    return {"$ref": f"#/components/schemas/{title}"}


def _merge_operations(one: Json, other: Json) -> Json:
    """One operation object for two operations on the same path; it allows the requests of both."""
    found = one | {
        "tags": [*one["tags"], *(tag for tag in other["tags"] if tag not in one["tags"])],
        "description": f"{one['description']}\n\n{other['summary']} {other['description']}",
    }
    parameters = [*one.get("parameters", ())]
    parameters += (each for each in other.get("parameters", ()) if each not in parameters)
    if parameters:
        found["parameters"] = parameters
    bodies = [each["requestBody"] for each in (one, other) if "requestBody" in each]
    if bodies:
        contents = _merge_content(*(body["content"] for body in bodies))
        found["requestBody"] = {"required": all(body["required"] for body in bodies), "content": contents}
    answers = dict(other["responses"]) | one["responses"]
    for status in one["responses"].keys() & other["responses"].keys():
        mine, theirs = one["responses"][status], other["responses"][status]
        if "content" in mine and "content" in theirs:
            answers[status] = mine | {"content": _merge_content(mine["content"], theirs["content"])}
        elif mine != theirs and "$ref" in mine:  # errors: the format depends on the client's API
            shapes = [each["$ref"].rpartition("/")[2].partition(".")[0] for each in (mine, theirs)]
            schema = {"anyOf": [{"$ref": f"#/components/schemas/{shape}"} for shape in shapes]}
            answers[status] = {"description": _status_phrase(status), "content": {JSON: {"schema": schema}}}
    return found | {"responses": answers}


def _merge_content(*contents: Json) -> Json:
    """All media types of the contents, each with all of its schemas."""
    found: Json = {}
    for content in contents:
        for kind, value in content.items():
            if kind in found and found[kind]["schema"] != value["schema"]:
                choices = found[kind]["schema"].get("anyOf", [found[kind]["schema"]])
                found[kind] = {**found[kind], "schema": {"anyOf": [*choices, value["schema"]]}}
            else:
                found[kind] = value
    return found


def _status_phrase(status: str) -> str:
    return "Another error." if status == "default" else HTTPStatus(int(status)).phrase


def _operation_id(method: str, path: str) -> str:
    return method.lower() + "_" + re.sub(r"\W+", "_", path).strip("_")
