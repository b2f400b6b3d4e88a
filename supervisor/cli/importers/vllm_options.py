"""The options of a `vllm serve` command line, as keys of the vllm_serve runtime.

An option with a key becomes that key, in the key's type. Options that llmux sets itself are lost. All other words become
`extra_args`, unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from runtimes.adapters.vllm.config import SPECULATIVE
from runtimes.vllm_serve.adapter import VllmServeConfig
from supervisor.catalog.document.document import scalar
from supervisor.catalog.problems import types_at

OWN: Final = "llmux chooses it"
_KEY_OF_SPECULATION: Final = {name: key for key, name in SPECULATIVE.items()}
_SWITCHED_BY: Final = frozenset(
    {"--enable-auto-tool-choice", "--no-enable-auto-tool-choice"}
)  # set by the key tool_call_parser
_BLOCKS: Final = "--num-gpu-blocks-override"


@dataclass(slots=True)
class VllmOptions:
    """The keys of the parsed words. `lost`: dropped options with the reason."""

    keys: dict[str, JsonValue] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, words: Sequence[str]) -> VllmOptions:
        """Parse the words after the model's name."""
        options = cls()
        own, key_of = VllmServeConfig.own_options(), VllmServeConfig.options()
        rest = list(words)
        while rest:
            word, equals, value = rest.pop(0).partition("=")
            option = word.replace("_", "-") if word.startswith("--") else word
            if option in own:
                options.lost.append((option, OWN))
                while not equals and rest and not rest[0].startswith("-"):
                    rest.pop(0)
            elif (key := key_of.get(option)) is None:
                options.extra.append(word + equals + value)
            elif bool in types_at(VllmServeConfig, (key,)):
                options.keys[key] = not option.startswith("--no-")
            elif option in _SWITCHED_BY:
                continue
            elif not equals and not rest:
                options.lost.append((option, "its value is missing"))
            else:
                options._add_valued_option(option, key, value if equals else rest.pop(0))
        if options.extra:
            options.keys["extra_args"] = list[JsonValue](options.extra)
        return options

    def _add_valued_option(self, option: str, key: str, value: str) -> None:
        if option in ("--speculative-config", "-sc"):
            self.speculation(option, value)
        elif option == _BLOCKS:
            self.lost.append((option, "kv_cache_memory_bytes says how large the cache is"))
        else:
            self.keys[key] = typed(key, value)

    def speculation(self, option: str, text: str) -> None:
        """Parse the JSON of --speculative-config into keys."""
        try:
            settings = json.loads(text)
        except (ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict):
            self.lost.append((option, f"{text} is no JSON object"))
            return
        for name, value in settings.items():
            if name in _KEY_OF_SPECULATION:
                self.keys[_KEY_OF_SPECULATION[name]] = value
            else:
                self.lost.append((f"{option}.{name}", "vllm_serve has no such key"))


def typed(key: str, value: str) -> JsonValue:
    """The value of an option in its key's type, where it can be parsed so; else the text."""
    branches = set(types_at(VllmServeConfig, (key,)))
    if any(getattr(branch, "__origin__", branch) is dict for branch in branches):
        try:
            parsed: JsonValue = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return parsed
    return scalar(value) if {int, float} & branches else value
