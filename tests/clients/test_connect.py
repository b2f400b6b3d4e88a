"""The lines that the page *Connect* offers: each is run by the program that it is for, or parsed as that program parses it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from supervisor.server.ui import FOLDER
from tests.support import client_programs, tiny
from tests.support.daemon import gguf, running
from tests.support.limits import LIMIT_S

KEY = 'sk-it\'s-a "key"-0123456789'
NAME = "acme/tiny chat".replace(" ", "-")


def offered(base: str, secret: str = KEY, name: str = NAME, **more: object) -> dict[str, dict[str, str]]:
    """By client."""
    node, _ = client_programs.node()
    given = {
        "base": base,
        "secret": secret,
        "chat": {"name": name, "context": 65536},
        "fill": None,
        "embed": None,
    } | more
    script = Path(__file__).with_name("snippets.mjs")
    command = [node, str(script), str(FOLDER / "js" / "snippets.js"), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return {one["name"]: one for one in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def found():
    return offered("http://127.0.0.1:8081/v1", fill="filler", embed="embedder")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    shape = {"layers": 1, "heads": 1, "kv_heads": 1, "head": 32, "context": 65536}
    model = gguf(tiny.model(name="tiny-connect", **shape), n_ctx=65536, parallel=2)
    with running(tmp_path_factory.mktemp("connect"), {"models": {NAME: model}}) as daemon:
        yield daemon


def environment(text: str) -> dict[str, str]:
    """What these lines of a shell set."""
    command = ["sh", "-c", f"{text}\nenv -0"]
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


class TestParsed:
    """As the programs that we can't run here read them; their documentation has the names of the keys."""

    def test_each_has_a_place(self, found):
        assert all(one["where"] and one["text"] for one in found.values())
        assert len(found) == 11

    def test_claude_code(self, found):
        values = environment(found["Claude Code"]["text"])
        assert (values["ANTHROPIC_BASE_URL"], values["ANTHROPIC_AUTH_TOKEN"]) == ("http://127.0.0.1:8081", KEY)
        assert values["ANTHROPIC_MODEL"] == values["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == NAME

    def test_the_sdks(self, found):
        values = environment(found["Environment of the OpenAI SDKs"]["text"])
        assert (values["OPENAI_BASE_URL"], values["OPENAI_API_KEY"]) == ("http://127.0.0.1:8081/v1", KEY)

    def test_curl(self, found):
        words = shlex.split(found["curl"]["text"].replace("\\\n", " "))
        assert words[1] == "http://127.0.0.1:8081/v1/chat/completions"
        assert f"Authorization: Bearer {KEY}" in words
        assert json.loads(words[-1])["model"] == NAME

    def test_codex(self, found):
        config = tomllib.loads(found["Codex"]["text"])
        assert (config["model"], config["model_context_window"]) == (NAME, 65536)
        provider = config["model_providers"][config["model_provider"]]
        assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8081/v1", "responses")

    def test_opencode(self, found):
        config = json.loads(found["OpenCode"]["text"])
        provider, _, model = config["model"].partition("/")
        assert config["provider"][provider]["models"][model]["limit"] == {"context": 65536, "output": 8192}
        assert config["provider"][provider]["options"] == {"baseURL": "http://127.0.0.1:8081/v1", "apiKey": KEY}

    def test_continue(self, found):
        config = yaml.safe_load(found["Continue"]["text"])
        assert config["schema"] == "v1"
        assert {one["model"]: one["roles"] for one in config["models"]} == {
            NAME: ["chat", "edit", "apply"],
            "filler": ["autocomplete"],
            "embedder": ["embed"],
        }
        assert {(one["apiBase"], one["apiKey"]) for one in config["models"]} == {("http://127.0.0.1:8081/v1", KEY)}

    def test_zed(self, found):
        provider = json.loads(found["Zed"]["text"])["language_models"]["openai_compatible"]["llmux"]
        assert provider["api_url"] == "http://127.0.0.1:8081/v1"
        assert [(one["name"], one["max_tokens"]) for one in provider["available_models"]] == [(NAME, 65536)]

    def test_aider(self, found):
        config = yaml.safe_load(found["aider"]["text"])
        assert config == {
            "model": f"openai/{NAME}",
            "openai-api-base": "http://127.0.0.1:8081/v1",
            "openai-api-key": KEY,
        }


class TestRun:
    """Against a daemon, until the model's answer is there."""

    @pytest.fixture
    def lines(self, site):
        return offered(f"{site.url}/v1", "any-key")

    def run(self, command, folder: Path, **env: str) -> str:
        environ = {"PATH": os.environ["PATH"], "HOME": str(folder), **env}
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def test_curl(self, lines, tmp_path):
        answer = json.loads(self.run(["sh", "-c", lines["curl"]["text"]], tmp_path))
        assert answer["choices"][0]["message"]["content"] == tiny.ANSWER

    @pytest.mark.parametrize("name", ["Python", "Python, Anthropic's SDK"])
    def test_python(self, lines, tmp_path, name):
        (tmp_path / "program.py").write_text(lines[name]["text"])
        assert self.run([str(client_programs.python()), "program.py"], tmp_path).strip() == tiny.ANSWER

    def test_node(self, lines, tmp_path):
        node, folder = client_programs.node()
        (tmp_path / "program.mjs").write_text(lines["Node"]["text"])
        (tmp_path / "node_modules").symlink_to(folder / "node_modules")
        assert self.run([node, "program.mjs"], tmp_path).strip() == tiny.ANSWER

    def test_claude_code(self, lines, tmp_path):
        program = client_programs.agent(".bin/claude")
        text = f"{lines['Claude Code']['text']}\nexec {shlex.quote(str(program))} -p 'Say hello' --output-format json"
        result = json.loads(self.run(["sh", "-c", text], tmp_path, DISABLE_AUTOUPDATER="1"))
        assert (result["is_error"], result["result"]) == (False, tiny.ANSWER)

    def test_codex(self, lines, tmp_path):
        (tmp_path / "config.toml").write_text(lines["Codex"]["text"])
        words = ["exec", "--skip-git-repo-check", "--json", "Say hello"]
        env = {"CODEX_HOME": str(tmp_path), "LLMUX_API_KEY": "any-key"}
        told = self.run([client_programs.agent(".bin/codex"), *words], tmp_path, **env)
        assert tiny.ANSWER in told

    def test_opencode(self, lines, tmp_path):
        (tmp_path / "opencode.json").write_text(lines["OpenCode"]["text"])
        program = client_programs.agent("opencode-linux-x64/bin/opencode")
        told = self.run([program, "run", "--format", "json", "Say hello"], tmp_path)
        assert tiny.ANSWER in told
