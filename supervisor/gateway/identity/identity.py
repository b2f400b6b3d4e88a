"""The stage that finds a request's tenant and priority, the keep-alive of its model, and its time budget.

The sources are the request's headers and body, its key, and its client's profile. The tenant is the key's. The request may
name another tenant only without keys or with a key for others (`for_others`), and only while `server.multi_tenant` is on. The
priority is the request's, else the key's, else the client's, else normal, but never more urgent than the key's ceiling.

`x_timeout_s` in the body, or the header `X-Timeout`, limits the time that the request may take, in seconds.
`X-Llmux-Load-Feedback` asks for status lines in the stream while the model loads. All of these headers and fields are llmux's
own and are never forwarded.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from supervisor.catalog import Catalog
from supervisor.catalog.keys import Key
from supervisor.catalog.sections.clients import ClientConfig
from supervisor.catalog.sections.sections import TENANT_LIMIT
from supervisor.core.demand import DEFAULT_DEMAND, NORMAL, Demand, priority_of
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import BUDGET, CLIENT, KEEP_ALIVE, PRIORITY, Body
from supervisor.gateway.head import LOAD_FEEDBACK, TIMEOUT, TRACE
from supervisor.gateway.head import PRIORITY as PRIORITY_HEADER
from supervisor.gateway.head import TENANT as TENANT_HEADER
from supervisor.gateway.identity.accounts import accounts_of
from supervisor.gateway.identity.trace_context import new_trace, trace_of
from supervisor.gateway.response_cycle import ResponseCycle
from supervisor.gateway.route.caching import CacheDirective, cache_directive_of
from supervisor.host.upstream.upstream import Headers

LONGEST_KEEP_ALIVE_S: Final = 86_400
LONGEST_BUDGET_S: Final = 86_400.0
_BOOLEANS: Final = {
    **dict.fromkeys((b"true", b"1", b"yes", b"on"), True),
    **dict.fromkeys((b"false", b"0", b"no", b"off"), False),
}


class Identity(NamedTuple):
    """A request's demand, for the queue and the limits, and its client's profile."""

    demand: Demand
    profile: ClientConfig
    is_lowered: bool = False  # the request asked for a more urgent priority than its key has


class Identifying:
    """The stage for one catalog. Requests without such headers and fields share one identity for each key."""

    def __init__(self, catalog: Catalog, arrived: Callable[[str], None]) -> None:
        """`arrived` counts a tenant's request, and raises RateLimitError while the tenant has to pause."""
        self._catalog = catalog
        self._arrived = arrived
        self._identities: dict[bytes | None, Identity] = {}  # by the key's digest
        self._default_directive = CacheDirective() if catalog.server.reports_caches else None

    async def __call__(self, cycle: ResponseCycle) -> None:
        """Set the request's demand, trace and budget. Raises InvalidRequestError, and RateLimitError in a pause."""
        request, body, own = cycle.request, cycle.body, cycle.head.own
        key = request.key
        if own or not body.is_silent:
            request.demand, cycle.profile, is_lowered = identify(own, body, key, self._catalog)
            for name, value in own:
                if name == TRACE:
                    request.trace = trace_of(value)
            request.cache = cache_directive_of(own) or self._default_directive
            request.budget_s = budget_s(own, body.extension(BUDGET))
            if is_lowered:
                request.extra.append((PRIORITY_HEADER, b"%d" % request.demand.priority))
        else:
            digest = None if key is None else key.digest
            known = self._identities.get(digest)
            if known is None:
                known = self._identities[digest] = identify(own, body, key, self._catalog)
            request.demand, cycle.profile, _ = known
            request.cache = self._default_directive
        if self._catalog.server.traces:
            request.trace, request.span_id = request.trace or new_trace(), secrets.token_hex(8)
        if request.demand.tenant:
            self._arrived(request.demand.tenant)


