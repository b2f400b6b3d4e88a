"""Authorization: the allowed hosts and origins, the only credential extractor, and the scope that each path requires.

It uses the same path as the application's routing and denies paths without a rule. Without keys the daemon listens only on
loopback and allows everything local; then the Host and Origin checks keep web pages in the user's browser out (DNS
rebinding, cross-site requests).
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from urllib.parse import urlsplit

from starlette.types import Scope

from supervisor.api.routing import scope_of
from supervisor.catalog.keys import Key, Keyring
from supervisor.catalog.sections.sections import METRICS, OLLAMA, ServerConfig
from supervisor.dialects.ollama import AT_OWN_PORT, Ollama
from supervisor.errors import AuthenticationError, ForbiddenError, InvalidRequestError, NotFoundError
from supervisor.gateway.dialect import Dialect
from supervisor.gateway.head import RequestHead, head_of
from supervisor.gateway.identity.rate_headers import NAMES as RATE_HEADERS

OWN_PAGES_ONLY = frozenset({"admin", "metrics", "configure"})
"""The scopes of paths that no page of another origin may call."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
MOST_HOSTS = 64
"""Most accepted Host fields that are kept."""
LONGEST_HOST = 300
CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})
"""The names by which containers reach their host."""
_HEALTH = frozenset({"/health", "/v1/health", "/livez"})


def own_names() -> frozenset[str]:
    """The names of this machine: its own, the one for its containers, and the one in its network (mDNS).

    Anyone who controls the network's DNS or mDNS can claim each of these names, and so rebind a page to this machine.
    """
    name = socket.gethostname().lower()
    return CONTAINER_NAMES | ({name, f"{name.partition('.')[0]}.local"} - {"", ".local"})


def scope_for(path: str, dialect: Dialect) -> str | None:
    """The key scope that `path` requires; None if it is open to all. The dialect decides about paths of inference."""
    declared = scope_of(path)
    return dialect.scope_for(path) if declared is None else declared[0]


def restrict_to_port(key: str, scope: Scope, dialect: Dialect) -> None:
    """Refuse a path that an extra port doesn't serve: it serves some of the main port's paths, with the same rules for keys.

    `key`: the port's key in the section `server`. Raises NotFoundError.
    """
    path = scope["path"]
    if key == OLLAMA:
        scope["state"][AT_OWN_PORT] = True
        if isinstance(dialect, Ollama) or path == "/" or path in _HEALTH or scope_for(path, dialect) == "inference":
            return
        answers = "Ollama's API and inference"
    else:
        assert key == METRICS
        if path == "/metrics" or path in _HEALTH:
            return
        answers = "/metrics, /health and /livez"
    raise NotFoundError(f"This port (server.{key}) answers {answers} alone: ask for {path[:200]} at the main port.")


