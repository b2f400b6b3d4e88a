"""The section `clients`: profiles, and what is wrong with them."""

from __future__ import annotations

import pytest

from supervisor.catalog.clients import NOBODY
from supervisor.errors import ConfigError

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
        assert catalog(text).client("somebody") is NOBODY

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
