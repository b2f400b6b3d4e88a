"""Who asks, and how urgently: the request, its key, and its client's profile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervisor.catalog.keys import Key, Scope
from supervisor.catalog.sections.clients import ClientConfig
from supervisor.core.demand import DEFAULT_DEMAND, HIGH, LOW, NORMAL, Demand
from supervisor.errors import InvalidRequestError
from supervisor.gateway.body.body import Body
from supervisor.gateway.body.json_body import JsonBody, open_object
from supervisor.gateway.head import LOAD_FEEDBACK, RequestHead
from supervisor.gateway.identity.identity import budget_s, identify, wants_load_feedback
from tests.support.cases import cases

SERVER = SimpleNamespace(multi_tenant=True)
CATALOG = SimpleNamespace(client=lambda _: ClientConfig(), server=SERVER)


def catalog(**clients):
    return SimpleNamespace(client=lambda name: ClientConfig(**clients.get(name, {})), server=SERVER)


def key(**fields):
    return Key("webui", b"", frozenset({Scope.INFERENCE}), **fields)


def body(text="{}"):
    return JsonBody(text.encode(), open_object(text.encode()))


def who(headers=(), text="{}", its_key=None, known=CATALOG):
    return identify([(b"host", b"a"), *headers], body(text), its_key, known)


class TestPriority:
    """The request's, else the key's, else the client's, else normal; never above the key's ceiling."""

    def test_of_nothing(self):
        assert identify([], Body(), None, CATALOG).demand is DEFAULT_DEMAND

    @cases(
        ("headers", "text", "number"),
        [
            ([(b"x-priority", b"high")], "{}", HIGH),
            ([(b"x-priority", b" 7 ")], "{}", 7),
            ([], '{"x_priority": 0}', 0),
            ([], '{"x_priority": "low"}', LOW),
            ([(b"x-priority", b"low")], '{"x_priority": 0}', LOW),  # the header counts
            ([(b"x-priority", b"")], '{"x_priority": ""}', NORMAL),
            ([], '{"x_priority": null}', NORMAL),
        ],
    )
    def test_the_requests(self, headers, text, number):
        assert who(headers, text).demand == Demand(number)

    def test_the_keys_counts_before_the_clients(self):
        known = catalog(webui={"priority": "low"})
        assert who(its_key=key(priority=HIGH), known=known).demand == Demand(HIGH, "webui")
        assert who(its_key=key(), known=known).demand == Demand(LOW, "webui")

    @pytest.mark.parametrize(("asked", "given"), [("high", NORMAL), ("0", NORMAL), ("normal", NORMAL), ("low", LOW)])
    def test_the_ceiling(self, asked, given):
        found = who([(b"x-priority", asked.encode())], its_key=key(priority_ceiling=NORMAL))
        assert (found.demand, found.is_lowered) == (Demand(given, "webui"), asked in {"high", "0"})

    def test_the_ceiling_holds_for_the_clients_default_too(self):
        known = catalog(webui={"priority": "high"})
        found = who(its_key=key(priority_ceiling=NORMAL), known=known)
        assert (found.demand, found.is_lowered) == (Demand(NORMAL, "webui"), False)

    @cases(
        ("headers", "text"),
        [
            ([(b"x-priority", b"urgent")], "{}"),
            ([(b"x-priority", b"\xff")], "{}"),
            ([(b"x-priority", b"low"), (b"x-priority", b"high")], "{}"),
            ([], '{"x_priority": true}'),
            ([], '{"x_priority": 101}'),
            ([], '{"x_priority": [1]}'),
            ([], '{"x_priority": %s}' % ("[" * 2000 + "]" * 2000)),
        ],
    )
    def test_a_bad_one(self, headers, text):
        with pytest.raises(InvalidRequestError):
            who(headers, text)


class TestTenant:
    """The key's; the request names it only where anybody may, or where the key speaks for others."""

    EXTENSION_FIELDS = ([(b"x-tenant-id", b"them")], '{"x_client_id": "others"}')

    def test_of_a_key(self):
        assert who(*self.EXTENSION_FIELDS, its_key=key()).demand.tenant == "webui"
        assert who(*self.EXTENSION_FIELDS, its_key=key(tenant="chat")).demand.tenant == "chat"

    def test_of_a_key_that_speaks_for_others(self):
        gateway = key(for_others=True, tenant="gateway")
        assert who(*self.EXTENSION_FIELDS, its_key=gateway).demand.tenant == "them"
        assert who([], self.EXTENSION_FIELDS[1], its_key=gateway).demand.tenant == "others"
        assert who([(b"x-tenant-id", b" ")], '{"x_client_id": " "}', its_key=gateway).demand.tenant == "gateway"

    def test_where_nobody_may_name_any(self):
        alone = SimpleNamespace(client=CATALOG.client, server=SimpleNamespace(multi_tenant=False))
        assert who(*self.EXTENSION_FIELDS, known=alone).demand.tenant == ""
        assert (
            who(*self.EXTENSION_FIELDS, its_key=key(for_others=True, tenant="gateway"), known=alone).demand.tenant
            == "gateway"
        )

    def test_without_keys(self):
        assert [who(*self.EXTENSION_FIELDS).demand.tenant, who([], self.EXTENSION_FIELDS[1]).demand.tenant] == [
            "them",
            "others",
        ]
        assert who([(b"x-tenant-id", "müller".encode())]).demand.tenant == "müller"

    @pytest.mark.parametrize("said", ["x" * 65, "a\tb", "\u202e", "\x1b[2J"])
    def test_a_bad_one(self, said):
        with pytest.raises(InvalidRequestError, match="at most 64 characters"):
            who([(b"x-tenant-id", said.encode())])

    @pytest.mark.parametrize("text", ['{"x_client_id": 5}', '{"x_client_id": {"a": 1}}'])
    def test_no_text(self, text):
        with pytest.raises(InvalidRequestError, match="x_client_id"):
            who(text=text)

    async def test_a_long_one_in_a_large_body_is_not_cut_short(self):
        raw = b'{"x_client_id": "%s", "input": "%s"}' % (b"a" * 300, b" " * 300_000)
        large = await JsonBody.open(raw)
        with pytest.raises(InvalidRequestError, match="at most 64"):
            identify([], large, None, CATALOG)

    def test_a_bad_one_of_a_key_that_may_not_name_any_is_not_looked_at(self):
        assert who([], '{"x_client_id": 5}', its_key=key()).demand.tenant == "webui"


