"""Counts of each client, and the pauses (cooldowns) of clients that misbehave.

A client is a tenant; a request without a tenant belongs to no client. Clients with a profile are kept forever, of the others
only the most recently seen.

A client has to pause after failures in a row, or after a burst of requests. A burst is measured by a leaky bucket that drains
`burst` requests per `window_s`. So a client that never sends more than `burst` requests within any window never pauses, and a
client that sends more than twice as many within one window always does. A pause has a fixed length: refused requests don't
extend it, and after it all counts start at zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from supervisor.catalog.sections.clients import DEFAULT, ClientConfig
from supervisor.errors import MAX_RETRY_AFTER_S, NotFoundError, RateLimitError
from supervisor.schema import client as schema

if TYPE_CHECKING:
    from supervisor.daemon.daemon import Daemon
    from supervisor.gateway.request import Request

log = structlog.get_logger("llmux.clients")

KEPT: Final = 1000  # clients without a profile
OTHER: Final = "other"
"""In metrics, all clients that neither a profile nor a key names: anybody could invent any number of names."""
BY_OPERATOR: Final = "an operator asked for it"
_REFUSED: Final = frozenset({429, 503, 504})  # before a worker had it
_NOT_THEIRS: Final = frozenset({"client_gone", "handed_over", "request_cancelled"})
_ROUNDING: Final = 1e-6  # of one request: sums of fractions


@dataclass(frozen=True, slots=True)
class CooldownRule:
    """The numbers of failures and of requests that make a client pause, and the length of the pause. 0: no limit."""

    errors: int = 0
    burst: int = 0
    window_s: float = 60.0
    pause_s: float = 30.0


class Cooldown:
    """One client's pauses, and the counts that lead to them. Times are seconds on any one clock."""

    __slots__ = ("_at", "_errors", "_level", "reason", "until")

    def __init__(self) -> None:
        self.until = 0.0  # the end of its last pause
        self.reason = ""  # for the last pause
        self._errors = 0  # in a row
        self._level = 0.0  # requests in the bucket, at `_at`
        self._at = 0.0

    def left_s(self, now: float) -> float:
        """Seconds until the pause ends; 0 without one."""
        return max(0.0, self.until - now)

    def arrived(self, rule: CooldownRule, now: float) -> float:
        """Count a request that arrived. Returns how many seconds the client has to pause; 0: the request may go on."""
        if now < self.until:
            return self.until - now
        if rule.burst:
            self._level = max(0.0, self._level - (now - self._at) * rule.burst / rule.window_s) + 1
            self._at = now
            if self._level > rule.burst + _ROUNDING:
                self.pause(now, rule.pause_s, f"it sent more than {rule.burst} requests within {rule.window_s:g} s")
        return self.left_s(now)

    def ended(self, rule: CooldownRule, now: float, *, failed: bool) -> None:
        """Count the end of a request that was let through."""
        if now < self.until:
            return
        self._errors = self._errors + 1 if failed else 0
        if rule.errors and self._errors >= rule.errors:
            self.pause(now, rule.pause_s, f"{self._errors} of its requests failed in a row")

    def pause(self, now: float, for_s: float, reason: str) -> None:
        """Begin a pause, or end it with 0 seconds. The counts begin anew."""
        self.until, self.reason = now + for_s, reason
        self._errors, self._level = 0, 0.0


@dataclass(slots=True)
class Client:
    """The counts of one client, since the daemon began or since it was forgotten."""

    id: str
    first_seen: float  # on the engine's clock, as is `last_seen`
    last_seen: float
    requests: int = 0
    errors: int = 0  # requests that failed, though they were let through
    refused: int = 0  # requests that got no worker, because there was no room or time, or because of a limit
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cooldown: Cooldown = field(default_factory=Cooldown)


