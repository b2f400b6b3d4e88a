"""Environments for a device: which build of torch gets in, from where, and that nothing replaces it afterwards."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtimes.device_kind import ROCM
from supervisor.host.environments import installer as installers
from supervisor.host.environments import venvs
from supervisor.host.environments.installer import InstallError
from supervisor.host.environments.recipe import Recipe
from supervisor.host.memory import devices
from supervisor.host.memory.amd import AmdDriver
from tests.support import fake_nvml
from tests.support.fake_amd import Amd
from tests.support.wheels import wheel

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
NATIVE = f"{TAG}-{TAG}-linux_{platform.machine()}"


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """A recipe as a runtime's folder holds it: a worker that wants torch, in builds that lie in folders."""
    links, runtime = tmp_path / "wheels", tmp_path / "runtime"
    runtime.mkdir()
    for program in ("PIP", "UV"):
        monkeypatch.setenv(f"{program}_NO_INDEX", "1")
        monkeypatch.setenv(f"{program}_FIND_LINKS", str(links))
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    monkeypatch.setattr(devices, "detect", lambda: "cpu")
    pins = {
        "requirements.lock": {"worker": wheel(links, "worker", "1.0", requires=("torch", "sympy"))},
        "requirements-cuda.lock": {"cublas": wheel(links, "cublas", "1.0")},
        "requirements-torch.lock": {"torch=": wheel(links, "torch", "1.0", requires=("sympy",))},
    }
    pins["requirements.lock"]["sympy"] = wheel(links, "sympy", "1.0")
    for build in ("cpu", "cu126", "rocm7.0"):
        wheel(links, "torch", f"1.0+{build}", tag=NATIVE, requires=("sympy",))
    for name, hashes in pins.items():
        text = "".join(f"{package}==1.0 \\\n    --hash=sha256:{digest}\n" for package, digest in hashes.items())
        (runtime / name).write_text(text)
    return Recipe("demo", runtime / "requirements.lock")


def quiet(_line):
    pass


def installed(recipe, tmp_path, **choices) -> set[str]:
    environment = venvs.install(recipe, tmp_path / "runtimes", quiet, **choices)
    return set(environment.packages) - {found for found in environment.packages if found.startswith(("pip", "setup"))}


COMMON = {"worker==1.0", "sympy==1.0"}


