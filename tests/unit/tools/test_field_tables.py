"""What the page of fields says of a type is what requests with these fields came to."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from msgspec import Raw

from supervisor.dialects.openai.types import ForLlmux, Maybe
from supervisor.gateway.body.typed import Sent, Unused, unparsed
from supervisor.schema.operation import doc
from tools import field_tables

REQUESTS = [
    pytest.param(kind, field_tables.recorded()[endpoint.path], id=f"{group.name} {endpoint.path}")
    for group, endpoint, kind in field_tables.requests()
    if endpoint.path in field_tables.recorded() and group.name != "llm-pool"
]


def outcomes(results: field_tables.Results, name: str) -> set[Any]:
    return {outcome for column, outcome in results.get(name, {}).items() if column != "value"}


class Request(Sent, kw_only=True):
    text: str
    rest: Raw = unparsed()
    label: Unused = None
    more: Annotated[Raw, doc("Not here.", "refused")] = unparsed()


class Native(ForLlmux, kw_only=True):
    text: Maybe[str]


class TestFates:
    """By its type."""

    def test_of_what_llmux_reads(self):
        expected = {"text": "read", "rest": "passed on", "label": "no effect", "more": "refused", "other": "named"}
        assert field_tables.fates(Request, {"text": {}, "other": {}}) == expected

    def test_of_what_a_worker_reads(self):
        assert field_tables.fates(Native, {"other": {}}) == {"text": "passed on", "other": "passed on"}


@pytest.mark.parametrize(("kind", "results"), REQUESTS)
class TestResults:
    """Of real workers."""

    def test_a_field_that_the_type_does_not_have_is_named(self, kind, results):
        unknown = results.keys() - field_tables.fates(kind) if issubclass(kind, Sent) else ()
        assert {name: outcomes(results, name) for name in unknown} == {name: {"ignored"} for name in unknown}

    def test_one_that_is_refused_is_refused(self, kind, results):
        refused = [name for name, fate in field_tables.fates(kind).items() if fate == "refused" and name in results]
        assert {name: outcomes(results, name) for name in refused} == {name: {"refused"} for name in refused}

    def test_one_without_effect_is_not_refused_anywhere(self, kind, results):
        unused = [name for name, fate in field_tables.fates(kind).items() if fate in ("named", "no effect")]
        assert [name for name in unused if "refused" in outcomes(results, name)] == []


def test_every_result_is_on_the_page():
    assert field_tables.recorded().keys() <= {endpoint.path for _, endpoint, _ in field_tables.requests()}
