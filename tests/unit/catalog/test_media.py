"""`server.media`: hosts are names, IP addresses and ports, and nothing else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from supervisor.catalog.media import MediaConfig
from tests.support.cases import cases


@cases(
    "host",
    ["h", "images.Example.com", "*.example.org", "*", "*:8443", "h:8443", "10.0.0.5", "10.0.0.5:1", "[fd00::5]:2"],
)
def test_hosts(host):
    assert MediaConfig(hosts=(host,)).hosts == (host,)


@cases(
    "host",
    [
        "",
        "https://h",
        "h/a",
        "10.0.0.0/8",
        "a b",
        "*.",
        "a.*.b",
        "*a",
        "h:",
        "h:0",
        "fd00::5",
        "user@h",
        "h.",
        "b\u00fcch.er",
    ],
)
def test_no_hosts(host):
    with pytest.raises(ValidationError):
        MediaConfig(hosts=(host,))
