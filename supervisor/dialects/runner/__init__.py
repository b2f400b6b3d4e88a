"""The API of a model runner: what it can do, loads and unloads as tasks, and its caches of prompts.

For schedulers that route requests to several runners and tell each which models to load. Inference is OpenAI's; the headers
that such clients send with it are the daemon's (`supervisor.gateway.route.caching`). Errors are
`{"error": {"code", "message", …}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.daemon.health import lifetime
from supervisor.dialects.openai import OpenAI
from supervisor.dialects.runner import flush, lifecycle
from supervisor.dialects.runner.capabilities import FRESH_S, Descriptor
from supervisor.errors import UnavailableError
from supervisor.gateway.disconnect import Scope

_SCOPES: Final = {
    "/v1/capabilities": "inference",
    "/v1/models/load": "admin",
    "/v1/models/unload": "admin",
    "/v1/cache/flush": "admin",
}
_COMMANDS: Final = frozenset({"/v1/models/load", "/v1/models/unload"})
_FIRST: Final = ("code", "message")


class Runner(OpenAI):
    """Its paths; keys are as OpenAI's."""

    name = "runner"
    shares_paths = True

    def owns(self, path: str) -> bool:
        """The fixed ones, and all below those of loads: who asks there for what isn't there is a runner's client."""
        return path in _SCOPES or path.startswith(lifecycle.TASKS)

    def is_spoken_by(self, scope: Scope) -> bool:
        """A model may be called `load`: `GET /v1/models/load` is OpenAI's."""
        return not (scope["method"] in ("GET", "HEAD") and scope["path"] in _COMMANDS)

    def scope_for(self, path: str) -> str | None:
        """What changes something, or tells of it, needs the admin scope; a model whose name begins with `load/` does not."""
        return _SCOPES.get(path, "admin" if lifecycle.is_task(path) else "inference")

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """Code and message, then what else there is."""
        known = {name: fields[name] for name in _FIRST if name in fields}
        rest = {name: value for name, value in fields.items() if name != "type" and value is not None}
        return msgspec.json.encode({"error": {**known, **rest}})

    def routes(self, daemon: Daemon) -> list[Route]:
        """See the module."""
        descriptor = Descriptor(daemon)

        async def capabilities(_request: Request) -> Response:
            if (phase := lifetime(daemon)) is not None:
                raise UnavailableError(f"The runner is {phase}.", retry_after_s=FRESH_S)
            headers = {"cache-control": f"private, max-age={FRESH_S:.0f}"}
            return JSONResponse(await descriptor.view(), headers=headers)

        return [
            Route("/v1/capabilities", capabilities, methods=["GET"]),
            *lifecycle.routes(daemon),
            *flush.routes(daemon),
        ]


RUNNER: Final = Runner()
