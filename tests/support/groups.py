"""Costly groups of tests, which the gate leaves out while nothing that they read has changed since they last passed.

    pytest --skip-unchanged     leaves those out, and says which (`make test`)
    pytest --note-passed        runs all tests, and notes the digest of each group that passed in tests/passed.json (`make test-all`)

The digest of a group is over the files and folders in `reads`. A test that starts a daemon uses more of the source than that:
what else it uses is tested by tests outside the group. One worker for each subject of the contract suite
(tests/contract/test_contract.py) is in no group, so one of each runtime runs every time; of a runtime that it does not have, the
group names a test in `always`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PASSED = REPOSITORY / "tests" / "passed.json"

LOCKS = ("pyproject.toml", "requirements.lock", "requirements-dev.lock")
SUPPORT = ("tests/conftest.py", "tests/support", *LOCKS)
DATA_PATH = tuple(f"supervisor/{room}" for room in ("api", "core", "dialects", "fleet", "gateway", "host", "schema"))
WORKER = ("runtimes/adapters", "runtimes/sdk", "runtimes/shared", *DATA_PATH, *SUPPORT)
INSTALLER = ("runtimes", "supervisor/cli", "supervisor/host", *SUPPORT)
E2E = "tests/e2e/runtimes"
DASHBOARD = "tests/e2e/dashboard"
DASHBOARD_TESTS = ("access", "dashboard", "editing", "extras", "operating", "playground")


@dataclass(frozen=True)
class Group:
    """`tests` and `always` are how the ids of tests begin; `reads` are files and folders, from the repository's."""

    tests: tuple[str, ...]
    reads: tuple[str, ...]
    always: tuple[str, ...] = ()

    def has(self, nodeid: str) -> bool:
        return nodeid.startswith(self.tests) and not (self.always and nodeid.startswith(self.always))

    def digest(self) -> str:
        """Raises pytest.UsageError for a path in `reads` or `tests` without files."""
        own = (test.partition("::")[0] for test in self.tests)
        found = sorted({file for path in (*self.reads, *own) for file in _files(path)})
        whole = hashlib.sha256()
        for file in found:
            whole.update(f"{file.relative_to(REPOSITORY)} {_digest(file)}\n".encode())
        return whole.hexdigest()


CONTRACT = "tests/contract/test_contract.py"
STARTS = (
    "a_taken_port_ends_it_with_a_telling_log",
    "ends_on_sigterm_while_it_starts",
    "a_model_that_cant_be_loaded_ends_it_with_a_telling_log",
)


def _runtime(
    names: tuple[str, ...],
    *tests: str,
    subjects: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    always: tuple[str, ...] = (),
) -> Group:
    """`subjects` are the contract suite's; the group has those of its tests that start another worker."""
    starts = (f"{CONTRACT}::TestWorker::test_{test}[{subject}]" for subject in subjects for test in STARTS)
    folders = (f"runtimes/{name}" for name in names)
    return Group((*tests, *starts), (*folders, *reads, "tests/contract", *WORKER), always)


