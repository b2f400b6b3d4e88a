"""The progress of requests that are processed in steps. `GET /progress` shows it by `x-request-id`.

The model's thread records each step; the server's thread reads the records.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response


class Steps:
    """The progress of running requests, and a count of all steps. `report` is the endpoint."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests: dict[str, tuple[int, int]] = {}  # steps made, of how many
        self._counter = Counter("llmux_worker_steps", "Steps made.", registry=registry)

    def begin(self, request: str, steps: int) -> None:
        """The model begins with this request, which has this many steps."""
        self._requests[request] = (0, steps)

    def finish_step(self, request: str, step: int, steps: int) -> None:
        """The model finished this step, of now this many."""
        self._counter.inc()
        self._requests[request] = (step, steps)

    def end(self, request: str) -> None:
        """Remove the request."""
        self._requests.pop(request, None)

    async def report(self, _request: Request) -> Response:
        """The endpoint: the progress of each running request."""
        steps_by_id = {name: {"step": step, "steps": steps} for name, (step, steps) in self._requests.copy().items()}
        return JSONResponse({"requests": steps_by_id})
