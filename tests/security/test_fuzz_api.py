"""Requests as the OpenAPI document allows them, and broken ones, against a running daemon: the answers are the documented ones.

What fits the schemas never makes an error of the server's own, but 503 and 504, which say when to try again. What doesn't fit
is refused with a documented status in the dialect's shape. Each operation is tried with the same requests every time.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from supervisor.schema.operation import EVENTS, JSON, LINES
from tests.support.cases import cases
from tests.support.counts import examples
from tests.support.daemon import Daemon, fake, running
from tests.support.fuzzing import damaged
from tests.support.openapi import Described, errors, operations, strict
from tests.support.schema_values import values

NOT_TRIED = {
    "POST /v1/admin/upgrade": "ends the daemon; tests/e2e/admin",
    "POST /v1/admin/models/{name}/load": "each starts a worker, which takes long",
}
LIFE = re.compile(r"/(load|unload|pin|flush)$")
"""What starts or ends workers is done to a model of its own, so that the others need not be loaded each time."""
PLACE = re.compile(r"{(\w+)}")
READ_BYTES = 4096  # of a stream, which may be endless
TRIED = [each for each in operations() if str(each) not in NOT_TRIED]
JOB = {
    "endpoint": "/v1/chat/completions",
    "body": {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]},
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    own = {"/messages", "/responses", "/audio/transcriptions", "/images/generations"}  # which are translated, or echoed
    runs = {each.path for each in TRIED if each.method == "POST" and "default" in each.said["responses"]}
    endpoints = sorted(path for path in runs if path.removeprefix("/v1") not in own and not path.startswith("/api/"))
    endpoints += ["GET /props", "GET /slots", "GET /lora-adapters"]
    models = {"chat": fake(endpoints=endpoints), "other": fake(endpoints=endpoints)}
    limits = {"keepalive_s": 0.5}
    with running(tmp_path_factory.mktemp("fuzz"), {"models": models, "limits": limits}) as daemon:
        chat = daemon.post("/v1/chat/completions", json=JOB["body"], headers={"x-tenant-id": "anna"})
        assert chat.status_code == 200
        yield daemon


@pytest.fixture(scope="module")
def ids(daemon) -> dict[str, tuple[str, ...]]:
    """What there is, by the paths that it stands below."""
    job = daemon.post("/v1/jobs", json=JOB).json()["id"]
    line = {"custom_id": "1", "method": "POST", "url": JOB["endpoint"], "body": JOB["body"]}
    file = daemon.post("/v1/files", data={"purpose": "batch"}, files={"file": json.dumps(line)}).json()["id"]
    asked = {"input_file_id": file, "endpoint": JOB["endpoint"], "completion_window": "24h"}
    batch = daemon.post("/v1/batches", json=asked).json()["id"]
    lease = daemon.post("/v1/admin/leases", json={"vram_mib": 1, "ttl_s": 3600}).json()["id"]
    return {
        "/v1/jobs": (job,),
        "/v1/files": (file,),
        "/v1/batches": (batch,),
        "/v1/admin/leases": (lease,),
        "/v1/admin/clients": ("anna",),
    }


@pytest.fixture(scope="module")
def client(daemon) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client


# --------------------------------------------------------------------------------------------------------- what is asked


def name_of_model(described: Described) -> st.SearchStrategy[str]:
    known = "other" if LIFE.search(described.path) else "chat"
    return st.sampled_from((known, known, known, "nobody"))


def body_of(described: Described, ids: dict[str, tuple[str, ...]]) -> st.SearchStrategy[Any]:
    """A body that fits its schema, mostly for a model, or a file, that there is."""
    assert described.request is not None
    _, schema = described.request

    def aimed(body: Any, name: str) -> Any:
        found = dict(body)
        for key in ("model", "modelId"):
            if key in found or key in schema.get("properties", {}):
                found[key] = name
        if "input_file_id" in found:
            found |= {"endpoint": JOB["endpoint"], "input_file_id": ids["/v1/files"][0]}
        elif "endpoint" in found:
            found |= {"endpoint": JOB["endpoint"], "body": {**found["body"], **JOB["body"], "model": name}}
        if "vram_mib" in found:
            found["vram_mib"] = 1
        for key in ("wait", "evictModel", "overrides", "verifiedOpToken"):
            found.pop(key, None)
        return found

    return st.builds(aimed, values(schema), name_of_model(described))


def path_of(described: Described, ids: dict[str, tuple[str, ...]]) -> st.SearchStrategy[str]:
    """The path with something in its places."""
    names = PLACE.findall(described.path)
    known = ids.get(described.path.partition("/{")[0], ())
    others = st.sampled_from(("1", "load-1", "index.html", "no-such", "ä?#"))
    piece = st.one_of(st.sampled_from(known) if known else name_of_model(described), others)

    def filled(pieces: list[str]) -> str:
        path = described.path
        for name, each in zip(names, pieces, strict=True):
            path = path.replace(f"{{{name}}}", quote(each))
        return path

    return st.lists(piece, min_size=len(names), max_size=len(names)).map(filled)


def said_of(described: Described, place: str) -> st.SearchStrategy[dict[str, str]]:
    """Some of its parameters, as they are written there."""
    found = {each["name"]: values(each["schema"]) for each in described.parameters if each["in"] == place}
    written = {name: value.map(as_text).filter(is_plain) for name, value in found.items()}
    return st.fixed_dictionaries({}, optional=written)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def is_plain(value: str) -> bool:
    """Can it be in a header, and is it none that would make a test take long?"""
    return value.isascii() and value.isprintable() and len(value) < 100 and value == value.strip()


# -------------------------------------------------------------------------------------------------------- what is answered


def ask(client: httpx.Client, described: Described, path: str, **keys: Any) -> tuple[httpx.Response, bytes]:
    """The answer, and its body, of a stream the beginning."""
    body = b""
    with client.stream(described.method, path, **keys) as response:
        is_endless = response.headers.get("content-type", "").startswith(EVENTS) and described.method == "GET"
        with contextlib.suppress(StopIteration):
            pieces = response.iter_raw()
            while len(body) < (1 if is_endless else 1 << 24):
                body += next(pieces)
    return response, body


def check(described: Described, response: httpx.Response, body: bytes) -> None:
    """It is one of the documented answers."""
    status, shown = response.status_code, f"{described} {response.request.url}: {response.status_code} {body[:500]!r}"
    answers = described.answers(status)
    assert answers is not None, f"not documented: {shown}"
    assert status < 500 or status in {501, 502, 503, 504}, shown
    if status in {503, 504}:
        assert "retry-after" in response.headers or "x-should-retry" in response.headers, shown
    kind = response.headers.get("content-type", "").partition(";")[0]
    if described.method == "HEAD" or not body:
        return
    assert kind in answers or "*/*" in answers or (not answers and status < 400), f"{kind} is not documented: {shown}"
    if kind == JSON and JSON in answers:
        assert errors(strict(answers[JSON]), json.loads(body)) == [], shown
    elif kind == LINES:
        for line in body.splitlines():
            json.loads(line)
    elif kind == EVENTS:
        assert body.endswith(b"\n\n") or described.method == "GET", shown


def tried(few: int) -> settings:
    return settings(
        max_examples=examples(few),
        database=None,
        phases=(Phase.generate,),  # what fails is small anyway
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )


class TestEveryOperation:
    """Documented requests get documented answers."""

    @cases("described", TRIED, ids=[*map(str, TRIED)])
    @tried(12)
    @given(data=st.data())
    def test_what_fits(self, described, client, ids, data):
        keys: dict[str, Any] = {
            "params": data.draw(said_of(described, "query")),
            "headers": data.draw(said_of(described, "header")),
        }
        if described.request is not None:
            kind, _ = described.request
            body = data.draw(body_of(described, ids))
            if kind == JSON:
                keys["json"] = body
            else:
                keys["data"] = {name: as_text(value) for name, value in body.items() if name != "file"}
                keys["files"] = {"file": b"RIFF"}
        check(described, *ask(client, described, data.draw(path_of(described, ids)), **keys))

    @cases("described", TRIED, ids=[*map(str, TRIED)])
    @tried(12)
    @given(data=st.data())
    def test_what_is_broken(self, described, client, ids, data):
        """A body that is nearly JSON, or JSON of another shape."""
        if described.request is None:
            names = st.sampled_from(("limit", "model", "after", "lines", "force")) | st.text(min_size=1)
            odd = data.draw(st.dictionaries(names, st.text()))
            check(described, *ask(client, described, data.draw(path_of(described, ids)), params=odd))
            return
        kind, schema = described.request
        whole = json.dumps(data.draw(body_of(described, ids))).encode()
        names = [*schema.get("properties", {"input": {}})]
        odd = st.one_of(
            st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.just([]), st.just([{}]), st.just({})
        )
        turned = st.builds(
            lambda name, value: json.dumps({**json.loads(whole), name: value}).encode(), st.sampled_from(names), odd
        )
        body = data.draw(st.one_of(damaged(whole, words=(b'"', b"{", b"[", b"null", b"1e999")), turned))
        body = re.sub(rb'"wait":\s*true', b'"wait": false', body)
        body = re.sub(rb'"vram_mib":\s*\d+', b'"vram_mib": 1', body)
        response, answer = ask(
            client, described, data.draw(path_of(described, ids)), content=body, headers={"content-type": kind}
        )
        check(described, response, answer)


def test_the_daemon_is_well_afterwards(daemon):
    answer = daemon.chat("chat")
    assert answer.status_code == 200, answer.text
    assert [event for event in daemon.events("request.failed") if event.get("level") == "error"] == []
