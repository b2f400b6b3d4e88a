"""What llhttp accepts and llmux refuses."""

from __future__ import annotations

import pytest

from supervisor.errors import MethodNotAllowedError
from supervisor.server.request_head import METHODS, refused_head, without_upgrade

HOST = (b"host", b"a")


def refusal(version="1.1", *fields, method=b"GET", url=b"/"):
    return refused_head(method, version, url, list(fields), 1000)


def test_a_head_without_its_offer_of_another_protocol():
    fields = [HOST, (b"upgrade", b"h2c"), (b"connection", b"Upgrade"), (b"http2-settings", b"A"), (b"x-a", b"1")]
    assert without_upgrade(b"GET", "1.1", b"/x", fields) == b"GET /x HTTP/1.1\r\nhost: a\r\nx-a: 1\r\n\r\n"


class TestHost:
    """Exactly one in HTTP/1.1, at most one in HTTP/1.0, which may do without."""

    @pytest.mark.parametrize(("version", "fields"), [("1.1", [HOST]), ("1.0", [HOST]), ("1.0", [])])
    def test_accepted(self, version, fields):
        assert refusal(version, *fields) is None

    @pytest.mark.parametrize(
        ("version", "fields", "clue"),
        [
            ("1.1", [], "has no Host"),
            ("1.1", [(b"x-host", b"a")], "has no Host"),
            ("1.1", [HOST, HOST], "several Host"),
            ("1.0", [HOST, HOST], "several Host"),
        ],
    )
    def test_refused(self, version, fields, clue):
        error = refusal(version, *fields)
        assert error.status == 400
        assert clue in error.message


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_other_versions_are_named(version):
    error = refusal(version, HOST)
    assert (error.status, f"HTTP/{version}" in error.message) == (400, True)


@pytest.mark.parametrize("method", [b"TRACE", b"CONNECT", b"PROPFIND"])
def test_a_method_for_no_path_says_which_there_are(method):
    error = refusal("1.1", HOST, method=method)
    assert isinstance(error, MethodNotAllowedError)
    assert set(error.allowed.encode().split(b", ")) == METHODS
