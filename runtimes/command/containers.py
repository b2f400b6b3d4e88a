"""Commands that run a container: `docker run …`, and the same with podman or nerdctl.

Such a command only starts the container engine's client. Killing the client does not end the container, so the container
gets a name for its removal. A port published without an address would be open to the whole network, so it gets the worker's
own address. A configured address stays. `-P` publishes all ports of an image, which llmux can't change.
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
        "--http-proxy",
        "--passwd",
        "--read-only-tmpfs",
        "--unsetenv-all",
        "--use-api-socket",
    ]
)
_GLOBAL_SWITCHES: Final = frozenset(
    {"-D", "--debug", "--tls", "--tlsverify", "-r", "--remote", "--syslog", "--debug-full"}
)
_SHORT_SWITCHES: Final = re.compile(r"-[ditPq]+")
_TRUE_VALUES: Final = frozenset({"", "1", "t", "T", "true", "True", "TRUE"})
"""The values that turn a switch on."""
_DETACHED: Final = ("-d", "--detach")
_PUBLISH: Final = ("-p", "--publish")
_PUBLISH_ALL: Final = ("-P", "--publish-all")


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
    """The options of `run`, which end before the image. Short ones may be joined, also with a value: `-dp8100:80`, `-P=false`."""
    at = words.index("run", 1) + 1
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        name, equals, value = word.partition("=")
        offset = len(name + equals)
        if not word.startswith("--"):
            switches = _SHORT_SWITCHES.match(word)
            offset = switches.end() if switches else 1
            if word[offset : offset + 1] == "=":
                offset -= 1  # the last switch has a value
            yield from (Option(f"-{letter}", "", at, 0) for letter in word[1:offset])
            name, value = f"-{word[offset : offset + 1]}", word[offset + 1 :].removeprefix("=")
            offset = len(word) - len(value)
        if value or equals or name in _SWITCHES:
            yield Option(name, value, at, offset)
        elif name != "-":
            at += 1
            yield Option(name, words[at] if at < len(words) else "", at, 0)
        at += 1


def _is_on(words: Sequence[str], switch: Sequence[str]) -> bool:
    return any(option.name in switch and option.value in _TRUE_VALUES for option in options(words))


def problems(words: Sequence[str], port: str) -> Iterator[str]:
    """Reasons why llmux can't supervise this container or reach it at `port`, each with the words to write instead."""
    if _is_on(words, _DETACHED):
        yield "a container that is detached looks as if it had ended: remove -d"
    if _is_on(words, _PUBLISH_ALL):
        yield (
            "-P publishes every port of the image to the whole network, where anybody could use the model without a key: "
            "remove it, and publish the one that serves, as in -p ${port}:8080"
        )

    hosts = [option.value.rpartition(":")[0] for option in options(words) if option.name in _PUBLISH]
    if hosts and port not in [host.rpartition(":")[2] for host in hosts]:
        yield "no -p publishes the port that llmux asks: write -p ${port}:8080, with the port inside the container after the colon"


def _with_address(value: str, host: str) -> str:
    """`[[address:][port]:]container port`, with this address if the value has none or an empty one."""
    *address, port, inner = ["", *value.rsplit(":", 2)][-3:]
    return value if any(address) else f"{host}:{port}:{inner}"


def prepare(words: Sequence[str], name: str, host: str) -> tuple[list[str], list[str]]:
    """The command with its container named and its ports published on `host`, and the command that removes the container.

    `name`: for a container without a name. Everything else stays as configured.
    """
    run = words.index("run", 1)
    command = list(words)
    given = None
    for option in options(words):
        if option.name == "--name":
            given = option.value
        elif option.name in _PUBLISH and option.value:
            command[option.word] = words[option.word][: option.offset] + _with_address(option.value, host)
    if given is None:
        command[run + 1 : run + 1] = ["--name", name]
    return command, [*words[:run], "rm", "--force", given or name]
