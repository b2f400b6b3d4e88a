"""`llmux run`, `add` and `remove`: from a name of the hub to an answer, in a home where nothing is yet."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from supervisor.cli.exit_codes import ExitCode
from tests.support import tiny
from tests.support.daemon import fake, running, wait_until
from tests.support.fake_hub import Hub, Repo
from tests.support.ports import quiet_ports
from tests.support.shell import Shell

SMALL, LARGE = "tiny-chat-Q4_K_M.gguf", "tiny-chat-Q8_0.gguf"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A model in two quantisations, and in one that is never chosen by itself."""
    model = tiny.model(name="tiny-chat").read_bytes()
    with Hub() as hub:
        files = {SMALL: model, LARGE: model + bytes(1 << 20), "tiny-chat-BF16.gguf": model + bytes(2 << 20)}
        hub.repos["acme/Tiny-Chat-GGUF"] = Repo({**files, "README.md": b"# Tiny\n"}, large=frozenset(files))
        hub.repos["acme/closed-GGUF"] = Repo({SMALL: model}, large=frozenset({SMALL}), gated=True)
        half = len(model) // 2
        split = {
            f"Q4_K_M/split-Q4_K_M-0000{n}-of-00002.gguf": part for n, part in ((1, model[:half]), (2, model[half:]))
        }
        hub.repos["acme/split-GGUF"] = Repo(
            {
                **split,
                "split-Q8_0.gguf": model,
                "mmproj-F16.gguf": model,
                "mmproj-F32.gguf": model,
                "x.imatrix.gguf": b"0",
            }
        )
        hub.repos["acme/cut"] = Repo({"config.json": b'{"architectures": ', "model.safetensors": b"0" * 64})
        hub.repos["acme/part-GGUF"] = Repo({"part-Q4_K_M-00002-of-00002.gguf": model, "mmproj-F16.gguf": model})
        hub.repos["acme/odd"] = Repo({"config.json": b'{"architectures": ["Odd"]}', "model.safetensors": b"0" * 64})
        yield hub


@pytest.fixture
def home(tmp_path: Path, hub: Hub) -> Shell:
    """An empty home, with free ports, the tests' runtimes, and this hub."""
    first = quiet_ports(20)
    variables = {
        "LLMUX_SERVER__PORT": str(first),
        "LLMUX_SERVER__WORKER_PORT_FIRST": str(first + 1),
        "LLMUX_SERVER__WORKER_PORT_LAST": str(first + 19),
        "LLMUX_SERVER__RUNTIMES_DIR": str(tiny.runtimes_dir()),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
    }
    return Shell(tmp_path, variables=variables)


def config_of(home: Shell) -> Path:
    return home.home / ".config" / "llmux" / "llmux.yaml"


def files_of(home: Shell) -> set[str]:
    """What was pulled."""
    folder = home.home / ".local/share/llmux/models/acme/Tiny-Chat-GGUF"
    return {path.name for path in folder.glob("*.gguf")}


