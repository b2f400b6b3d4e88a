"""`/v1/messages` of llama.cpp's server, which speaks it itself: what it would pass over, or take wrongly, llmux translates."""

from __future__ import annotations

import pytest

from tests.support.daemon import gguf, running

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("get_weather", "get_time")]
CALL = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}
EDITS = [{"type": "clear_tool_uses_20250919"}]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with running(tmp_path_factory.mktemp("messages"), {"models": {"chat": gguf()}}) as daemon:
        yield daemon


def ask(site, *more, **fields):
    messages = [{"role": "user", "content": "Hello"}, *more]
    return site.post("/v1/messages", json={"model": "chat", "max_tokens": 20, "messages": messages, **fields})


def called(told):
    return [block["name"] for block in told.json()["content"] if block["type"] == "tool_use"]


def test_what_it_knows_is_its_own(site):
    told = ask(site, tools=TOOLS, tool_choice={"type": "auto"})
    assert (called(told), told.json()["id"][:9]) == (["get_weather"], "chatcmpl-")


@pytest.mark.parametrize("choice", [{"type": "none"}, {"type": "tool", "name": "get_time"}])
def test_a_tool_that_was_not_chosen_is_not_called(site, choice):
    assert "get_weather" not in called(ask(site, tools=TOOLS, tool_choice=choice))


def test_a_result_that_is_an_error(site):
    """The model is told so, which takes tokens."""

    def tokens(**more):
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "no such city", **more}
        told = ask(site, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}, tools=TOOLS)
        return sum(count for name, count in told.json()["usage"].items() if name != "output_tokens")

    assert tokens(is_error=True) > tokens()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("container", "container_1"),
        ("mcp_servers", [{"type": "url", "url": "https://example.com", "name": "mine"}]),
        ("context_management", {"edits": EDITS}),
    ],
)
def test_what_runs_at_anthropic_is_refused_by_name(site, field, value):
    told = ask(site, **{field: value})
    assert (told.status_code, told.json()["error"]["param"]) == (400, field)
    assert told.json()["error"]["code"] == "unsupported_parameter"


def test_a_tool_of_anthropics_that_the_client_runs(site):
    tools = [*TOOLS, {"type": "bash_20250124", "name": "bash"}]
    assert called(ask(site, tools=tools, tool_choice={"type": "tool", "name": "get_weather"})) == ["get_weather"]
