"""A model that no GPU has room for alone (`gpus: auto`): its parts on GPUs that are not alike, and what changes them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.support import tiny
from tests.support.clients import Call, Gpu
from tests.support.daemon import FAKE_WORKER, Daemon, fake, running, wait_until
from tests.support.shell import Shell

LARGE_MIB = 14 * 1024
TO_FAKE = """
import json, os, pathlib, sys
told = sys.argv[1:]
pathlib.Path(os.environ["ARGV_TO"]).write_text(json.dumps(told))
value = lambda name: told[told.index(name) + 1]
os.execv(sys.executable, [sys.executable, "-I", "-S", os.environ["FAKE_WORKER"], "--host", value("--host"),
    "--port", value("--port"), "--name", value("--alias")])
"""


@pytest.fixture
def cards(tmp_path) -> Gpu:
    """One of 8 and one of 12 GiB; the margin takes 512 MiB of each."""
    return Gpu(tmp_path, totals=(8192, 12288))


def large(**keys: Any) -> dict[str, Any]:
    """Takes exactly its parts."""
    return fake(vram_mib=LARGE_MIB, gpus="auto", **keys)


def site(cards: Gpu, **models: Any) -> dict[str, Any]:
    takes_parts = {"FAKE_VRAM_MIB": "${parts}", "FAKE_VRAM_WORLD": cards.world}
    return {"devices": "auto", "models": {"large": large(env=takes_parts), **models}}


def parts(daemon: Daemon, model: str = "large") -> dict[str, int]:
    """What it has leased of each device."""
    devices = daemon.get("/v1/admin/gpu-memory").json()["devices"]
    return {d["id"]: lease["lease_mib"] for d in devices for lease in d["leases"] if lease["model"] == model}


def why(daemon: Daemon, kind: str, model: str = "large") -> str:
    return [decision["reason"] for decision in daemon.decisions(model) if decision["kind"] == kind][-1]


class TestParts:
    """In proportion to what is free of each, less 512 MiB."""

    def test_llama_server_divides_its_layers_so(self, tmp_path, cards):
        program = tmp_path / "llama-server"
        program.write_text(f"#!{sys.executable}\n{TO_FAKE}")
        program.chmod(0o755)
        env = {"ARGV_TO": str(tmp_path / "argv.json"), "FAKE_WORKER": str(FAKE_WORKER)}
        model = {"runtime": "llama_server", "binary": str(program), "path": str(tiny.model()), "env": env}
        models = {
            "large": {**model, "vram_mib": LARGE_MIB},
            "small": {**model, "vram_mib": 1000},
        }  # auto is its default
        config = {"devices": "auto", "models": models}
        with running(tmp_path, config, env=cards.env) as daemon:
            assert daemon.chat("large").status_code == 200
            told = json.loads((tmp_path / "argv.json").read_text())
            assert told[told.index("--tensor-split") + 1] == "5576,8760"
            assert parts(daemon) == {"gpu0": 5576, "gpu1": 8760}
            daemon.post("/v1/admin/models/large/unload")
            assert daemon.chat("small").status_code == 200
            assert [*parts(daemon, "small").values()] == [1000]
            assert "--tensor-split" not in json.loads((tmp_path / "argv.json").read_text())

    def test_they_are_shown(self, tmp_path, cards):
        with running(tmp_path, site(cards), env=cards.env) as daemon:
            assert daemon.chat("large").status_code == 200
            assert why(daemon, "admit") == (
                "needs 14336 MiB: 5576 MiB on Fake 8 GiB (gpu0) and 8760 MiB on Fake 12 GiB (gpu1), in proportion to what it can have there, less "
                "512 MiB each; 7680 and 11776 free"
            )
            wait_until(lambda: daemon.model("large")["memory"]["measured_mib"] == LARGE_MIB)
            model = daemon.model("large")
            assert (model["device"], model["memory"]["lease_mib"]) == ("gpu0 + gpu1", LARGE_MIB)
            assert model["memory"]["parts"] == {"gpu0": 5576, "gpu1": 8760}
            assert "gpu0 5576 MiB + gpu1 8760 MiB" in Shell(tmp_path, daemon.url)("ps", "--wide").stdout

    def test_one_that_fits_on_one_gpu_is_not_divided(self, tmp_path, cards):
        with running(tmp_path, site(cards, small=fake(vram_mib=9000, gpus="auto")), env=cards.env) as daemon:
            assert daemon.chat("small").status_code == 200
            assert parts(daemon, "small") == {"gpu1": 9000}

    def test_an_idle_model_goes_for_it(self, tmp_path, cards):
        idle = fake(vram_mib=6000, env=cards.takes(6000))
        with running(tmp_path, site(cards, idle=idle), env=cards.env) as daemon:
            assert daemon.chat("idle").status_code == 200
            assert parts(daemon, "idle") == {"gpu0": 6000}
            assert daemon.chat("large").status_code == 200
            assert why(daemon, "evict").endswith("evicting idle (llm, 6000 MiB, idle 0 s)")
            assert parts(daemon) == {"gpu0": 5576, "gpu1": 8760}

    def test_what_a_partner_has_changes_them(self, tmp_path, cards):
        with running(tmp_path, site(cards), env=cards.env) as daemon:
            wanted = {"vram_mib": 3000, "holder": "job", "device": "gpu1"}
            assert daemon.post("/v1/admin/leases", json=wanted).status_code == 201
            assert daemon.chat("large").status_code == 200
            assert parts(daemon) == {"gpu0": 6659, "gpu1": 7677}

    def test_memory_that_goes_between_plan_and_start_changes_them(self, tmp_path, cards):
        """When the evicted model's memory comes back, somebody else has taken 1000 MiB of the first GPU."""
        cards.write(return_after_s=None)
        idle = fake(vram_mib=6000, env=cards.takes(6000))
        with running(tmp_path, site(cards, idle=idle), env=cards.env) as daemon:
            assert daemon.chat("idle").status_code == 200
            loading = Call(daemon, "large")
            wait_until(lambda: daemon.model("idle")["state"] == "stopping")
            cards.write(return_after_s=0, first={"processes": [{"pid": 1, "mib": 1000}]})
            assert loading.result().status == 200
            assert "5576 MiB on Fake 8 GiB (gpu0)" in why(daemon, "evict")
            assert parts(daemon) == {"gpu0": 5073, "gpu1": 9263}

    def test_out_of_memory_raises_the_whole(self, tmp_path, cards):
        """And the next try has so much more on each of them."""
        mark = tmp_path / "runs-out"
        mark.touch()
        fails = 'if [ -e "$0" ]; then rm "$0"; echo "CUDA error: out of memory" >&2; exit 1; fi; exec "$@"'
        model = fake(vram_mib=12288, gpus="auto")
        short = {**model, "cmd": ["sh", "-c", fails, str(mark), *model["cmd"]]}
        with running(tmp_path, {"devices": "auto", "models": {"large": short}}, env=cards.env) as daemon:
            assert daemon.chat("large").status_code == 200
            assert "tried once more, with 15360 MiB in all instead of 12288" in why(daemon, "raise")
            assert daemon.model("large")["memory"]["raised"] == {"gpu0": 15360, "gpu1": 15360}
            assert sum(parts(daemon).values()) == 15360

    def test_what_was_measured_is_of_all_of_it(self, tmp_path, cards):
        """A later daemon gives it other parts of the same sum."""
        model = fake(gpus="auto", env={"FAKE_VRAM_MIB": "5000,7000", "FAKE_VRAM_WORLD": cards.world})
        model = {**model, "files": [str(tmp_path / "weights")]}
        del model["vram_mib"]
        with (tmp_path / "weights").open("wb") as weights:
            weights.truncate(10 << 30)
        with running(tmp_path, {"devices": "auto", "models": {"large": model}}, env=cards.env) as daemon:
            assert daemon.chat("large").status_code == 200
            assert sum(parts(daemon).values()) == 13312
            wait_until(lambda: daemon.model("large")["memory"]["learned"] == {"gpu0": 12000, "gpu1": 12000})
            daemon.stop()
            daemon.start()
            assert daemon.chat("large").status_code == 200
            assert parts(daemon) == {"gpu0": 4667, "gpu1": 7333}


