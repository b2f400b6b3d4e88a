"""Predicted memory against what real llama.cpp workers take."""

from __future__ import annotations

import os
import subprocess
import time

import httpx
import pytest

from runtimes import device_kind
from runtimes.base import LaunchContext
from runtimes.device_kind import DeviceAssignment
from runtimes.llama_server.adapter import LlamaServerAdapter
from runtimes.llama_server.adapter.estimate import PROGRAM_MIB
from tests.support import tiny
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports

ADAPTER = LlamaServerAdapter()


def resident_mib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmRSS"))


def measured_mib(config) -> int:
    """What a worker holds once a prompt as long as a whole batch went through it."""
    port = quiet_ports()
    context = LaunchContext(
        "m", "127.0.0.1", port, "key", (DeviceAssignment("host", device_kind.HOST),), tiny.runtimes_dir()
    )
    spec = ADAPTER.launch(config, context)
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        spec.argv, env={**os.environ, **spec.env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    if httpx.get(url + "/health", trust_env=False).is_success:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.02)
            body = {"prompt": "hello world " * 60, "max_tokens": 4}
            headers = {"Authorization": "Bearer key"}
            answer = httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=LIMIT_S, trust_env=False)
            assert answer.status_code == 200, answer.text
            return resident_mib(process.pid)
        finally:
            process.kill()


def config(**keys):
    return ADAPTER.config(runtime="llama_server", program="embedded", **keys)


def computed_mib(config) -> int:
    """The estimate without the program."""
    return ADAPTER.estimate(config).mib - PROGRAM_MIB


@pytest.fixture(scope="module")
def program_mib() -> int:
    """What the program takes on this machine: how much of its libraries is in memory is the kernel's choice."""
    subject = config(path=str(tiny.model()), threads=1, n_ctx=2048)
    return measured_mib(subject) - computed_mib(subject)


class TestMeasured:
    """The estimate is what a worker comes to take, or a little more: nothing here fills its whole context."""

    def test_the_program(self, program_mib, record_property):
        record_property("program_mib", program_mib)
        assert abs(PROGRAM_MIB - program_mib) <= 8

    @pytest.mark.parametrize(
        ("parameters", "keys"),
        [
            ({"size_mib": 50}, {"n_ctx": 2048}),
            ({"size_mib": 200}, {"n_ctx": 16384, "extra_args": ["--load-mode", "none"]}),
            ({"size_mib": 400, "dim": 512, "heads": 8}, {"n_ctx": 2048}),
            ({"layers": 40}, {"n_ctx": 8192, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
            ({"size_mib": 100, "dim": 1024, "heads": 16, "kv_heads": 16}, {"n_ctx": 4096, "kv_unified": False}),
        ],
        ids=lambda value: ",".join(f"{name}={item}" for name, item in value.items()),
    )
    def test_predicted_is_what_is_taken(self, parameters, keys, program_mib, record_property):
        subject = config(path=str(tiny.model(**parameters)), threads=1, **keys)
        computed = computed_mib(subject)
        measured = measured_mib(subject)
        record_property("predicted_mib", computed + PROGRAM_MIB)
        record_property("measured_mib", measured)
        taken = measured - program_mib
        assert taken * 0.95 <= computed <= taken * 1.05 + 10, (ADAPTER.estimate(subject).detail, measured, program_mib)
