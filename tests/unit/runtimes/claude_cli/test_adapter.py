"""The runtime's configuration: what it takes and refuses, and what its worker and its program are given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from runtimes.base import LaunchContext, LaunchSpec, ModelUnusableError
from runtimes.claude_cli.worker.conversation import ProgramRequest, parse_request
from runtimes.claude_cli.worker.program import Options
from runtimes.registry import REGISTRY
from runtimes.sdk.server import Settings
from tests.support.cases import cases

ADAPTER = REGISTRY.get("claude_cli")
FILE = Path("/private/system.txt")


def config(**keys: object):
    return ADAPTER.config(**{"runtime": "claude_cli", "upstream_model": "sonnet", **keys})


def launch(**keys: object) -> LaunchSpec:
    context = LaunchContext("m", "127.0.0.1", 8100, "secret", (), Path("/runtimes"))
    return ADAPTER.launch(config(**{"command": [sys.executable, "${model}"], **keys}), context)


def asked(*messages: tuple[str, str]) -> ProgramRequest:
    return parse_request({"messages": [{"role": role, "content": text} for role, text in messages]})


def options(**keys: object) -> Options:
    told = Settings.parse(launch(**keys).argv[-1]).options
    return Options(**told)


class TestConfiguration:
    @cases(
        ("keys", "complaint"),
        [
            ({"command": []}, "empty"),
            ({"command": ["x", "${port}"]}, r"\$\{port\}: not a placeholder"),
            ({"command": ["x", "a\0b"]}, "NUL"),
            ({"pass_env": ["not a name"]}, "not the name of an environment variable"),
            ({"upstream_model": "--dangerous"}, "pattern"),
            ({"modalities": ["text", "image"]}, "text alone"),
            ({"type": "tts"}, "llm"),
            ({"target_inflight": 0}, "parallel"),
            ({"vram_mib": 5}, "for models that run here"),
            ({"timeout_s": 0}, "greater than 0"),
            ({"output": "xml"}, "claude_json"),
        ],
    )
    def test_mistakes(self, keys, complaint):
        with pytest.raises(ValidationError, match=complaint):
            config(**keys)

    def test_a_program_that_is_not_there(self, tmp_path):
        missing = config(command=["no-such-program"])
        assert ADAPTER.check(missing, runtimes_dir=tmp_path) == ("command: no-such-program is not a program on PATH",)
        with pytest.raises(ModelUnusableError, match="no-such-program"):
            launch(command=["no-such-program"])

    def test_a_variable_that_is_not_set(self):
        with pytest.raises(ModelUnusableError, match="A_KEY"):
            launch(pass_env=["A_KEY"])

    def test_no_value_is_in_an_argument(self, monkeypatch):
        """The program has its worker's environment, so nothing else is in it."""
        monkeypatch.setenv("A_KEY", "hunter2")
        spec = launch(pass_env=["A_KEY"], env={"B": "hunter3"})
        own = {"CLAUDE_CODE_DISABLE_ATTACHMENTS": "1", "LLMUX_WORKER_KEY": "secret"}
        assert spec.env == {**own, "A_KEY": "hunter2", "B": "hunter3"}
        assert "hunter" not in "".join(spec.argv)

    def test_how_long_it_may_be_silent(self):
        assert launch(timeout_s=1000).patience_s > 1000

    @pytest.mark.parametrize(
        ("keys", "most"), [({}, 2), ({"parallel": 5}, 5), ({"parallel": 5, "target_inflight": 3}, 3)]
    )
    def test_how_many_at_once(self, keys, most):
        assert ADAPTER.target_inflight(config(**keys)) == most

    def test_what_it_can_do(self):
        can = ADAPTER.capabilities(config())
        assert (can.modalities, can.tools, can.multi_turn) == (("text",), False, True)
        assert can.thinking is None  # a request that switches it is refused
        assert ADAPTER.remote
        assert ADAPTER.needs_permission(config())
        assert not ADAPTER.needs_permission(config(allow_remote=True))


class TestCall:
    """The prompt is in no argument."""

    def test_one_message(self):
        request = asked(("user", "Hello"))
        assert options().argv(request, FILE) == [sys.executable, "sonnet"]
        assert options().prompt(request) == "Hello"

    def test_a_system_prompt(self):
        request = asked(("system", "A"), ("user", "Hello"), ("developer", "B"), ("user", "again"))
        assert options().argv(request, FILE)[2:] == ["--system-prompt-file", "/private/system.txt"]
        assert request.system == "A\n\nB"
        assert options().prompt(request).endswith("<user>\nHello\n</user>\n<user>\nagain\n</user>")

    def test_a_system_prompt_with_the_prompt(self):
        request = asked(("system", "A"), ("user", "Hello"))
        assert options(system_args=[]).argv(request, FILE)[2:] == []
        assert options(system_args=[]).prompt(request) == "A\n\nHello"

    def test_values_are_not_looked_through(self):
        assert options(upstream_model="${system_file}").argv(asked(("user", "Hello")), FILE)[1] == "${system_file}"