def credential(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The only credential in these fields: `Authorization: Bearer`, or another header.

    An empty credential counts as none: clients without a key send `Bearer` and nothing. Raises InvalidRequestError for two
    different credentials, because another program might use the other one. Raises AuthenticationError for another scheme.
    """
    found: set[bytes] = set()
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() != b"bearer":
                raise AuthenticationError("Use 'Authorization: Bearer <key>' or 'x-api-key: <key>'.")
            found.add(token.strip())
        else:
            found.add(value.strip())
    found.discard(b"")
    if len(found) > 1:
        raise InvalidRequestError(
            "The request carries two different credentials; send one.", code="conflicting_credentials"
        )
    return found.pop() if found else None


class Auth:
    """Checks every request before anything else looks at it."""

    def __init__(self, keyring: Keyring, server: ServerConfig, local: Key | None = None) -> None:
        """`local`: the daemon's own key, which has all scopes if keys are required."""
        self._keyring = replace(keyring, keys=(*keyring.keys, local)) if keyring and local is not None else keyring
        named = {host.lower() for host in (*server.allowed_hosts, server.host)}
        self._hosts = LOOPBACK_NAMES | named
        self._own_names = own_names()
        self._served_hosts: set[bytes] = set()  # Host fields that passed the check
        self._origins = frozenset(origin.lower().rstrip("/") for origin in server.allowed_origins)

    def authorize(self, head: RequestHead, dialect: Dialect, wanted: str | None) -> Key | None:
        """The request's key (None: an open path, or no keys are configured). Raises the client's error.

        `wanted`: the scope that the request needs, see `scope_for`.
        """
        if head.host is not None and head.host not in self._served_hosts:
            self._check_host(head.host)
        if head.origin is not None or head.site is not None:
            self._check_origin(head, wanted)
        if wanted is None or not self._keyring.keys:
            return None
        secret = credential(head.keys(dialect.credential_headers))
        if secret is None:
            raise AuthenticationError(
                f"This needs a key: send 'Authorization: Bearer <key>'. Its operator makes one with: llmux keys add NAME --scope {wanted}"
            )
        key = self._keyring.authenticate(secret, time.time())
        if key is None:
            raise AuthenticationError("This key is not known, or it has expired.")
        if wanted not in key.scopes:
            remedy = f"Its operator makes one that has it with: llmux keys add NAME --scope {wanted}"
            message = f"The key {key.name!r} does not have the scope {wanted!r}. {remedy}"
            raise ForbiddenError(message, code="insufficient_scope")
        return key

    def cors(self, scope: Scope, wanted: str | None) -> list[tuple[bytes, bytes]]:
        """Headers that let a page of an allowed origin read the answer; none for the admin API. `wanted`: as above."""
        origin = head_of(scope).origin
        if origin is None or wanted != "inference":
            return []
        if not self._is_allowed_origin(origin.decode("latin-1").lower().rstrip("/")):
            return []
        headers = [
            (b"access-control-allow-origin", origin),
            (
                b"access-control-expose-headers",
                b"x-request-id, request-id, openai-processing-ms, retry-after, x-should-retry, x-queue-wait-ms, x-cache-hit, x-cache-tokens-reused, x-gpu-time-ms, x-llmux-model, x-llmux-reason, x-audio-s, x-processing-ms, x-real-time-factor, x-language, x-language-probability, "
                + b", ".join(RATE_HEADERS),
            ),
            (b"vary", b"origin"),
        ]
        if scope["method"] == "OPTIONS":
            # All requested headers: SDKs have dozens of their own, and the origin is already trusted.
            requested = [value for name, value in scope["headers"] if name == b"access-control-request-headers"]
            headers += [
                (b"access-control-allow-methods", b"GET, POST, DELETE"),
                (b"access-control-allow-headers", requested[0] if requested else b"authorization, content-type"),
                (b"access-control-max-age", b"600"),
            ]
            if any(name == b"access-control-request-private-network" for name, _ in scope["headers"]):
                headers.append((b"access-control-allow-private-network", b"true"))
        return headers

    def _is_allowed_origin(self, origin: str) -> bool:
        return _host_of_origin(origin)[0] in LOOPBACK_NAMES or origin in self._origins or "*" in self._origins

    def _check_host(self, value: bytes) -> None:
        host = _host_name(value.decode("latin-1"))
        is_served = host in self._hosts or _is_ip_address(host) or "*" in self._hosts
        if not (is_served or (self._keyring and host in self._own_names)):  # a rebound page has no key
            raise ForbiddenError(
                f"The host {host!r} is not served here; add it to server.allowed_hosts.",
                code="host_not_allowed",
            )
        if len(self._served_hosts) < MOST_HOSTS and len(value) <= LONGEST_HOST:
            self._served_hosts.add(value)

    def _check_origin(self, head: RequestHead, wanted: str | None) -> None:
        """Raises ForbiddenError. The daemon's own pages may call all paths, pages of other allowed origins only inference.

        Images, frames and links send no Origin, but browsers report in `Sec-Fetch-Site` whether the page is another site's.
        """
        if head.origin is not None:
            origin = head.origin.decode("latin-1").lower().rstrip("/")
            if _is_own_page(origin, head.host):
                return
            if wanted in OWN_PAGES_ONLY:
                raise ForbiddenError("Pages of other origins may not call this.", code="origin_not_allowed")
            if not self._is_allowed_origin(origin):
                raise ForbiddenError(
                    f"The origin {origin!r} may not call this; add it to server.allowed_origins.",
                    code="origin_not_allowed",
                )
            return
        if wanted is None:
            return
        if head.site == b"cross-site" or (head.site == b"same-site" and wanted in OWN_PAGES_ONLY):
            raise ForbiddenError("Pages of other sites may not refer to this.", code="origin_not_allowed")


def _is_own_page(origin: str, host: bytes | None) -> bool:
    """Is this the origin of llmux's own page? Its host was checked. The scheme may differ: a reverse proxy may terminate TLS."""
    return bool(host) and host is not None and _host_of_origin(origin)[1] == host.decode("latin-1").strip().lower()


def _host_of_origin(origin: str) -> tuple[str | None, str]:
    """The host name, and the host with its port, of an origin; neither for an origin that is no URL."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None, ""
    return parts.hostname, parts.netloc


def _is_ip_address(host: str) -> bool:
    """Is the host an IP address? DNS can't rebind an address: a page that calls llmux by one was loaded from that address."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _host_name(value: str) -> str:
    """The Host field without its port, lowercase."""
    value = value.strip().lower()
    if value.startswith("["):
        return value.partition("]")[0] + "]"
    return value.partition(":")[0]
