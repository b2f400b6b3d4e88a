"""`llmux config show`: every value that counts, with who set it."""

from __future__ import annotations

import json
import re

import pytest

from runtimes.registry import REGISTRY
from supervisor.cli import doctor, keys, options, service
from supervisor.cli.configuration import as_json, checked, daemon_url, effective, found, required, shown
from supervisor.cli.environments import environments
from supervisor.cli.models import model_entries
from supervisor.errors import ConfigError
from tests.support import tiny

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


class TestSettingsOfLlmPool:
    """They are the configuration where llm-pool's variables name them and there is no other."""

    @pytest.fixture
    def settings(self, folder, monkeypatch):
        path = folder.write(json.dumps(self.pool("one")), "pool/settings.json")
        monkeypatch.setenv("LLM_POOL_SETTINGS_PATH", str(path))
        return path

    def pool(self, name):
        return {"engine": {"models": {name: {"backend": "llama_server", "model_path": str(tiny.model())}}}}

    def test_merged_with_what_is_beside_them(self, folder, settings):
        folder.write(json.dumps(self.pool("two")), "pool/local.json")
        assert list(checked(None).models) == ["one", "two"]
        configuration = found(None)
        files = configuration.files(configuration.read())
        assert [*files][:2] == [settings, settings.with_name("local.json")]

    def test_mistakes_name_the_file(self, folder, settings):
        settings.write_text(settings.read_text().replace(".gguf", ".gone.gguf"))
        (trouble,) = checked(None).models["one"].troubles
        assert re.fullmatch(r"pool/settings.json models.one.path: .*there is no such file", str(trouble))

    def test_others_must_not_write_to_them(self, folder, settings):
        settings.chmod(0o666)
        with pytest.raises(ConfigError, match="chmod go-w"):
            checked(None)

    def test_an_own_configuration_wins(self, folder, settings):
        folder.write(f"models: {{own: {{path: {tiny.model()}}}}}\n")
        assert list(checked(None).models) == ["own"]

    @pytest.mark.parametrize("variable", ["LLM_POOL_SETTINGS_PATH", "LLM_POOL_LOCAL_SETTINGS_PATH"])
    def test_a_named_file_that_is_not_there(self, folder, settings, monkeypatch, variable):
        monkeypatch.setenv(variable, "/no/such.json")
        with pytest.raises(ConfigError, match=f"^{variable}: /no/such.json: there is no such file$"):
            found(None)

    def test_local_settings_over_nothing(self, folder, settings, monkeypatch):
        monkeypatch.setenv("LLM_POOL_LOCAL_SETTINGS_PATH", str(settings))
        monkeypatch.delenv("LLM_POOL_SETTINGS_PATH")
        with pytest.raises(ConfigError, match=r"goes over config/settings.json, and there is no such file"):
            found(None)

    def test_every_command_takes_them(self, folder, settings):
        """Or says why it can't, instead of making a configuration that would hide them."""
        settings.write_text(json.dumps(self.pool("one") | {"service": {"host": "127.0.0.1", "port": 9123}}))
        assert list(required(None).read().models) == ["one"]  # pull, bench, config
        assert daemon_url() == "http://127.0.0.1:9123"
        assert options.configured_names(None, ["models"]) == ["one"]
        checks = {check.name: check for check in doctor.examine(None)}
        assert str(settings) in checks["configuration"].message
        assert "9123" in checks["port"].message
        place = model_entries.target(None)
        assert place.catalog.route("one") is not None
        assert place.arguments == ()
        with pytest.raises(ConfigError, match="llmux config import -o"):
            place.check_writable()
        with pytest.raises(ConfigError, match="llmux config import -o"):
            service.install(print, config=None, linger=False, start=False, address=None)


class TestWithoutAFile:
    """The variables' settings count for every command, as they do for the demo that `serve` would serve."""

    def test_address(self, folder, monkeypatch):
        assert daemon_url() == "http://127.0.0.1:8081"
        monkeypatch.setenv("LLMUX_SERVER__HOST", "::")
        monkeypatch.setenv("LLMUX_SERVER__PORT", "9124")
        assert daemon_url() == "http://[::1]:9124"
        assert any("9124" in check.message for check in doctor.examine(None) if check.name == "port")

    def test_places(self, folder, monkeypatch):
        monkeypatch.setenv("LLMUX_SERVER__RUNTIMES_DIR", str(folder.path / "mine"))
        monkeypatch.setenv("LLMUX_SERVER__API_KEYS", str(folder.path / "mine.yaml"))
        assert environments.resolve(None) == folder.path / "mine"
        assert keys.keys_file(None) == folder.path / "mine.yaml"

    def test_the_named_file_is_not_there_yet(self, folder, monkeypatch):
        """As in a container's image, which names where the file will be."""
        monkeypatch.setenv("LLMUX_CONFIG", str(folder.path / "missing.yaml"))
        monkeypatch.setenv("LLMUX_SERVER__RUNTIMES_DIR", str(folder.path / "mine"))
        assert environments.resolve(None) == folder.path / "mine"

    def test_the_current_folder_is_gone(self, folder, monkeypatch):
        (folder.path / "gone").mkdir()
        monkeypatch.chdir(folder.path / "gone")
        (folder.path / "gone").rmdir()
        assert daemon_url() == "http://127.0.0.1:8081"

    def test_mistakes_elsewhere_do_not_matter(self, folder, monkeypatch):
        folder.write("models: {a: {}}\nserver: {port: 9126, runtimes_dir: mine}\n")
        assert daemon_url() == "http://127.0.0.1:9126"
        assert any("9126" in check.message for check in doctor.examine(None) if check.name == "port")
        assert environments.resolve(None) == folder.path / "mine"
