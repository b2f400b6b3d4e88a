"""Counts of tokens by an answer of one token: what is asked, and what becomes of the answer."""

from __future__ import annotations

import json

import msgspec
import pytest

from supervisor.errors import InvalidRequestError, UpstreamError
from supervisor.gateway.filters.counting import Counting


def asked(**fields):
    """The request that goes out."""
    raw = {key: msgspec.Raw(json.dumps(value).encode()) for key, value in fields.items()}
    return {key: msgspec.json.decode(raw) for key, raw in Counting("m").request(raw)[0].items()}


def told(body):
    return Counting("m").request({})[1].answer(body)


class TestRequest:
    """As short an answer as can be, to the same prompt."""

    def test_the_prompt_stays(self):
        fields = {"model": "m", "messages": [], "tools": [], "response_format": {"type": "text"}, "stop": ["."]}
        assert asked(**fields) == fields | {"max_tokens": 1}

    def test_what_makes_the_answer_longer_goes(self):
        assert asked(max_tokens=500, stream=True, stream_options={}, n=3, min_tokens=5) == {"max_tokens": 1}

    @pytest.mark.parametrize("other", [{}, {"max_tokens": 9}])
    def test_the_limit_of_models_that_take_no_other(self, other):
        assert asked(max_completion_tokens=500, **other) == {"max_completion_tokens": 1}

    def test_a_limit_that_is_null_is_none(self):
        assert asked(max_completion_tokens=None) == {"max_tokens": 1}


class TestAnswer:
    """The count."""

    def test_of_the_prompt_alone(self):
        body = b'{"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}}'
        assert json.loads(told(body)) == {"object": "response.input_tokens", "input_tokens": 12}

    @pytest.mark.parametrize("body", [b"{}", b'{"usage": null}', b'{"usage": {}}', b'{"usage": {"prompt_tokens": 0}}'])
    def test_there_is_none(self, body):
        with pytest.raises(InvalidRequestError, match="m doesn't count tokens") as refused:
            told(body)
        assert (refused.value.code, refused.value.param) == ("endpoint_not_supported", "model")

    @pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"usage": {"prompt_tokens": "many"}}'])
    def test_no_answer(self, body):
        with pytest.raises(UpstreamError):
            told(body)
