"""`config check`, `doctor` and `ps` say the same of models whose memory can't be right, and of context and slots."""

from __future__ import annotations

import json

import pytest

from supervisor.cli.exit_codes import ExitCode
from tests.support import tiny
from tests.support.daemon import fake, running, wait_until
from tests.support.shell import Shell


def gguf(**keys: object) -> dict[str, object]:
    """Three lines and no more, beside what the test machine needs."""
    return {"path": str(tiny.model(name="tiny-chat")), "program": "embedded", "threads": 1, **keys}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    models = {
        "plain": gguf(),
        "little": gguf(vram_mib=40, n_ctx=16384),
        "huge": fake(vram_mib=50_000),
        "measured": gguf(vram_mib=30, n_ctx=512, parallel=1, cache_ram_mib=1),
    }
    with running(tmp_path_factory.mktemp("warned"), {"models": models}) as daemon:
        yield daemon


@pytest.fixture
def shell(site, tmp_path):
    return Shell(tmp_path, site.url)


def warned(shell, site) -> list[str]:
    """What `config check` warns of, once all three were seen to say the same."""
    path = str(site.config_path)
    check = json.loads(shell("config", "check", path, "--json").stdout)["warnings"]
    models = json.loads(shell("ps", "--json").stdout)["data"]
    assert [f"{model['name']}: {one}" for model in models for one in model["warnings"]] == check
    checks = json.loads(shell("doctor", path, "--json").stdout)["checks"]
    assert [one["message"] for one in checks if one["name"] == "memory"] == check
    for command in (["config", "check", path], ["ps"]):
        told = shell(*command)
        assert told.returncode == ExitCode.DONE
        assert [line for line in told.stdout.splitlines() if line.startswith("warning")] == [
            f"warning: {x}" for x in check
        ]
    return check


class TestWarnings:
    def test_less_than_computed_and_larger_than_the_device(self, shell, site):
        little, huge, measured = warned(shell, site)
        assert little.startswith("little: vram_mib is 40, but its files need ")
        assert huge.startswith("huge: takes 50000 MiB (explicit: vram_mib of the configuration), more than any device")
        assert measured.startswith("measured: vram_mib is 30, but its files need ")

    def test_less_than_measured(self, shell, site):
        """Also while the daemon has its file of measurements locked."""
        assert site.chat("measured").status_code == 200
        wait_until(lambda: site.model("measured")["memory"]["learned"], what="it was measured")
        assert warned(shell, site)[2].endswith("MiB were measured; raise or remove it")

    def test_pins_that_can_not_all_be_kept(self, tmp_path):
        models = {name: fake(vram_mib=600, pin=True) for name in ("one", "two")}
        with running(tmp_path, {"devices": [{"kind": "host", "budget_mib": 1000}], "models": models}) as daemon:
            (told,) = warned(Shell(tmp_path, daemon.url), daemon)
            assert told.startswith(
                "two: is pinned, and so is one: together they don't fit, and a pinned model never makes room"
            )


class TestSizes:
    def test_check_and_ps(self, shell, site):
        size = "context 32768 (all it was trained with) in 4 slots"
        told = shell("config", "check", str(site.config_path)).stdout
        assert f"plain: {size}.\n" in told
        assert "little: context 16384 (of 32768 trained) in 4 slots: as configured.\n" in told
        assert json.loads(shell("config", "check", str(site.config_path), "--json").stdout)["sizes"]["plain"] == size
        assert size.removeprefix("context ") in shell("ps", "--wide").stdout
