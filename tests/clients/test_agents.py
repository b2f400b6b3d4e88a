"""Agents that write code, as people run them: five turns in which each looks at a picture, for a model that reads text only."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from PIL import Image

from tests.support import client_programs, tiny
from tests.support.daemon import gguf, running, wait_until
from tests.support.limits import LIMIT_S

TURNS = 5
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("agents")
    for name in ("work", "daemon"):
        (found / name).mkdir()
    Image.new("RGB", (64, 64), (200, 10, 10)).save(found / "work" / "a.png")
    return found


@pytest.fixture(scope="module")
def site(folder):
    """Models that call an agent's own tool once in each turn."""
    picture = str(folder / "work" / "a.png")
    tools = {
        "claude": {"name": "Read", "arguments": {"file_path": picture}},
        "codex": {"name": "view_image", "arguments": {"path": picture}},
        "shell": {"name": "exec_command", "arguments": {"cmd": "echo hi"}},
    }
    shape = {"layers": 1, "heads": 1, "kv_heads": 1, "head": 32, "context": CONTEXT}
    models = {
        name: gguf(tiny.model(name=f"tiny-{name}", tool_call=tool, **shape), n_ctx=CONTEXT, parallel=2)
        for name, tool in tools.items()
    }
    with running(folder / "daemon", {"models": models}) as daemon:
        yield daemon


def run(program, folder, *words, **env):
    """What it prints, line by line."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), **env}
    command = [client_programs.agent(program), *words]
    done = subprocess.run(
        command,
        cwd=folder / "work",
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
        found = [each for each in site.events("request.finished") if each["model"] == model]
        return found if len(found) >= count else None

    return wait_until(ended)


def test_claude_code(site, folder):
    env = {
        "ANTHROPIC_BASE_URL": site.url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "ANTHROPIC_MODEL": "claude",
        "ANTHROPIC_SMALL_FAST_MODEL": "claude",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    looked = 0
    for turn in range(TURNS):
        words = ["-p", f"Turn {turn}: look at a.png", "--output-format", "json", "--allowedTools", "Read"]
        *_, result = run("claude", folder, *words, *(["--continue"] if turn else []), **env)
        assert (result["is_error"], result["result"]) == (False, tiny.ANSWER)
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
def test_codex(site, folder, model, names):
    home = folder / model
    home.mkdir()
    (home / "config.toml").write_text(CODEX.format(url=site.url))
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
        items = [each["item"] for each in run("codex", folder, *words, **env) if each["type"] == "item.completed"]
        assert [item["text"] for item in items if item["type"] == "agent_message"] == [tiny.ANSWER]
        if model == "shell":
            assert [item["aggregated_output"] for item in items if item["type"] == "command_execution"] == ["hi\n"]
    found = records(site, model, 2 * TURNS)
    assert {each["status"] for each in found} == {200}
    assert any(name.startswith(names) for name in found[-1]["ignored"])
