"""Limits of clients and keys: how rates are written, which variables set them, and what comes before what."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.catalog.document import plain
from supervisor.catalog.keys import load_keys
from supervisor.catalog.limited import rate_of, read_variables
from supervisor.core.limits import NO_LIMITS, Rate, TenantLimits
from supervisor.errors import ConfigError


class TestRates:
    """A number, and in what time."""

    @pytest.mark.parametrize(
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

    @pytest.mark.parametrize(
        "text", ["", "100", "0/min", "-5/min", "1.5/s", "many/min", "5/day", "5/min/s", "9" * 10 + "/s"]
    )
    def test_they_do_not(self, text):
        with pytest.raises(ValueError, match="100/min, 5/s or 1000/h"):
            rate_of(text)

    @pytest.mark.parametrize("text", ["5/s", "100/min", "1000/h"])
    def test_as_they_are_shown(self, text):
        assert str(rate_of(text)) == text


class TestVariables:
    """The names that other runners have, taken as they stand there."""

    def read(self, **variables: str):
        return read_variables({name.replace("__", "-"): value for name, value in variables.items()}, Path("/"))

    def test_all_of_them(self):
        root, problems = self.read(
            MAX_QUEUE_DEPTH="16",
            QUEUE_TIMEOUT_MS="1500",
            DEFAULT_RATE_LIMIT="100req/min",
            TENANT_RATE_LIMIT_community__x="7req/min",
            TENANT_RATE_LIMIT_Community="8/s",
            TENANT_RATE_LIMITER="9",
            MAX_QUEUE_DEPTHS="17",
        )
        assert problems == []
        assert plain(root) == {
            "limits": {"queue_total": 16, "queue_wait_s": 1.5},
            "clients": {
                "default": {"request_rate": "100req/min"},
                "Community": {"request_rate": "8/s"},
                "community-x": {"request_rate": "7req/min"},
            },
        }

    def test_of_two_for_everybody_the_tenants_own_counts(self):
        root, _ = self.read(DEFAULT_RATE_LIMIT="100req/min", TENANT_RATE_LIMIT_default="50req/min")
        assert plain(root) == {"clients": {"default": {"request_rate": "50req/min"}}}

    def test_an_empty_one_says_nothing(self):
        assert plain(self.read(MAX_QUEUE_DEPTH="", TENANT_RATE_LIMIT_x=" ", QUEUE_TIMEOUT_MS="")[0]) == {}

    def test_a_time_that_is_none(self):
        root, (problem,) = self.read(QUEUE_TIMEOUT_MS="soon")
        assert plain(root) == {}
        assert str(problem) == "QUEUE_TIMEOUT_MS: expected a whole number of milliseconds, got 'soon'"

    def test_mistakes_name_their_variable(self, folder, monkeypatch):
        monkeypatch.setenv("MAX_QUEUE_DEPTH", "0")
        monkeypatch.setenv("TENANT_RATE_LIMIT_x", "lots")
        with pytest.raises(ConfigError) as caught:
            folder.load("models: {}")
        first, second = sorted(caught.value.problems)
        assert first.startswith("MAX_QUEUE_DEPTH limits.queue_total: expected at least 1")
        assert second.startswith("TENANT_RATE_LIMIT_x clients.x.request_rate: ")
        assert "100/min, 5/s or 1000/h" in second

    def test_they_come_after_the_files_and_before_ours(self, folder, monkeypatch):
        monkeypatch.setenv("MAX_QUEUE_DEPTH", "16")
        monkeypatch.setenv("QUEUE_TIMEOUT_MS", "2000")
        monkeypatch.setenv("LLMUX_LIMITS__QUEUE_TOTAL", "17")
        monkeypatch.setenv("TENANT_RATE_LIMIT_x", "2/s")
        text = "limits: {queue_total: 15, queue_wait_s: 1}\nclients: {x: {request_rate: 1/s, concurrency: 3}}"
        catalog = folder.load(text)
        assert (catalog.limits.queue_total, catalog.limits.queue_wait_s) == (17, 2.0)
        assert catalog.client("x").tenant_limits == TenantLimits(Rate(2, 1.0), None, 3)
        assert str(catalog.origin("clients", "x", "request_rate")).startswith("TENANT_RATE_LIMIT_x")


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
