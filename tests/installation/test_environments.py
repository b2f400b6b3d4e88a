"""The workers' own environments: what a worker's Python sees, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtimes import device_kind
from runtimes.adapters.worker_adapter import BOOTSTRAP, WorkerAdapter
from runtimes.base import LaunchContext, RuntimeNotInstalledError
from runtimes.device_kind import DeviceAssignment
from runtimes.registry import REGISTRY
from supervisor.cli.environments import environments as products
from supervisor.cli.environments import worker_imports
from tests.support import environments, hf_folder
from tests.support.daemon import running
from tests.support.limits import LIMIT_S

REPOSITORY = Path(__file__).parents[2]
OURS = [name for name in REGISTRY.names() if isinstance(REGISTRY.get(name), WorkerAdapter)]
SUPERVISORS = ("supervisor", "structlog", "psutil", "pydantic_settings", "msgspec", "pynvml", "tests")
LIGHTEST = "faster_whisper"


@pytest.fixture(scope="module")
def interpreter() -> Path:
    """A worker's Python, as installed for a user; the SDK is the same for all runtimes."""
    return environments.installed(LIGHTEST) / LIGHTEST / "bin" / "python"


def worker(python: Path, module: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a module as a worker's program is run."""
    return subprocess.run(
        [python, "-I", BOOTSTRAP, module, *words],
        env={"PATH": "/usr/bin:/bin", **variables},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


class TestInterpreter:
    """A worker's Python sees its own environment, the standard library and the SDK."""

    def test_its_path(self, interpreter):
        told = worker(interpreter, "site", PYTHONPATH=str(REPOSITORY), PYTHONHOME="/nowhere")
        assert told.returncode == 0, told.stderr
        path = [line.strip().strip("',") for line in told.stdout.splitlines() if line.startswith("    ")]
        environment = str(interpreter.parents[1].resolve())
        own = [place for place in path if place.startswith((environment, str(interpreter.parents[1])))]
        assert own
        assert all(place.startswith(sys.base_prefix) for place in path if place not in own), path
        assert "ENABLE_USER_SITE: False" in told.stdout

    @pytest.mark.parametrize("module", SUPERVISORS)
    def test_nothing_of_the_supervisor(self, interpreter, module):
        told = worker(interpreter, "timeit", "-n1", "-r1", f"import {module}", PYTHONPATH=str(REPOSITORY))
        assert "No module named" in told.stderr
        assert told.returncode == 1

    def test_the_kit_and_its_own_packages(self, interpreter):
        wanted = "import runtimes.sdk.server, faster_whisper, sys; assert 'pydantic' not in sys.modules"
        assert worker(interpreter, "timeit", "-n1", "-r1", wanted).returncode == 0


class TestNotInstalled:
    """A load without its environment is refused, with the command that makes it."""

    @pytest.mark.parametrize("name", OURS)
    def test_by_every_adapter(self, name, tmp_path):
        adapter = REGISTRY.get(name)
        needed = {key for key, field in adapter.config.model_fields.items() if field.is_required()} - {"runtime"}
        config = adapter.config(runtime=name, **dict.fromkeys(needed, str(tmp_path)))
        context = LaunchContext("m", "127.0.0.1", 1, "key", (DeviceAssignment("host", device_kind.HOST),), tmp_path)
        with pytest.raises(RuntimeNotInstalledError, match=f"llmux runtimes install {name}$"):
            adapter.launch(config, context)

    def test_over_http(self, tmp_path):
        hf_folder.write(tmp_path / "model").joinpath("tokenizer.json").write_text("{}")
        config = {
            "server": {"runtimes_dir": str(tmp_path / "runtimes")},
            "models": {"m": {"runtime": "transformers", "path": str(tmp_path / "model"), "vram_mib": 100}},
        }
        with running(tmp_path, config) as daemon:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
            answer = daemon.post("/v1/chat/completions", json=body)
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["code"] == "runtime_not_installed"
            assert "llmux runtimes install transformers" in error["message"]


class TestDeclarations:
    """What the runtimes' folders say fits together."""

    @pytest.mark.parametrize("name", [name for name in REGISTRY.names() if REGISTRY.get(name).requirements])
    def test_every_lock_is_pinned_by_hash_and_names_no_index(self, name):
        recipe = products.recipe_of(name)
        for lock in recipe.lock.parent.glob("requirements*.lock"):
            text = lock.read_text()
            assert "://" not in text
            entries = [entry for entry in text.replace("\\\n", " ").splitlines() if entry.strip()]
            assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
        assert recipe.torch is None or "torch==" not in recipe.lock.read_text().replace("torch===", "")

    @pytest.mark.parametrize("name", OURS)
    def test_what_the_programs_import_is_asked_for(self, name):
        """Every package that a worker imports is in its locks, so that an environment without it can't come about."""
        recipe = products.recipe_of(name)
        imported = {module.partition(".")[0] for module in worker_imports.imports(recipe.lock.parent)}
        assert {"starlette", "uvicorn", "prometheus_client"} <= imported
        modules = {"PIL": "pillow", "llama_cpp": "llama-cpp-python"}
        names = {modules.get(module, module).replace("_", "-") for module in imported}
        locks = [*recipe.locks("cuda"), *([recipe.build_lock] if "cuda" in recipe.builds else [])]
        found = {package.lower().replace("_", "-") for lock in locks for package in products.pinned(lock)}
        missing = {wanted for wanted in names if not any(wanted in {one, one.split("-")[0]} for one in found)}
        assert missing == set()


class TestListing:
    """What `llmux runtimes list` shows of an environment that depends on the device."""

    def test_the_device_and_the_versions_that_matter(self, interpreter):
        row = products.row(LIGHTEST, environments.FOLDER)
        assert (row["state"], row["device"], row["imports"]) == ("installed", "cpu", True), row["problem"]
        assert any(version.startswith("faster-whisper==") for version in row["versions"])
        assert len(row["packages"]) > len(row["versions"])
        (_, shown), *_ = (table.rows for table in products.table_of([row]))
        assert "cpu" in shown
        assert "ctranslate2==" in shown[-1]
