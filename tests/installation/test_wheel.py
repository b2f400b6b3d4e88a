"""The wheel, installed as its users have it: in an environment and a home of its own, away from the checkout."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from supervisor.cli.exit_codes import ExitCode
from tests.support.daemon import REPOSITORY
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports
from tests.support.wheels import wheel

UV = str(Path(sys.executable).with_name("uv"))
CONFIG = REPOSITORY / "config"
HOME_SERVER = CONFIG / "examples" / "home-16gb"
SUPERVISORD = "supervisor==4.3.0"


class Installed:
    """An environment with the wheel in it, and a home. Commands run there, without a word of the checkout."""

    def __init__(self, folder: Path, built: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.bin = folder / "environment" / "bin"
        cache = subprocess.run([UV, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LLMUX_", "PYTHON", "XDG_", "VIRTUAL_ENV"))}
        first = quiet_ports(20)
        self.env = kept | {
            "HOME": str(self.home),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "PYTHONSAFEPATH": "1",
            "UV_CACHE_DIR": cache,
            "LLMUX_SERVER__WORKER_PORT_FIRST": str(first),
            "LLMUX_SERVER__WORKER_PORT_LAST": str(first + 19),
        }
        self._run(UV, "venv", "--quiet", "--no-project", "--python", sys.executable, str(self.bin.parent))
        self.add("--require-hashes", "--requirement", str(REPOSITORY / "requirements.lock"))
        self.add("--no-deps", str(built))

    def add(self, *words: str) -> None:
        """Install something."""
        self._run(UV, "pip", "install", "--quiet", "--python", str(self.python), *words).check_returncode()

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._run(str(self.bin / "llmux"), *words)

    @property
    def python(self) -> Path:
        return self.bin / "python"

    def place_of(self, package: str) -> Path:
        """Where an import finds it."""
        code = f"import {package}; print({package}.__file__)"
        return Path(self._run(str(self.python), "-c", code).stdout.strip()).parent

    @contextlib.contextmanager
    def serving(self, *words: str) -> Iterator[dict[str, str]]:
        """A daemon; what it tells of itself."""
        command = [str(self.bin / "llmux"), "serve", "--port", "0", "--json", *words]
        with (
            (self.home / "daemon.log").open("w") as log,
            subprocess.Popen(command, env=self.env, cwd=self.home, stdout=subprocess.PIPE, stderr=log) as daemon,
        ):
            try:
                assert daemon.stdout is not None
                line = daemon.stdout.readline()
                assert line, (self.home / "daemon.log").read_text()
                yield json.loads(line)
            finally:
                daemon.terminate()
                assert daemon.wait(LIMIT_S) == ExitCode.DONE

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(folder)]
    subprocess.run([UV, "build", "--quiet", *options, str(REPOSITORY)], check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def llmux(built, tmp_path_factory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), built)


@pytest.fixture(scope="module")
def runtimes_dir(llmux) -> Path:
    """With the embedded llama.cpp server in it, installed by the installed command."""
    folder = llmux.home / "runtimes"
    told = llmux("runtimes", "install", "llama_server", "--runtimes-dir", str(folder), "--json")
    assert told.returncode == ExitCode.DONE, told.stderr
    assert json.loads(told.stdout)["name"] == "llama_server"
    return folder


@pytest.fixture(scope="module")
def shared(built, tmp_path_factory) -> Installed:
    """With the real supervisord in the environment, and with a package that is called `runtimes`."""
    folder = tmp_path_factory.mktemp("shared")
    installed = Installed(folder, built)
    installed.add("--no-deps", SUPERVISORD)
    wheel(folder, "runtimes", "1.0")
    installed.add(str(folder / "runtimes-1.0-py3-none-any.whl"))
    overwritten = installed.place_of("supervisor") / "__init__.py"
    assert overwritten.read_text() != (REPOSITORY / "supervisor" / "__init__.py").read_text()
    return installed


def example_files(folder: Path) -> list[Path]:
    """All but its page, which is for those who have the source."""
    return [path for path in folder.rglob("*") if path.is_file() and path != folder / "README.md"]


class TestCommands:
    """Everything works that needs no checkout."""

    def test_its_modules_are_its_own(self, llmux):
        for package in ("supervisor", "runtimes"):
            assert llmux.place_of(package).is_relative_to(llmux.bin.parent)

    def test_version(self, llmux):
        version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
        assert llmux("--version").stdout == f"llmux, version {version}\n"

    def test_schema(self, llmux):
        assert json.loads(llmux("config", "schema").stdout) == json.loads((CONFIG / "llmux.schema.json").read_text())

    def test_doctor(self, llmux, runtimes_dir):
        (llmux.home / "small.yaml").write_text(
            "models: {cat: {cmd: [cat, '${port}'], vram_mib: 1}}\n"
            "devices: [{kind: host, budget_mib: 1000}]\n"
            f"server: {{port: 0, runtimes_dir: {runtimes_dir}}}\n"
        )
        told = llmux("doctor", "small.yaml", "--json")
        checks = {check["name"]: check for check in json.loads(told.stdout)["checks"]}
        assert told.returncode == ExitCode.DONE, checks
        assert str(llmux.bin.parent) in checks["environment"]["message"]
        assert checks["runtime llama_server"]["message"].startswith("installed")

    def test_demo(self, llmux, runtimes_dir, monkeypatch, tmp_path):
        monkeypatch.setitem(llmux.env, "LLMUX_SERVER__RUNTIMES_DIR", str(runtimes_dir))
        monkeypatch.setitem(llmux.env, "MODEL_BASE_PATH", str(tmp_path))  # its models lie elsewhere
        version = llmux("--version").stdout.split()[-1]
        pages = REPOSITORY / "supervisor" / "server" / "ui"
        with (
            llmux.serving("--demo") as told,
            httpx.Client(base_url=told["url"], trust_env=False, timeout=LIMIT_S) as client,
        ):
            body = {"model": "Tiny-Instruct", "messages": [{"role": "user", "content": "Hello"}]}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == "Hello from a tiny model"
            assert client.get("/ui/").content == (pages / "index.html").read_bytes()
            for path in pages.rglob("*.*"):
                assert client.get(f"/ui/{path.relative_to(pages)}").content == path.read_bytes()
            assert f'llmux_build_info{{version="{version}"}} 1' in client.get("/metrics").text


class TestExamples:
    """`llmux config example`: the checkout's examples, out of the wheel."""

    def test_every_key(self, llmux):
        assert llmux("config", "example").stdout == (CONFIG / "llmux.example.yaml").read_text()
        told = llmux("config", "example", "--to", "every/key", "--json")
        written = [llmux.home / path for path in json.loads(told.stdout)["written"]]
        assert [path.read_text() for path in written] == [(CONFIG / path.name).read_text() for path in written]
        assert [path.name for path in written] == ["llmux.example.yaml", "llmux.schema.json"]

    def test_whole_ones(self, llmux):
        for folder in (CONFIG / "examples").iterdir():
            assert llmux("config", "example", folder.name).stdout == (folder / "llmux.yaml").read_text()
            files = json.loads(llmux("config", "example", folder.name, "--json").stdout)["files"]
            assert files == {str(path.relative_to(folder)): path.read_text() for path in example_files(folder)}

    def test_written_for_oneself(self, llmux):
        folder = llmux.home / "mine"
        assert llmux("config", "example", HOME_SERVER.name, "--to", "mine").returncode == ExitCode.DONE
        for path in example_files(HOME_SERVER):
            copy = folder / path.relative_to(HOME_SERVER)
            assert (copy.read_text(), copy.stat().st_mode & 0o777) == (path.read_text(), 0o600)

    @pytest.mark.parametrize("kept", ["llmux.yaml", "api_keys.yaml"])
    def test_nothing_is_overwritten(self, llmux, tmp_path, kept):
        (tmp_path / kept).write_text("mine")
        told = llmux("config", "example", HOME_SERVER.name, "--to", str(tmp_path))
        assert (told.returncode, told.stdout) == (ExitCode.FAILED, "")
        assert f"{tmp_path / kept}: there already" in told.stderr
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]

    def test_where_nothing_can_be_written(self, llmux):
        told = llmux("config", "example", "--to", "/proc/llmux")
        assert told.returncode == ExitCode.FAILED
        assert "--to" in told.stderr
        assert "Traceback" not in told.stderr


