"""The runtime's configuration: what it takes, what it refuses, and that it repeats no secret."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from runtimes.base import ModelUnusableError
from runtimes.registry import REGISTRY
from supervisor.catalog import load
from supervisor.cli.configuration import effective, shown
from supervisor.core.types import FootprintSource
from supervisor.errors import ConfigError
from tests.support.cases import cases
from tests.support.daemon import REPOSITORY
from tests.support.fake_remote import KEY, MODEL

ADAPTER = REGISTRY.get("openai_remote")
ADDRESS = "https://api.example.com/v1"


def config(**keys: object):
    return ADAPTER.config(**{"runtime": "openai_remote", "base_url": ADDRESS, "upstream_model": MODEL, **keys})


class TestConfiguration:
    """`check` and validation report mistakes before any request."""

    @pytest.mark.parametrize(
        ("address", "kept"),
        [(f"{ADDRESS}/", ADDRESS), ("http://10.0.0.7:8081/v1", "http://10.0.0.7:8081/v1"), ("https://h", "https://h")],
    )
    def test_addresses(self, address, kept):
        assert config(base_url=address).base_url == kept

    @cases(
        "address",
        ["api.example.com/v1", "ftp://h/v1", "https://", "https://h/v1?key=hunter2", "https://h/v1#x", "https://h:99999/v1",
         "https://ann:hunter2@h/v1", "https://h/a b", "https://h/\x00"],
    )  # fmt: skip
    def test_what_is_no_address(self, address):
        with pytest.raises(ValidationError, match=r"address|credentials|path|blank") as caught:
            config(base_url=address)
        assert "hunter2" not in caught.value.errors()[0]["msg"]

    def test_a_key_in_the_wrong_place_is_not_repeated(self, tmp_path):
        path = tmp_path / "llmux.yaml"
        path.write_text(
            f"models:\n  far: {{runtime: openai_remote, base_url: '{ADDRESS}', upstream_model: m, api_key_env: {KEY}}}\n"
        )
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert "models.far.api_key_env" in str(caught.value)
        assert KEY not in str(caught.value)

    @pytest.mark.parametrize("key", ["vram_mib", "keep_alive_s", "grace_s"])
    def test_keys_of_processes(self, key):
        with pytest.raises(ValidationError, match=f'"{key}" is for models that run here'):
            config(**{key: 5})

    def test_a_thinking_switch_without_its_field(self):
        with pytest.raises(ValidationError, match="thinking_field"):
            config(thinking="disabled")

    def test_a_file_of_certificates_that_is_not_there(self, tmp_path):
        missing = config(ca_file=tmp_path / "none.pem")
        assert ADAPTER.check(missing, runtimes_dir=tmp_path) == (
            f"ca_file: {tmp_path}/none.pem: there is no such file",
        )

    def test_what_is_shown_can_be_read_again(self, tmp_path):
        path, again = tmp_path / "llmux.yaml", tmp_path / "again.yaml"
        path.write_text(f"models: {{far: {{runtime: openai_remote, base_url: '{ADDRESS}', upstream_model: m}}}}\n")
        again.write_text(shown(list(effective(load(path)))))
        assert load(again).models["far"].config == load(path).models["far"].config


class TestKey:
    """The key comes from the variable, and is in no text of anything."""

    def test_read_from_the_environment(self):
        spec = ADAPTER.connect(config(api_key_env="A_KEY"), {"A_KEY": f"{KEY}\n"})
        assert spec.key == KEY
        assert KEY not in repr(spec)
        assert KEY not in str(spec)

    def test_none_is_needed(self):
        assert ADAPTER.connect(config(), {"A_KEY": KEY}).key is None

    @cases("value", ["", "  ", "two words", "line\nbreak", "schlüssel"])
    def test_what_can_be_no_key(self, value):
        with pytest.raises(ModelUnusableError, match="A_KEY") as caught:
            ADAPTER.connect(config(api_key_env="A_KEY"), {"A_KEY": value})
        assert not value.strip() or value not in str(caught.value)


class TestFootprint:
    """It takes no memory, whatever its name looks like."""

    def test_none(self, tmp_path):
        path = tmp_path / "llmux.yaml"
        path.write_text(
            f"models: {{llama-70b-q4: {{runtime: openai_remote, base_url: '{ADDRESS}', upstream_model: m}}}}\n"
        )
        (spec,) = load(path).model_specs()
        assert (spec.remote, spec.footprint.mib, spec.footprint.source) == (True, 0, FootprintSource.EXPLICIT)


class TestThinking:
    """Each way to switch reasoning has its two sides."""

    @cases("field", ["thinking", "enable_thinking", "chat_template_kwargs", "reasoning", "reasoning_effort"])
    def test_fields(self, field):
        switch = ADAPTER.thinking(config(thinking_field=field))
        assert set(switch.enabled) == set(switch.disabled) == {field}
        assert switch.enabled != switch.disabled
        assert ADAPTER.fields(config(thinking_field=field, thinking="enabled")) == switch.enabled
        assert ADAPTER.fields(config(thinking_field=field)) == {}

    def test_without_one(self):
        assert ADAPTER.thinking(config()) is None


class TestImports:
    """httpx is paid for by daemons that have a remote model."""

    def test_not_imported(self):
        code = "import sys, supervisor.fleet.fleet, supervisor.server.app; sys.exit('httpx' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
