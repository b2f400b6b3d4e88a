"""Who is charged for a request: each limit that names its tenant or key, and the default where nothing does."""

from __future__ import annotations

from collections import deque

import pytest

from supervisor.catalog.keys import Key, Scope
from supervisor.catalog.sections.clients import ClientConfig, filled
from supervisor.core.admission.limits import NO_LIMITS, Account, Rate, TenantLimits
from supervisor.gateway.attempt import Outcome
from supervisor.gateway.identity.accounts import ANONYMOUS_TENANT, accounts_of, tokens_of

FIVE, SIX, SEVEN = (Rate(count, 60.0) for count in (5, 6, 7))


class Clients:
    """As much of a catalog as is asked for."""

    def __init__(self, **clients: dict[str, object]) -> None:
        self.clients = filled({name: ClientConfig.model_validate(client) for name, client in clients.items()})

    def client(self, tenant):
        return self.clients.get(tenant) or self.clients.get("default") or ClientConfig()


def key(limits=NO_LIMITS, name="phone", tenant=""):
    return Key(name, b"", frozenset({Scope.INFERENCE}), tenant=tenant, limits=limits)


def charged(tenant, of=None, **clients):
    return {account.name: account.limits for account in accounts_of(of, tenant, Clients(**clients))}


DEFAULT = {"default": {"request_rate": "5/min", "concurrency": 2}}


def test_nobody_without_limits():
    assert accounts_of(None, "alice", Clients()) == ()
    assert accounts_of(key(), "phone", Clients(bob={"concurrency": 3})) == ()


def test_a_tenant_by_its_entry_or_the_default():
    assert charged("alice", **DEFAULT) == {"tenant alice": TenantLimits(FIVE, None, 2)}
    assert charged("alice", alice={"request_rate": "6/min"}, **DEFAULT) == {"tenant alice": TenantLimits(SIX, None, 2)}


def test_those_that_do_not_say_are_one():
    assert charged("", **DEFAULT) == {ANONYMOUS_TENANT: TenantLimits(FIVE, None, 2)}


def test_a_keys_own_take_the_place_of_the_defaults():
    mine = TenantLimits(requests=SEVEN)
    assert charged("phone", key(mine), **DEFAULT) == {
        "tenant phone": TenantLimits(concurrency=2),
        "key phone": mine,
    }
    assert charged("team", key(TenantLimits(SEVEN, SEVEN, 9), tenant="team"), **DEFAULT) == {
        "key phone": TenantLimits(SEVEN, SEVEN, 9)
    }


def test_both_count_that_are_named():
    mine = TenantLimits(requests=SEVEN)
    assert charged("phone", key(mine), phone={"request_rate": "6/min"}) == {
        "tenant phone": TenantLimits(requests=SIX),
        "key phone": mine,
    }


def test_a_gateway_pays_beside_whom_it_speaks_for():
    mine = TenantLimits(requests=SEVEN)
    assert charged("alice", key(mine, "gateway"), **DEFAULT) == {
        "tenant alice": TenantLimits(FIVE, None, 2),
        "key gateway": mine,
    }


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}', 7),
        (b'{"usage": {"prompt_tokens": 3}}', 3),
        (b'{"error": {}}', 0),
        (b"", 0),
    ],
)
def test_tokens_are_what_the_answer_says(body, tokens):
    outcome = Outcome(worker_tail=deque([body]))
    assert tokens_of([Account("a", TenantLimits(tokens=FIVE))], outcome) == tokens
    assert tokens_of([Account("a", TenantLimits(requests=FIVE))], outcome) == 0
    assert tokens_of([], outcome) == 0
