"""The command line options of a program, one for each key of its runtime's configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from pydantic import JsonValue

Options = Mapping[str, str | tuple[str, str | None]]
"""Key → option; a pair is (option when true, option when false)."""


def of_keys(keys: Iterable[str]) -> dict[str, str]:
    """The options that are called as their keys are."""
    return {key: f"--{key.replace('_', '-')}" for key in keys}


def keys_of(options: Options) -> dict[str, str]:
    """Each option's key."""
    pairs = {key: found if isinstance(found, tuple) else (found,) for key, found in options.items()}
    return {option: key for key, found in pairs.items() for option in found if option is not None}


def command_line(options: Options, values: Mapping[str, JsonValue]) -> list[str]:
    """These values of keys as words of a command line: a list as several, an object as JSON."""
    words: list[str] = []
    for key, value in values.items():
        option = options[key]
        if isinstance(option, tuple):
            words += filter(None, [option[0] if value else option[1]])
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
