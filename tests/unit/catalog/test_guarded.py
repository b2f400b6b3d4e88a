"""Which keys of a configuration only its owner changes."""

from __future__ import annotations

import types
import typing

from runtimes.registry import REGISTRY
from supervisor.catalog.document.guarded import KEYS, RUNTIMES, guarded_changes
from tests.support.cases import cases

FREE = {
    # of every model
    *("runtime", "source", "devices", "modalities", "prompt_format", "type"),
    # weights, which `llmux add` enters by path, too
    *(
        "path",
        "model",
        "mmproj",
        "draft_model",
        "lora",
        "vad_model",
        "speculative_model",
        "speculative_models",
    ),
    # words that a runtime looks up, or sends to its worker as data
    *(
        "spec_type",
        "cache_quant",
        "build",
        "cache_mode",
        "default_chat_template_kwargs",
        "default_language",
    ),
    *("default_voice", "device_map", "endpoints", "gpu_split", "health_path", "inputs", "limit_mm_per_prompt"),
    *("mm_processor_kwargs", "quantization", "reasoning_parser", "revision", "variant"),
    *("speculative_attention_backend", "speculative_method", "speculative_moe_backend"),
    *("tool_call_parser", "tool_format", "upstream_model", "voice_aliases"),
    "files",  # of `command`, whose `cmd` is guarded
}
"""Keys that take a text, a list or a mapping, and start nothing, and show nothing that isn't the model's."""
CMD = {"models": {"a": {"runtime": "command", "cmd": ["x"]}, "b": {"path": "/m.gguf"}}, "server": {"port": 1}}


def is_plain(annotation: object) -> bool:
    """Only numbers, booleans and words of a list?"""
    if typing.get_origin(annotation) is typing.Annotated:
        return is_plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return all(map(is_plain, typing.get_args(annotation)))
    return annotation in (int, float, bool, type(None)) or typing.get_origin(annotation) is typing.Literal


class TestKeys:
    """A new key is thought about before anybody can set it from a distance."""

    @cases("name", REGISTRY.names())
    def test_each_is_guarded_or_known_to_be_harmless(self, name):
        fields = REGISTRY.get(name).config.model_fields
        assert not [key for key, field in fields.items() if key not in KEYS | FREE and not is_plain(field.annotation)]

    def test_none_is_both_and_none_is_invented(self):
        known = {key for name in REGISTRY.names() for key in REGISTRY.get(name).config.model_fields}
        assert known >= KEYS - {"allow_remote"}
        assert known >= FREE
        assert not KEYS & FREE
        assert set(REGISTRY.names()) >= RUNTIMES

    @cases("key", ["cmd", "binary", "env", "library_path", "extra_args", "trust_remote_code"])
    def test_what_starts_programs(self, key):
        assert key in KEYS


class TestChanges:
    """By the values that the file had before."""

    @cases(
        ("change", "guarded"),
        [
            (lambda doc: doc["models"]["b"].update(n_ctx=5, priority=3), ()),
            (lambda doc: doc.update(limits={"drain_s": 5}, models_from=["/models"]), ()),
            (lambda doc: doc["models"]["a"].update(cmd=["y"]), ("models.a.cmd",)),
            (lambda doc: doc["models"]["b"].update(extra_args=["--x"]), ("models.b.extra_args",)),
            (lambda doc: doc["models"]["b"].update(trust_remote_code=True), ("models.b.trust_remote_code",)),
            (lambda doc: doc["models"]["b"].update(runtime="claude_cli"), ("models.b.runtime",)),
            (lambda doc: doc["models"]["b"].update(path="$HF_TOKEN"), ("models.b.path",)),
            (lambda doc: doc["models"]["b"].update(runtime="$ANY"), ("models.b.runtime",)),
            (lambda doc: doc["models"]["b"].update(runtime=["claude_cli"]), ()),  # a mistake, as a reload says
            (lambda doc: doc["models"]["b"].update(runtime={"cmd": "x"}), ("models.b.runtime.cmd",)),
            (lambda doc: doc.update(models_from=["${HOME}"]), ("models_from[0]",)),
            (lambda doc: doc["server"].update(edit="all"), ("server",)),
            (lambda doc: doc.pop("server"), ("server",)),
            (lambda doc: doc["models"]["a"].pop("cmd"), ("models.a.cmd",)),
            (lambda doc: doc.update({"x-base": {"env": {"A": "b"}}}), ("x-base.env",)),
            (lambda doc: doc["models"].update(c=doc["models"].pop("a")), ("models.c.runtime", "models.c.cmd")),
            (lambda doc: doc.update(tasks={"t": {"candidates": [], "allow_remote": True}}), ("tasks.t.allow_remote",)),
            (lambda doc: doc["models"].pop("a"), ()),
            (lambda doc: doc.pop("models"), ()),
        ],
    )
    def test_one(self, change, guarded):
        after = {
            key: {name: dict(entry) if isinstance(entry, dict) else entry for name, entry in value.items()}
            for key, value in CMD.items()
        }
        change(after)
        assert guarded_changes(CMD, after) == guarded

    def test_nothing_was_readable_before(self):
        assert guarded_changes({}, CMD) == ("models.a.runtime", "models.a.cmd", "server")
