"""The commands of the documents: the blocks that a reader pastes into a terminal, and the `llmux` commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from supervisor.cli.main import main
from tests.support.daemon import REPOSITORY

PAGES = sorted(
    [
        *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "docs" / "reference").glob("*.md"),
        *(REPOSITORY / "deploy").glob("*/README.md"),
        *(REPOSITORY / "config" / "examples").glob("*/README.md"),
    ]
)
_FENCE = re.compile(r"^( *)```(sh|console)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"(?<!\S)#.*")
_OPERATORS = frozenset("();<>|&\n")


@dataclass(frozen=True)
class Block:
    """What stands between two fences. `sh` is commands only; in `console` they begin with "$ ", and the rest is shown.

    `before`: the prose between the block before it and this one.
    """

    page: str
    line: int
    language: str
    text: str
    before: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def steps(self) -> list[tuple[str, list[str]]]:
        """Scripts, each with the lines that it is said to print."""
        if self.language == "sh":
            return [(self.text, [])]
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
        return found

    @property
    def script(self) -> str:
        return "\n".join(script for script, _ in self.steps())


def blocks() -> dict[str, list[Block]]:
    """Every block of commands, by page, in the page's order."""
    found: dict[str, list[Block]] = {}
    for path in PAGES:
        text, page = path.read_text(encoding="utf-8"), path.relative_to(REPOSITORY).as_posix()
        end = 0
        for match in _FENCE.finditer(text):
            indent, language, inner = match.groups()
            inner = "".join(line.removeprefix(indent) for line in inner.splitlines(keepends=True))
            line = text.count("\n", 0, match.start()) + 1
            found.setdefault(page, []).append(Block(page, line, language, inner, text[end : match.start()]))
            end = match.end()
    return found


def llmux_calls(script: str) -> Iterator[list[str]]:
    """The words after each `llmux` that is run, as a shell would split them."""
    plain = _COMMENT.sub("", script.replace("\\\n", " ")).replace('"$(', " ( ").replace(')"', " ) ")
    lexer = shlex.shlex(plain, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    words = list(lexer)
    for at, word in enumerate(words):
        if Path(word).name != "llmux" or (at and not _begins_command(words[at - 1])):
            continue
        rest = words[at + 1 :]
        end = next((n for n, other in enumerate(rest) if set(other) <= _OPERATORS), len(rest))
        yield rest[:end]


def _begins_command(before: str) -> bool:
    """Whether a word that follows this one is a program."""
    return set(before) <= _OPERATORS or "=" in before or before in {"exec", "sudo", "do", "then"} or before.isdigit()


def parse(words: list[str]) -> None:
    """Let `llmux` read these words without doing anything. Raises click.UsageError for what it doesn't know."""
    command: click.Command = main
    parent: click.Context | None = None
    while True:
        with command.make_context("llmux", words, parent=parent) as context:
            if not isinstance(command, click.Group):
                return
            words = [*context._protected_args, *context.args]
            _, found, words = command.resolve_command(context, words)
            assert found is not None
            command, parent = found, context
