"""Environments for a device: which build of torch gets in, from where, and that nothing replaces it afterwards."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from runtimes.build import Build
from runtimes.device_kind import ROCM
from supervisor.cli import environments as products
from supervisor.io import compiling, devices, venvs
from supervisor.io import installer as installers
from supervisor.io.amd import AmdDriver
from supervisor.io.installer import InstallError
from supervisor.io.recipe import Recipe, pinned
from tests.support import fake_nvml
from tests.support.daemon import wait_until
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
        assert first.asked_python == sys.executable
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
        with pytest.raises(InstallError, match="no packages for cpu"):
            venvs.install(runtime, tmp_path / "runtimes", quiet, device="cpu")

    def test_any_lock_of_the_folder_makes_it_outdated(self, runtime, tmp_path):
        first = venvs.install(runtime, tmp_path / "runtimes", quiet)
        for name in ("requirements.lock", "requirements-cuda.lock", "requirements-torch.lock"):
            path = runtime.lock.with_name(name)
            before, path_text = runtime.digest(), path.read_text()
            path.write_text(path_text + "# changed\n")
            assert runtime.digest() != before == first.lock_digest
            path.write_text(path_text)


BACKEND = """
import os, sys, zipfile
import tool
def build_wheel(folder, config_settings=None, metadata_directory=None):
    if "BROKEN" in os.environ:
        print("-- The CXX compiler identification is GNU 14\\nCMake Error at CMakeLists.txt:267 (message):\\n  CUDA Toolkit not found")
        raise SystemExit("\\n".join(f"  File {n}, in run_command" for n in range(30)))
    assert os.environ["TMPDIR"].endswith("/building")
    name = "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as archive:
        program = zipfile.ZipInfo("engine/bin/engine-server")
        program.external_attr = 0o755 << 16
        archive.writestr(program, os.environ.get("PROGRAM") or f"#!/bin/sh\\necho '{os.environ['CMAKE_ARGS']} {os.environ['LDFLAGS']}'\\n")
        archive.writestr("engine/__init__.py", "import pathlib; pathlib.Path(__file__).with_name('imported').touch()")
        info = "engine-1.0.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: engine\\nVersion: 1.0\\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(info + "RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = ["tool"]
