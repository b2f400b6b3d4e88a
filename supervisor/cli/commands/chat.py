"""`llmux chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from supervisor.cli.options import daemon_options, model_argument

if TYPE_CHECKING:
    from supervisor.cli.client import Client


@click.command()
@model_argument(public=True)
@click.argument("prompt", nargs=-1)
@click.option("--system", help="The system prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="End each answer after so many tokens.")
@click.option("--no-thinking", is_flag=True, help="Don't show the model's reasoning.")
@daemon_options
def chat(
    model: str,
    prompt: tuple[str, ...],
    system: str | None,
    max_tokens: int | None,
    no_thinking: bool,
    daemon: Client,
    as_json: bool,
) -> None:
    """Chat with MODEL; with PROMPT, or a prompt on stdin, get one answer. --json prints the whole answer at once."""
    from supervisor.cli.chat import Conversation, talk  # noqa: PLC0415  # not for declaring

    text = " ".join(prompt)
    if not sys.stdin.isatty() and (not prompt or text == "-"):
        text = sys.stdin.read().strip()
        if not text:
            raise click.UsageError("There is no prompt: stdin is empty.")
    if as_json and not text:
        raise click.UsageError("--json is for one answer: give a prompt.")
    conversation = Conversation(daemon, model, system=system, max_tokens=max_tokens, thinking=not no_thinking)
    if as_json:
        conversation.answer_json(text)
    elif text:
        conversation.answer(text)
    else:
        talk(conversation)


COMMANDS = (chat,)
