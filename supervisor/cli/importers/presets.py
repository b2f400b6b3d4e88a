"""llama.cpp's router presets: an INI file with a section for each model, options by their long names, `[*]` for all.

Parsed as llama.cpp does: `;` and `#` begin a comment anywhere, and a second section of a name replaces the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from runtimes.llama_server.adapter.config import FLAGS, KEY_OF_OPTION
from supervisor.catalog.document.document import scalar
from supervisor.cli.importers.draft import Draft
from supervisor.cli.importers.llama_options import REMOTE, Options
from supervisor.errors import ConfigError

EVERY: Final = "*"
PROGRAM: Final = "llama-server"

Section = dict[str, str]

_HEADER = re.compile(r"\[\s*([^\]]*?)\s*\]\s*(?:[;#].*)?")
_ENTRY = re.compile(r"([A-Za-z_][\w.-]*)\s*=\s*(.*)")
_COMMENT = re.compile(r"\s*[;#].*")
_TRUE: Final = frozenset({"on", "enabled", "true", "1"})
_SWITCHES: Final = frozenset(
    {"mmap", "mlock", "cont-batching", "warmup", "kv-offload", "context-shift", "op-offload", "repack", "swa-full"}
    | {"slots", "props", "webui", "ui", "check-tensors", "perf", "escape", "special", "verbose", "no-host", "offline"}
    | {"cpu-moe", "verbose-prompt", "prefill-assistant", "models-autoload", "direct-io", "spec-default"}
)
"""Options without a value that have no key here."""


def parse(text: str) -> dict[str, Section]:
    """The sections; entries before the first section are section "". Raises ConfigError with every line that is neither section nor entry."""
    sections: dict[str, Section] = {}
    current = ""
    problems = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in ";#":
            continue
        if header := _HEADER.fullmatch(line):
            current = header[1]
            sections[current] = {}
        elif entry := _ENTRY.fullmatch(line):
            sections.setdefault(current, {})[entry[1]] = _COMMENT.sub("", entry[2]).strip()
        else:
            problems.append(f"line {number}: neither [section] nor name = value")
    if problems:
        raise ConfigError(tuple(problems))
    return sections


def convert(text: str) -> Draft:
    """The draft. Raises ConfigError for lines that are neither section nor entry, and where there are no models."""
    draft = Draft()
    sections = parse(text)
    if not sections.keys() - {"", EVERY}:
        raise ConfigError(("there are no models: no section but [*]",))
    for key in sections.get("", {}):
        if key != "version":
            draft.lose(key, "stands above all sections; llama.cpp makes a model `default` of it")
    draft.reserve(sections)
    shared = _normalised_entries(sections.get(EVERY, {}))
    for foreign_name, own in sections.items():
        if foreign_name not in {"", EVERY}:
            entries = shared | _normalised_entries(own)
            aliases = entries.pop("alias", "").split(",")
            _convert_model(draft, foreign_name, entries)
            _add_aliases(draft, foreign_name, aliases, sections.keys())
    draft.list_models()
    return draft


def _convert_model(draft: Draft, foreign_name: str, entries: Section) -> None:
    name = draft.name(foreign_name)
    model = draft.models[name] = {}
    preload, stop = entries.pop("load-on-startup", "false"), entries.pop("stop-timeout", None)
    idle = entries.pop("sleep-idle-seconds", "-1")
    words = list(_command_words(entries))
    options = Options.read(words)
    if "path" in options.keys:
        options.lost = [(option.lstrip("-"), why) for option, why in options.lost]
        options.give(draft, name, foreign_name)
        if "n_ctx" not in model:
            draft.look(
                f"{foreign_name}.ctx-size",
                "is not set: n_ctx is chosen to fit the device; llmux config check says how",
                model=name,
            )
    else:
        if not options.is_remote:
            words = ["--hf-repo", foreign_name, *words]
        model["cmd"] = [PROGRAM, "--host", "${host}", "--port", "${port}", *(w.replace("${", "$${") for w in words)]
        why = "llama-server fetches it itself, so its memory can't be told: set vram_mib, or name its file by path"
        draft.look(f"{foreign_name}.{'hf-repo' if options.is_remote else 'model'}", why, model=name)
    if (idle_s := scalar(idle)) != -1:
        model["keep_alive_s"] = idle_s
    if preload in _TRUE:
        model["preload"] = True
    if stop is not None:
        model["grace_s"] = scalar(stop)


def _add_aliases(draft: Draft, foreign_name: str, aliases: list[str], models: Collection[str]) -> None:
    """Add further names for clients."""
    for alias in filter(None, map(str.strip, aliases)):
        if alias == foreign_name:
            continue
        name = draft.name(alias)
        if alias in models or name in draft.virtual_models:
            draft.lose(f"{foreign_name}.alias", f"{name} is the name of another model", model=draft.name(foreign_name))
        else:
            draft.virtual(name, draft.name(foreign_name))
    draft.spread(draft.name(foreign_name))


def _normalised_entries(entries: Section) -> Section:
    """The entries with one spelling for each option, so that a section's own entry overrides a shared one.

    Names of environment variables become options, too.
    """
    return dict(
        _normalised_entry(
            key.removeprefix("LLAMA_ARG_").lower().replace("_", "-") if "LLAMA_ARG_" in key else key, value
        )
        for key, value in entries.items()
    )


def _normalised_entry(key: str, value: str) -> tuple[str, str]:
    known = KEY_OF_OPTION.get(f"--{key}") or KEY_OF_OPTION.get(f"-{key}")
    if known is None:
        return key, value
    spelling = FLAGS[known]
    if isinstance(spelling, str):
        return spelling.removeprefix("--"), value
    if key.startswith("no-"):
        value = "false" if value.lower() in _TRUE else "true"
    return spelling[0].removeprefix("--"), value


def _command_words(entries: Section) -> Iterator[str]:
    for key, value in entries.items():
        option = f"-{key}" if len(key) <= 2 or f"-{key}" in REMOTE else f"--{key}"
        known = KEY_OF_OPTION.get(option)
        positive = key.removeprefix("no-")
        is_switch = {positive, key} & _SWITCHES or value.lower() in {"true", "false"}
        if isinstance(FLAGS[known], tuple) if known is not None else is_switch:
            wanted = value.lower() in _TRUE
            if key.startswith("no-") and positive in _SWITCHES:
                wanted, option = not wanted, f"--{positive}"
            if wanted:
                yield option
            elif option not in {"--embeddings", "--rerank", "--mlock"}:
                yield f"--no-{option.lstrip('-')}"
        else:
            yield option
            yield value
