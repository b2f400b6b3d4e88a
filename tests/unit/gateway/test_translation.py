"""A translated request is adapted to its model, and what is told of fields without effect."""

from __future__ import annotations

import json

import msgspec
import pytest

from runtimes.base import CHAT_TEMPLATE, Thinking
from runtimes.registry import REGISTRY
from supervisor.dialects.anthropic import ANTHROPIC
from supervisor.dialects.ollama import OLLAMA
from supervisor.dialects.responses import RESPONSES
from supervisor.gateway.filters.translation import Adapted, Chained, TargetModel, ignored_header, shown
from supervisor.gateway.prompts.answer import Chats
from tests.support.cases import cases

EFFORT = Thinking({"reasoning_effort": "medium"}, {"reasoning_effort": "none"})
MESSAGES = ("/v1/messages", ANTHROPIC, {"max_tokens": 5})
OLLAMA_CHAT = ("/api/chat", OLLAMA, {})


def adapted(api, switch=CHAT_TEMPLATE, decoding=None, modes=("default", "enabled", "disabled"), **fields):
    """The canonical request, and what has no effect on the model."""
    path, dialect, rest = api
    request = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **rest, **fields}
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in request.items()}
    target = TargetModel(thinking=switch, thinking_modes=modes, decoding=decoding or {})
    translation = Adapted(dialect.translation("POST", path), target)
    canonical, _ = translation.request(raw)
    return {name: json.loads(bytes(value)) for name, value in canonical.items()}, (*translation.ignored,)


@cases(
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
        (OLLAMA_CHAT, {"think": False}, None, {}, ("think",)),
    ],
)  # fmt: skip
def test_thinking(api, asked, thinking, found, ignored):
    canonical, unused = adapted(api, thinking, **asked)
    assert {name: value for name, value in canonical.items() if "effort" in name or "kwargs" in name} == found
    assert unused == ignored


@cases(
    ("api", "asked", "modes", "ignored"),
    [
        (OLLAMA_CHAT, {"think": True}, ("disabled",), ("think",)),
        (OLLAMA_CHAT, {"think": "high"}, ("disabled",), ("think",)),
        (OLLAMA_CHAT, {"think": False}, ("disabled",), ()),
        (MESSAGES, {"thinking": {"type": "disabled"}}, ("enabled",), ("thinking",)),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, ("enabled",), ()),
        (MESSAGES, {"thinking": {"type": "disabled"}}, ("default",), ()),
        (MESSAGES, {}, ("enabled",), ()),
    ],
)
@cases("switch", [CHAT_TEMPLATE, EFFORT])
def test_thinking_that_is_fixed(api, asked, modes, ignored, switch):
    """A virtual model's configuration wins, and what a request says otherwise is named."""
    _, unused = adapted(api, switch, modes=modes, **asked)
    assert unused == ignored


@pytest.mark.parametrize(
    ("runtime", "found", "ignored"),
    [
        ("llama_server", {"top_k": 3, "repeat_penalty": 1.1, "repeat_last_n": 9}, ()),
        ("vllm_serve", {"top_k": 3, "repetition_penalty": 1.1}, ("options.repeat_last_n",)),
        ("command", {"top_k": 3, "repeat_penalty": 1.1, "repetition_penalty": 1.1, "repeat_last_n": 9}, ()),
        ("openai_remote", {}, ("options.repeat_last_n", "options.repeat_penalty", "options.top_k")),
    ],
)
def test_parameters_have_the_workers_own_names(runtime, found, ignored):
    """One that it would pass over is named."""
    options = {"top_k": 3, "repeat_penalty": 1.1, "repeat_last_n": 9}
    canonical, unused = adapted(OLLAMA_CHAT, decoding=REGISTRY.get(runtime).decoding, options=options)
    own = ("top_k", "repeat_penalty", "repetition_penalty", "repeat_last_n")
    assert {name: canonical[name] for name in own if name in canonical} == found
    assert (*sorted(unused),) == ignored


class TestNames:
    """What a later step ignores is told by the name that the client sent."""

    @pytest.mark.parametrize(
        ("path", "dialect", "fields", "ignored"),
        [
            ("/v1/messages", ANTHROPIC, {"max_tokens": 5}, {"stop_sequences", "thinking", "top_k", "x"}),
            ("/api/chat", OLLAMA, {}, {"options.stop", "options.num_predict", "think", "options.top_k", "x"}),
            ("/v1/responses", RESPONSES, {"input": "Hello"}, {"max_output_tokens", "reasoning.effort", "top_k", "x"}),
        ],
    )
    def test_of_each_dialect(self, path, dialect, fields, ignored):
        request = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **fields, "x": 1}
        request.pop("messages" if path == "/v1/responses" else "", None)
        raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in request.items()}
        _, answers = dialect.translation("POST", path).request(raw)
        chats = Chats(("stop", "max_tokens", "chat_template_kwargs.enable_thinking", "top_k"), None)
        assert ignored <= {*Chained(chats, answers).ignored}


class TestShown:
    """Clients make the names up, and they go into headers and logs."""

    def test_some_of_many(self):
        assert shown([f"x{number}" for number in range(50)]) == [*(f"x{number}" for number in range(20)), "and 30 more"]

    def test_each_once(self):
        assert shown(["tools.x", "top_k", "tools.x"]) == ["tools.x", "top_k"]

    @pytest.mark.parametrize(
        ("path", "dialect", "rest"),
        [MESSAGES, OLLAMA_CHAT, ("/v1/responses", RESPONSES, {"input": "Hello"})],
    )
    def test_of_each_dialect(self, path, dialect, rest):
        """Whichever it is, no name is lost without being counted, and none breaks the header."""
        many = {"a\r\nset-cookie: b": 1, **{f"f{number}": 1 for number in range(29)}}
        request = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **rest, **many}
        request.pop("messages" if path == "/v1/responses" else "", None)
        fields = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in request.items()}
        _, answers = dialect.translation("POST", path).request(fields)
        told = ignored_header(answers.ignored)
        assert told == ", ".join(["a??set-cookie??b", *(f"f{number}" for number in range(19)), "and 10 more"])

    def test_plain_characters(self):
        assert shown(["a\r\nb: c" + "d" * 100, "messages[0].näme"]) == [f"a??b??c{'d' * 57}", "messages[0].n?me"]

    def test_header(self):
        assert ignored_header(["top_k", "a,b"]) == "top_k, a?b"
