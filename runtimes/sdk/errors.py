"""A worker's error responses: always `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from starlette.responses import JSONResponse


class WorkerError(Exception):
    """An error that the client can act on. `param` names the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's type for this kind of error."""
        if self.status in {401, 403}:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, object]:
        """The JSON of an error response or of an error event in a stream."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error response."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(), self.status, headers)


def unsupported(name: str, why: str) -> WorkerError:
    """The error for a parameter whose value this runtime doesn't support."""
    return WorkerError(f"{name}: {why}", code="unsupported_parameter", param=name)


def queue_full(waiting: int) -> WorkerError:
    """The error for a request that the full queue refuses."""
    message = f"This worker has {waiting} requests waiting already. Try again in a moment."
    return WorkerError(message, code="queue_full", status=503, retry_after_s=1)
