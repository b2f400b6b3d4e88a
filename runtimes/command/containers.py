"""Commands that run a container: `docker run …`, and the same of podman and nerdctl.

What starts is only the engine's client. Killing it does not end the container, so the container gets a name, by which it can
be removed. A port that is published without an address would be open to the whole network: it is published on the worker's
own address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

ENGINES: Final = frozenset({"docker", "podman", "nerdctl"})

_SWITCHES: Final = frozenset(
    [
        "--detach",
        "--disable-content-trust",
        "--init",
        "--interactive",
        "--no-healthcheck",
        "--oom-kill-disable",
        "--privileged",
        "--publish-all",
        "--quiet",
        "--read-only",
        "--rm",
        "--sig-proxy",
        "--tty",
        "--replace",
        "--rmi",
        "--no-hosts",
        "--no-hostname",
        "--tls-verify",
        "--env-host",
    ]
)
_GLOBAL_SWITCHES: Final = frozenset(
    {"-D", "--debug", "--tls", "--tlsverify", "-r", "--remote", "--syslog", "--debug-full"}
)
_SHORT_SWITCHES: Final = re.compile(r"-[ditPq]+")
_DETACHED: Final = frozenset({"-d", "--detach"})
_PUBLISH: Final = ("-p", "--publish")


def is_container(words: Sequence[str]) -> bool:
    """Does this command run a container in the foreground or the background?"""
    if PurePath(words[0]).name not in ENGINES:
        return False
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or words[at] in _GLOBAL_SWITCHES else 2
    at += words[at : at + 1] == ["container"]
    return words[at : at + 1] == ["run"]  # not of `compose run`, nor a word that `exec` runs


class Option(NamedTuple):
    """An option of `run`. The value, "" for a switch, begins at `offset` of the word number `word`."""

    name: str
    value: str
    word: int
    offset: int


def options(words: Sequence[str]) -> Iterator[Option]:
    """The options of `run`, which end before the image. Short ones may be joined, also with a value: `-dp8100:80`."""
    at = words.index("run", 1) + 1
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        name, equals, value = word.partition("=")
        offset = len(name + equals)
        if not word.startswith("--"):
            switches = _SHORT_SWITCHES.match(word)
            offset = switches.end() if switches else 1
            yield from (Option(f"-{letter}", "", at, 0) for letter in word[1:offset])
            name, value = f"-{word[offset : offset + 1]}", word[offset + 1 :].removeprefix("=")
            offset = len(word) - len(value)
        if value or equals or name in _SWITCHES:
            yield Option(name, value, at, offset)
        elif name != "-":
            at += 1
            yield Option(name, words[at] if at < len(words) else "", at, 0)
        at += 1


def is_detached(words: Sequence[str]) -> bool:
    """Does the engine's client end at once, and leave the container running?"""
    return any(option.name in _DETACHED and option.value in {"", "true"} for option in options(words))


def prepared(words: Sequence[str], name: str, host: str) -> tuple[list[str], list[str]]:
    """The command, its container named and its ports published on `host`, and the command that removes the container.

    `name`: for a container that has none. The parts that were written stay as they are.
    """
    run = words.index("run", 1)
    command = list(words)
    given = None
    for option in options(words):
        if option.name == "--name":
            given = option.value
        elif option.name in _PUBLISH and option.value.count(":") == 1:
            command[option.word] = f"{words[option.word][: option.offset]}{host}:{option.value}"
    if given is None:
        command[run + 1 : run + 1] = ["--name", name]
    return command, [*words[:run], "rm", "--force", given or name]
