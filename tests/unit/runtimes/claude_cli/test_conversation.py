"""Requests as prompts: each field is used, refused by its name, or named as ignored."""

from __future__ import annotations

import pytest

from runtimes.claude_cli.worker.conversation import parse_request
from runtimes.sdk.errors import WorkerError
from tests.support.cases import cases

USER = {"role": "user", "content": "Hello"}


def asked(**fields: object):
    return parse_request({"model": "m", "messages": [USER], **fields})


def refused(**fields: object) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        asked(**fields)
    return caught.value


class TestFields:
    def test_what_is_used(self):
        found = asked(stream=True, stream_options={"include_usage": True})
        assert (found.prompt, found.system, found.stream, found.include_usage) == ("Hello", "", True, True)
        assert found.ignored == ()

    def test_what_is_ignored(self):
        assert asked(temperature=1, seed=3, max_tokens=None, user="u").ignored == ("temperature", "seed", "user")

    def test_what_is_ignored_within_others(self):
        part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
        messages = [
            {"role": "assistant", "content": "Hi", "reasoning_content": "Hm", "refusal": None, "tool_calls": []},
            {"role": "user", "name": "me", "content": [part]},
        ]
        found = asked(messages=messages, stream_options={"include_usage": True, "include_obfuscation": False})
        assert set(found.ignored) == {
            "messages[0].reasoning_content",
            "messages[1].name",
            "messages[1].content[0].cache_control",
            "stream_options.include_obfuscation",
        }

    @cases("kind", [[], {}, 1, None, "", "image_url"])
    def test_a_part_of_another_type(self, kind):
        assert (
            refused(messages=[{"role": "user", "content": [{"type": kind, "": "x"}]}]).param == "messages[0].content[0]"
        )

    @cases(
        ("name", "value"),
        [
            ("tools", [{"type": "function"}]),
            ("functions", [{"name": "f"}]),
            ("tool_choice", "required"),
            ("tool_choice", {"type": "function"}),
            ("response_format", {"type": "json_schema"}),
            ("n", 2),
            ("logprobs", True),
            ("top_logprobs", 3),
            ("audio", {"voice": "v"}),
            ("modalities", ["text", "audio"]),
            ("web_search_options", {"x": 1}),
        ],
    )
    def test_what_is_refused(self, name, value):
        error = refused(**{name: value})
        assert error.param == name
        assert f'"{name}"' in str(error)

    def test_what_asks_for_nothing(self):
        nothing = {"tools": [], "tool_choice": "auto", "n": 1, "logprobs": False, "top_logprobs": 0, "audio": None}
        assert asked(**nothing, response_format={"type": "text"}, modalities=["text"]).ignored == ()


class TestMessages:
    @cases(
        ("message", "param"),
        [
            ("Hello", "messages[0]"),
            ({"content": "Hello"}, "messages[0].role"),
            ({"role": ["user"], "content": "Hello"}, "messages[0].role"),
            ({"role": "tool", "content": "4"}, "messages[0].role"),
            ({"role": "user"}, "messages[0].content"),
            ({"role": "user", "content": 5}, "messages[0].content"),
            ({"role": "user", "content": ["Hello"]}, "messages[0].content[0]"),
            ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0]"),
            ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ],
    )
    def test_mistakes(self, message, param):
        error = refused(messages=[message, USER])
        assert (error.param, error.code) == (param, "invalid_request")

    def test_what_is_no_text(self):
        error = refused(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        assert (error.param, error.code) == ("messages[0].content[0]", "modality_unsupported")

    @cases("messages", [None, [], "Hello", [{"role": "system", "content": "A"}],
                                          [USER, {"role": "assistant", "content": "B"}]])  # fmt: skip
    def test_nobody_to_answer(self, messages):
        assert refused(messages=messages).param == "messages"

    def test_parts(self):
        parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
        assert asked(messages=[{"role": "user", "content": parts}]).prompt == "One\nTwo"

    def test_an_assistant_that_refused(self):
        silent = {"role": "assistant", "content": None, "refusal": "No."}
        assert "<assistant>\nNo.\n</assistant>" in asked(messages=[USER, silent, USER]).prompt

    def test_half_a_character(self):
        assert refused(messages=[{"role": "user", "content": "\ud83d"}]).param == "messages"
