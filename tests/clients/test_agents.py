"""Agents that write code, as people run them: five turns in which each looks at a picture, for a model that reads text only."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from supervisor.cli.demo.tiny import MERGES
from tests.support import client_programs, tiny, tiny_language
from tests.support.daemon import Daemon, gguf, running, wait_until
from tests.support.limits import LIMIT_S

TURNS = 5
PROGRAM = "ai_sdk.mjs"
CONTEXT = 65536  # their first message takes a third of it
CODEX = """\
model = "codex"
model_provider = "llmux"
[model_providers.llmux]
name = "llmux"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
"""


OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "models": {
        "opencode": {
            "attachment": True,
            "tool_call": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
            "limit": {"context": CONTEXT, "output": 100},
        }
    },
}


@pytest.fixture(scope="module", params=["llama_server", "transformers"])
def site(request, tmp_path_factory):
    """A daemon with models that call an agent's own tool once in each turn, its folder, and what such a model answers."""
    folder = tmp_path_factory.mktemp("agents")
    for name in ("work", "daemon", "home"):
        (folder / name).mkdir()
    picture = str(folder / "work" / "a.png")
    Image.new("RGB", (64, 64), (200, 10, 10)).save(picture)
    tools = {
        "claude": {"name": "Read", "arguments": {"file_path": picture}},
        "codex": {"name": "view_image", "arguments": {"path": picture}},
        "shell": {"name": "exec_command", "arguments": {"cmd": "echo hi"}},
        "opencode": {"name": "read", "arguments": {"filePath": picture}},
        "weather": dict(tiny.TOOL_CALL),
    }
    models = {name: MODELS[request.param](name, tool) for name, tool in tools.items()}
    with running(folder / "daemon", {"models": models}) as daemon:
        yield Site(daemon, folder, tiny.ANSWER if request.param == "llama_server" else tiny_language.ANSWER)


def of_llama_cpp(name, tool):
    shape = {"layers": 1, "heads": 1, "kv_heads": 1, "head": 32, "context": CONTEXT}
    return gguf(tiny.model(name=f"tiny-{name}", tool_call=tool, **shape), n_ctx=CONTEXT, parallel=2)


def of_transformers(_name, tool):
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    path = tiny_language.model(tool_call=tool, merges=MERGES, max_position_embeddings=CONTEXT, **shape)
    return {"runtime": "transformers", "path": str(path), "threads": 2, "n_ctx": CONTEXT, "parallel": 2}


MODELS = {"llama_server": of_llama_cpp, "transformers": of_transformers}


@dataclass
class Site:
    daemon: Daemon
    folder: Path
    answer: str


def run(program, site, *words, **env):
    """What it prints, line by line."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(site.folder / "home"), **env}
    command = [client_programs.agent(program), *words]
    done = subprocess.run(
        command,
        cwd=site.folder / "work",
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def records(site, model, count):
    """The log's lines about this model's requests, at least so many."""

    def ended():
        found = [each for each in site.daemon.events("request.finished") if each["model"] == model]
        return found if len(found) >= count else None

    return wait_until(ended)


def test_claude_code(site):
    env = {
        "ANTHROPIC_BASE_URL": site.daemon.url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "ANTHROPIC_MODEL": "claude",
        "ANTHROPIC_SMALL_FAST_MODEL": "claude",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    looked = 0
    for turn in range(TURNS):
        words = ["-p", f"Turn {turn}: look at a.png", "--output-format", "json", "--allowedTools", "Read"]
        *_, result = run(".bin/claude", site, *words, *(["--continue"] if turn else []), **env)
        assert (result["is_error"], result["result"]) == (False, site.answer)
        looked += (
            result["num_turns"] - 1
        )  # not where it lets the system speak last: the tiny model calls after a user's turn
    assert looked >= 2
    found = records(site, "claude", TURNS + looked)
    assert {each["status"] for each in found} == {200}
    pictures = [name for name in found[-1]["ignored"] if name.startswith("messages[")]
    assert len(pictures) >= looked - 1, "all that it has looked at so far"
    assert all(each["prompt_tokens"] for each in found), "told at the beginning of a stream"


@pytest.mark.parametrize(("model", "names"), [("codex", "input["), ("shell", "tools[web_search]")])
def test_codex(site, model, names):
    home = site.folder / model
    home.mkdir()
    (home / "config.toml").write_text(CODEX.format(url=site.daemon.url))
    env = {"CODEX_HOME": str(home), "KEY": "any"}
    for turn in range(TURNS):
        words = [
            "exec",
            *(["resume", "--last"] if turn else []),
            "--skip-git-repo-check",
            "--json",
            "-m",
            model,
            f"Turn {turn}",
        ]
        items = [each["item"] for each in run(".bin/codex", site, *words, **env) if each["type"] == "item.completed"]
        assert [item["text"] for item in items if item["type"] == "agent_message"] == [site.answer]
        if model == "shell":
            assert [item["aggregated_output"] for item in items if item["type"] == "command_execution"] == ["hi\n"]
    found = records(site, model, 2 * TURNS)
    assert {each["status"] for each in found} == {200}
    assert any(name.startswith(names) for name in found[-1]["ignored"])


def test_opencode(site):
    provider = {**OPENCODE, "options": {"baseURL": f"{site.daemon.url}/v1"}}
    config = {"provider": {"llmux": provider}, "model": "llmux/opencode", "autoupdate": False, "share": "disabled"}
    (site.folder / "work" / "opencode.json").write_text(json.dumps(config))
    for turn in range(TURNS):
        words = ["run", *(["--continue"] if turn else []), "--format", "json", f"Turn {turn}: look at a.png"]
        parts = [each["part"] for each in run("opencode-linux-x64/bin/opencode", site, *words) if "part" in each]
        assert [part["text"] for part in parts if part["type"] == "text"] == [site.answer]
        assert [part["state"]["status"] for part in parts if part["type"] == "tool"] == ["completed"]
    found = records(site, "opencode", 2 * TURNS)
    assert {each["status"] for each in found} == {200}
    pictures = [name for name in found[-1]["ignored"] if name.startswith("messages[")]
    assert len(pictures) == TURNS, "each comes in a message behind the result of its tool"


def test_ai_sdk(site):
    told = client_programs.run(PROGRAM, site.daemon.url, "weather")
    arguments = tiny.TOOL_CALL["arguments"]
    assert told == {"said": [site.answer] * TURNS, "called": [arguments] * TURNS, "messages": 4 * TURNS + 2}
