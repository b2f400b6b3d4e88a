"""llama.cpp's 500 for a mistake of the client is a 400; a server's own failure stays one."""

from __future__ import annotations

import json

import pytest

from supervisor.dialects.openai import OPENAI
from supervisor.gateway.upstream_error import error_answer, is_overflow, restated, upstream_error
from tests.support.cases import cases


def failure(message: str, status: int = 500) -> bytes:
    """As llama.cpp writes it."""
    return json.dumps(
        {"error": {"code": status, "message": message, "type": "server_error"}}, ensure_ascii=False
    ).encode()


class TestRestated:
    """By the words that begin its message."""

    @cases(
        ("message", "told"),
        [
            ("Failed to parse messages: Missing 'role' in message: {}; messages = [ {} ]", None),
            (
                'Failed to parse tools: Missing tool type: "x"; tools = ' + "[0]" * 90_000,
                'Failed to parse tools: Missing tool type: "x"',
            ),
            ("Failed to parse tool call arguments as JSON: at line 1\ncolumn 3", None),
            ("'messages' is required", None),
            ("audio input is not supported - hint: you may need to provide the mmproj", None),
        ],
    )
    def test_a_clients_mistake(self, message, told):
        status, data = restated(500, failure(message)[: 64 * 1024])
        error = json.loads(error_answer(status, b"application/json", data, OPENAI))["error"]
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request")
        assert error["message"] == (told or message.partition("; messages = ")[0])

    @cases("letter", ["a", "\x01", '"', "\u00e4", "\U0001f642"])
    @cases("shift", range(6))
    def test_one_that_repeats_much_of_what_was_sent(self, letter, shift):
        """It is cut, but not within a character."""
        message = "Failed to parse tools: Expected 'tools' to be an array, got " + "x" * shift + letter * 30_000
        status, data = restated(500, failure(message)[: 64 * 1024])
        told = json.loads(error_answer(status, b"application/json", data, OPENAI))["error"]["message"]
        assert (status, message.startswith(told)) == (400, True)
        assert len(told) > 200

    @pytest.mark.parametrize(
        ("status", "said", "param"),
        [
            (501, "Infill is not supported by this model", "suffix"),
            (500, "vector::_M_range_check: __n (which is 99) >= this->size() (which is 9)", "tokens"),
        ],
    )
    def test_one_that_is_named(self, status, said, param):
        mended, data = restated(status, failure(said))
        error = json.loads(data)["error"]
        assert (mended, error["param"], error["type"]) == (400, param, "invalid_request_error")

    def test_an_embedding_longer_than_the_context(self):
        said = (
            "input (9000 tokens) is too large to process. increase the physical batch size (current batch size: 8192)"
        )
        status, data = restated(500, failure(said))
        error = json.loads(error_answer(status, b"application/json", data, OPENAI))["error"]
        assert (status, error["code"], error["message"]) == (400, "context_length_exceeded", said)

    @cases(
        ("status", "data"),
        [
            (500, failure("CUDA error: out of memory")),
            (500, failure("it said: Failed to parse tools: x")),
            (500, b"Failed to parse tools: x"),
            (500, b""),
            (503, failure("Failed to parse tools: x")),
            (400, failure("'messages' is required")),
        ],
    )
    def test_anything_else_stays(self, status, data):
        assert restated(status, data) == (status, data)


class TestParam:
    """The field that a worker complains of, as the client calls it."""

    @pytest.mark.parametrize(
        ("param", "told"), [("temperature", "decoding.temperature"), ("seed", "seed"), (None, None), (["seed"], None)]
    )
    def test_of_a_translated_request(self, param, told):
        error = {"message": "No.", "type": "invalid_request_error", "code": "x", "param": param}
        names = {"temperature": "decoding.temperature"}
        said = error_answer(400, b"application/json", json.dumps({"error": error}).encode(), OPENAI, names)
        assert json.loads(said) == {"error": error | {"param": told}}


class TestOverflow:
    """A worker's error that the prompt is too long, whatever it calls that."""

    @pytest.mark.parametrize(
        ("status", "body"),
        [
            (400, b'{"error": {"code": 400, "message": "the request exceeds the available context size, try less"}}'),
            (400, b'{"error": {"code": "context_length_exceeded", "message": "too many"}}'),
            (400, b'{"error": {"message": "This model\'s maximum context length is 4096 tokens.", "code": 400}}'),
            (
                400,
                b'{"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}}',
            ),
        ],
    )
    def test_known_kinds(self, status, body):
        assert is_overflow(upstream_error(status, b"application/json", body))

    @pytest.mark.parametrize(
        ("status", "body"),
        [
            (400, b'{"error": {"message": "no such field"}}'),
            (500, b'{"error": {"code": "context_length_exceeded", "message": "maximum context length"}}'),
            (429, b'{"error": {"message": "too many requests"}}'),
        ],
    )
    def test_others(self, status, body):
        assert not is_overflow(upstream_error(status, b"application/json", body))
