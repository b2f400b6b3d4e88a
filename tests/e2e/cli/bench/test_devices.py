"""Where a model is tried: the devices there are, their memory by measurement and by a daemon's ledger, and the ratio."""

from __future__ import annotations

import pytest
import yaml

from supervisor.cli.exit_codes import ExitCode
from tests.e2e.cli.bench.conftest import pretender
from tests.support import environments, fake_nvml, hearing
from tests.support.daemon import Daemon, fake, running

TAKES_MIB = 700


@pytest.fixture
def gpus(bench):
    """A scripted driver with two GPUs, the second with more free; models that take memory of the one they see."""
    world = str(bench.folder)
    busy, idle = {"name": "Busy", "processes": [{"pid": 1, "mib": 9000}]}, {"name": "Idle"}
    fake_nvml.write_script(bench.script, gpus=[busy, idle], world=world)
    return {"FAKE_VRAM_MIB": str(TAKES_MIB), "FAKE_VRAM_WORLD": world}


@pytest.fixture
def site(tmp_path):
    """A daemon's folder."""
    folder = tmp_path / "daemon"
    folder.mkdir()
    return folder


class TestGpu:
    """A GPU and the processor, side by side."""

    def test_both_are_tried_and_compared(self, bench, gpus):
        bench.write({"chat": pretender(slow=0.05, env=gpus)})
        found = bench.json("chat", "--tokens", "20", "--rounds", "3")
        gpu, cpu = found["devices"]
        assert (gpu["device"], gpu["kind"], gpu["name"]) == ("gpu1", "cuda", "Idle")  # the roomiest
        assert (cpu["device"], cpu["kind"]) == ("host", "cpu")
        assert gpu["measured_mib"] == TAKES_MIB
        ratio = found["ratio"]
        assert (ratio["device"], ratio["over"], ratio["wanted"]) == ("gpu1", "host", 5.0)
        assert ratio["times"] == pytest.approx(gpu["rate"] / cpu["rate"], rel=0.01)
        assert ratio["met"] is True

    def test_a_gpu_that_is_too_slow(self, bench, gpus):
        bench.write({"chat": pretender(quick=0.02, slow=0.02, env=gpus)})
        done = bench("chat", "--tokens", "10", "--rounds", "3")
        assert done.returncode == ExitCode.DONE
        assert "times as fast as host; wanted: 5 times or more, not met." in done.stdout

    def test_devices_by_name_in_the_order_asked_for(self, bench, gpus):
        bench.write({"chat": pretender(env=gpus)})
        found = bench.json("chat", "--devices", "cpu,gpu0", "--tokens", "2", "--rounds", "1")
        assert [row["device"] for row in found["devices"]] == ["host", "gpu0"]
        assert found["ratio"]["device"] == "gpu0"
        found = bench.json("chat", "--devices", "gpu0,gpu1", "--tokens", "2", "--rounds", "1")
        assert found["ratio"]["met"] is None  # two GPUs are not judged

    def test_a_model_keeps_to_its_gpus(self, bench, gpus):
        bench.write({"chat": pretender(env=gpus, devices=["gpu0"])})
        found = bench.json("chat", "--devices", "cuda", "--tokens", "2", "--rounds", "1")
        assert [row["device"] for row in found["devices"]] == ["gpu0"]

    def test_one_that_several_share_is_tried_on_the_processor(self, bench, gpus):
        bench.write({"chat": pretender(env=gpus, gpus=2)})
        refused = bench("chat", "--tokens", "2", "--rounds", "1")
        assert refused.returncode == ExitCode.FAILED
        assert "spread over 2 GPUs" in refused.stderr
        assert "llmux bench chat --devices cpu" in refused.stderr
        found = bench.json("chat", "--devices", "cpu", "--tokens", "2", "--rounds", "1")
        assert [row["device"] for row in found["devices"]] == ["host"]

    def test_one_that_computes_elsewhere(self, bench, gpus):
        bench.write({"chat": pretender()})
        found = bench.json("chat", "--tokens", "2", "--rounds", "1", code=ExitCode.FAILED)
        gpu, cpu = found["devices"]
        assert "nothing of the GPU's memory" in gpu["problem"]
        assert gpu["rate"] is None
        assert cpu["rate"] > 0  # the other one was tried all the same
        assert found["ratio"] is None

    def test_a_runtime_built_for_the_processor(self, bench, gpus):
        model = {"runtime": "faster_whisper", "type": "asr", "path": str(hearing.converted())}
        bench.write({"ear": model}, environments.installed("faster_whisper"))
        (row,) = bench.json("ear", "--devices", "cuda", code=ExitCode.FAILED)["devices"]
        assert "llmux runtimes install faster_whisper --accelerator cuda" in row["problem"]
        assert row["load_s"] is None

    def test_no_gpu(self, bench):
        started = bench.folder / "started"
        bench.write({"chat": pretender("--started", str(started))})
        refused = bench("chat", "--devices", "cpu,cuda")
        assert (refused.returncode, refused.stdout) == (ExitCode.FAILED, "")
        assert "no device 'cuda' here" in refused.stderr
        assert "NVML Shared Library Not Found" in refused.stderr
        assert "there is: cpu (host:" in refused.stderr
        assert not started.exists()

    def test_a_configuration_without_gpus(self, bench, gpus):
        bench.write({"chat": pretender(env=gpus)}, devices=[{"kind": "host"}])
        refused = bench("chat", "--devices", "cuda")
        assert "lists no GPU" in refused.stderr


