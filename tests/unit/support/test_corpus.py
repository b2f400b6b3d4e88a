"""The recorded contract: what it covers, and that each kind of difference is seen."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import corpus
from tests.support.daemon import REPOSITORY
from tests.support.openapi import operations

NOT_RECORDED = {
    "goes on without end": r"GET /v1/admin/events|GET /api/events/.*|.*/stream$",
    "depends on when it happens": r".*/v1/jobs.*|.*/v1/batches.*|.*/v1/files.*|GET /v1/admin/(recording|gpu-memory|history).*"
    r"|GET /v1/capabilities|.*/models/load.*|POST /v1/admin/(shutdown|upgrade).*",
    "describes itself": r"GET /(openapi\.json|metrics|docs|ui).*",
}
NOT_RECORDED_CODES = {
    "needs several requests at once, at a certain moment": {"model_unloaded", "shutting_down", "too_many_connections"},
    "depends on the devices of the machine": {"device_quarantined", "device_lost"},
    "depends on the ports that are in use": {"no_free_port"},
    "tells how long something took here": {"budget_too_small"},
    "says what this machine's libraries say": {"upstream_certificate", "invalid_media"},
    "is a bug": {"internal_error"},
    "is of Ollama's API alone, whose errors are texts": {"not_offered"},
}


def exchanges() -> Iterator[dict[str, Any]]:
    for path in corpus.scenarios().values():
        yield from json.loads(path.read_text())["exchanges"]


def asked() -> set[tuple[str, str]]:
    """Method and path of each."""
    lines = (exchange["request"]["line"].rpartition(" ")[0].partition(" ") for exchange in exchanges())
    return {(method, target.partition("?")[0]) for method, _, target in lines}


def documented_codes() -> set[str]:
    """The codes of docs/reference/errors.md that clients get."""
    page = (REPOSITORY / "docs" / "reference" / "errors.md").read_text()
    table = page.partition("\n## Error codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| (\d+) \|", table, re.MULTILINE)
    return {code for cell, _ in rows for code in re.findall(r"`(\w+)`", cell)}


def recorded_codes() -> set[str]:
    """The codes of all answers, also of those that are events of a stream."""
    answers = (json.dumps(exchange["answer"]).replace(r"\"", '"') for exchange in exchanges())
    return {code for answer in answers for code in re.findall(r'"(?:error_)?code": ?"(\w+)"', answer)}


class TestCoverage:
    """Every operation that can be recorded is."""

    def test_operations(self):
        found = asked()
        lacking = []
        for operation in operations():
            pattern = re.compile(re.sub(r"\\\{[^/]*\\\}", "[^/]+", re.escape(operation.path)))
            is_there = any(method == operation.method and pattern.fullmatch(path) for method, path in found)
            if not is_there and not any(re.fullmatch(each, str(operation)) for each in NOT_RECORDED.values()):
                lacking.append(str(operation))
        assert not lacking, "\n".join(lacking)

    def test_error_codes(self):
        reasons = set().union(*NOT_RECORDED_CODES.values())
        assert documented_codes() - recorded_codes() == reasons

    def test_enough_of_them(self):
        assert sum(1 for _ in exchanges()) >= 1500

    def test_headers(self):
        source = "".join(path.read_text() for path in (REPOSITORY / "supervisor").rglob("*.py"))
        told = {
            name.lower()
            for each in exchanges()
            for name, _ in [*each["answer"]["headers"], *each["request"]["headers"]]
        }
        assert set(re.findall(r'b"(x-llmux-[a-z-]*[a-z])', source)) - told == set()


@pytest.fixture
def scenario() -> dict[str, Any]:
    answer = {"line": "HTTP/1.1 200 OK", "headers": [["date", "<date>"]], "events": ["data: 1", "data: [DONE]"]}
    request = {
        "line": "POST /v1/chat/completions HTTP/1.1",
        "headers": [["Host", "127.0.0.1"]],
        "json": {"a": 1, "b": 2},
    }
    return {"exchanges": [{"request": request, "answer": answer, "worker": [request]}], "log": [{"status": 200}]}


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def made(scenario: dict[str, Any]) -> None:
        *ahead, last = (int(key) if key.isdigit() else key for key in path.split("."))
        place: Any = scenario
        for key in ahead:
            place = place[key]
        place[last] = value

    return made


class TestDifferences:
    """Each is told with its kind."""

    @pytest.mark.parametrize(
        ("kind", "made"),
        [
            ("status", change("exchanges.0.answer.line", "HTTP/1.1 201 Created")),
            ("headers", change("exchanges.0.answer.headers.0.0", "Date")),
            ("body", change("exchanges.0.answer.events", ["data: 1\\n", "data: [DONE]"])),
            ("body", change("exchanges.0.answer.events", ["data: 1"])),
            ("worker", change("exchanges.0.worker", [])),
            ("worker", change("exchanges.0.worker.0.json", {"b": 2, "a": 1})),
            ("log", change("log.0.status", 500)),
        ],
    )
    def test_kinds(self, scenario, kind, made):
        made(other := copy.deepcopy(scenario))
        assert [found for found, _ in corpus.differences(scenario, other)] == [kind]
        assert list(corpus.differences(scenario, scenario)) == []

    def test_what_is_not_recorded(self, scenario):
        (exchange,) = scenario["exchanges"]
        wanted = scenario | {"log": None, "exchanges": [exchange | {"worker": None}]}
        assert list(corpus.differences(wanted, scenario)) == []


class TestWords:
    """What is another one each time stands in no file, and goes back into requests."""

    def test_there_and_back(self, tmp_path):
        words = corpus.Words(tmp_path, ["size"])
        text = f'{{"id":"resp_{"a1" * 16}","at":17.5,"size":12,"n":3,"x":"{tmp_path}/a","f":0.05000000074505806}}'
        kept = words.kept(text)
        assert kept == '{"id":"<id 1>","at":0,"size":0,"n":3,"x":"<folder>/a","f":0.05000000074505806}'
        assert words.sent("GET /v1/responses/<id 1>") == f"GET /v1/responses/resp_{'a1' * 16}"

    @pytest.mark.parametrize(
        "name", ["others/paths-1", "openai/codes-jobs", "openai/codes-models", "openai/codes-requests"]
    )
    def test_the_same_bytes(self, tmp_path, name):
        text = corpus.scenarios()[name].read_text()
        corpus.write(path := tmp_path / "a" / "b.json", json.loads(text))
        assert path.read_text() == text
