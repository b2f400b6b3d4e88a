"""The generated parts of docs/reference/api.md: each operation with its fields and an example.

An example is a command that runs unchanged against the demo, unless its comment names a requirement.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from supervisor.api.openapi import answer_of, key_of, recorded, sections
from supervisor.dialects.openai.types import ForLlmux
from supervisor.schema.operation import FORM, JSON, Operation, Schema, Section
from tools.markdown import table

URL: Final = "http://127.0.0.1:8081"
WIDTH: Final = 120
MOST_LINES: Final = 24
"""Lines of an answer; "…" stands for further lines."""
_SCOPES: Final = {None: "Open to all.", "admin": "Needs the scope `admin`.", "metrics": "Needs the scope `metrics`."}


def blocks() -> dict[str, str]:
    """Name of a block → the text of its section."""
    answers, described = recorded(), set[str]()
    return {f"operations of {section.name}": _section_text(section, answers, described) for section in sections()}


def _section_text(section: Section, answers: Mapping[str, Any], described: set[str]) -> str:
    return "\n\n".join(
        part
        for operation in section.operations
        for part in _operation_parts(
            operation, answer_of(key_of(section, operation), operation.example, answers), described
        )
    )


def _operation_parts(operation: Operation, answer: Any, described: set[str]) -> Iterator[str]:
    paths = (operation.path, *operation.aliases)
    yield "### " + ", ".join(f"`{operation.method} {path}`" for path in paths)
    yield " ".join(filter(None, (operation.summary, _SCOPES.get(operation.scope))))
    if operation.description:
        yield operation.description
    if operation.parameters:
        yield _meanings_table("Parameter", {each.name: each.description for each in operation.parameters})
    for head, schema in (("Field", operation.request), ("Of the answer", operation.answer)):
        if rows := _field_descriptions(schema, described):
            yield _meanings_table(head, rows)
    yield f"```sh\n{_curl_command(operation)}\n```"
    if answer is not None:
        yield _answer_block(answer)


def _field_descriptions(schema: Schema | None, described: set[str]) -> dict[str, str]:
    """The fields with a description, of an object or of the first list of objects in it."""
    if schema is None or schema.get("title") in described:
        return {}
    described.update(filter(None, [schema.get("title")]))
    fields: Mapping[str, Schema] = schema.get("properties", {})
    rows = {
        name: field["description"]
        for name, field in fields.items()
        if "description" in field and name not in ForLlmux.__struct_fields__
    }
    lists = [field["items"] for field in fields.values() if "items" in field and not rows]
    return rows or next((found for items in lists if (found := _field_descriptions(items, described))), {})


def _meanings_table(head: str, rows: Mapping[str, str]) -> str:
    """A table in which names with the same meaning share a row."""
    meanings: dict[str, list[str]] = {}
    for name, meaning in rows.items():
        meanings.setdefault(meaning, []).append(f"`{name}`")
    return table((head, "Meaning"), [(", ".join(names), meaning) for meaning, names in meanings.items()])


def _curl_command(operation: Operation) -> str:
    """The curl command of an operation's example."""
    example, method = operation.example, operation.method
    words = ["curl", "-f", URL + (example.path or operation.path)]
    if method == "HEAD":
        words.append("-I")
    elif method not in {"GET", "POST"} or (method == "POST" and example.body is None):
        words += ["-X", method]
    for name, value in example.headers.items():
        words += ["-H", f"{name}: {value}"]
    if operation.request_type == FORM:
        words += (word for name, value in (example.body or {}).items() for word in ("-F", f"{name}={value}"))
    elif example.body is not None:
        words += ["-H", f"Content-Type: {JSON}", "-d", json.dumps(example.body, ensure_ascii=False)]
    return shlex.join(words) + (f"  # needs {example.needs}" if example.needs else "")


def _answer_block(answer: Any) -> str:
    is_text = isinstance(answer, str)
    lines = answer.rstrip("\n").split("\n") if is_text else [*_json_lines(answer)]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "…"]
    return "\n".join(("```" if is_text else "```json", *lines, "```"))


def _json_lines(value: Any, indent: str = "", before: str = "", after: str = "") -> Iterator[str]:
    """JSON, broken into lines of at most `WIDTH` characters where possible."""
    plain = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(before) + len(plain) + len(after) <= WIDTH or not isinstance(value, dict | list) or not value:
        yield indent + before + plain + after
        return
    marks: Sequence[str] = "{}" if isinstance(value, dict) else "[]"
    items = [*value.items()] if isinstance(value, dict) else [(None, each) for each in value]
    yield indent + before + marks[0]
    for at, (name, each) in enumerate(items, 1):
        label = "" if name is None else json.dumps(name, ensure_ascii=False) + ": "
        yield from _json_lines(each, indent + "  ", label, "," if at < len(items) else "")
    yield indent + marks[1] + after
