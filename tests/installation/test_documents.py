"""Every command in the documents is run as it stands there, page by page, each in a home of its own.

What can't be run here stands in `NOT_RUN`, with the reason; bash and `llmux` still read it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest

from supervisor.cli.exit_codes import ExitCode
from tests.support import documents, tiny
from tests.support.daemon import REPOSITORY, wait_until
from tests.support.documents import Block
from tests.support.fake_hub import Hub, Repo
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports
from tests.support.shell import environment

NOT_RUN = {
    r"\bmake (test|docs)|\bpytest\b": "runs these tests, or writes these pages",
    r"\bgit clone\b": "the reader has it",
    r"\buv tool\b|\bpipx\b": "installs from an index; test_wheel.py installs the same wheel",
    r"\bllmux service\b|\bsystemctl\b|\bjournalctl\b|\bloginctl\b": "needs systemd; test_service.py, test_systemd.py",
    r"\bdocker (run|build|compose|push)\b": "needs Docker, and images of gigabytes",
    r"\bpodman\b|\bmake image\b|\bsudo\b": "changes this machine, or needs podman; test_podman.py",
    r"\brun_once\b|\bcreate_pod\b|llmux_pod": "needs podman; test_podman.py follows these steps",
    r"\bkubectl\b": "needs a cluster; test_deploy.py has kubectl read the files",
    r"--(accelerator|devices?) \S*cuda|\bllmux bench\b": "needs a GPU, and gigabytes; tests/e2e/cli/bench",
    r"\bHF_TOKEN=… llmux pull\b": "70 GB; tests/e2e/home_server starts the same configuration with tiny models",
    r"\bpython -m bench\b": "needs nginx and a quiet machine",
    r"\btrain\.py\b": "somebody's own program; tests/e2e/cli/test_lease.py runs others",
    r"\bgpu-host\b": "asks another machine",
    r"\bllmux token\b": "needs the keys of several people",
    r"  # needs ": "needs what the comment says, which the demo doesn't have",
}
"""What a block must not have in it to be run here, and why."""

CHECKOUT = {"README.md"}
"""Pages whose commands are run in the source folder; those of the others in the home folder."""

_CONFIGURED = f"mkdir -p ~/.config/llmux; echo 'models: {{tiny-chat: {{path: {tiny.model(name='tiny-chat')}}}}}' > ~/.config/llmux/llmux.yaml"
_IMPORTED = REPOSITORY / "tests" / "golden" / "importers"
BEFORE = {
    "deploy/compose/README.md": f"cp -r {REPOSITORY}/deploy/compose/. .; rm -rf secrets",
    "deploy/kubernetes/README.md": f"mkdir deploy; cp -r {REPOSITORY}/deploy/kubernetes deploy",
    "deploy/traefik/README.md": _CONFIGURED,
    "docs/coming-from.md": f"mkdir config; cp {_IMPORTED}/settings.json config; cp {_IMPORTED}/manifest.yaml {_IMPORTED}/tasks.yaml .",
    "docs/docker-and-lan.md": _CONFIGURED,
    "docs/troubleshooting.md": _CONFIGURED,
    "docs/upgrade.md": f"{_CONFIGURED}; mkdir -p ~/.local/state/llmux",
}
"""What readers of a page have done already."""

RUNNING = {
    "deploy/traefik/README.md": "llmux serve",
    "docs/reference/api.md": "llmux demo",
    "docs/operations.md": "llmux demo",
    "docs/tasks.md": "llmux demo",
    "docs/terminal.md": "llmux demo",
    "docs/troubleshooting.md": "llmux serve",
}
"""Pages of a daemon that runs already, and how it was started."""

SERVES = re.compile(r"(make run|llmux (serve|demo))( .*)?")
"""A block of this alone goes on until Ctrl-C: the blocks after it are another terminal's."""

HEADINGS = re.compile(r"[A-Z /]{12,}")
"""The first line of a table."""

CTRL_C = re.compile(r"\bCtrl-C ends|\bStop .* with Ctrl-C")
"""What a page says where such a block is ended."""

BLOCKS = documents.blocks()


