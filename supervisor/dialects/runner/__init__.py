"""The API of a model runner: its capabilities, loads and unloads as tasks, and flushes of prompt caches.

Its clients are schedulers that route requests to several runners and tell each runner which models to load. Inference uses
OpenAI's API; `supervisor.gateway.route.caching` handles the headers that such clients add. Errors are
`{"error": {"code", "message", …}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.routing import Route

from supervisor.daemon.daemon import Daemon
from supervisor.dialects.openai import OpenAI
from supervisor.dialects.runner.capabilities import RunnerApi
from supervisor.dialects.runner.operations import GROUP, TASKS
from supervisor.gateway.disconnect import Scope

_PATHS: Final = frozenset(endpoint.path for endpoint in GROUP.endpoints)
_FIRST: Final = ("code", "message")


class Runner(OpenAI):
    """The runner's paths; API keys work as with OpenAI's API."""

    name = "runner"
    shares_paths = True

    def owns(self, path: str) -> bool:
        """The fixed paths, and every path below that of load tasks: only a runner's client requests unknown paths there."""
        return path in _PATHS or path.startswith(TASKS)

    def is_spoken_by(self, scope: Scope) -> bool:
        """A model may have the name `load`, so `GET /v1/models/load` belongs to OpenAI's dialect."""
        return not (scope["method"] in ("GET", "HEAD") and scope["path"] in ("/v1/models/load", "/v1/models/unload"))

    def scope_for(self, path: str) -> str | None:
        """The operation's scope. A path without an operation may belong to a model with a name such as `load/a`."""
        return "inference" if (operation := GROUP.at(path)) is None else operation.scope

    def error(self, fields: Mapping[str, object], status: int) -> bytes:
        """See Dialect: code and message, then the other fields."""
        known = {name: fields[name] for name in _FIRST if name in fields}
        rest = {name: value for name, value in fields.items() if name != "type" and value is not None}
        return msgspec.json.encode({"error": {**known, **rest}})

    def routes(self, daemon: Daemon) -> list[Route]:
        """See the module."""
        return GROUP.routes(RunnerApi(daemon))


RUNNER: Final = Runner()