class TestTorch:
    """Its build is what the device needs, and its version what the lock says."""

    @pytest.mark.parametrize(
        ("device", "torch"),
        [("cpu", {"torch==1.0+cpu"}), ("rocm", {"torch==1.0+rocm7.0"}), ("cuda", {"torch==1.0", "cublas==1.0"})],
    )
    def test_for_each_device(self, runtime, tmp_path, device, torch):
        assert installed(runtime, tmp_path, device=device) == COMMON | torch

    def test_of_another_cuda_when_the_settings_say_so(self, runtime, tmp_path, monkeypatch):
        monkeypatch.setenv("UV_TORCH_BACKEND", "cu126")
        monkeypatch.setattr(installers, "local_torch", lambda *_: None)
        lines: list[str] = []
        with pytest.raises(InstallError):  # its index can't be asked: none may be
            venvs.install(runtime, tmp_path / "runtimes", lines.append, device="cuda")
        assert not any("torch==1.0 " in line for line in lines)

    def test_from_the_folders_of_pips_settings(self, runtime, tmp_path, monkeypatch):
        monkeypatch.delenv("UV_FIND_LINKS")
        assert "torch==1.0+cpu" in installed(runtime, tmp_path)
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        (tmp_path / "pip.conf").write_text(f"[global]\nfind-links =\n    {tmp_path / 'wheels'}\n    /nowhere\n")
        monkeypatch.delenv("PIP_FIND_LINKS")
        assert "torch==1.0+rocm7.0" in installed(runtime, tmp_path, device="rocm")
        assert "/nowhere" not in installers.wheel_folders()

    def test_pips_files(self, tmp_path, monkeypatch):
        """All that pip itself counts, by its own account."""
        for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
        monkeypatch.setenv("XDG_CONFIG_DIRS", f"{tmp_path / 'shared'}:/nowhere")

        def write(name: str, text: str) -> None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

        def found() -> list[str]:
            links = (link.removeprefix("file://") for link in installers.wheel_folders())
            return [Path(link).name for link in links if Path(link).is_relative_to(tmp_path)]

        def pips() -> set[str]:
            argv = [sys.executable, "-m", "pip", "config", "list"]
            told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
            return set(re.findall(r"\b\w+-wheels\b", "".join(re.findall(".*find-links.*", told))))

        for name in ("shared", "own", "old", "named"):
            (tmp_path / f"{name}-wheels").mkdir()
        write("shared/pip/pip.conf", f"[global]\nfind-links = file://{tmp_path}/shared-wheels\n")
        write("own/pip/pip.conf", f"[install]\nfind_links = {tmp_path}/own-wheels 100%\n[wheel]\ntimeout = 5\n")
        write(".pip/pip.conf", "not a settings file")
        assert found() == ["own-wheels", "shared-wheels"]
        write(".pip/pip.conf", "[wheel]\nfind-links = ~/old-wheels\n")
        assert found() == ["own-wheels", "old-wheels", "shared-wheels"]
        assert set(found()) == pips()
        write("named.conf", f"[wheel]\nfind-links = {tmp_path}/named-wheels\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "named.conf"))
        assert found() == ["named-wheels", "shared-wheels"]
        assert set(found()) == pips()
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        assert installers.wheel_folders() == ()

    def test_a_wheel_for_another_python_is_passed_over(self, runtime, tmp_path):
        for path in (tmp_path / "wheels").glob("torch-1.0+cpu-*"):
            path.rename(path.with_name(path.name.replace(TAG, "cp310")))
        with pytest.raises(InstallError):  # the index that would have another can't be asked: none may be
            venvs.install(runtime, tmp_path / "runtimes", quiet)
        assert venvs.installed("demo", tmp_path / "runtimes") is None

    def test_a_changed_build_of_the_lock_is_refused(self, runtime, tmp_path):
        wheel(tmp_path / "wheels", "torch", "1.0", requires=("sympy",), text="other = True")
        with pytest.raises(InstallError) as error:
            venvs.install(runtime, tmp_path / "runtimes", quiet, device="cuda")
        assert any("hash" in line.lower() for line in error.value.detail)


class TestChoice:
    """What was asked for is kept until something else is asked for."""

    def test_the_device_is_kept(self, runtime, tmp_path):
        first = venvs.install(runtime, tmp_path / "runtimes", quiet, device="rocm")
        assert first.device == "rocm"
        assert venvs.install(runtime, tmp_path / "runtimes", quiet) == first
        other = venvs.install(runtime, tmp_path / "runtimes", quiet, device="cpu")
        assert other.device == "cpu"
        assert not first.path.exists()

    def test_the_device_of_this_machine_is_the_default(self, runtime, tmp_path, monkeypatch):
        monkeypatch.setattr(devices, "detect", lambda: "cuda")
        assert "cublas==1.0" in installed(runtime, tmp_path)

    def test_the_python_is_kept(self, runtime, tmp_path):
        first = venvs.install(runtime, tmp_path / "runtimes", quiet, python=sys.executable)
        assert first.requested_python == sys.executable
        assert venvs.install(runtime, tmp_path / "runtimes", quiet) == first

    def test_a_python_that_isnt_there(self, runtime, tmp_path, monkeypatch):
        monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
        with pytest.raises(InstallError, match=r"3\.99"):
            venvs.install(runtime, tmp_path / "runtimes", quiet, python="3.99")

    def test_without_torch_the_device_makes_no_difference(self, tmp_path, runtime):
        for name in ("requirements-torch.lock", "requirements-cuda.lock"):
            runtime.lock.with_name(name).unlink()
        plain = Recipe("demo", runtime.lock)
        assert not plain.varies
        first = venvs.install(plain, tmp_path / "runtimes", quiet, device="cuda")
        assert first.device is None
        assert venvs.install(plain, tmp_path / "runtimes", quiet, device="cpu") == first

    def test_a_device_that_it_has_nothing_for(self, runtime, tmp_path):
        runtime.lock.rename(runtime.lock.with_name("requirements-rocm.lock"))
        runtime.lock.write_text("# each device has its own\n")
        assert installed(runtime, tmp_path, device="rocm") == COMMON | {"torch==1.0+rocm7.0"}
        assert runtime.devices == ("cuda", "rocm")
        with pytest.raises(InstallError, match="no packages for cpu; choose another --accelerator: cuda, rocm"):
            venvs.install(runtime, tmp_path / "runtimes", quiet, device="cpu")

    def test_any_lock_of_the_folder_makes_it_outdated(self, runtime, tmp_path):
        first = venvs.install(runtime, tmp_path / "runtimes", quiet)
        for name in ("requirements.lock", "requirements-cuda.lock", "requirements-torch.lock"):
            path = runtime.lock.with_name(name)
            before, path_text = runtime.digest(), path.read_text()
            path.write_text(path_text + "# changed\n")
            assert runtime.digest() != before == first.lock_digest
            path.write_text(path_text)


class TestFinish:
    """What an adapter declares to be done to its environment besides."""

    def test_files_that_do_harm_are_removed(self, runtime, tmp_path):
        recipe = Recipe("demo", runtime.lock, prune=("wor*.py",))
        packages = installers.site_packages(venvs.install(recipe, tmp_path / "runtimes", quiet).path)
        assert not (packages / "worker.py").exists()
        assert (packages / "sympy.py").exists()

    def test_another_name_for_one_device(self, runtime, tmp_path):
        recipe = Recipe("demo", runtime.lock, claims={"cpu": ("engine==2.0+cpu",)})
        assert "engine==2.0+cpu" in installed(recipe, tmp_path, device="cpu")
        assert "engine==2.0+cpu" not in installed(recipe, tmp_path, device="rocm")


class TestDetection:
    """The device of this machine, without loading anything that computes."""

    def test_amd_by_its_cards(self, tmp_path, monkeypatch):
        """A processor's own small GPU doesn't count."""
        amd = Amd(tmp_path)
        monkeypatch.setitem(devices.DRIVERS, ROCM, lambda: AmdDriver(amd.sys, amd.proc))
        monkeypatch.setenv("LLMUX_NVML_MODULE", fake_nvml.__file__)
        amd.gpu(1, vram_mib=512, apu=True)
        assert devices.detect() == "cpu"
        amd.gpu(2, vram_mib=16368)
        assert devices.detect() == "rocm"

    def test_nvidia_by_its_driver(self, monkeypatch, tmp_path):
        monkeypatch.setitem(devices.DRIVERS, ROCM, lambda: AmdDriver(tmp_path))
        monkeypatch.setenv("LLMUX_NVML_MODULE", fake_nvml.__file__)
        monkeypatch.setenv("LLMUX_FAKE_NVML", str(tmp_path / "script.json"))
        assert devices.detect() == "cpu"
        fake_nvml.write_script(tmp_path / "script.json", gpus=[{"uuid": "GPU-1", "name": "card", "total_mib": 16000}])
        assert devices.detect() == "cuda"