def identify(headers: Headers, body: Body, key: Key | None, catalog: Catalog) -> Identity:
    """A request's identity. A header takes precedence over the body's field. Raises InvalidRequestError."""
    priority: object = None
    tenant: object = None
    for name, value in headers:
        if name == PRIORITY_HEADER:
            priority = _header_text(value, "X-Priority", priority)
        elif name == TENANT_HEADER:
            tenant = _header_text(value, "X-Tenant-ID", tenant)
    priority = priority or body.extension(PRIORITY)
    if catalog.server.multi_tenant and (key is None or key.for_others):
        tenant = tenant or body.extension(CLIENT)
        own = "" if key is None else key.tenant or key.name
        tenant_name = own if tenant is None else _check_tenant(tenant) or own
    else:
        tenant_name = "" if key is None else key.tenant or key.name
    profile = catalog.client(tenant_name)
    if priority is not None:
        wanted = _parse_priority(priority)
    elif key is not None and key.priority is not None:
        wanted = key.priority
    else:
        wanted = NORMAL if profile.priority is None else priority_of(profile.priority)
    given = wanted if key is None else max(wanted, key.priority_ceiling)
    accounts = accounts_of(key, tenant_name, catalog)
    keep_alive_s = _parse_keep_alive_s(body.extension(KEEP_ALIVE))
    is_default = given == NORMAL and not tenant_name and not accounts and keep_alive_s is None
    demand = DEFAULT_DEMAND if is_default else Demand(given, tenant_name, accounts, keep_alive_s, weight=profile.weight)
    return Identity(demand, profile, priority is not None and given != wanted)


def with_keep_alive(demand: Demand, body: Body) -> Demand:
    """`demand` with the longer of its keep-alive and that of a translated body. Raises InvalidRequestError."""
    keep_alive_s = _parse_keep_alive_s(body.extension(KEEP_ALIVE))
    if keep_alive_s is None:
        return demand
    return replace(demand, keep_alive_s=max(keep_alive_s, demand.keep_alive_s or 0.0))


def budget_s(headers: Iterable[tuple[bytes, bytes]], text: object) -> float | None:
    """The shortest time limit, in seconds, of headers and body; None without a limit.

    `text` is the body's. Raises InvalidRequestError for anything but a number of seconds.
    """
    times = []
    for name, value in headers:  # every request runs this: a loop is faster than a comprehension
        if name == TIMEOUT:
            times.append(_parse_seconds(value.decode("latin-1"), "X-Timeout"))
    if text is not None:
        times.append(_parse_seconds(text, BUDGET))
    return min(times) if times else None


def wants_load_feedback(headers: Iterable[tuple[bytes, bytes]]) -> bool | None:
    """Does the client want status lines while its model loads? None: there is no such header.

    Raises InvalidRequestError for a value that is neither true nor false.
    """
    for name, value in headers:
        if name == LOAD_FEEDBACK:
            given = _BOOLEANS.get(value.strip().lower())
            if given is None:
                raise InvalidRequestError("X-Llmux-Load-Feedback must be true or false.", param="X-Llmux-Load-Feedback")
            return given
    return None


def _parse_seconds(text: object, where: str) -> float:
    try:
        value = float(text) if isinstance(text, str | float) or type(text) is int else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if not 0 < value <= LONGEST_BUDGET_S:
        raise InvalidRequestError(
            f"{where} must be a number of seconds, above 0 and at most {LONGEST_BUDGET_S:.0f}.", param=BUDGET
        )
    return value


def _header_text(value: bytes, header: str, before: object) -> object:
    """The text of a header; `before`, the text so far, for a blank one. Raises InvalidRequestError for a second text."""
    value = value.strip()
    if not value:
        return before
    if before is not None:
        raise InvalidRequestError(f"The request has several {header} headers; send one.", param=header)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{header} is not UTF-8.", param=header) from error


def _parse_priority(given: object) -> int:
    try:
        return priority_of(given)
    except ValueError as error:
        message = f"`X-Priority` or `{PRIORITY}` is no priority: {error}."
        raise InvalidRequestError(message, code="invalid_priority", param=PRIORITY) from error


def _parse_keep_alive_s(given: object) -> float | None:
    if isinstance(given, str):  # in a form
        with contextlib.suppress(ValueError):
            given = float(given)
    if given is None:
        return None
    if isinstance(given, int | float) and type(given) is not bool and 0 <= given <= LONGEST_KEEP_ALIVE_S:
        return given
    message = f"`{KEEP_ALIVE}` must be a number of seconds from 0 to {LONGEST_KEEP_ALIVE_S}."
    raise InvalidRequestError(message, code="invalid_keep_alive", param=KEEP_ALIVE)


def _check_tenant(given: object) -> str:
    tenant = given.strip() if isinstance(given, str) else None
    if tenant is None or len(tenant) > TENANT_LIMIT or not tenant.isprintable():
        message = (
            f"`X-Tenant-ID` or `{CLIENT}` must be a text of at most {TENANT_LIMIT} characters that can be printed."
        )
        raise InvalidRequestError(message, code="invalid_tenant", param=CLIENT)
    return tenant
