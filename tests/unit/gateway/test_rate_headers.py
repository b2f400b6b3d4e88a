"""What is left of a client's limits, in OpenAI's headers."""

from __future__ import annotations

from supervisor.core.admission.limits import Counted, Standing
from supervisor.gateway.identity.rate_headers import NAMES, duration, rate_headers
from tests.support.cases import cases

REQUESTS = Standing("a", Counted.REQUESTS, 60, 60.0, 10, 0.0, 50.0)
TOKENS = Standing("a", Counted.TOKENS, 1000, 60.0, 0, 3.2, 63.1)


@cases(
    ("count_s", "told"),
    [
        (0.0, "0ms"),
        (0.12, "120ms"),
        (1.0, "1s"),
        (8.64, "8.64s"),
        (59.9, "59.9s"),
        (60.0, "1m0s"),
        (361.4, "6m1s"),
        (3605.0, "1h0m5s"),
    ],
)
def test_durations_are_written_as_openai_does(count_s, told):
    assert duration(count_s) == told


def test_requests_and_tokens():
    headers = rate_headers([REQUESTS, TOKENS, Standing("a", Counted.CONCURRENCY, 4, 0.0, 0, 1.0, 0.0)])
    assert headers == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"10"),
        (b"x-ratelimit-reset-requests", b"50s"),
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"0"),
        (b"x-ratelimit-reset-tokens", b"1m3s"),
    ]
    assert {name for name, _ in headers} == set(NAMES)


def test_before_a_request_is_charged():
    headers = dict(rate_headers([REQUESTS, TOKENS], taking=1))
    assert headers[b"x-ratelimit-remaining-requests"] == b"9"
    assert headers[b"x-ratelimit-reset-requests"] == b"51s"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"0"


def test_of_several_accounts_the_one_with_least_left():
    other = Standing("b", Counted.REQUESTS, 5, 60.0, 2, 0.0, 36.0)
    headers = dict(rate_headers([REQUESTS, other]))
    assert headers[b"x-ratelimit-limit-requests"] == b"5"
    assert headers[b"x-ratelimit-remaining-requests"] == b"2"


def test_without_limits_nothing():
    assert rate_headers([]) == []
