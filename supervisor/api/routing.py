"""All operations of the daemon: the routes that answer them, and the scope that each path needs."""

from __future__ import annotations

import re
from typing import Final

from starlette.routing import Route

from supervisor.api import batches, clients, configuration, daemon, health, jobs, memory, models, requests
from supervisor.api.operation import Api
from supervisor.gateway.operation import Endpoint, Group, pattern
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


_PATHS: Final = [
    *(path for endpoint in ENDPOINTS for path in endpoint.paths),
    *(other.path for group in GROUPS for other in group.others),
]
_SCOPES: Final[list[tuple[re.Pattern[str], Scope | None]]] = [
    *((pattern(path), endpoint.scope) for endpoint in ENDPOINTS for path in endpoint.paths),
    *((pattern(other.path), other.scope) for group in GROUPS for other in group.others),
    (re.compile("/ui/.*", re.DOTALL), None),
    (re.compile(f"{configuration.PATH}/.*", re.DOTALL), "configure"),
    (re.compile("/v1/admin.*", re.DOTALL), "admin"),
]
"""Also of paths without an operation, below those that have some."""
_PREFIXES: Final = tuple({path.partition("{")[0] for path in (*_PATHS, "/ui/", "/v1/admin")} - {"/"})


def routes(api: Api) -> list[Route]:
    """Those of all operations, the most exact paths first."""
    return [route for endpoint in ENDPOINTS for route in endpoint.routes(api)]


def scope_of(path: str) -> tuple[Scope | None] | None:
    """The scope of a key that the path needs, in a tuple; None: the path is none of the daemon's own."""
    if path != "/" and not path.startswith(_PREFIXES):
        return None
    return next(((scope,) for pattern, scope in _SCOPES if pattern.fullmatch(path)), None)