class TestRun:
    """One command, from nothing to an answer."""

    def test_from_an_empty_home(self, home, hub):
        told = home("run", "acme/Tiny-Chat-GGUF", stdin="Hello", timeout=300)
        assert (told.returncode, told.stdout.strip()) == (ExitCode.DONE, tiny.ANSWER), told.stderr
        entry = yaml.safe_load(config_of(home).read_text())["models"]
        assert entry == {"tiny-chat": {"source": {"repo": "acme/Tiny-Chat-GGUF", "files": [SMALL]}}}
        assert config_of(home).read_text().startswith("# yaml-language-server: $schema=./llmux.schema.json\n")
        assert files_of(home) == {SMALL}
        hub.repos["acme/Tiny-Chat-GGUF"].gated = True  # it is not asked again
        try:
            again = home("run", "acme/Tiny-Chat-GGUF:Q4_K_M", "Hello", "--json")
        finally:
            hub.repos["acme/Tiny-Chat-GGUF"].gated = False
        assert json.loads(again.stdout)["choices"][0]["message"]["content"] == tiny.ANSWER, again.stderr

    def test_a_well_known_name(self, home, hub):
        """It is fetched by `pull` as well, and its clients ask for it by that name."""
        hub.repos["Qwen/Qwen3-4B-GGUF"] = hub.repos["acme/Tiny-Chat-GGUF"]
        pulled = home("pull", "qwen3:4b", timeout=300)
        assert (pulled.returncode, pulled.stdout) == (ExitCode.DONE, ""), pulled.stderr
        assert "Qwen/Qwen3-4B-GGUF" in pulled.stderr.splitlines()[0]
        assert list(yaml.safe_load(config_of(home).read_text())["models"]) == ["qwen3:4b"]
        assert home("run", "qwen3:4b", "Hello", timeout=300).stdout.strip() == tiny.ANSWER
        told = home("add", "qwen3:5b")
        assert "qwen3:8b" in told.stderr
        both = home("pull", "acme/Tiny-Chat-GGUF", "qwen3:4b", timeout=300)
        assert both.returncode == ExitCode.DONE, both.stderr
        assert list(yaml.safe_load(config_of(home).read_text())["models"]) == ["qwen3:4b", "tiny-chat"]

    def test_several_at_once(self, home, hub):
        """Each does what it does alone; what can't be had keeps none of the others."""
        hub.repos["Qwen/Qwen3-4B-GGUF"] = hub.repos["acme/Tiny-Chat-GGUF"]
        told = home("pull", "acme/Tiny-Chat-GGUF", "acme/nothing-GGUF", "qwen3:4b", "--json", timeout=300)
        assert (told.returncode, "acme/nothing-GGUF: " in told.stderr) == (ExitCode.FAILED, True), told.stderr
        assert [row["models"] for row in json.loads(told.stdout)] == [["tiny-chat"], ["qwen3:4b"]]
        assert list(yaml.safe_load(config_of(home).read_text())["models"]) == ["tiny-chat", "qwen3:4b"]
        assert files_of(home) == {SMALL}
        (home.home / ".local/share/llmux/models/acme/Tiny-Chat-GGUF" / SMALL).unlink()
        planned = home("pull", "tiny-chat", "acme/Tiny-Chat-GGUF:Q8_0", "--dry-run")
        assert (planned.returncode, LARGE in config_of(home).read_text()) == (ExitCode.DONE, False)
        again = home("pull", "tiny-chat", "acme/Tiny-Chat-GGUF:Q8_0", timeout=300)
        assert (again.returncode, files_of(home)) == (ExitCode.DONE, {SMALL, LARGE}), again.stderr
        assert "tiny-chat-q8_0" in again.stdout
        refused = home("pull", "acme/part-GGUF", "no-such-name")
        assert (refused.returncode, "no-such-name" in refused.stderr) == (ExitCode.NOT_FOUND, True)
        assert "part" not in config_of(home).read_text()

    def test_no_question(self, home):
        """Nothing is fetched for nobody."""
        told = home("run", "acme/Tiny-Chat-GGUF", stdin="")
        assert (told.returncode, files_of(home)) == (ExitCode.USAGE, set())

    def test_twice_at_the_same_time(self, home):
        """One entry, one daemon, two answers."""
        with ThreadPoolExecutor() as threads:
            both = list(threads.map(lambda _: home("run", "acme/Tiny-Chat-GGUF", "Hello", timeout=300), range(2)))
        assert [told.stdout.strip() for told in both] == [tiny.ANSWER] * 2, [told.stderr for told in both]
        assert list(yaml.safe_load(config_of(home).read_text())["models"]) == ["tiny-chat"]

    def test_a_model_that_does_not_start(self, home):
        """Its last words are told at once: afterwards no daemon is there to ask."""
        config_of(home).parent.mkdir(parents=True)
        model = fake("--exit-code", "1", "--log-text", "no such file: weights.bin")
        config_of(home).write_text(yaml.safe_dump({"models": {"bad": model}, "limits": {"crash_limit": 1}}))
        told = home("run", "bad", "Hello", "--json")
        assert "no such file: weights.bin" in told.stderr.splitlines()[-1]
        assert "no such file: weights.bin" in json.loads(told.stdout)["error"]["detail"]

    def test_its_daemon_ends_with_it(self, home, hub):
        """Also when the command is killed: nobody is left who could end it."""
        config_of(home).parent.mkdir(parents=True)
        config_of(home).write_text(
            yaml.safe_dump({"models": {"talker": fake("--chunks", "4000", "--chunk-delay", "0.05")}})
        )
        with home.terminal("run", "talker", "Hello") as terminal:
            terminal.wait_for("started one for this chat")
            log = home.home / ".local/state/llmux/run.log"
            wait_until(lambda: "daemon.listening" in log.read_text())
        wait_until(lambda: "daemon.stopped" in log.read_text(), what="its daemon ends")

    def test_a_daemon_that_can_not_start(self, home, hub):
        config_of(home).parent.mkdir(parents=True)
        config_of(home).write_text(yaml.safe_dump({"models": {"talker": fake()}}))
        with socket.socket() as other:  # which nobody can reach, nor bind
            other.bind(("127.0.0.1", 0))
            told = home("run", "talker", "Hello", LLMUX_SERVER__PORT=str(other.getsockname()[1]))
        assert (told.returncode, told.stdout) == (ExitCode.FAILED, "")
        assert "run.log" in told.stderr

    def test_at_a_terminal(self, home):
        """Ctrl-C cuts off an answer, and not the daemon that was started for it."""
        config_of(home).parent.mkdir(parents=True)
        model = fake("--chunks", "4000", "--chunk-delay", "0.05")
        config_of(home).write_text(yaml.safe_dump({"models": {"talker": model}}))
        with home.terminal("run", "talker") as terminal:
            for _ in range(2):
                terminal.wait_for("> ")
                terminal.type("Hello\n")
                terminal.wait_for("Hello")
                terminal.wait_for("from")
                terminal.type("\x03")
                terminal.wait_for("cut off")
            terminal.type("/quit\n")
            assert terminal.end() == ExitCode.DONE

    def test_no_such_name(self, home):
        told = home("run", "tiny")
        assert (told.returncode, told.stdout) == (ExitCode.NOT_FOUND, "")
        assert "ORG/REPO" in told.stderr


