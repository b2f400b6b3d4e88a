"""The section `clients`: profiles, mistakes in them, and the limits of clients and keys."""

from __future__ import annotations

import pytest

from supervisor.catalog.keys import load_keys
from supervisor.catalog.sections.clients import DEFAULT_CLIENT, rate_of
from supervisor.core.admission.limits import NO_LIMITS, Rate, TenantLimits
from supervisor.errors import ConfigError
from tests.support.cases import cases

MODELS = """\
models:
  qwen: {path: qwen.gguf}
  off: {path: qwen.gguf, enabled: false}
virtual_models:
  fast: {model: qwen}
"""


@pytest.fixture
def catalog(folder):
    folder.write("", "qwen.gguf")
    return lambda clients: folder.load(MODELS + clients)


class TestProfiles:
    """A client has its own entry; `default` fills in what it leaves open, and is for all others."""

    def test_default_fills_in(self, catalog):
        found = catalog(
            """\
clients:
  default: {model: fast, cooldown_errors: 5, parameters: {top_k: 1}}
  open-webui: {priority: high, cooldown_errors: 0, parameters: {temperature: 0.5}}
"""
        )
        own, other = found.client("open-webui"), found.client("somebody")
        assert (own.model, own.priority, own.cooldown_errors, own.parameters) == (
            "fast",
            "high",
            0,
            {"temperature": 0.5},
        )
        assert (other.model, other.priority, other.cooldown_errors, other.parameters) == ("fast", None, 5, {"top_k": 1})
        assert found.client("") == other

    @pytest.mark.parametrize("text", ["", "clients:\n", "clients: {}\n", "clients: {a: {priority: 7}}\n"])
    def test_without_default(self, catalog, text):
        assert catalog(text).client("somebody") is DEFAULT_CLIENT

    def test_mistakes(self, catalog):
        with pytest.raises(ConfigError) as caught:
            catalog(
                """\
clients:
  a: {model: fsat}
  b: {model: off}
  c: {priority: urgent}
  d: {priority: -1}
  e: {parameters: {stream: true}}
  f: {cooldown_errors: -1, cooldown_s: 0, colour: red}
  "g\\t": {}
"""
            )
        told = "\n".join(caught.value.problems)
        assert 'clients.a.model: no model "fsat" answers; did you mean "fast"?' in told
        assert 'clients.b.model: no model "off" answers' in told
        assert "clients.c.priority: expected" in told
        assert "clients.d.priority: expected" in told
        assert 'clients.e.parameters: "stream" can\'t be changed' in told
        for key in ("cooldown_errors", "cooldown_s", "colour"):
            assert f"clients.f.{key}:" in told
        assert "not a client: up to 100 characters that can be printed" in told
        assert len(caught.value.problems) == 9


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


class TestLimits:
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
