"""The accounts that a request is charged to: its tenant's, and that of its key.

The limits of both accounts count. `clients.default` limits tenants without an entry of their own; where a key has a limit of
its own, that limit replaces the default's for the key's own tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from supervisor.catalog import Catalog
from supervisor.catalog.keys import Key
from supervisor.core.admission.limits import Account, TenantLimits
from supervisor.gateway.attempt import Outcome

ANONYMOUS_TENANT: Final = "all requests without a tenant"


def accounts_of(key: Key | None, tenant: str, catalog: Catalog) -> tuple[Account, ...]:
    """The request's accounts that have limits."""
    limits = catalog.client(tenant).tenant_limits
    if key is None or not key.limits:
        return (Account(_account_name(tenant), limits),) if limits else ()
    own = Account(f"key {key.name}", key.limits)
    if tenant == (key.tenant or key.name) and tenant not in catalog.clients:
        limits = _without_key_limits(limits, key.limits)
    return (Account(_account_name(tenant), limits), own) if limits else (own,)


def tokens_of(accounts: Sequence[Account], outcome: Outcome) -> int:
    """The tokens that an answer reports, in and out; 0 if no account limits tokens, or if the answer reports none."""
    if all(account.limits.tokens is None for account in accounts):
        return 0
    usage = outcome.usage()
    return (usage.prompt or 0) + (usage.completion or 0)


def _account_name(tenant: str) -> str:
    return f"tenant {tenant}" if tenant else ANONYMOUS_TENANT


def _without_key_limits(default: TenantLimits, own: TenantLimits) -> TenantLimits:
    return TenantLimits(
        default.requests if own.requests is None else None,
        default.tokens if own.tokens is None else None,
        default.concurrency if own.concurrency is None else None,
    )