class TestRoom:
    """Nothing is started without room for it, and nothing has to go for it."""

    def test_a_model_that_is_too_large(self, bench, gpus):
        started = bench.folder / "started"
        bench.write(
            {"chat": pretender("--started", str(started), vram_mib=16000)}, devices=[{"kind": "cuda", "index": 0}]
        )
        (row,) = bench.json("chat", "--devices", "cuda", code=ExitCode.FAILED)["devices"]
        assert "takes 15.6 GiB (explicit:" in row["problem"]
        assert "7384 MiB are free on Busy (gpu0)" in row["problem"]  # 16 GiB less what the other program has
        assert not started.exists()

    def test_by_the_daemons_ledger(self, bench, site):
        started = bench.folder / "started"
        small = pretender("--started", str(started), vram_mib=500)
        config = {"devices": [{"kind": "host", "budget_mib": 1000, "margin_mib": 0}]}
        bench.write({"small": small}, **config)
        with running(site, {"models": {"large": fake(vram_mib=900), "small": small}, **config}) as daemon:
            load(daemon, "large")
            (row,) = bench.json("small", code=ExitCode.FAILED, url=daemon.url)["devices"]
            assert "by the daemon's ledger 100 MiB may be taken on processor and RAM (host)" in row["problem"]
            assert not started.exists()
            assert daemon.model("large")["state"] == "ready"  # nothing was evicted
            assert daemon.post("/v1/admin/models/large/unload").status_code == 200
            (row,) = bench.json("small", "--tokens", "2", "--rounds", "1", url=daemon.url)["devices"]
            assert row["rate"] > 0
            assert daemon.model("small")["state"] == "stopped"  # the daemon never had it
            assert daemon.workers() == []

    def test_a_daemon_that_keeps_its_ledger_to_itself(self, bench, site):
        key = "sk-" + "a" * 40
        (site / "api_keys.yaml").write_text(
            yaml.safe_dump([{"name": "admin", "key": key, "scopes": ["admin", "inference"]}])
        )
        bench.write({"chat": pretender()})
        with running(site, {"models": {"chat": pretender()}}) as daemon:
            (row,) = bench.json("chat", code=ExitCode.FAILED, url=daemon.url)["devices"]
            assert "--key" in row["problem"]
            (row,) = bench.json("chat", "--key", key, "--tokens", "2", "--rounds", "1", url=daemon.url)["devices"]
            assert row["rate"] > 0


class TestUnfit:
    """Names and models that can't be tried."""

    def test_an_unknown_model(self, bench):
        bench.write({"chat": pretender()})
        told = bench("chap")
        assert (told.returncode, told.stdout) == (ExitCode.NOT_FOUND, "")
        assert "Did you mean chat?" in told.stderr

    def test_a_remote_model(self, bench):
        remote = {"runtime": "openai_remote", "base_url": "http://127.0.0.1:1/v1", "upstream_model": "x"}
        bench.write({"far": remote})
        told = bench("far")
        assert told.returncode == ExitCode.FAILED
        assert "run by others" in told.stderr

    def test_a_model_without_its_file(self, bench):
        bench.write({"chat": {"runtime": "llama_server", "path": "/nowhere/model.gguf"}})
        told = bench("chat")
        assert told.returncode == ExitCode.FAILED
        assert "/nowhere/model.gguf" in told.stderr

    def test_pictures_are_not_measured(self, bench):
        bench.write({"painter": pretender(type="image")})
        assert "type image" in bench("painter").stderr


def load(daemon: Daemon, model: str) -> None:
    assert daemon.post(f"/v1/admin/models/{model}/load").status_code == 200
