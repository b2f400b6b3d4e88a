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


@cases(
    ("path", "scope"),
    [("/models", "inference"), ("/models/load", "admin"), ("/models/sse", "inference"), ("/completion", None)],
)
def test_owned(path, scope):
    """What the daemon answers; a worker's paths of inference are OpenAI's."""
    assert LLAMACPP.owns(path) is (scope is not None)
    assert scope is None or LLAMACPP.scope_for(path) == scope
