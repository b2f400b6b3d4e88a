"""The OpenAPI document for tests: its operations, and schemas that stand alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from supervisor.api.openapi import document

DOCUMENT = document()


@dataclass(frozen=True, repr=False)
class Described:
    """One operation, as a client reads it."""

    method: str
    path: str
    said: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def parameters(self) -> list[dict[str, Any]]:
        return [resolved(each) for each in self.said.get("parameters", ())]

    @property
    def request(self) -> tuple[str, Any] | None:
        """The content type of its body, and the schema."""
        if "requestBody" not in self.said:
            return None
        [(kind, content)] = self.said["requestBody"]["content"].items()
        return kind, alone(content["schema"])

    def answers(self, status: int) -> dict[str, Any] | None:
        """Schemas by content type; None: no answer has this status."""
        responses = self.said["responses"]
        found = responses.get(str(status), responses.get("default") if status >= 400 else None)
        if found is None:
            return None
        return {kind: alone(content["schema"]) for kind, content in resolved(found).get("content", {}).items()}


def operations() -> Iterator[Described]:
    """All of them."""
    for path, methods in DOCUMENT["paths"].items():
        for method in methods:
            yield Described(method.upper(), path, methods[method])


def resolved(value: Any) -> Any:
    """What a reference stands for."""
    while "$ref" in value:
        found: Any = DOCUMENT
        for name in value["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        value = found
    return value


def alone(schema: Any) -> Any:
    """A schema without references."""
    if isinstance(schema, list):
        return [alone(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: alone(value) for key, value in resolved(schema).items()}


def strict(schema: Any) -> Any:
    """The schema, which takes no field that it doesn't name, but where it says that there may be others."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        found.setdefault("additionalProperties", False)
    return found


def errors(schema: Any, value: Any) -> list[str]:
    """What of the value doesn't fit."""
    return [f"{error.json_path}: {error.message}"[:500] for error in Draft202012Validator(schema).iter_errors(value)]
