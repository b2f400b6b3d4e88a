"""What a worker says when it can't do what was asked: always `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from starlette.responses import JSONResponse


class WorkerError(Exception):
    """A request that ends with an error its sender can act on. `param` names the field at fault."""

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
        """OpenAI's word for this kind of error."""
        if self.status in {401, 403}:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, object]:
        """As it is sent, in an answer of its own or inside a stream."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """As an answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return JSONResponse(self.body(), self.status, headers)


def unsupported(name: str, why: str) -> WorkerError:
    """What the parameter asks for can't be done here."""
    return WorkerError(f"{name}: {why}", code="unsupported_parameter", param=name)


def queue_full(waiting: int) -> WorkerError:
    """No turn for this request."""
    message = f"This worker has {waiting} requests waiting already. Try again in a moment."
    return WorkerError(message, code="queue_full", status=503, retry_after_s=1)