GROUPS: Mapping[str, Group] = {
    "transformers": _runtime(
        ("transformers",),
        f"{E2E}/test_transformers_adapter.py",
        f"{E2E}/test_transformers_chat.py",
        f"{E2E}/test_transformers_decoder.py",
        "tests/e2e/cli/pull/test_kernels_loaded.py",
        "tests/e2e/dialects/test_prompt_formats.py",
        subjects=("transformers",),
    ),
    "embeddings": _runtime(
        ("embeddings",),
        f"{E2E}/test_embeddings.py",
        f"{E2E}/test_vision.py",
        always=(f"{E2E}/test_embeddings.py::TestEmbeddings::test_similar_texts_are_near",),
    ),
    "diffusers": _runtime(
        ("diffusers",),
        f"{E2E}/test_diffusers.py",
        f"{E2E}/test_pictures.py",
        f"{DASHBOARD}/test_pictures.py",
        subjects=("diffusers",),
        reads=("supervisor/server/ui", f"{DASHBOARD}/conftest.py"),
    ),
    "transcription": _runtime(
        ("ctranslate2", "faster_whisper", "transformers", "whisper_cpp"),
        f"{E2E}/transcription",
        f"{E2E}/test_ctranslate2.py",
        subjects=("transformers-asr", "faster_whisper", "ctranslate2"),
    ),
    "chatterbox": _runtime(
        ("chatterbox",),
        f"{E2E}/test_chatterbox.py",
        always=(f"{E2E}/test_chatterbox.py::TestSpeech::test_it_comes_as_it_is_made",),
    ),
    "exllamav3": _runtime(("exllamav3",), f"{E2E}/test_exllamav3.py"),
    "vllm": _runtime(("vllm",), f"{E2E}/test_vllm.py", f"{E2E}/test_vllm_processes.py", f"{E2E}/test_vllm_worker.py"),
    "comfyui": _runtime(("comfyui",), f"{E2E}/test_comfyui.py"),
    "claude_cli": _runtime(
        ("claude_cli",),
        f"{E2E}/test_claude_cli.py",
        always=(f"{E2E}/test_claude_cli.py::TestAnswers::test_whole",),
    ),
    "side by side": _runtime(
        ("chatterbox", "embeddings", "faster_whisper", "llama_server", "transformers"), f"{E2E}/test_side_by_side.py"
    ),
    "request fields": Group(
        ("tests/clients/test_request_fields.py",), ("runtimes", "tests/clients", "tests/golden", *DATA_PATH, *SUPPORT)
    ),
    "wire": Group(
        ("tests/e2e/wire",),
        ("supervisor/daemon", "supervisor/server", "runtimes/command", *DATA_PATH, *SUPPORT),
        always=("tests/e2e/wire/test_as_it_is.py",),
    ),
    "dashboard": Group(
        tuple(f"{DASHBOARD}/test_{name}.py" for name in DASHBOARD_TESTS),
        ("supervisor", f"{DASHBOARD}/conftest.py", *SUPPORT),
        always=(f"{DASHBOARD}/test_dashboard.py::TestOperator::test_loads",),
    ),
    "clients' programs": Group(
        ("tests/clients/test_agents.py", "tests/clients/test_connect.py", "tests/clients/test_programs.py"),
        ("tests/clients", "supervisor/server", "runtimes/llama_server", *DATA_PATH, *SUPPORT),
    ),
    "footprints": Group(("tests/contract/test_footprints.py",), ("runtimes", "supervisor/catalog", *SUPPORT)),
    "commands of documents": Group(
        ("tests/installation/test_documents.py",),
        ("README.md", "docs", "deploy", "supervisor/cli", "supervisor/catalog", "tests/golden/importers", *SUPPORT),
    ),
    "home server": Group(
        ("tests/e2e/home_server",),
        ("config/examples/home-16gb", "runtimes", "supervisor", *SUPPORT),
    ),
    "model hub": Group(
        ("tests/e2e/cli/pull",),
        ("runtimes/registry.py", "supervisor/catalog", "supervisor/cli", "supervisor/host", *SUPPORT),
    ),
    "installer": Group(
        (
            "tests/installation/test_accelerator_builds.py",
            "tests/installation/test_compiling.py",
            "tests/installation/test_empty_cache.py",
            "tests/installation/test_gpu_builds.py",
            "tests/installation/test_reinstall.py",
            "tests/installation/test_release.py",
            "tests/installation/test_wheel.py",
            "tests/unit/tools/test_audit.py",
            "tests/unit/tools/test_lock.py",
        ),
        ("tools", "config", *INSTALLER),
    ),
    "podman and Traefik": Group(
        ("tests/installation/test_podman.py", "tests/installation/test_traefik.py"), ("deploy", *INSTALLER)
    ),
    "GPU suite on a scripted driver": Group(("tests/gpu",), ("bench/gpu", "runtimes", "supervisor/core", *SUPPORT)),
    "llmux bench": Group(("tests/e2e/cli/bench",), ("supervisor/cli/bench", "runtimes", "supervisor/host", *SUPPORT)),
}


@cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _files(path: str) -> Iterator[Path]:
    place = REPOSITORY / path
    found = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    found = [file for file in found if "__pycache__" not in file.parts]
    if not found:
        raise pytest.UsageError(f"tests/support/groups.py names {path}, where there is no file")
    yield from found


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--skip-unchanged", action="store_true", help="leave out costly groups that passed as they are")
    parser.addoption("--note-passed", action="store_true", help="note in tests/passed.json which costly groups passed")


def register(config: pytest.Config) -> None:
    if config.getoption("--skip-unchanged") or config.getoption("--note-passed"):
        config.pluginmanager.register(Selection(config), "groups")


class Selection:
    """One a process. The digests are of the files as they are when the tests begin."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._digests = {name: group.digest() for name, group in GROUPS.items()}
        before = json.loads(PASSED.read_text()) if PASSED.exists() else {}
        skips = config.getoption("--skip-unchanged")
        self._unchanged = {name for name, digest in self._digests.items() if skips and before.get(name) == digest}
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_report_header(self) -> list[str]:
        if not self._config.getoption("--skip-unchanged"):
            return []
        told = [f"left out, unchanged since it passed: {name}" for name in GROUPS if name in self._unchanged]
        return [*told, "to run everything: make test-all"] if told else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if any(GROUPS[name].has(item.nodeid) for name in self._unchanged)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            gone = set(left_out)
            items[:] = [item for item in items if item not in gone]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        groups = {name for name, group in GROUPS.items() if group.has(report.nodeid)}
        if report.failed:
            self._failed |= groups
        elif report.when == "call" and report.passed:
            self._passed |= groups

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """A group that failed is noted no more. One of which nothing could run on this machine stays as it was noted, or isn't."""
        config = self._config
        option = config.option
        is_part = config.args_source is pytest.Config.ArgsSource.ARGS or option.keyword or option.markexpr
        is_whole = not is_part and exitstatus <= pytest.ExitCode.TESTS_FAILED
        if hasattr(config, "workerinput") or not option.note_passed or not is_whole:
            return
        before = json.loads(PASSED.read_text()) if PASSED.exists() else {}
        noted = {name: self._digests[name] if name in self._passed else before.get(name) for name in GROUPS}
        noted |= dict.fromkeys(self._failed)
        PASSED.write_text(json.dumps({name: digest for name, digest in noted.items() if digest}, indent=1) + "\n")