def reason(block: Block) -> str | None:
    """Why it is not run; None: it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, block.script)), None)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """The repositories that the documents name, with a tiny model in each file."""
    model = tiny.model(name="tiny-chat").read_bytes()
    with Hub() as hub:
        for name in ("Qwen3-4B", "Llama-3.2-3B-Instruct"):
            files = {f"{name}-Q4_K_M.gguf": model, f"{name}-Q8_0.gguf": model + bytes(1 << 20)}
            owner = "Qwen" if name.startswith("Qwen") else "bartowski"
            hub.repos[f"{owner}/{name}-GGUF"] = Repo({**files, "README.md": b"# Tiny\n"}, large=frozenset(files))
        yield hub


class Reader:
    """Somebody who pastes a page, block by block, into a terminal."""

    def __init__(self, home: Path, page: str, hub: Hub) -> None:
        self.home, self.page = home, page
        self.port = quiet_ports(20)
        self.url = f"http://127.0.0.1:{self.port}"
        bin_dir, runtimes = home / ".local/bin", home / ".local/share/llmux/runtimes"
        for folder in (bin_dir, runtimes.parent):
            folder.mkdir(parents=True)
        (bin_dir / "llmux").symlink_to(Path(sys.executable).with_name("llmux"))
        runtimes.symlink_to(tiny.runtimes_dir())
        python = bin_dir / "python3"  # it has the clients that the pages show
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        self.env = environment(
            home,
            PATH=f"{bin_dir}:{os.environ['PATH']}",
            XDG_RUNTIME_DIR=str(home),
            HF_ENDPOINT=hub.url,
            HF_HOME=str(home / "hf"),
            LLMUX_SERVER__PORT=str(self.port),
            LLMUX_SERVER__WORKER_PORT_FIRST=str(self.port + 1),
            LLMUX_SERVER__WORKER_PORT_LAST=str(self.port + 19),
        )
        self.cwd = REPOSITORY if page in CHECKOUT else home

    def _bash(self, script: str) -> list[str]:
        return ["bash", "-eu", "-o", "pipefail", "-c", script.replace("127.0.0.1:8081", f"127.0.0.1:{self.port}")]

    @contextlib.contextmanager
    def serving(self, script: str) -> Iterator[None]:
        """Leave it running in another terminal."""
        log = self.home / "daemon.log"
        with (
            log.open("wb") as output,
            subprocess.Popen(
                self._bash(script), env=self.env, cwd=self.cwd, stdout=output, stderr=output, process_group=0
            ) as process,
        ):
            try:
                wait_until(lambda: process.poll() is not None or self._answers(), what=script)
                assert process.poll() is None, log.read_text()
                self.env["LLMUX_URL"] = self.url
                yield
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
                process.wait(LIMIT_S)
                self.env.pop("LLMUX_URL", None)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health").is_success
        return False

    def run(self, script: str, shown: list[str]) -> None:
        """Run it, and see that it ends as the page says. What is shown as typed is typed."""
        typed = "".join(line.removeprefix("> ") + "\n" for line in shown if line.startswith("> "))
        done = subprocess.run(
            self._bash(script),
            env=self.env,
            cwd=self.cwd,
            input=typed,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        told = f"{script}\n{done.stdout}\n{done.stderr}"
        error = next((line for line in shown if line.startswith("llmux: ")), None)
        if error is not None:
            assert error.replace("127.0.0.1:8081", f"127.0.0.1:{self.port}") in done.stderr, told
        else:
            assert done.returncode == 0, told
            if shown and HEADINGS.fullmatch(shown[0]):
                assert done.stdout.splitlines()[0].split() == shown[0].split(), told


@pytest.mark.parametrize("page", BLOCKS)
class TestCommands:
    """What a page says to type works."""

    def test_they_run(self, page, tmp_path, hub):
        if all(map(reason, BLOCKS[page])):
            pytest.skip("none of them can be run here")
        reader = Reader(tmp_path, page, hub)
        with contextlib.ExitStack() as stack:
            if page in BEFORE:
                reader.run(BEFORE[page], [])
            if page in RUNNING:
                stack.enter_context(reader.serving(RUNNING[page]))
            for block in BLOCKS[page]:
                if CTRL_C.search(block.before):
                    stack.close()
                if reason(block) is not None:
                    continue
                if SERVES.fullmatch(block.script.strip()):
                    stack.enter_context(reader.serving(block.script))
                else:
                    for script, shown in block.steps():
                        reader.run(script, shown)

    def test_bash_can_read_them(self, page):
        for block in BLOCKS[page]:
            told = subprocess.run(["bash", "-n"], input=block.script, capture_output=True, text=True, check=False)
            assert (told.returncode, told.stderr) == (ExitCode.DONE, ""), str(block)

    def test_llmux_knows_their_words(self, page):
        for block in BLOCKS[page]:
            for words in documents.llmux_calls(block.script):
                try:
                    documents.parse(words)
                except click.UsageError as error:
                    raise AssertionError(f"{block}: llmux {' '.join(words)}: {error.format_message()}") from error


class TestReading:
    """The tests above see what they are meant to see."""

    def test_each_exception_is_needed(self):
        every = [block for page in BLOCKS.values() for block in page]
        assert [p for p in NOT_RUN if not any(re.search(p, block.script) for block in every)] == []
        assert BEFORE.keys() | RUNNING.keys() <= BLOCKS.keys()

    @pytest.mark.parametrize(
        ("script", "calls"),
        [
            ("llmux ps\n.venv/bin/llmux why -n 6 | head", [["ps"], ["why", "-n", "6"]]),
            ('eval "$(llmux completion bash)"', [["completion", "bash"]]),
            ("A=b llmux pull x  # llmux nothing\nmkdir llmux && llmux man > llmux.1", [["pull", "x"], ["man"]]),
            ("llmux add x \\\n  --dry-run", [["add", "x", "--dry-run"]]),
            ("cd ~/.config/llmux; echo Hello | llmux chat x; echo llmux ps", [["chat", "x"]]),
        ],
    )
    def test_calls_are_found(self, script, calls):
        assert list(documents.llmux_calls(script)) == calls

    @pytest.mark.parametrize("words", [["prune"], ["ps", "--all"], ["config", "chekc"], ["load"], ["keys", "add"]])
    def test_unknown_words_are_refused(self, words):
        with pytest.raises(click.UsageError):
            documents.parse(words)
