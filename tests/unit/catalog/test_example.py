from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import supervisor
from runtimes.model_config import ModelConfig
from runtimes.registry import REGISTRY
from supervisor.catalog.document.document import Layer, Source, parse, plain
from supervisor.catalog.schema import json_schema

CONFIG = Path(supervisor.__file__).parent.parent / "config"
EXAMPLE = CONFIG / "llmux.example.yaml"
_OFF = re.compile(r"^( *)#(?! |-)(?=\S)", re.MULTILINE)


def everything_on() -> str:
    """The example with every commented-out setting taken in."""
    text = EXAMPLE.read_text()
    text = text.replace("\ndevices: auto\n", "\n")
    listed = re.sub(r"^#(?=devices:$)", "", text, flags=re.MULTILINE)
    lines, within = [], False
    for line in listed.splitlines():
        within = line == "devices:" or (within and line.startswith("#"))
        lines.append(re.sub(r"^#", "", line) if within else line)
    return _OFF.sub(r"\1", "\n".join(lines))


class TestExample:
    """config/llmux.example.yaml is valid as it is and with every setting on, and has every key there is."""

    def test_as_it_is(self, folder):
        folder.write(EXAMPLE.read_text())
        catalog = folder.load(registry=REGISTRY, check_files=False)
        names = [entry.name for entry in catalog.listing()]
        assert names[:2] == ["qwen3-8b-instruct", "my-server"]
        assert len(names) == len(catalog.models) + len(catalog.tasks)

    def test_with_everything_on(self, folder):
        catalog = folder.load(everything_on(), registry=REGISTRY, check_files=False)
        assert [device.id for device in catalog.devices] == ["host", "gpu0", None]

    def test_every_key_is_there(self):
        node, problems = parse(everything_on(), Source(Layer.FILE, "example", CONFIG))
        assert problems == []
        data, schema = plain(node), json_schema()
        definitions = schema["$defs"]
        shown = {
            "ServerConfig": set(data["server"]),
            "LimitsConfig": set(data["limits"]),
            "DeviceConfig": {key for device in data["devices"] for key in device},
            "VirtualModelConfig": {key for item in data["virtual_models"].values() for key in item},
            "TaskConfig": {key for item in data["tasks"].values() for key in item},
            "CandidateConfig": {
                key
                for item in data["tasks"].values()
                for one in item["candidates"]
                if isinstance(one, dict)
                for key in one
            },
            "ClientConfig": {key for item in data["clients"].values() for key in item},
        }
        models = {name: set() for name in REGISTRY.names()}
        for model in data["models"].values():
            models[model.get("runtime") or REGISTRY.infer(model)] |= set(model)
        common = set.union(*models.values()) & set(ModelConfig.model_fields)
        shown |= {REGISTRY.get(name).config.__name__: keys | common for name, keys in models.items()}
        missing = {
            f"{name}.{key}"
            for name, keys in shown.items()
            for key in definitions[name]["properties"]
            if key not in keys | {"physical", "params"}
        }
        place = "config/llmux.example.yaml, where a model of each runtime shows its keys, as a comment if need be"
        assert not missing, f"Add to {place}: {', '.join(sorted(missing))}"

    def test_every_key_has_a_purpose(self):
        undescribed = {
            f"{name}.{key}"
            for name, definition in json_schema()["$defs"].items()
            for key, field in definition.get("properties", {}).items()
            if "description" not in field and key != "params"
        }
        assert set() == undescribed


class TestImports:
    """A start pays only for what it uses."""

    @pytest.mark.parametrize(
        "module", ["pydantic_settings", "runtimes.command.adapter", "runtimes.llama_server.adapter"]
    )
    def test_not_imported(self, module):
        code = f"import sys, supervisor.catalog, supervisor.catalog.keys; sys.exit({module!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=CONFIG.parent, check=False).returncode == 0
