"""What whole answers say of their worker's cache."""

from __future__ import annotations

from supervisor.gateway.filters.cache_report import report
from tests.support.cases import cases


@cases(
    ("body", "headers"),
    [
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": 5}}}', {"hit": b"true", "tokens-reused": b"5"}),
        (b'{"usage": {"input_tokens_details": {"cached_tokens": 0}}}', {"hit": b"false", "tokens-reused": b"0"}),
        (b'{"usage": {"cache_read_input_tokens": 3}}', {"hit": b"true", "tokens-reused": b"3"}),
        (b'{"timings": {"cache_n": 2}}', {"hit": b"true", "tokens-reused": b"2"}),
        (b'{"timings": {"prompt_ms": 1.5, "predicted_ms": 2}}', {"gpu": b"3"}),
        (b'{"usage": {"prompt_tokens_details": null}, "timings": null}', {}),
        (b'{"usage": "none"}', {}),
        (b"[]", {}),
        (b"", {}),
    ],
)
def test_says_what_is_there_and_nothing_else(body, headers):
    names = {"hit": b"x-cache-hit", "tokens-reused": b"x-cache-tokens-reused", "gpu": b"x-gpu-time-ms"}
    assert dict(report(body)) == {names[name]: value for name, value in headers.items()}
