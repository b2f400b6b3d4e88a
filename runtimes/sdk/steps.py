"""How far requests are that are worked on in steps: `GET /progress` tells it by their `x-request-id`.

The model's thread writes it down after each step, the server's reads it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response


class Steps:
    """The requests that the model works on, and a count of all steps. `tell` is the endpoint."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests: dict[str, tuple[int, int]] = {}  # steps made, of how many
        self._made = Counter("llmux_worker_steps", "Steps made.", registry=registry)

    def begin(self, request: str, steps: int) -> None:
        """It is worked on now, in so many steps."""
        self._requests[request] = (0, steps)

    def made(self, request: str, step: int, steps: int) -> None:
        """One more: its `step`th of now so many."""
        self._made.inc()
        self._requests[request] = (step, steps)

    def end(self, request: str) -> None:
        """Nothing more is told of it."""
        self._requests.pop(request, None)

    async def tell(self, _request: Request) -> Response:
        """Of each request that has begun."""
        told = {name: {"step": step, "steps": steps} for name, (step, steps) in self._requests.copy().items()}
        return JSONResponse({"requests": told})
