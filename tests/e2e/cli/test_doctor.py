"""`llmux doctor`: whole set-ups, and broken ones, each with what mends it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from supervisor.cli.environments import environments
from supervisor.cli.exit_codes import ExitCode
from supervisor.host.environments import venvs
from tests.support import fake_nvml, hearing, hf_folder, tiny
from tests.support.daemon import fake, gguf
from tests.support.fake_amd import Amd
from tests.support.shell import Shell

Checks = dict[str, list[dict[str, Any]]]


def examined(shell: Shell, config: dict[str, Any] | None, **variables: str) -> tuple[int, Checks]:
    """Its exit code, and the checks by name."""
    words = ["doctor", "--json"]
    if config is not None:
        path = shell.home / "llmux.yaml"
        path.write_text(yaml.safe_dump(config))
        words += ["--config", str(path)]
    told = shell(*words, **variables)
    answer = json.loads(told.stdout)
    found: Checks = {}
    for check in answer["checks"]:
        found.setdefault(check["name"], []).append(check)
    assert answer["ok"] == (told.returncode == ExitCode.DONE)
    return told.returncode, found


def whole(shell: Shell, **models: object) -> dict[str, Any]:
    """A configuration without a mistake, that touches nothing outside."""
    return {
        "models": {"chat": gguf(), "other": fake(), **models},
        "devices": [{"kind": "host", "budget_mib": 4000}],
        "server": {
            "port": 0,
            "state_dir": str(shell.home / "state"),
            "runtimes_dir": str(tiny.runtimes_dir()),
            "worker_port_first": 28100,
            "worker_port_last": 28110,
        },
    }


class TestWhole:
    """Nothing is wrong."""

    def test_all_is_well(self, alone):
        code, found = examined(alone, whole(alone))
        assert code == ExitCode.DONE
        assert {check["status"] for checks in found.values() for check in checks} <= {"ok", "warn"}
        assert found["models"][0]["message"].startswith("2 of 2")

    def test_for_people(self, alone):
        (alone.home / "llmux.yaml").write_text(yaml.safe_dump(whole(alone)))
        told = alone("doctor")  # in this folder it is found without being named
        assert told.returncode == ExitCode.DONE
        assert "2 models" in told.stdout
        assert "\x1b" not in told.stdout

    def test_without_a_configuration(self, alone):
        code, found = examined(alone, None)
        assert code == ExitCode.DONE
        assert found["configuration"][0]["status"] == "warn"

    def test_it_leaves_nothing_behind(self, alone):
        examined(alone, whole(alone))
        assert [path.name for path in alone.home.iterdir()] == ["llmux.yaml"]


class TestBroken:
    """One thing at a time is wrong; the exit code is 1, and the line says how to mend it."""

    def fails(self, shell: Shell, config: dict[str, Any], name: str, **variables: str) -> dict[str, Any]:
        code, found = examined(shell, config, **variables)
        assert code == ExitCode.FAILED
        bad = [check for checks in found.values() for check in checks if check["status"] == "fail"]
        assert {check["name"] for check in bad} == {name}
        return bad[0]

    def test_every_mistake_of_the_configuration(self, alone):
        config = whole(alone, gone=gguf(Path("/nowhere.gguf")))
        config["limits"] = {"queue_totl": 1}
        code, found = examined(alone, config)
        assert code == ExitCode.FAILED
        told = " ".join(check["message"] for check in found["configuration"])
        assert "queue_total" in told
        assert "llmux config check" in found["configuration"][0]["fix"]

    def test_no_file_at_all(self, alone):
        told = alone("doctor", "--config", "nowhere.yaml")
        assert told.returncode == ExitCode.FAILED
        assert "no such file" in told.stdout

    def test_a_model_file_is_missing(self, alone):
        code, found = examined(alone, whole(alone, gone=gguf(Path("/nowhere.gguf"))))
        assert code == ExitCode.FAILED
        read, missing = found["configuration"]
        assert (read["status"], "/nowhere.gguf" in missing["message"]) == ("ok", True)
        assert "port" in found  # the rest is looked at still

    def test_a_runtime_is_not_installed(self, alone):
        config = whole(alone)
        config["server"]["runtimes_dir"] = str(alone.home / "runtimes")
        bad = self.fails(alone, config, "model chat")
        assert bad["fix"] == "llmux runtimes install llama_server"

    def test_a_runtime_is_outdated(self, alone):
        config = whole(alone)
        runtimes = alone.home / "runtimes"
        live = (tiny.runtimes_dir() / "llama_server").resolve()
        (runtimes / "llama_server").mkdir(parents=True)
        for name in os.listdir(live):
            (runtimes / "llama_server" / name).symlink_to(live / name)
        record = runtimes / "llama_server" / venvs.RECORD
        facts = json.loads(record.read_text())
        record.unlink()
        record.write_text(json.dumps(facts | {"lock_digest": "another"}))
        config["server"]["runtimes_dir"] = str(runtimes)
        code, found = examined(alone, config)
        assert code == ExitCode.DONE
        assert found["runtime llama_server"][0]["status"] == "warn"
        assert found["runtime llama_server"][0]["fix"] == "llmux runtimes install llama_server"

    def test_a_program_is_missing(self, alone):
        config = whole(alone)
        config["models"]["chat"] = gguf(program="binary")
        bad = self.fails(alone, config, "model chat", PATH=os.path.dirname(shutil.which("env") or ""))
        assert bad["message"].endswith(
            "or compile it: llmux runtimes install llama_server --accelerator cuda|rocm|vulkan"
        )

    def test_the_port_is_taken(self, alone):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            config = whole(alone)
            config["server"]["port"] = taken.getsockname()[1]
            failed = self.fails(alone, config, "port")
            assert "server.port" in failed["fix"]
            assert f"is taken by pid {os.getpid()} (" in failed["message"]

    def test_an_extra_port_is_taken(self, alone):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            config = whole(alone)
            config["server"]["ollama_port"] = taken.getsockname()[1]
            assert "server.ollama_port" in self.fails(alone, config, "ollama port")["fix"]

    def test_the_daemon_has_the_port(self, alone, site):
        config = whole(alone)
        config["server"]["port"] = site.port
        code, found = examined(alone, config)
        assert code == ExitCode.DONE
        assert "llmux is running" in found["port"][0]["message"]

    def test_no_port_for_workers(self, alone):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            config = whole(alone)
            port = taken.getsockname()[1]
            config["server"] |= {"worker_port_first": port, "worker_port_last": port}
            assert "worker_port_first" in self.fails(alone, config, "workers' ports")["fix"]

    def test_a_folder_that_is_a_file(self, alone):
        config = whole(alone)
        (alone.home / "state").write_text("")
        assert "can't be written" in self.fails(alone, config, "state")["message"]

    def test_a_file_that_was_damaged(self, alone):
        config = whole(alone)
        state_dir = Path(config["server"]["state_dir"])
        state_dir.mkdir()
        (state_dir / "llmux.sqlite3.broken-1").write_text("")
        code, found = examined(alone, config)
        assert code == ExitCode.DONE
        (_, check) = found["state"]
        assert (check["status"], check["fix"].endswith("llmux.sqlite3.broken-1")) == ("warn", True)

    def test_the_world_without_keys(self, alone):
        config = whole(alone)
        config["server"]["host"] = "0.0.0.0"
        assert self.fails(alone, config, "keys")["fix"] == "llmux keys add NAME"

    def test_keys_that_others_can_read(self, alone):
        path = alone.home / "api_keys.yaml"
        path.write_text("- {name: a, key: sk-a-long-enough-key, expires: 2020-01-01, scopes: [inference]}\n")
        path.chmod(0o644)
        code, found = examined(alone, whole(alone))
        assert code == ExitCode.DONE
        told = {check["fix"] for check in found["keys"] if check["status"] == "warn"}
        assert told == {f"chmod 600 {path}", "llmux keys revoke a", "llmux keys add admin --scope admin"}

    def test_a_file_of_keys_with_mistakes(self, alone):
        (alone.home / "api_keys.yaml").write_text("- {name: a, key: short}\n")
        assert "shorter" in self.fails(alone, whole(alone), "keys")["message"]


class TestGpu:
    """What the driver says."""

    def nvml(self, shell: Shell, **script: object) -> dict[str, str]:
        path = shell.home / "nvml.json"
        path.write_text(json.dumps(script))
        return {"LLMUX_NVML_MODULE": fake_nvml.__file__, "LLMUX_FAKE_NVML": str(path)}

    def on_gpu(self, shell: Shell) -> dict[str, Any]:
        return whole(shell) | {"devices": [{"kind": "cuda", "index": 0}]}

    def test_found(self, alone):
        gpu = {"uuid": "GPU-1", "name": "Fake 4090", "total_mib": 24000}
        variables = self.nvml(alone, driver="999.1", gpus=[gpu])
        code, found = examined(alone, self.on_gpu(alone), **variables)
        assert code == ExitCode.DONE
        assert "Fake 4090" in found["gpu"][0]["message"]
        assert "999.1" in found["gpu"][0]["message"]

    def test_no_driver(self, alone):
        variables = {"LLMUX_NVML_MODULE": fake_nvml.__file__, "LLMUX_FAKE_NVML": "/nowhere.json"}
        code, found = examined(alone, self.on_gpu(alone), **variables)
        assert (code, found["gpu"][0]["status"]) == (ExitCode.FAILED, "fail")
        assert "driver" in found["gpu"][0]["fix"]
        code, found = examined(alone, whole(alone) | {"devices": "auto"}, **variables)
        assert (code, found["gpu"][0]["status"]) == (ExitCode.DONE, "warn")

    def test_mig(self, alone):
        gpu = {"uuid": "GPU-1", "name": "Fake", "total_mib": 24000, "mig": True}
        code, found = examined(alone, self.on_gpu(alone), **self.nvml(alone, gpus=[gpu]))
        assert code == ExitCode.FAILED
        assert "-mig 0" in found["gpu"][0]["fix"]

    @pytest.mark.parametrize(
        ("devices", "status", "told"),
        [
            ("  CUDA0: Fake 4090 (24000 MiB, 23000 MiB free)", "ok", "sees CUDA0"),
            ("  (none)", "warn", "chat: there is a GPU (cuda), but {program} sees no GPU"),
        ],
    )
    def test_a_llama_server_and_the_gpu(self, alone, devices, status, told):
        program = alone.home / "llama-server"
        program.write_text(
            f"#!/bin/sh\n[ $LD_LIBRARY_PATH = /opt/cuda ] && [ $# = 1 ] && [ $1 = --list-devices ] && "
            f"printf 'Available devices:\n{devices}\n'\n"
        )
        program.chmod(0o755)
        model = {"path": str(tiny.model()), "binary": str(program), "library_path": ["/opt/cuda"]}
        config = whole(alone) | {"models": {"chat": model}}
        gpu = {"uuid": "GPU-1", "name": "Fake 4090", "total_mib": 24000}
        code, found = examined(alone, config | {"devices": "auto"}, **self.nvml(alone, gpus=[gpu]))
        (check,) = found["llama-server"]
        assert (code, check["status"]) == (ExitCode.DONE, status)
        assert check["message"].endswith(told.format(program=program))
        if status == "warn":
            assert check["fix"].startswith("llmux runtimes install llama_server --accelerator cuda, or")
        assert "llama-server" not in examined(alone, config | {"devices": [{"kind": "host"}]})[1]

    @pytest.mark.parametrize(
        ("does", "told"),
        [
            (
                "echo 'llama-server: error while loading shared libraries: libcudart.so.13: cannot open' >&2; exit 127",
                "doesn't start: llama-server: error while loading shared libraries: libcudart.so.13: cannot open",
            ),
            (
                "echo 'ggml_cuda_init: failed to initialize CUDA: the driver is old'; echo 'Available devices:'",
                "sees no GPU: ggml_cuda_init: failed to initialize CUDA: the driver is old",
            ),
        ],
        ids=["a library is missing", "the driver is old"],
    )
    def test_a_compiled_llama_server_that_has_no_gpu(self, alone, does, told):
        """To install it again as it is would do nothing."""
        place = alone.home / "runtimes" / "llama_server"
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "python").symlink_to(sys.executable)
        (place / "bin" / "llama-server").write_text(f"#!/bin/sh\n{does}\n")
        (place / "bin" / "llama-server").chmod(0o755)
        record = {"python": "3.11.0", "asked_python": None, "device": "cuda", "packages": []}
        digest = environments.recipe_of("llama_server").digest()
        (place / venvs.RECORD).write_text(json.dumps(record | {"lock_digest": digest}))
        config = self.on_gpu(alone) | {"models": {"chat": {"path": str(tiny.model())}}}
        config["server"] = config["server"] | {"runtimes_dir": str(place.parent)}
        gpu = {"uuid": "GPU-1", "name": "Fake 4090", "total_mib": 24000}
        _, found = examined(alone, config, **self.nvml(alone, gpus=[gpu]))
        (check,) = found["llama-server"]
        assert check["message"].endswith(f"{place / 'bin' / 'llama-server'} {told}")
        again = "llmux runtimes remove llama_server && llmux runtimes install llama_server --accelerator cuda"
        assert check["fix"].endswith(again)

    def test_the_embedded_server_and_the_gpu(self, alone):
        server = whole(alone)["server"] | {"runtimes_dir": str(tiny.runtimes_dir())}
        model = {"path": str(tiny.model()), "program": "embedded"}
        config = whole(alone) | {"server": server, "models": {"chat": model}, "devices": "auto"}
        gpu = {"uuid": "GPU-1", "name": "Fake 4090", "total_mib": 24000}
        _, found = examined(alone, config, **self.nvml(alone, gpus=[gpu]))
        (check,) = found["llama-server"]
        assert check["status"] == "warn"
        assert "is built for the processor alone" in check["message"]
        model["n_gpu_layers"] = 0  # as it should be
        assert "llama-server" not in examined(alone, config, **self.nvml(alone, gpus=[gpu]))[1]

    def test_amd(self, alone):
        amd = Amd(alone.home / "amd")
        amd.gpu(1, vram_mib=24560, name="Radeon RX 7900 XTX")
        config = whole(alone) | {"devices": [{"kind": "rocm", "index": 0}]}
        code, found = examined(alone, config, LLMUX_AMD_SYS=str(amd.sys))
        assert (code, found["gpu"][-1]["message"]) == (ExitCode.DONE, "amd0 Radeon RX 7900 XTX, 24.0 GiB")
        (amd.dev / "kfd").unlink()
        code, found = examined(alone, config, LLMUX_AMD_SYS=str(amd.sys))
        _, card, with_vulkan = found["gpu"]
        assert (code, card["status"]) == (ExitCode.FAILED, "fail")
        assert "--groups render,video" in card["fix"]
        assert (with_vulkan["status"], with_vulkan["message"]) == ("ok", "vk0 Radeon RX 7900 XTX, 24.0 GiB")
        amd.gpu(2, vram_mib=512, apu=True)  # the processor's own, which nobody has listed
        (_, card, small, *_) = examined(alone, config, LLMUX_AMD_SYS=str(amd.sys))[1]["gpu"]
        assert (card["status"], small["status"]) == ("fail", "ok")
        code, found = examined(alone, config, LLMUX_AMD_SYS=str(alone.home / "none"))
        assert (code, found["gpu"][-1]["status"]) == (ExitCode.FAILED, "fail")
        assert "amdgpu" in found["gpu"][-1]["fix"]

    @pytest.mark.parametrize(
        ("name", "package"), [("transformers", "torch==2.13.0+cpu"), ("llama_cpp", "llama-cpp-python==0.3.36")]
    )
    def test_a_runtime_built_for_the_processor(self, alone, name, package):
        path = alone.home / "model"
        if name == "transformers":
            hf_folder.write(path).joinpath("tokenizer.json").write_text("{}")
        else:
            path = tiny.model()
        place = alone.home / "runtimes" / name
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "python").symlink_to(sys.executable)
        record = {"python": "3.11.0", "asked_python": None, "device": "cpu", "packages": [package]}
        digest = environments.recipe_of(name).digest()
        (place / venvs.RECORD).write_text(json.dumps(record | {"lock_digest": digest}))
        config = self.on_gpu(alone) | {"models": {"chat": {"runtime": name, "path": str(path)}}}
        config["server"] = config["server"] | {"runtimes_dir": str(place.parent)}
        gpu = {"uuid": "GPU-1", "name": "Fake 4090", "total_mib": 24000}
        code, found = examined(alone, config, **self.nvml(alone, gpus=[gpu]))
        (told,) = found[f"runtime {name}"]
        assert (code, told["status"]) == (ExitCode.DONE, "warn")
        assert told["fix"] == f"llmux runtimes install {name} --accelerator cuda"
        (told,) = examined(alone, config | {"devices": [{"kind": "host"}]})[1][f"runtime {name}"]
        assert (told["status"], told["message"]) == ("ok", f"installed for cpu: {package}")

    def test_a_runtime_that_has_nothing_for_the_gpu(self, alone):
        """CTranslate2 has no build for AMD's: to install it again wouldn't help."""
        amd = Amd(alone.home / "amd")
        amd.gpu(1, vram_mib=24560)
        place = alone.home / "runtimes" / "faster_whisper"
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "python").symlink_to(sys.executable)
        record = {"python": "3.11.0", "asked_python": None, "device": "cpu", "packages": ["faster-whisper==1.2.1"]}
        digest = environments.recipe_of("faster_whisper").digest()
        (place / venvs.RECORD).write_text(json.dumps(record | {"lock_digest": digest}))
        config = whole(alone) | {"devices": [{"kind": "rocm", "index": 0}]}
        config["models"] = {"ears": {"runtime": "faster_whisper", "path": str(hearing.converted())}}
        config["server"] = config["server"] | {"runtimes_dir": str(place.parent)}
        variables = {"LLMUX_AMD_SYS": str(amd.sys), "LLMUX_NVML_MODULE": fake_nvml.__file__}
        (told,) = examined(alone, config, **variables)[1]["runtime faster_whisper"]
        assert (told["status"], told["message"]) == ("ok", "installed for cpu: faster-whisper==1.2.1")
