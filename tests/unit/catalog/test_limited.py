"""Limits of clients and keys: how rates are written, and what comes before what."""

from __future__ import annotations

import pytest

from supervisor.catalog.keys import load_keys
from supervisor.catalog.limited import rate_of
from supervisor.core.limits import NO_LIMITS, Rate, TenantLimits
from tests.support.cases import cases


class TestRates:
    """A number, and in what time."""

    @cases(
        ("text", "count", "period_s"),
        [
            ("100req/min", 100, 60.0),
            ("100/min", 100, 60.0),
            (" 5 req / s ", 5, 1.0),
            ("5/sec", 5, 1.0),
            ("1000/h", 1000, 3600.0),
            ("1000req/hour", 1000, 3600.0),
            ("50000tokens/minute", 50000, 60.0),
        ],
    )
    def test_they_say(self, text, count, period_s):
        assert rate_of(text) == Rate(count, period_s)

    @cases("text", ["", "100", "0/min", "-5/min", "1.5/s", "many/min", "5/day", "5/min/s", "9" * 10 + "/s"])
    def test_they_do_not(self, text):
        with pytest.raises(ValueError, match="100/min, 5/s or 1000/h"):
            rate_of(text)

    @pytest.mark.parametrize("text", ["5/s", "100/min", "1000/h"])
    def test_as_they_are_shown(self, text):
        assert str(rate_of(text)) == text


class TestClients:
    """What an entry leaves open is the default's, and null lifts a limit."""

    def test_filled(self, folder):
        catalog = folder.load(
            "clients: {default: {request_rate: 5/min, concurrency: 2}, a: {concurrency: 3}, b: {request_rate: null}}"
        )
        assert catalog.client("nobody").tenant_limits == TenantLimits(Rate(5, 60.0), None, 2)
        assert catalog.client("a").tenant_limits == TenantLimits(Rate(5, 60.0), None, 3)
        assert catalog.client("b").tenant_limits == TenantLimits(None, None, 2)

    def test_a_reload_counts_also_for_those_that_asked_before(self, folder):
        text = "clients: {%s}"
        assert not folder.load(text % "").client("a").tenant_limits
        assert folder.load(text % "a: {concurrency: 3}").client("a").tenant_limits.concurrency == 3

    def test_without_any(self, folder):
        limits = folder.load("clients: {a: {priority: low}}").client("a").tenant_limits
        assert limits == NO_LIMITS
        assert not limits

    def test_keys_have_their_own(self, tmp_path):
        path = tmp_path / "keys.yaml"
        path.write_text(
            "- {name: a, key: sk-0123456789abcdef, token_rate: 9/h}\n- {name: b, key: sk-fedcba9876543210}\n"
        )
        path.chmod(0o600)
        first, second = load_keys(path).keys
        assert (first.limits, second.limits) == (TenantLimits(tokens=Rate(9, 3600.0)), NO_LIMITS)
