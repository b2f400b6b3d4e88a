"""Commands that run a container: `docker run …`, and the same of podman and nerdctl.

What starts is only the engine's client. Killing it does not end the container, so the container gets a name, by which it can
be removed. A port that is published without an address would be open to the whole network: it is published on the worker's
own address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

ENGINES: Final = frozenset({"docker", "podman", "nerdctl"})
DETACHED: Final = frozenset({"-d", "--detach", "--detach=true"})

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
_SHORT_SWITCHES: Final = re.compile(r"-[ditPq]+")
_PUBLISH: Final = ("-p", "--publish")


def is_container(words: Sequence[str]) -> bool:
    """Does this command run a container in the foreground or the background?"""
    return PurePath(words[0]).name in ENGINES and "run" in words[1:]


def options(words: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """The options of `run`: each with its position and its value, "" for a switch. They end before the image."""
    at = words.index("run", 1) + 1
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        if equals or name in _SWITCHES or _SHORT_SWITCHES.fullmatch(name):
            yield at, name, value
            at += 1
        else:
            yield at, name, words[at + 1] if at + 1 < len(words) else ""
            at += 2


def prepared(words: Sequence[str], name: str, host: str) -> tuple[list[str], list[str]]:
    """The command, its container named and its ports published on `host`, and the command that removes the container.

    `name`: for a container that has none. The parts that were written stay as they are.
    """
    run = words.index("run", 1)
    command = list(words)
    given = None
    for at, option, value in options(words):
        if option == "--name":
            given = value
        elif option in _PUBLISH and value.count(":") == 1:
            joined = "=" in words[at]
            command[at if joined else at + 1] = f"{option}={host}:{value}" if joined else f"{host}:{value}"
    if given is None:
        command[run + 1 : run + 1] = ["--name", name]
    return command, [*words[:run], "rm", "--force", given or name]
