"""A translated request is adapted to its model, and what is told of fields without effect."""

from __future__ import annotations

import json

import msgspec
import pytest

from runtimes.base import CHAT_TEMPLATE, Thinking
from runtimes.registry import REGISTRY
from supervisor.dialects.anthropic import ANTHROPIC
from supervisor.dialects.ollama import OLLAMA
from supervisor.proxy.translation import Adapted, TargetModel, ignored_header, shown

EFFORT = Thinking({"reasoning_effort": "medium"}, {"reasoning_effort": "none"})
MESSAGES = ("/v1/messages", ANTHROPIC, {"max_tokens": 5})
OLLAMA_CHAT = ("/api/chat", OLLAMA, {})


def adapted(api, switch=CHAT_TEMPLATE, decoding=None, **fields):
    """The canonical request, and what has no effect on the model."""
    path, dialect, rest = api
    request = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **rest, **fields}
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in request.items()}
    translation = Adapted(dialect.translation("POST", path), TargetModel(thinking=switch, decoding=decoding or {}))
    canonical, _ = translation.request(raw)
    return {name: json.loads(bytes(value)) for name, value in canonical.items()}, (*translation.ignored,)


@pytest.mark.parametrize(
    ("api", "asked", "thinking", "found", "ignored"),
    [
        (MESSAGES, {"thinking": {"type": "disabled"}}, CHAT_TEMPLATE,
         {"chat_template_kwargs": {"enable_thinking": False}}, ()),
        (MESSAGES, {"thinking": {"type": "disabled"}}, EFFORT, {"reasoning_effort": "none"}, ()),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, EFFORT, {"reasoning_effort": "medium"}, ()),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, None, {}, ("thinking",)),
        (MESSAGES, {}, EFFORT, {}, ()),
        (MESSAGES, {}, None, {}, ()),
        (OLLAMA_CHAT, {"think": "high"}, None, {"reasoning_effort": "high"}, ()),
        (OLLAMA_CHAT, {"think": "high"}, EFFORT, {"reasoning_effort": "high"}, ()),
        (OLLAMA_CHAT, {"think": False}, None, {}, ("thinking",)),
    ],
)  # fmt: skip
def test_thinking(api, asked, thinking, found, ignored):
    canonical, unused = adapted(api, thinking, **asked)
    assert {name: value for name, value in canonical.items() if "effort" in name or "kwargs" in name} == found
    assert unused == ignored


@pytest.mark.parametrize(
    ("runtime", "found", "ignored"),
    [
        ("llama_server", {"top_k": 3, "repeat_penalty": 1.1, "repeat_last_n": 9}, ()),
        ("vllm_serve", {"top_k": 3, "repetition_penalty": 1.1}, ("repeat_last_n",)),
        ("command", {"top_k": 3, "repeat_penalty": 1.1, "repetition_penalty": 1.1, "repeat_last_n": 9}, ()),
        ("openai_remote", {}, ("repeat_last_n", "repetition_penalty", "top_k")),
    ],
)
def test_parameters_have_the_workers_own_names(runtime, found, ignored):
    """One that it would pass over is named."""
    options = {"top_k": 3, "repeat_penalty": 1.1, "repeat_last_n": 9}
    canonical, unused = adapted(OLLAMA_CHAT, decoding=REGISTRY.get(runtime).decoding, options=options)
    own = ("top_k", "repeat_penalty", "repetition_penalty", "repeat_last_n")
    assert {name: canonical[name] for name in own if name in canonical} == found
    assert (*sorted(unused),) == ignored


class TestShown:
    """Clients make the names up, and they go into headers and logs."""

    def test_some_of_many(self):
        assert shown([f"x{number}" for number in range(50)]) == [f"x{number}" for number in range(20)]

    def test_plain_characters(self):
        assert shown(["a\r\nb: c" + "d" * 100, "messages[0].näme"]) == [f"a??b??c{'d' * 57}", "messages[0].n?me"]

    def test_header(self):
        assert ignored_header(["top_k", "a,b"]) == "top_k, a?b"