class Clients:
    """One for each daemon; outlives reloads."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._known: OrderedDict[str, Client] = OrderedDict()  # the most recently seen client is last
        self._rules: Mapping[str, CooldownRule] = {}
        self._named: frozenset[str] = frozenset()
        daemon.requests.observers.append(self.finished)
        daemon.requests.listeners.append(self._count_tokens)
        daemon.on_configure.append(self._configure)

    def _configure(self) -> None:
        catalog, keys = self._daemon.catalog, self._daemon.keyring.keys
        self._rules = {name: _cooldown_rule(client) for name, client in catalog.clients.items()}
        self._named = frozenset((*catalog.clients, *(key.tenant or key.name for key in keys))) - {DEFAULT}

    def label(self, tenant: str) -> str:
        """The tenant's name in metrics."""
        return tenant if tenant in self._named else OTHER

    def arrived(self, tenant: str) -> None:
        """Count a request of this tenant. Raises RateLimitError while the tenant has to pause."""
        now = self._daemon.engine.clock()
        client = self._client(tenant, now)
        client.requests += 1
        client.last_seen = now
        until = client.cooldown.until
        left_s = client.cooldown.arrived(self._rule_of(tenant), now)
        self._log_pause(client, until)
        if left_s > 0:
            message = f"{tenant} has to pause: {client.cooldown.reason}. Try again in {max(1.0, left_s):.0f} s."
            error = RateLimitError(message, code="client_cooldown", retry_after_s=left_s)
            error.lasts = left_s > MAX_RETRY_AFTER_S
            raise error

    def _client(self, tenant: str, now: float) -> Client:
        client = self._known.get(tenant)
        if client is None:
            client = self._known[tenant] = Client(tenant, now, now)
            if len(self._known) > KEPT + len(self._rules):
                oldest = next(name for name in self._known if name not in self._rules)
                del self._known[oldest]
        else:
            self._known.move_to_end(tenant)
        return client

    def _count_tokens(self, ended: Sequence[Request]) -> None:
        """Count the tokens of requests that ended."""
        for request in ended:
            client = self._known.get(request.demand.tenant)
            if client is not None:
                client.prompt_tokens += request.usage.prompt or 0
                client.completion_tokens += request.usage.completion or 0

    def finished(self, request: Request) -> None:
        """Count a request that ended. Its client may have to pause now."""
        client = self._known.get(request.demand.tenant)
        if client is None:
            return
        outcome, code = request.attempt.outcome, request.attempt.outcome.error or request.failure
        status = outcome.status or request.failed_status
        if request.attempt.ticket is None and status in _REFUSED:
            client.refused += 1
            return
        if code in _NOT_THEIRS or (
            request.attempt.ticket is not None and request.attempt.ticket.cut_reason is not None
        ):
            return
        failed = code is not None or status >= 400
        client.errors += failed
        until = client.cooldown.until
        client.cooldown.ended(self._rule_of(client.id), request.ended_at, failed=failed)
        self._log_pause(client, until)

    def _log_pause(self, client: Client, until: float) -> None:
        """Log the pause if it is new. `until`: the end of the pause that was known before."""
        if client.cooldown.until != until:
            self._daemon.requests.record()  # so that the log lines of its requests come first
            log.warning("client.paused", client=client.id, reason=client.cooldown.reason)

    def _rule_of(self, tenant: str) -> CooldownRule:
        return self._rules.get(tenant) or self._rules.get(DEFAULT, _NO_RULE)

    def pause(self, tenant: str, for_s: float) -> None:
        """Make the client pause from now on; 0: end its pause. Raises NotFoundError."""
        self.find(tenant).cooldown.pause(self._daemon.engine.clock(), for_s, BY_OPERATOR)

    def forget(self, tenant: str) -> None:
        """Delete the client's counts, and end its pause. Raises NotFoundError."""
        self._known.pop(self.find(tenant).id)

    def find(self, tenant: str) -> Client:
        """The client of this name. Raises NotFoundError if it has sent nothing, or was forgotten."""
        client = self._known.get(tenant)
        if client is None:
            raise NotFoundError(
                f"No client {tenant[:100]!r} has been seen; GET /v1/admin/clients lists them.", code="client_not_found"
            )
        return client

    def views(self) -> list[schema.Client]:
        """All clients for the admin API, the most recently seen first; clients with a profile that were never seen are last."""
        never = [name for name in self._rules if name not in self._known and name != DEFAULT]
        in_flight = self._daemon.requests.by_tenant()
        return [self._view(name, in_flight) for name in (*reversed(self._known), *never)]

    def view(self, tenant: str) -> schema.Client:
        """One client for the admin API. Raises NotFoundError."""
        return self._view(tenant, self._daemon.requests.by_tenant())

    def _view(self, tenant: str, in_flight: Mapping[str, int]) -> schema.Client:
        daemon = self._daemon
        now = daemon.engine.clock()
        has_profile = tenant in self._rules and tenant != DEFAULT
        client = Client(tenant, now, now) if has_profile and tenant not in self._known else self.find(tenant)
        is_seen = client.id in self._known
        left_s = client.cooldown.left_s(now)
        return schema.Client(
            id=client.id,
            requests=client.requests,
            errors=client.errors,
            refused=client.refused,
            prompt_tokens=client.prompt_tokens,
            completion_tokens=client.completion_tokens,
            in_flight=in_flight.get(tenant, 0),
            first_seen=round(daemon.wall_time(client.first_seen), 3) if is_seen else None,
            last_seen=round(daemon.wall_time(client.last_seen), 3) if is_seen else None,
            cooldown_s=round(left_s, 1) if left_s else None,
            cooldown_reason=client.cooldown.reason if left_s else None,
            profile=daemon.catalog.clients[tenant].model_dump(mode="json") if has_profile else None,
        )


_NO_RULE: Final = CooldownRule()


def _cooldown_rule(client: ClientConfig) -> CooldownRule:
    return CooldownRule(client.cooldown_errors, client.cooldown_burst, client.cooldown_window_s, client.cooldown_s)
