"""All operations of the daemon: their routes, and the scope that each path needs."""

from __future__ import annotations

from typing import Final

from starlette.routing import Route

from supervisor.api import all_jobs, batches, clients, configuration, daemon, health, jobs, memory, models, requests
from supervisor.api.operation import Api
from supervisor.gateway.operation import Endpoint, Group, pattern
from supervisor.schema.operation import Scope

GROUPS: Final[tuple[Group, ...]] = (
    jobs.GROUP,
    batches.GROUP,
    health.GROUP,
    models.GROUP,
    all_jobs.GROUP,
    memory.GROUP,
    requests.GROUP,
    clients.GROUP,
    daemon.GROUP,
    configuration.GROUP,
)
"""In the order of the documentation."""


def _specificity(endpoint: Endpoint) -> tuple[int, int]:
    """A sort key: longer paths come first, and among equally long paths those with fewer parameters."""
    return -endpoint.path.count("/"), endpoint.path.count("{")


ENDPOINTS: Final = sorted((endpoint for group in GROUPS for endpoint in group.endpoints), key=_specificity)


_SCOPES: Final[list[tuple[str, Scope | None]]] = [
    *((path, endpoint.scope) for endpoint in ENDPOINTS for path in endpoint.paths),
    *((other.path, other.scope) for group in GROUPS for other in group.others),
    ("/ui/{path:path}", None),
    (f"{configuration.PATH}/{{path:path}}", "configure"),
    ("/v1/admin{path:path}", "admin"),
]
"""The scope of each path; the last entries are for paths without an operation."""
_PATTERNS: Final = [(pattern(path), scope) for path, scope in _SCOPES]
_PREFIXES: Final = tuple({path.partition("{")[0] for path, _ in _SCOPES} - {"/"})


def routes(api: Api) -> list[Route]:
    """The routes of all operations, the most specific paths first."""
    return [route for endpoint in ENDPOINTS for route in endpoint.routes(api)]


def scope_of(path: str) -> tuple[Scope | None] | None:
    """The key scope of a path, in a tuple; None: the path doesn't belong to the daemon."""
    if path != "/" and not path.startswith(_PREFIXES):
        return None
    return next(((scope,) for pattern, scope in _PATTERNS if pattern.fullmatch(path)), None)
