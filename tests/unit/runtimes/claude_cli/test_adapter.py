"""The runtime's configuration: what it takes and refuses, and what its program is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from runtimes.base import ModelUnusableError
from runtimes.registry import REGISTRY

ADAPTER = REGISTRY.get("claude_cli")
FOLDER = Path("/private")


def config(**keys: object):
    return ADAPTER.config(**{"runtime": "claude_cli", "upstream_model": "sonnet", **keys})


def call(*messages: tuple[str, str], **keys: object):
    body = {"messages": [{"role": role, "content": text} for role, text in messages]}
    spec = ADAPTER.connect(config(**{"command": [sys.executable, "${model}"], **keys}), {})
    return spec.call(json.dumps(body).encode(), FOLDER)


class TestConfiguration:
    @pytest.mark.parametrize(
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
            ADAPTER.connect(missing, {})

    def test_a_variable_that_is_not_set(self):
        with pytest.raises(ModelUnusableError, match="A_KEY"):
            ADAPTER.connect(config(command=[sys.executable], pass_env=["A_KEY"]), {})

    def test_no_value_is_in_a_text(self):
        keys = {"command": [sys.executable], "pass_env": ["A_KEY"], "env": {"B": "hunter3"}}
        spec = ADAPTER.connect(config(**keys), {"A_KEY": "hunter2"})
        assert spec.env == {"CLAUDE_CODE_DISABLE_ATTACHMENTS": "1", "A_KEY": "hunter2", "B": "hunter3"}
        assert "hunter" not in repr(spec)

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
        made = call(("user", "Hello"))
        assert (made.argv, made.stdin, made.files) == ((sys.executable, "sonnet"), b"Hello", {})

    def test_a_system_prompt(self):
        made = call(("system", "A"), ("user", "Hello"), ("developer", "B"), ("user", "again"))
        assert made.argv[2:] == ("--system-prompt-file", "/private/system.txt")
        assert made.files == {"system.txt": b"A\n\nB"}
        assert made.stdin.endswith(b"<user>\nHello\n</user>\n<user>\nagain\n</user>")

    def test_a_system_prompt_with_the_prompt(self):
        made = call(("system", "A"), ("user", "Hello"), system_args=[])
        assert (made.argv[2:], made.files, made.stdin) == ((), {}, b"A\n\nHello")

    def test_values_are_not_looked_through(self):
        made = call(("user", "Hello"), upstream_model="${system_file}")
        assert made.argv[1] == "${system_file}"
