"""A machine with a scripted NVIDIA driver, for one test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import fake_nvml

FAKE = Path(fake_nvml.__file__)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Call it with the script's keys to (re)write the driver's world. One 16 GiB GPU to begin with."""
    path = tmp_path / "nvml.json"
    monkeypatch.setenv("LLMUX_NVML_MODULE", str(FAKE))
    monkeypatch.setenv("LLMUX_FAKE_NVML", str(path))
    world = tmp_path.name

    def write(**keys):
        fake_nvml.write_script(path, **{"gpus": [{"total_mib": 16384}], "world": world, **keys})

    write()
    write.world = world
    return write


@pytest.fixture
def spawn():
    """Start `python -c CODE` with further environment; killed at the end."""
    started = []

    def start(code="import sys; sys.stdin.read()", **env):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **{key: str(value) for key, value in env.items()}},
        )
        started.append(process)
        environ = Path(f"/proc/{process.pid}/environ")
        while not environ.read_bytes():  # for a moment the kernel shows none of the program it has begun
            time.sleep(0.001)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
