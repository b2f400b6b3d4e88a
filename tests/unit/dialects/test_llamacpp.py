"""llama.cpp's dialect: which requests are the daemon's own."""

from __future__ import annotations

from supervisor.dialects.llamacpp import LLAMACPP
from tests.support.cases import cases


@cases(
    ("query", "is_for_daemon"),
    [(b"", True), (b"model=", True), (b"%C2%9F=%C3%A4", True), (b"model=a", False), (b"model=%C3%A4&%C2%9F=1", False)],
)
def test_props_of_no_model(query, is_for_daemon):
    """A query may have any characters."""
    assert LLAMACPP.is_for_daemon("GET", "/props", query) is is_for_daemon