build-backend = "backend"
backend-path = ["."]
[project]
name = "engine"
version = "1.0"
"""


class TestCompiled:
    """What is compiled on this machine: only when asked for, with the options of the device."""

    @pytest.fixture
    def compiled(self, runtime, tmp_path):
        """A recipe whose program for cuda is built from sources."""
        for name in ("requirements-torch.lock", "requirements-cuda.lock"):
            runtime.lock.with_name(name).unlink()
        wheel(tmp_path / "wheels", "tool", "1.0")  # what compiles isn't compiled itself
        path = tmp_path / "wheels" / "engine-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in {"pyproject.toml": PROJECT, "backend.py": BACKEND}.items():
                entry = tarfile.TarInfo(f"engine-1.0/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        runtime.lock.with_name("requirements-build.lock").write_text(f"engine==1.0 --hash=sha256:{digest}\n")
        build = Build("engine", "bin/engine-server", "-DGGML_CUDA=ON -DTESTS=OFF", {"true": "coreutils"})
        return Recipe("demo", runtime.lock, builds={"cuda": build})

    def test_its_program_is_in_the_environment(self, compiled, tmp_path, monkeypatch):
        monkeypatch.setenv("CMAKE_ARGS", "-DCMAKE_CUDA_ARCHITECTURES=89-real")
        environment = venvs.install(compiled, tmp_path / "runtimes", quiet, device="cuda")
        assert (environment.device, "engine==1.0" in environment.packages) == ("cuda", True)
        done = subprocess.run([environment.path / "bin" / "engine-server"], capture_output=True, text=True, check=True)
        assert not (environment.path / "building").exists()
        assert done.stdout.split() == ["-DGGML_CUDA=ON", "-DTESTS=OFF", "-DCMAKE_CUDA_ARCHITECTURES=89-real"]
        assert (installers.site_packages(environment.path) / "engine" / "imported").exists()

    def test_it_finds_the_toolkits_libraries(self, compiled, tmp_path, monkeypatch):
        """The system's loader often doesn't know their folder."""
        toolkit = tmp_path / "cuda"
        for name in ("bin", "lib64"):
            (toolkit / name).mkdir(parents=True)
        (toolkit / "bin" / "compiler").write_text("#!/bin/sh\n")
        (toolkit / "bin" / "compiler").chmod(0o755)
        monkeypatch.setenv("PATH", f"{toolkit / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("LDFLAGS", "-Wl,-z,now")
        recipe = replace(compiled, builds={"cuda": replace(compiled.builds["cuda"], toolkit="compiler")})
        environment = venvs.install(recipe, tmp_path / "runtimes", quiet, device="cuda")
        done = subprocess.run([environment.path / "bin" / "engine-server"], capture_output=True, text=True, check=True)
        assert done.stdout.split()[-2:] == [f"-Wl,-rpath,{toolkit / 'lib64'}", "-Wl,-z,now"]

    def test_a_failure_is_told_with_its_cause(self, compiled, tmp_path, monkeypatch):
        """Not with the last of hundreds of lines; all of them are in a file, until the next one."""
        before = venvs.install(compiled, tmp_path / "runtimes", quiet)
        monkeypatch.setenv("BROKEN", "1")
        with pytest.raises(InstallError) as error:
            venvs.install(compiled, tmp_path / "runtimes", quiet, device="cuda")
        cause = "CMake Error at CMakeLists.txt:267 (message): CUDA Toolkit not found"
        log = tmp_path / "runtimes" / ".envs" / "demo" / compiling.LOG
        assert str(error.value) == (
            f"demo could not be compiled for cuda: {cause}. Mend that, and say it again; all that was said is in {log}"
        )
        assert error.value.detail == (cause,)
        assert "in run_command" in log.read_text()
        assert venvs.installed("demo", tmp_path / "runtimes") == before
        monkeypatch.delenv("BROKEN")
        venvs.install(compiled, tmp_path / "runtimes", quiet, device="cuda")
        assert not log.exists()

    def test_a_program_that_does_not_start(self, compiled, tmp_path, monkeypatch):
        monkeypatch.setenv(
            "PROGRAM", "#!/bin/sh\necho 'libcudart.so.13: cannot open shared object file' >&2; exit 127\n"
        )
        with pytest.raises(InstallError, match=r"exit code 127: libcudart\.so\.13: cannot open shared object file"):
            venvs.install(compiled, tmp_path / "runtimes", quiet, device="cuda")
        assert venvs.installed("demo", tmp_path / "runtimes") is None

    @pytest.mark.parametrize(
        ("script", "told"),
        [
            (
                None,
                "none can be used: NVML Shared Library Not Found. Install NVIDIA's driver; give a container its devices.",
            ),
            ({"gpus": []}, "none can be used: the driver shows none."),
            ({"cuda": [12, 4]}, "nvcc is of CUDA 13.0, and the driver 590.48 is for CUDA 12.4: "),
            ({"cuda": [13, 0]}, None),
            ({"cuda": [14, 0]}, None),
            ({"errors": {"nvmlSystemGetCudaDriverVersion": 13}}, None),
        ],
        ids=["no driver", "no GPU", "an old driver", "as new", "newer", "it doesn't say"],
    )
    def test_a_toolkit_and_a_driver(self, tmp_path, monkeypatch, script, told):
        """What would be compiled for an hour and then find no GPU is told before."""
        nvcc = tmp_path / "nvcc"
        nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("LLMUX_NVML_MODULE", fake_nvml.__file__)
        monkeypatch.setenv("LLMUX_FAKE_NVML", str(tmp_path / "script.json"))
        if script is not None:
            card = {"uuid": "GPU-1", "name": "card", "total_mib": 16000}
            fake_nvml.write_script(tmp_path / "script.json", **{"gpus": [card], **script})
        build = Build("engine", None, "", {"nvcc": "the toolkit"}, "nvcc")
        found = compiling.problem("demo", "cuda", build)
        assert found is None if told is None else told in found

    def test_a_library_without_a_program(self, compiled, tmp_path):
        recipe = replace(compiled, builds={"cuda": replace(compiled.builds["cuda"], program=None)})
        environment = venvs.install(recipe, tmp_path / "runtimes", quiet, device="cuda")
        assert (installers.site_packages(environment.path) / "engine" / "imported").exists()
        assert not (environment.path / "bin" / "engine-server").exists()

    def test_llama_cpp(self):
        """It is compiled once for each device, the processor's too, and nothing that it needs is."""
        recipe = products.recipe_of("llama_cpp")
        assert pinned(recipe.build_lock) == {"llama-cpp-python"}
        assert set(recipe.devices) == {"cpu", "cuda", "rocm", "vulkan"}
        for device in recipe.devices:
            there = set().union(*map(pinned, recipe.locks(device)))
            assert ("llama-cpp-python" in there) == (device == "cpu")
            assert {"numpy", "jinja2", "diskcache", "typing-extensions", "starlette"} <= there
        assert recipe.builds["cuda"].options.split()[0] == "-DGGML_CUDA=ON"
        assert "nvcc" in recipe.builds["cuda"].needs

    def test_nothing_is_compiled_unasked(self, compiled, tmp_path, monkeypatch):
        monkeypatch.setattr(devices, "detect", lambda: "cuda")
        environment = venvs.install(compiled, tmp_path / "runtimes", quiet)
        assert environment.device == "cpu"
        assert not (environment.path / "bin" / "engine-server").exists()
        venvs.install(compiled, tmp_path / "runtimes", quiet, device="cuda")
        assert venvs.install(compiled, tmp_path / "runtimes", quiet).device == "cuda"  # as before

    def test_a_missing_compiler_is_told_before_anything_is_made(self, compiled, tmp_path):
        needs = {"no-such-compiler": "the toolkit", "true": "coreutils"}
        recipe = replace(compiled, builds={"cuda": replace(compiled.builds["cuda"], needs=needs)})
        before = venvs.install(recipe, tmp_path / "runtimes", quiet)
        with pytest.raises(InstallError, match=r"these are not on PATH: no-such-compiler \(the toolkit\)\."):
            venvs.install(recipe, tmp_path / "runtimes", quiet, device="cuda")
        assert venvs.installed("demo", tmp_path / "runtimes") == before

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_its_compilers_end_with_the_installer(self, tmp_path, number):
        below = tmp_path / "pid"
        compiling = f"sleep 1000 & echo $! > {below}; wait"
        program = f"from supervisor.io.installer import run; run(['sh', '-c', {compiling!r}], {{}}, print)"
        with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as installer:
            wait_until(lambda: below.exists() and below.read_text().endswith("\n"), what="it compiles")
            installer.send_signal(number)
        assert installer.returncode not in (0, None)
        wait_until(lambda: not psutil.pid_exists(int(below.read_text())), what="the compiler has ended")

    def test_a_device_that_it_has_no_build_for(self, compiled, tmp_path):
        with pytest.raises(InstallError, match="no packages for vulkan; choose another --accelerator"):
            venvs.install(compiled, tmp_path / "runtimes", quiet, device="vulkan")


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
