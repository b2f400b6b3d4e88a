"""All operations of the daemon: the routes that answer them, and the scope that each path needs."""

from __future__ import annotations

import re
from typing import Final

from starlette.routing import Route, compile_path

from supervisor.api import batches, clients, configuration, daemon, health, jobs, memory, models, requests
from supervisor.api.operation import Api, Endpoint, Group
from supervisor.schema.operation import Scope

GROUPS: Final[tuple[Group, ...]] = (
    jobs.GROUP,
    batches.GROUP,
    health.GROUP,
    models.GROUP,
    memory.GROUP,
    requests.GROUP,
    clients.GROUP,
    daemon.GROUP,
    configuration.GROUP,
)
"""In the order of the documentation."""


def _exactness(endpoint: Endpoint) -> tuple[int, int]:
    """Where two paths match, the longer one is meant, and of equally long ones that with fewer places."""
    return -endpoint.path.count("/"), endpoint.path.count("{")


ENDPOINTS: Final = sorted((endpoint for group in GROUPS for endpoint in group.endpoints), key=_exactness)
_SCOPES: Final[list[tuple[re.Pattern[str], Scope | None]]] = [
    *((compile_path(path)[0], endpoint.scope) for endpoint in ENDPOINTS for path in endpoint.paths),
    *((compile_path(other.path)[0], other.scope) for group in GROUPS for other in group.others),
    (re.compile("/ui/.*", re.DOTALL), None),
    (re.compile("/v1/admin.*", re.DOTALL), "admin"),
]


def routes(api: Api) -> list[Route]:
    """Those of all operations, the most exact paths first."""
    return [route for endpoint in ENDPOINTS for route in endpoint.routes(api)]


def scope_of(path: str) -> tuple[Scope | None] | None:
    """The scope of a key that the path needs, in a tuple; None: the path is none of the daemon's own.

    Below `/v1/admin` a path without an operation needs the scope admin.
    """
    return next(((scope,) for pattern, scope in _SCOPES if pattern.fullmatch(path)), None)
