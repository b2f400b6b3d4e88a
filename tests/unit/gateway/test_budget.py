"""How long a request may take, by its own words."""

from __future__ import annotations

import pytest

from supervisor.errors import InvalidRequestError
from supervisor.gateway.identity.budget import budget_s
from supervisor.gateway.upstream_error import is_overflow, upstream_error
from tests.support.cases import cases


class TestBudget:
    """The least of what header and body say, in seconds."""

    @cases(
        ("headers", "said", "expected"),
        [
            ([], None, None),
            ([b"30"], None, 30.0),
            ([], 2.5, 2.5),
            ([], "7", 7.0),
            ([b"30", b"0.5"], 20, 0.5),
            ([b"86400"], None, 86400.0),
        ],
    )
    def test_the_least_counts(self, headers, said, expected):
        assert expected == budget_s([(b"x-timeout", value) for value in headers], said)

    @cases("said", [0, -1, 86401, True, [], {}, "soon", "nan", "inf", "", 10**400])
    def test_what_is_no_such_time(self, said):
        with pytest.raises(InvalidRequestError, match="x_timeout_s must be a number of seconds") as caught:
            budget_s([], said)
        assert caught.value.param == "x_timeout_s"


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
