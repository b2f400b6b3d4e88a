"""Environments for which something is compiled on this machine: when, with what, and what is told where it fails."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace

import psutil
import pytest

from runtimes.base import Build
from supervisor.cli.environments import environments as products
from supervisor.host.environments import compiling, venvs
from supervisor.host.environments import installer as installers
from supervisor.host.environments.installer import InstallError
from supervisor.host.environments.recipe import Recipe, pinned
from supervisor.host.memory import devices
from tests.support import fake_nvml
from tests.support.daemon import wait_until
from tests.support.small_disk import small_disk
from tests.support.wheels import wheel

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


def quiet(_line):
    pass


class TestCompiled:
    """What is compiled on this machine: only when asked for, with the options of the device."""

    @pytest.fixture
    def compiled(self, tmp_path, monkeypatch):
        """A recipe whose program for cuda is built from sources."""
        links, runtime = tmp_path / "wheels", tmp_path / "runtime"
        runtime.mkdir()
        for program in ("PIP", "UV"):
            monkeypatch.setenv(f"{program}_NO_INDEX", "1")
            monkeypatch.setenv(f"{program}_FIND_LINKS", str(links))
        monkeypatch.setattr(devices, "detect", lambda: "cpu")
        lock = runtime / "requirements.lock"
        lock.write_text(f"worker==1.0 --hash=sha256:{wheel(links, 'worker', '1.0')}\n")
        wheel(links, "tool", "1.0")  # what compiles isn't compiled itself
        path = tmp_path / "wheels" / "engine-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in {"pyproject.toml": PROJECT, "backend.py": BACKEND}.items():
                entry = tarfile.TarInfo(f"engine-1.0/{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lock.with_name("requirements-build.lock").write_text(f"engine==1.0 --hash=sha256:{digest}\n")
        build = Build("engine", "bin/engine-server", "-DGGML_CUDA=ON -DTESTS=OFF", {"true": "coreutils"})
        return Recipe("demo", lock, builds={"cuda": build})

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

    def test_causes(self):
        """Of compilers, linkers and disks, with what is indented below them; not uv's own line."""
        lines = [
            "error: Failed to build `engine==1.0`",
            "  cause: The build backend returned an error",
            "     CMake Error at CMakeTestCCompiler.cmake:70 (message):",
            "       The C compiler",
            '         "/bin/false"',
            "       is not able to compile a simple test program.",
            "       It fails with the following output:",
            "     engine.cu:7:3: error: identifier is undefined",
            "     nvcc fatal   : Unsupported gpu architecture 'compute_'",
            "     c++: fatal error: Killed signal terminated program cc1plus",
            "     subprocess.CalledProcessError: Command 'cmake' returned non-zero exit status 1.",
        ]
        assert compiling.causes(lines) == [
            " ".join(line.strip() for line in lines[2:6]),
            *(line.strip() for line in lines[7:10]),
        ]

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
        own = f"import signal; signal.signal({number:d}, signal.SIG_DFL)"  # nohup's programs ignore one of them
        program = f"{own}; from supervisor.host.environments.installer import run; run(['sh', '-c', {compiling!r}], {{}}, print)"
        with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as installer:
            wait_until(lambda: below.exists() and below.read_text().endswith("\n"), what="it compiles")
            installer.send_signal(number)
        assert installer.returncode not in (0, None)
        wait_until(lambda: not psutil.pid_exists(int(below.read_text())), what="the compiler has ended")

    def test_what_no_text_is_stops_nothing(self):
        """A compiler quotes a line of a source in another encoding."""
        lines: list[str] = []
        installers.run(["sh", "-c", r"printf 'int \351t\351;\n'"], {}, lines.append)
        assert lines == ["int \ufffdt\ufffd;"]

    def test_a_full_disk(self, compiled, tmp_path):
        """A real one of a megabyte, and a package of two."""
        digest = wheel(tmp_path / "wheels", "worker", "1.0", text="#" * (2 << 20))
        compiled.lock.write_text(f"worker==1.0 --hash=sha256:{digest}\n")
        with small_disk(tmp_path / "disk") as disk:
            program = (
                "import sys; from pathlib import Path; from supervisor.host.environments import venvs; from supervisor.host.environments.recipe import Recipe; "
                "venvs.install(Recipe('demo', Path(sys.argv[1])), Path(sys.argv[2]), print, device='cpu')"
            )
            done = subprocess.run(
                [*disk.enter, sys.executable, "-c", program, compiled.lock, disk.inside / "runtimes"],
                capture_output=True,
                text=True,
                check=False,
            )
            assert "InstallError: The disk is full. Make room on it, and say it again" in done.stderr
            assert [path.name for path in (disk.path / "runtimes" / ".envs" / "demo").iterdir()] == ["lock"]

    def test_a_device_that_it_has_no_build_for(self, compiled, tmp_path):
        with pytest.raises(InstallError, match="no packages for vulkan; choose another --accelerator"):
            venvs.install(compiled, tmp_path / "runtimes", quiet, device="vulkan")