class TestBudget:
    """The least of what header and body say, in seconds."""

    @cases(
        ("headers", "said", "expected"),
        [
            ([], None, None),
            ([b"30"], None, 30.0),
            ([], 2.5, 2.5),
            ([], "7", 7.0),
            ([b"30", b"0.5"], 20, 0.5),
            ([b"86400"], None, 86400.0),
        ],
    )
    def test_the_least_counts(self, headers, said, expected):
        assert expected == budget_s([(b"x-timeout", value) for value in headers], said)

    @cases("said", [0, -1, 86401, True, [], {}, "soon", "nan", "inf", "", 10**400])
    def test_what_is_no_such_time(self, said):
        with pytest.raises(InvalidRequestError, match="x_timeout_s must be a number of seconds") as caught:
            budget_s([], said)
        assert caught.value.param == "x_timeout_s"


class TestLoadFeedback:
    """The header overrules the key and the server, and stays here."""

    @cases(("value", "wanted"), [(b"true", True), (b" Yes ", True), (b"1", True), (b"FALSE", False), (b"0", False)])
    def test_says_it(self, value, wanted):
        assert wants_load_feedback([(b"accept", b"*/*"), (LOAD_FEEDBACK, value)]) is wanted

    def test_without_it_nothing_is_said(self):
        assert wants_load_feedback([(b"accept", b"*/*")]) is None

    @pytest.mark.parametrize("value", [b"perhaps", b"", b"\xff"])
    def test_anything_else_is_refused(self, value):
        with pytest.raises(InvalidRequestError, match="must be true or false"):
            wants_load_feedback([(LOAD_FEEDBACK, value)])

    def test_no_worker_gets_it(self):
        assert RequestHead([(LOAD_FEEDBACK, b"true"), (b"accept", b"*/*")]).for_worker == [(b"accept", b"*/*")]