class TestConfiguration:
    def test_larger_than_all_of_them(self, tmp_path, cards):
        models = {"huge": fake(vram_mib=30000, gpus="auto"), "other": fake()}
        with running(tmp_path, {"devices": "auto", "models": models}, env=cards.env) as daemon:
            (warning,) = daemon.model("huge")["warnings"]
            assert warning == (
                "takes 30000 MiB (explicit: vram_mib of the configuration), more than Fake 8 GiB (gpu0) and Fake 12 GiB (gpu1) together, which have "
                "18432 MiB after their margins, less 512 MiB each; choose a smaller quantisation or context, or other devices"
            )
            refused = daemon.chat("huge")
            assert refused.status_code == 503
            assert (
                "needs 30000 MiB, and Fake 8 GiB (gpu0) and Fake 12 GiB (gpu1) have 18432 usable together, less 512 MiB each"
                in refused.text
            )
            assert daemon.chat("other").status_code == 200

    def test_a_refusal_names_what_helps(self, tmp_path, cards):
        models = {"large": fake(vram_mib=LARGE_MIB), "lora": fake(vram_mib=30000)}
        with running(tmp_path, {"devices": "auto", "models": models}, env=cards.env) as daemon:
            refused = daemon.chat("large")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "insufficient_memory")
            helps = (
                "gpus: auto lets it go over several GPUs; choose a smaller quantisation or context, or other devices"
            )
            assert refused.json()["error"]["message"].endswith(f"To mend it: {helps}")
            assert helps in daemon.model("large")["warnings"][0]

    def test_a_runtime_that_divides_equally(self, tmp_path, cards):
        model = {"runtime": "vllm_serve", "path": str(tmp_path), "gpus": "auto"}
        with pytest.raises(AssertionError) as told:
            Daemon(tmp_path, {"devices": "auto", "models": {"m": model}}, cards.env).start()
        problem = "gpus: vllm_serve divides a model equally: say by how many GPUs. With auto these work: llama_server, "
        assert problem in str(told.value)
