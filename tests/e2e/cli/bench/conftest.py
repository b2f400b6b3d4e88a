"""`llmux bench` as a person calls it: a process of its own, a configuration, and no daemon unless a test starts one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import tiny
from tests.support.chatterbox import runtimes_dir as runtimes_dir  # a fixture
from tests.support.daemon import REPOSITORY, fake
from tests.support.limits import LIMIT_S
from tests.support.shell import LLMUX, Shell, environment, heed_ctrl_c

NOWHERE = "http://127.0.0.1:1"


def pretender(*flags: str, quick: float = 0.001, slow: float = 0.03, **keys: object) -> dict[str, object]:
    """A model that is as fast as its device: so many seconds a chunk, `quick` where it sees a GPU, `slow` where it doesn't."""
    pace = ("--chunk-delay", str(quick), "--chunk-delay-without-gpu", str(slow))
    return fake("--bench", *pace, *flags, **keys)


class Bench:
    """The command, on a configuration of these models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "bench.yaml"
        self.script = folder / "nvml.json"  # without it there is no driver
        self.variables = {
            "LLMUX_NVML_MODULE": str(REPOSITORY / "tests" / "support" / "fake_nvml.py"),
            "LLMUX_FAKE_NVML": str(self.script),
            "TMPDIR": str(folder),
        }

    def write(self, models: dict[str, Any], runtimes_dir: Path | None = None, **sections: Any) -> None:
        server = {"runtimes_dir": str(runtimes_dir or tiny.runtimes_dir()), "state_dir": str(self.folder / "state")}
        self.config.write_text(yaml.safe_dump({"server": server, "models": models, **sections}))

    def __call__(self, *words: str, url: str = NOWHERE) -> subprocess.CompletedProcess[str]:
        shell = Shell(self.folder, url)
        return shell("bench", *words, "--config", str(self.config), timeout=LIMIT_S, **self.variables)

    def json(self, *words: str, code: int = 0, **keys: str) -> dict[str, Any]:
        done = self(*words, "--json", **keys)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """It goes on in the background; what it tells on stderr is in `told`."""
        with self.told.open("w") as told:
            return subprocess.Popen(
                [*LLMUX, "bench", *words, "--config", str(self.config)],
                env=environment(self.folder, LLMUX_URL=NOWHERE, PYTHONPATH=str(REPOSITORY), **self.variables),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=told,
                text=True,
                preexec_fn=heed_ctrl_c,
            )

    @property
    def told(self) -> Path:
        return self.folder / "stderr"

    def leftovers(self) -> list[Path]:
        """Folders of logs that should be gone."""
        return list(self.folder.glob("llmux-bench-*"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
