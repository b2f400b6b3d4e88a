"""The operational errors: each carries what its renderer needs (HTTP status, OpenAI `type` and `code`, remedy).

Bugs are assertions and are not caught; an `LlmuxError` is always something a person can act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

MAX_RETRY_AFTER_S: Final = 120
"""Clients ignore a longer `Retry-After`."""


class LlmuxError(Exception):
    """Root of all operational errors.

    `message` is for a person and says what to do; `param` names the offending field; `retry_after_s` becomes
    `Retry-After`; `detail` holds further lines (a worker's last words) for the error body.
    """

    status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR
    type: str = "server_error"
    code: str = "internal_error"
    lasts: bool = False  # a client that tries again, however soon a client does, gets the same
    figures: Mapping[str, float | None] = MappingProxyType({})  # further fields of the error body

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        detail: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.detail = detail


class InvalidRequestError(LlmuxError):
    """The client sent something that can't be served as it is."""

    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"
    code = "invalid_request"


class AuthenticationError(LlmuxError):
    """No credential, or not a valid one."""

    status = HTTPStatus.UNAUTHORIZED
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(LlmuxError):
    """A valid credential without the scope, or a host or origin that is not allowed."""

    status = HTTPStatus.FORBIDDEN
    type = "permission_error"
    code = "forbidden"


class NotFoundError(LlmuxError):
    """No such path or model."""

    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowedError(LlmuxError):
    """The path exists, the method doesn't."""

    status = HTTPStatus.METHOD_NOT_ALLOWED
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed  # the methods that are, comma-separated


class TooLargeError(LlmuxError):
    """A body or header over its limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimitError(LlmuxError):
    """The caller sends too much."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class RequestCancelledError(LlmuxError):
    """An operator ended the request. Not a status that clients try again on."""

    status = HTTPStatus.GONE
    code = "request_cancelled"


class UnavailableError(LlmuxError):
    """It can't be served now: queue full, load failed, shutting down."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "unavailable"


class QueueTimeoutError(LlmuxError):
    """It waited for a worker as long as it may."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    code = "queue_timeout"


class LeaseUnavailableError(LlmuxError):
    """A partner asked for memory that isn't free now."""

    status = HTTPStatus.CONFLICT
    code = "lease_unavailable"


class UpstreamError(LlmuxError):
    """A worker answered wrongly or broke off before its answer."""

    status = HTTPStatus.BAD_GATEWAY
    code = "upstream_error"


class UnreachableError(UpstreamError):
    """A worker takes no connection; nothing of the request was sent."""


class UpstreamTimeoutError(LlmuxError):
    """A worker did not answer in time."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    code = "upstream_timeout"


class BudgetError(LlmuxError):
    """An answer can't come, or did not come, within the time that its request has."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    code = "budget_exceeded"
    lasts = True


class ConfigError(LlmuxError):
    """The configuration is wrong; `problems` lists every one of them, each with its place."""

    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"
    code = "invalid_configuration"

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems), detail=problems)
        self.problems = problems