class TestNames:
    """Other packages are imported as `supervisor` and `runtimes`, too: beside one llmux refuses to start."""

    @pytest.mark.parametrize("words", [("serve",), ("serve", "--demo", "--json"), ("demo",)], ids=" ".join)
    def test_start(self, shared, words):
        told = shared(*words)
        assert told.returncode == ExitCode.FAILED
        if "--json" in words:
            assert json.loads(told.stdout)["error"]["code"] == "name_taken"
        else:
            assert told.stdout == ""
        assert re.search("^llmux: the package supervisor, .*; the package runtimes, .* Remedy: .*uv tool", told.stderr)
        assert len(told.stderr.splitlines()) == 1

    def test_the_manual_page(self, shared):
        """Where `man` looks for it: beside the folder of programs."""
        page = shared.bin.parent / "share" / "man" / "man1" / "llmux.1"
        assert page.read_text() == shared("man").stdout

    def test_doctor(self, shared):
        told = shared("doctor", "--json")
        checks = [check for check in json.loads(told.stdout)["checks"] if check["name"] == "environment"]
        assert told.returncode == ExitCode.FAILED
        assert [check["status"] for check in checks] == ["fail", "fail"]
        assert all("uv tool install" in check["fix"] for check in checks)

    def test_doctor_whose_imports_fail(self, shared):
        first = shared.place_of("supervisor").with_name("runtimes") / "__init__.py"
        before = first.read_text()
        first.write_text("from .nowhere import something\n")
        try:
            told = shared("doctor")
        finally:
            first.write_text(before)
        assert told.returncode == ExitCode.FAILED
        assert "Remedy: " in told.stderr
        assert "Traceback" not in told.stderr

    def test_the_rest_still_works(self, shared, llmux):
        assert shared("--version").stdout == llmux("--version").stdout
        assert shared("config", "example").stdout == llmux("config", "example").stdout


class TestTold:
    """Nobody is sent to a file, or to a `make`, that the wheel doesn't have."""

    @staticmethod
    def texts() -> Iterator[tuple[Path, str]]:
        """What can be printed, docstrings of commands included, and what the examples explain."""
        for path in [*(REPOSITORY / "supervisor").rglob("*.py"), *(REPOSITORY / "runtimes").rglob("*.py")]:
            tree = ast.parse(path.read_text())
            silent = {
                id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and "commands" not in path.parts
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
                    yield path, node.value
        for path in [CONFIG / "llmux.example.yaml", *example_files(HOME_SERVER)]:
            yield path, path.read_text()

    def test_only_what_is_there(self):
        targets = "|".join(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
        outside = re.compile(
            rf"(?<![./\w])(?:docs|deploy|bench|tests|config)/\w[\w/.-]*|\bREADME\b|\bmake (?:{targets})\b"
        )
        others = {"config/settings.json"}  # of the program that is imported from
        found = [(path.name, match) for path, text in self.texts() for match in outside.findall(text)]
        assert [(name, match) for name, match in found if match not in others] == []
