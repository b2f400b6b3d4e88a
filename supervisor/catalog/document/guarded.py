"""Keys that only the file's owner may change: with them one can run programs as the daemon's user, or read its files and
variables.

`server.edit` controls whether other clients may change them. Guarded are the keys below in any section, runtimes that run
arbitrary programs or send prompts elsewhere, texts with a variable, and the whole section `server`. An entry may be removed
with its guarded keys: that runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import JsonValue

from supervisor.catalog.document.document import Trail, dotted

KEYS: Final = frozenset(
    {
        *("cmd", "stop_cmd", "kill_cmd", "command", "cwd", "binary", "python", "folder", "base_directory", "workflow"),
        *("extra_args", "system_args", "env", "pass_env", "library_path", "trust_remote_code", "load_format"),
        *("base_url", "api_key_env", "ca_file", "allow_remote"),  # the target of prompts, and its secret
        *("chat_template", "chat_template_file", "voices", "keep_bodies"),  # clients may see the text of these files
    }
)
RUNTIMES: Final = frozenset({"command", "claude_cli", "comfyui", "openai_remote"})
_GUARDED_SECTION: Final = "server"
_SECTIONS: Final = ("models", "virtual_models", "tasks", "sets", "clients")
"""Sections whose entries may be removed with their guarded keys."""


def guarded_changes(before: JsonValue, after: JsonValue) -> tuple[str, ...]:
    """The guarded keys that differ between the documents, as dotted keys in the order of `after`."""
    old, new = dict(_guarded_values(before, ())), dict(_guarded_values(after, ()))
    changed = [trail for trail, value in new.items() if trail not in old or old[trail] != value]
    changed += [trail for trail in old if trail not in new and not _is_of_removed_entry(trail, after)]
    return tuple(dotted(trail) for trail in changed)


def _is_of_removed_entry(trail: Trail, after: JsonValue) -> bool:
    section = after.get(str(trail[0])) if isinstance(after, dict) else None
    return trail[0] in _SECTIONS and not (isinstance(section, dict) and trail[1] in section)


def _guarded_values(value: JsonValue, trail: Trail) -> Iterator[tuple[Trail, JsonValue]]:
    if trail and _is_guarded(trail, value):
        yield trail, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _guarded_values(item, (*trail, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _guarded_values(item, (*trail, index))


def _is_guarded(trail: Trail, value: JsonValue) -> bool:
    if trail == (_GUARDED_SECTION,) or trail[-1] in KEYS:
        return True
    if not isinstance(value, str):
        return False
    # The result would show the variable's value.
    return (trail[-1] == "runtime" and value in RUNTIMES) or ("$" in value and trail[0] in ("models", "models_from"))
