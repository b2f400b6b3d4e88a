"""Every error has Anthropic's shape on Anthropic's paths."""

from __future__ import annotations

import json

from supervisor.dialects import dialect_of
from supervisor.errors import (
    AuthenticationError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    RateLimitError,
    TooLargeError,
    UnavailableError,
    UpstreamError,
    UpstreamTimeoutError,
)
from supervisor.gateway.error_response import error_body
from tests.support.cases import cases

PATHS = ("/v1/messages", "/v1/messages/count_tokens")


class TestShape:
    """`{"type": "error", "error": {"type", "message", …}}`, with our own fields inside."""

    @cases("path", PATHS)
    @cases(
        ("error", "kind"),
        [
            (InvalidRequestError("x", param="model"), "invalid_request_error"),
            (AuthenticationError("x"), "authentication_error"),
            (ForbiddenError("x"), "permission_error"),
            (NotFoundError("x"), "not_found_error"),
            (TooLargeError("x"), "request_too_large"),
            (RateLimitError("x"), "rate_limit_error"),
            (UnavailableError("x", detail=("a", "b")), "overloaded_error"),
            (UpstreamError("x"), "api_error"),
            (UpstreamTimeoutError("x"), "timeout_error"),
        ],
    )
    def test_kinds(self, path, error, kind):
        told = json.loads(error_body(error, dialect_of({"path": path, "headers": []})))
        assert {"type", "error"} == told.keys()
        assert told["type"] == "error"
        assert (kind, "x") == (told["error"]["type"], told["error"]["message"])
        assert (error.code, error.param) == (told["error"]["code"], told["error"]["param"])
        assert list(error.detail) == told["error"].get("detail", [])

    @cases("path", ["", "/v1/chat/completions", "/v1/messagesx", "/messages", "/v1/admin/models"])
    def test_other_paths_keep_theirs(self, path):
        assert json.loads(error_body(NotFoundError("x"), dialect_of({"path": path, "headers": []}))).keys() == {"error"}