class TestChoice:
    """What there is, and what is taken."""

    def offered(self, home: Shell, model: str) -> dict[str, dict]:
        told = home("add", model, "--dry-run", "--json")
        assert told.returncode == ExitCode.DONE, told.stderr
        assert not config_of(home).exists()
        return {row["quantisation"]: row for row in json.loads(told.stdout)["variants"]}

    def test_the_best_that_fits(self, home):
        found = self.offered(home, "acme/Tiny-Chat-GGUF")
        assert [label for label, row in found.items() if row["taken"]] == ["Q4_K_M"]
        assert list(found) == ["BF16", "Q8_0", "Q4_K_M"]
        assert all(row["fits"] for row in found.values())
        needs = {label: row["need_mib"] for label, row in found.items()}
        config_of(home).parent.mkdir(parents=True)
        budget = {"kind": "host", "budget_mib": needs["Q4_K_M"] + 64, "margin_mib": 64}
        config_of(home).write_text(yaml.safe_dump({"devices": [budget], "models": {"a": fake(vram_mib=1)}}))
        told = json.loads(home("add", "acme/Tiny-Chat-GGUF", "--dry-run", "--json").stdout)["variants"]
        assert [(row["quantisation"], row["fits"], row["taken"]) for row in told] == [
            ("BF16", False, False),
            ("Q8_0", False, False),
            ("Q4_K_M", True, True),
        ]
        refused = home("add", "acme/Tiny-Chat-GGUF:Q8_0")
        assert (refused.returncode, "takes" in refused.stderr) == (ExitCode.FAILED, True)

    def test_the_one_that_is_named(self, home, hub):
        for name in (
            "acme/Tiny-Chat-GGUF:q4_k_m",
            "hf://acme/Tiny-Chat-GGUF:Q4_K_M",
            f"{hub.url}/acme/Tiny-Chat-GGUF/blob/main/{SMALL}",
        ):
            assert [label for label, row in self.offered(home, name).items() if row["taken"]] == ["Q4_K_M"]

        told = home("add", "acme/Tiny-Chat-GGUF:Q2_K")
        assert told.returncode == ExitCode.NOT_FOUND
        assert "Q8_0, Q4_K_M" in told.stderr

    def test_gated(self, home):
        told = home("add", "acme/closed-GGUF")
        assert (told.returncode, "HF_TOKEN" in told.stderr) == (ExitCode.FAILED, True)
        assert home("add", "acme/closed-GGUF", "--dry-run", HF_TOKEN="hf_good").returncode == ExitCode.DONE

    @pytest.mark.parametrize(
        ("repo", "why"), [("odd", "names Odd"), ("cut", "config.json can't be read"), ("part-GGUF", "no whole model")]
    )
    def test_what_no_runtime_is_sure_to_run(self, home, repo, why):
        told = home("add", f"acme/{repo}")
        assert told.returncode == ExitCode.NOT_FOUND
        assert why in told.stderr

    def test_parts_and_projector(self, home):
        found = self.offered(home, "acme/split-GGUF")
        parts = [f"Q4_K_M/split-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]
        assert found["Q4_K_M"]["files"] == [*parts, "mmproj-F16.gguf"]
        assert set(found) == {"Q4_K_M", "Q8_0"}


class TestEntry:
    """What becomes of the configuration, and of the daemon that runs with it."""

    CONFIG = """# my models
models:
  talker: {cmd: [sleep, "9"], vram_mib: 1} # mine

# the end
"""

    def test_a_running_daemon_serves_it_at_once(self, home, hub, tmp_path):
        server = {"models_dir": str(tmp_path / "models")}
        with running(tmp_path, {"models": {"talker": fake()}, "server": server}) as daemon:
            home.url = daemon.url
            text = f"# mine\n{daemon.config_path.read_text()}# the end\n"
            daemon.config_path.write_text(text)
            own = ("--config", str(daemon.config_path))
            told = home("add", "acme/Tiny-Chat-GGUF:Q4_K_M", "--name", "tiny", "--json", *own)
            assert json.loads(told.stdout)["reloaded"] is True, told.stderr
            answer = home("chat", "tiny", "Hello", "--url", f"{daemon.url}/v1/")
            assert answer.stdout.strip() == tiny.ANSWER
            assert home("run", "tiny", "Hello", *own).stdout.strip() == tiny.ANSWER
            assert not (daemon.state_dir / "run.log").exists()
            refused = home("remove", "tiny", "--files", *own)
            assert (refused.returncode, "--yes" in refused.stderr) == (ExitCode.USAGE, True)
            removed = json.loads(home("remove", "tiny", "--files", "--yes", "--json", *own).stdout)
            assert removed["deleted"] == [str(tmp_path / "models/acme/Tiny-Chat-GGUF" / SMALL)]
            assert daemon.config_path.read_text() == text
            assert list((tmp_path / "models").rglob("*")) == []
            assert home("chat", "tiny", "Hello", "--url", daemon.url).returncode == ExitCode.NOT_FOUND

    def test_a_daemon_with_another_configuration(self, home, tmp_path):
        with running(tmp_path, {"models": {"talker": fake()}}) as daemon:
            config_of(home).parent.mkdir(parents=True)
            config_of(home).write_text(self.CONFIG.replace("talker", "other"))
            told = home("run", "other", "Hello", "--url", daemon.url)
            assert (told.returncode, "another configuration" in told.stderr) == (ExitCode.NOT_FOUND, True)
            added = home("add", "acme/Tiny-Chat-GGUF", "--json", "--url", daemon.url)
            assert (json.loads(added.stdout)["reloaded"], "another configuration" in added.stderr) == (False, True)

    @pytest.mark.parametrize("name", ["a b", ""])
    def test_no_name(self, home, name):
        told = home("add", "acme/Tiny-Chat-GGUF", "--name", name)
        assert (told.returncode, f"{name!r} is not a name" in told.stderr) == (ExitCode.FAILED, True)

    def test_what_can_not_be_fetched_is_not_entered(self, home, hub):
        config_of(home).parent.mkdir(parents=True)
        config_of(home).write_text(self.CONFIG)
        hub.corrupt[SMALL] = 5  # the header, and each attempt
        try:
            told = home("add", "acme/Tiny-Chat-GGUF:Q4_K_M")
        finally:
            hub.corrupt.clear()
        assert told.returncode == ExitCode.FAILED
        assert "another hash" in told.stderr
        assert config_of(home).read_text() == self.CONFIG

    def test_files_that_others_use_stay(self, home):
        config_of(home).parent.mkdir(parents=True)
        config_of(home).write_text(self.CONFIG)
        for quantisation in ("Q4_K_M", "Q8_0"):
            assert home("add", f"acme/Tiny-Chat-GGUF:{quantisation}").returncode == ExitCode.DONE
        assert home("remove", "tiny-chat", "--files", "--yes").returncode == ExitCode.DONE
        assert files_of(home) == {LARGE}
        assert home("remove", "tiny-chat-q8_0").returncode == ExitCode.DONE
        assert files_of(home) == {LARGE}
        assert config_of(home).read_text() == self.CONFIG

    def test_virtual_models_refer_to_it(self, home):
        text = f"{self.CONFIG}virtual_models:\n  alias: {{model: talker}}\n"
        config_of(home).parent.mkdir(parents=True)
        config_of(home).write_text(text)
        told = home("remove", "talker")
        assert (told.returncode, "alias" in told.stderr) == (ExitCode.FAILED, True)
        assert config_of(home).read_text() == text

    def test_a_file_that_can_not_be_edited_safely(self, home):
        config_of(home).parent.mkdir(parents=True)
        config_of(home).write_text("{models: {a: {cmd: [x], vram_mib: 1}}}")
        told = home("add", "acme/Tiny-Chat-GGUF")
        assert told.returncode == ExitCode.FAILED
        assert "source: {repo: acme/Tiny-Chat-GGUF" in told.stderr
        assert files_of(home) == set()
