"""The command line options of a program, one for each key of its runtime's configuration."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping

from pydantic import JsonValue

Options = Mapping[str, str | tuple[str, str | None]]
"""Key → option; a pair is (option when true, option when false), each a word or several, or none."""


def of_key(key: str) -> str:
    """The option with the same name as its key."""
    return f"--{key.replace('_', '-')}"


def of_keys(keys: Iterable[str]) -> dict[str, str]:
    """The options of keys that have the same name as their option."""
    return {key: of_key(key) for key in keys}


def keys_of(options: Options) -> dict[str, str]:
    """The reverse of `options`: each option → its key."""
    pairs = {key: found if isinstance(found, tuple) else (found,) for key, found in options.items()}
    return {option: key for key, found in pairs.items() for option in found if option is not None}


def command_line(options: Options, values: Mapping[str, JsonValue]) -> list[str]:
    """The values of these keys as words of a command line.

    Null gives no word, true a switch, a list several words, an object its JSON.

    A key that isn't among the options stands for the option of its name.
    """
    words: list[str] = []
    for key, value in values.items():
        found = options.get(key) or of_key(key)
        option, off = found if isinstance(found, tuple) else (found, None)
        if value is None:
            continue
        if isinstance(value, bool):
            words += ((option if value else off) or "").split()
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def extra_args(former: Options, given: Mapping[str, JsonValue]) -> list[JsonValue]:
    """`extra_args` of a model with these keys: its own words, then the options of former keys that have a value."""
    own = given.get("extra_args")
    renamed = {key: given[key] for key in given if key in former and given[key] != "auto"}
    return [*(own if isinstance(own, list) else ()), *command_line(former, renamed)]


def refused_options(words: Iterable[str], own: Collection[str], keys: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each of these words that is an option which users may not set.

    `own`: options that only llmux sets. `keys`: options that have a configuration key. argparse also takes abbreviated options,
    underscores and `--option.key`, so these count too.
    """
    known = sorted({*own, *keys})
    for word in words:
        if not word.startswith("-") or word[1:2].isdigit():
            continue
        option = word.partition("=")[0].partition(".")[0]
        if option.startswith("--"):
            option = option.replace("_", "-")
        meant = option
        if option not in known and option.startswith("--"):
            meant = next((name for name in known if name.startswith(option)), option)
        if meant in own:
            yield f"{option} is set by llmux"
        elif (key := keys.get(meant)) is not None:
            yield f"{option} has a key of its own, {key}"
