"""A hub of its own for each test, and `llmux pull` as a person runs it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.daemon import REPOSITORY
from tests.support.fake_hub import Hub, Repo
from tests.support.limits import LIMIT_S
from tests.support.shell import llmux

MIB = 1 << 20


@cache
def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """One repository in the layout of transformers, one of GGUF files."""
    with Hub() as hub:
        hub.repos["acme/tiny"] = Repo(
            {
                "config.json": b'{"model_type": "qwen3"}\n',
                "tokenizer.json": content(70_000, 1),
                "model.safetensors": content(5 * MIB, 2),
                "pytorch_model.bin": content(MIB, 3),
                "original/consolidated.pth": content(1000, 4),
                ".gitattributes": b"*.safetensors filter=lfs\n",
            },
            large=frozenset({"model.safetensors", "pytorch_model.bin"}),
            versions={"v2": {"model.safetensors": content(5 * MIB, 12)}},
        )
        hub.repos["acme/tiny-gguf"] = Repo(
            {
                "tiny-Q4_K_M.gguf": content(3 * MIB, 5),
                "tiny-Q8_0.gguf": content(4 * MIB, 6),
                "mmproj-F16.gguf": content(MIB, 7),
                "README.md": b"# Tiny\n",
            },
            large=frozenset({"tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-F16.gguf"}),
        )
        yield hub


class Pull:
    """`llmux pull` on a configuration, in a home of its own."""

    def __init__(self, home: Path, hub: Hub) -> None:
        self.home = home
        self.hub = hub
        self.models_dir = home / "models"
        self.models: dict[str, object] = {}
        self.virtual: dict[str, object] = {}
        self.runtimes_dir = home / "runtimes"
        self.server: dict[str, object] = {"models_dir": str(self.models_dir), "runtimes_dir": str(self.runtimes_dir)}

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LLMUX_", "HF_", "XDG_"))}
        config = self.home / "llmux.yaml"
        config.write_text(
            yaml.safe_dump(
                {"server": self.server, "models": self.models, "virtual_models": self.virtual}, sort_keys=False
            )
        )
        own = {"HOME": str(self.home), "PYTHONPATH": str(REPOSITORY), "LLMUX_CONFIG": str(config)}
        return kept | own | {"HF_ENDPOINT": self.hub.url} | variables

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "supervisor.cli", "pull", *words],
            env=self.environment(**variables),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return llmux("pull", *words, env=self.environment(**variables), cwd=self.home, timeout=LIMIT_S)

    def rows(self, *words: str, **variables: str) -> list[dict]:
        done = self(*words, "--json", **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def names(self, folder: str) -> set[str]:
        """The files that are there of a repository, without what pull itself remembers."""
        root = self.models_dir / folder
        found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        return {name for name in found if not name.startswith(".llmux-pull")}


@pytest.fixture
def pull(tmp_path: Path, hub: Hub) -> Pull:
    """A configuration of one model of either repository."""
    found = Pull(tmp_path, hub)
    found.models["tiny"] = {"runtime": "transformers", "source": {"repo": "acme/tiny"}}
    found.models["small"] = {"source": {"repo": "acme/tiny-gguf", "files": ["tiny-Q4_K_M.gguf", "mmproj-*.gguf"]}}
    return found
