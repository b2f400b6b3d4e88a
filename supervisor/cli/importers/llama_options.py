"""llama-server's command line, parsed into the keys of our llama_server runtime.

An option with a key becomes that key. Sampling options, which are defaults for requests, become defaults of a virtual model,
because every program that runs the model understands those. Options that the supervisor sets itself are dropped. All other
options stay as further arguments for the binary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from runtimes.llama_server.adapter.config import FLAGS, KEY_OF_OPTION, LlamaServerConfig
from supervisor.catalog.document.document import scalar
from supervisor.catalog.problems import types_at
from supervisor.cli.importers.draft import Draft

REMOTE: Final = frozenset(
    {"-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url", "-dr", "--docker-repo"}
)
"""Options by which llama-server fetches a model itself."""

_OLD_NAMES: Final = dict.fromkeys(("--draft", "--draft-n", "--draft-max"), "spec_draft_n_max")
_RENAMED: Final = dict.fromkeys(("--draft-min", "--draft-n-min"), "--spec-draft-n-min")
"""Options that llama.cpp has renamed, and that have no key here."""
_SAME_NAMES: Final = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty"),
    *("frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("xtc_probability", "xtc_threshold", "mirostat", "seed"),
)
"""Request fields with the same name as the option."""
_SAMPLING: Final = (
    {f"--{name.replace('_', '-')}": name for name in _SAME_NAMES}
    | {"--temp": "temperature", "--top-nsigma": "top_n_sigma", "--typical": "typical_p", "-s": "seed"}
    | dict.fromkeys(("-n", "--predict", "--n-predict"), "max_tokens")
)
_IGNORED: Final = frozenset(
    {"--host", "--port", "--metrics", "--webui", "--no-webui", "--ui", "--no-ui", "--reuse-port", "--models-autoload"}
    | {"--alias", "-a"}  # no client sees it
)
_KEYS: Final = "each worker gets a key of its own; clients' keys are made with: llmux keys add"
_DEVICE: Final = "llmux gives each worker its devices: see `devices`, and `gpus` for several"
_FITTING: Final = "llmux counts the memory before the start, and the worker takes exactly that"
_DROPPED: Final[Mapping[str, str]] = (
    dict.fromkeys(("--api-key", "--api-key-file"), _KEYS)
    | dict.fromkeys(("--ssl-key-file", "--ssl-cert-file"), "workers listen on loopback only")
    | dict.fromkeys(("-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx"), _FITTING)
    | dict.fromkeys(("-dev", "--device", "-mg", "--main-gpu", "-ts", "--tensor-split", "-sm", "--split-mode"), _DEVICE)
    | dict.fromkeys(("--models-dir", "--models-preset", "--models-max", "--no-models-autoload"), "llmux's own work")
    | {"--api-prefix": "llmux serves one set of paths"}
    | dict.fromkeys(("-cd", "--ctx-size-draft"), "llama.cpp has it no more: a draft has the context of its model")
    | dict.fromkeys(("-dt", "--defrag-thold"), "llama.cpp has it no more")
)
_LOADING: Final = {"--mlock": "mlock", "--mmap": "mmap", "--no-mmap": "no-mmap"}
_ON_OFF: Final = {"1": "on", "true": "on", "0": "off", "false": "off"}
_NEGATIVE = re.compile(r"-[0-9.]+")


@dataclass(slots=True)
class Options:
    keys: dict[str, JsonValue] = field(default_factory=dict)
    defaults: dict[str, JsonValue] = field(default_factory=dict)  # request fields
    extra: list[str] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)  # option, why
    is_remote: bool = False  # llama-server would fetch the model itself
    _loading: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, words: Sequence[str]) -> Options:
        """Parse the words after the program's name."""
        options = cls()
        rest = list(words)
        while rest:
            word = rest.pop(0)
            option = word.replace("_", "-") if word.startswith("--") else word
            option = _RENAMED.get(option, option)
            has_value = bool(rest) and (not rest[0].startswith("-") or _NEGATIVE.fullmatch(rest[0]) is not None)
            options._add_option(option, rest, has_value=has_value)
        options._finish_keys()
        return options

    def give(self, draft: Draft, name: str, where: str) -> None:
        """Add all options to a model; keys that the model has already stay."""
        model = draft.models[name]
        if not str(self.keys.get("path", ".gguf")).lower().endswith(".gguf"):
            model.setdefault("runtime", "llama_server")
        for key in dict.fromkeys(("path", "binary", *self.keys)):
            if key in self.keys:
                model.setdefault(key, self.keys[key])
        draft.merge(name, name, "defaults", self.defaults)
        for option, why in self.lost:
            draft.lose(f"{where}.{option}", why, model=name)

    def _add_option(self, option: str, rest: list[str], *, has_value: bool) -> None:
        key = KEY_OF_OPTION.get(option) or _OLD_NAMES.get(option)
        if option in _LOADING:
            self._loading.add(_LOADING[option])
        elif key is not None and isinstance(FLAGS[key], tuple):
            if option not in _IGNORED:
                self._set_key(option, key, "no" not in option.split("-")[:3])
        elif key == "flash_attn" and not has_value:
            self.keys["flash_attn"] = "on"  # in llama.cpp's older syntax, without a value
        else:
            value = rest.pop(0) if has_value else None
            if option in _DROPPED:
                self.lost.append((option, _DROPPED[option]))
            elif option in _IGNORED:
                pass
            elif value is None:
                self.extra.append(option)
            else:
                self._add_valued_option(option, key, value)

    def _add_valued_option(self, option: str, key: str | None, value: str) -> None:
        if option in REMOTE:
            self.is_remote = True
        elif option == "--sleep-idle-seconds":
            if (seconds := scalar(value)) != -1:
                self.keys["keep_alive_s"] = seconds
        elif option == "--chat-template-kwargs":
            try:
                self.defaults["chat_template_kwargs"] = json.loads(value)
            except (ValueError, RecursionError):
                self.lost.append((option, f"{value} is no JSON"))
        elif option in _SAMPLING:
            if _SAMPLING[option] not in {"max_tokens", "seed"} or scalar(value) != -1:
                self.defaults[_SAMPLING[option]] = scalar(value)
        elif key is None:
            self.extra += [option, value]
        else:
            self._set_key(option, key, value)

    def _set_key(self, option: str, key: str, value: str | bool) -> None:
        if key == "model":
            self.keys["path"] = value
        elif key == "lora":
            known = self.keys.setdefault("lora", [])
            assert isinstance(known, list)
            known += str(value).split(",")
        elif key in {"flash_attn", "reasoning"}:
            self.keys[key] = _ON_OFF.get(str(value), value)
        elif (key, value) in {("n_gpu_layers", "auto"), ("spec_draft_ngl", "auto"), ("parallel", "-1")}:
            self.lost.append((option, f"{value}: llmux has to know how much memory it takes"))
        elif key == "spec_type":
            kinds: list[JsonValue] = ["draft-simple" if kind == "draft" else kind for kind in str(value).split(",")]
            self.keys[key] = kinds if len(kinds) > 1 else kinds[0]
        elif isinstance(value, str) and {int, float} & set(types_at(LlamaServerConfig, (key,))):
            self.keys[key] = scalar(value)
        else:
            self.keys[key] = value

    def _finish_keys(self) -> None:
        if self._loading:
            parts = [part for part in ("mmap", "mlock") if part in self._loading]
            if "mlock" in parts and "no-mmap" not in self._loading:
                parts = ["mmap", "mlock"]
            self.keys["load_mode"] = "+".join(parts) or "none"
        if self.keys.get("embeddings"):
            del self.keys["embeddings"]
            self.keys["type"] = "embedding"
        if self.keys.get("rerank"):
            self.keys["type"] = "embedding"
        if self.keys.get("jinja"):
            del self.keys["jinja"]  # our default
        if self.extra:
            self.keys["extra_args"] = list(self.extra)
