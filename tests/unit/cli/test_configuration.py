"""`llmux config show`: every value that counts, with who set it."""

from __future__ import annotations

import pytest

from runtimes.registry import REGISTRY
from supervisor.cli.configuration import as_json, effective, shown

TEXT = """\
models:
  a:
    cmd: [worker, "--api-key", hunter2, "${port}"]
    env: {API_TOKEN: hunter2, PLAIN: "1"}
virtual_models:
  b:
    physical: a
    params:
      defaults: {temperature: 0.5}
limits:
  queue_total: 9
"""


@pytest.fixture
def values(folder, monkeypatch):
    monkeypatch.setenv("LLMUX_LIMITS__DRAIN_S", "7")
    folder.write("limits: {queue_per_model: 3}\n", name="local.yaml")
    return list(effective(folder.load(TEXT, registry=REGISTRY, check_files=False)))


def origins(values) -> dict[str, tuple[object, str]]:
    return {".".join(map(str, value.trail)): (value.value, value.origin) for value in values}


class TestEffective:
    """Where each value came from."""

    def test_origins(self, values):
        told = origins(values)
        assert told["limits.queue_total"][0] == 9
        assert told["limits.queue_total"][1].endswith("llmux.yaml:11")
        assert told["limits.queue_per_model"][1].endswith("local.yaml:1 (local)")
        assert told["limits.drain_s"] == (7.0, "LLMUX_LIMITS__DRAIN_S (env)")
        assert told["limits.header_kib"] == (64, "default")
        assert told["virtual_models.b.model"][1].endswith("llmux.yaml:7")
        assert told["virtual_models.b.defaults.temperature"][1].endswith("llmux.yaml:9")

    def test_secrets_are_masked(self, values):
        assert "hunter2" not in shown(values)
        assert origins(values)["models.a.env.PLAIN"][0] == "1"
        assert all("hunter2" not in str(entry) for entry in as_json(values))

    def test_can_be_read_again(self, values, folder):
        """What is shown is itself a configuration that says the same."""
        again = list(effective(folder.load(shown(values), registry=REGISTRY, check_files=False)))
        assert [(value.trail, value.value) for value in again] == [(value.trail, value.value) for value in values]
