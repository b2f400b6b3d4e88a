"""`llmux bench` on the home server: one that writes and one that speaks, on both devices, beside the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.daemon import REPOSITORY
from tests.support.limits import LIMIT_S


@pytest.mark.parametrize(
    ("model", "unit"),
    [("qwen3.5-9b-fp8-uncensored", "tokens/s"), ("chatterbox-turbo", "x real time")],
)
def test_both_devices(home, model, unit):
    """The daemon keeps what it has; the GPU here is none, so neither is the other's multiple."""
    home.given()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMUX_")}
    options = ["--devices", "cuda,cpu", "--rounds", "1", "--json", "--config", home.config_path, "--url", home.url]
    done = subprocess.run(
        [sys.executable, "-m", "supervisor.cli", "bench", model, *options],
        cwd=REPOSITORY,
        env=kept | home.env | {"LLMUX_API_KEY": home.operator},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["unit"] == unit
    assert [(device["kind"], device["problem"]) for device in told["devices"]] == [("cuda", None), ("cpu", None)]
    gpu, processor = (device["rate"] for device in told["devices"])
    assert told["ratio"]["times"] == pytest.approx(gpu / processor, abs=0.01)
    assert told["devices"][0]["measured_mib"] == home.sizes[model]
    assert home.loaded() == set()
