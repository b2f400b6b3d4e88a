from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import Field

from runtimes.base import Adapter, Endpoint, LaunchSpec, Thinking
from runtimes.estimate import Estimate
from runtimes.model_config import ModelConfig
from runtimes.registry import Registry
from runtimes.sizing import Sizing
from supervisor.catalog import Catalog, load
from supervisor.errors import ConfigError


class StubConfig(ModelConfig):
    path: Path | None = None
    cmd: str | None = None
    n_ctx: int = Field(default=4096, ge=1, le=1 << 20)
    layers: int | str = "all"
    folders: list[Path] = Field(default_factory=list)
    insists_on: str | None = None
    has_switch: bool = True
    estimated_mib: int | None = None


class StubAdapter(Adapter[StubConfig]):
    """Real enough for a catalog: everything an adapter decides can be set in the file."""

    summary = "for tests"
    config = StubConfig
    spreads = True
    divides = True
    overridable_keys = ("layers",)

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, config, *, runtimes_dir):
        if config.path is None or config.path.is_file():
            return ()
        return (f"path: {config.path}: there is no such file", "a sentence without a key")

    def launch(self, config, context):
        return LaunchSpec(argv=("true",))

    def endpoints(self, config):
        return frozenset({Endpoint("/v1/chat/completions")})

    def estimate(self, config):
        return Estimate(config.estimated_mib, "computed", "as told") if config.estimated_mib else None

    def sized(self, config, room):
        layers = config.layers if config.layers != "all" or room is None else room.mib
        return config.model_copy(update={"layers": layers}), Sizing(config.n_ctx, 1, 0, str(room))

    def thinking(self, config):
        if not config.has_switch:
            return None
        return Thinking(
            enabled={"chat_template_kwargs": {"enable_thinking": True}},
            disabled={"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"},
        )

    def upstream_model(self, config):
        return config.insists_on


STUBS = Registry({"llama_server": StubAdapter("llama_server"), "command": StubAdapter("command")})


class Folder:
    """A configuration folder that is also the current one, so that problems name files shortly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str, name: str = "llmux.yaml") -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def load(self, text: str | None = None, **options) -> Catalog:
        if text is not None:
            self.write(text)
        options.setdefault("registry", STUBS)
        return load(self.path / "llmux.yaml", **options)

    def problems(self, text: str | None = None, **options) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self.load(text, **options)
        return list(caught.value.problems)

    def troubles(self, text: str | None = None, **options) -> list[str]:
        models = self.load(text, **options).models.values()
        return [str(trouble) for model in models for trouble in model.troubles]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Folder:
    for name in list(os.environ):
        if name.startswith("LLMUX_"):
            monkeypatch.delenv(name)
    for name in ("CONFIG", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "xdg" / name.lower()))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path)
