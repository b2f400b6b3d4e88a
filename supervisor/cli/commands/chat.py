"""`llmux chat`: a conversation with a model, streamed to the terminal.

The model's reasoning is dimmed; where stdout is a file or a pipe, the reasoning goes to stderr, so that the file holds the
answer alone. Ctrl-C cuts an answer off; the conversation keeps the part that came. Ctrl-C or Ctrl-D at the prompt ends `chat`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, field
from typing import Final

import click

from supervisor.cli import client
from supervisor.cli.client import Client, Json
from supervisor.cli.options import Command, inference_options, model_argument, print_json
from supervisor.cli.output import clean
from supervisor.errors import LlmuxError

HELP: Final = (
    "/system TEXT sets the system prompt, /reset forgets the conversation, /quit ends it; Ctrl-C cuts an answer off."
)
PATH: Final = "/v1/chat/completions"


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the model that answers."""

    daemon: Client
    model: str
    system: str | None = None
    max_tokens: int | None = None
    thinking: bool = True
    turns: list[Json] = field(default_factory=list)

    def answer(self, text: str) -> None:
        """Send the text and print the answer as it comes; a cut answer stays in the conversation. Raises LlmuxError."""
        self.turns.append({"role": "user", "content": text})
        answer = ""
        screen = _AnswerPrinter(thinking=self.thinking)
        try:
            with contextlib.closing(
                self.daemon.events(PATH, method="POST", body=self._request_body(stream=True))
            ) as events:
                for event in events:
                    if event.data == "[DONE]":
                        continue  # read to the end, else the daemon logs that the client disconnected
                    thought, reply = _delta_texts(json.loads(event.data))
                    screen.show(thought, reply)
                    answer += reply
        finally:
            screen.end()
            if answer:
                self.turns.append({"role": "assistant", "content": answer})
            else:  # many chat templates refuse two messages of the user in a row
                self.turns.pop()

    def answer_json(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})
        print_json(self.daemon.post(PATH, self._request_body(stream=False)))

    def _request_body(self, *, stream: bool) -> Json:
        system: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        request: Json = {"model": self.model, "messages": [*system, *self.turns], "stream": stream}
        return request | ({"max_tokens": self.max_tokens} if self.max_tokens is not None else {})


def talk(conversation: Conversation) -> None:
    import readline  # noqa: F401, PLC0415  # gives `input` editing and a history; not wanted elsewhere

    click.echo(f"{conversation.model}  {HELP}", err=True)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if text in {"/quit", "/exit"}:
            return
        if text:
            _handle_line(conversation, text)


def _handle_line(conversation: Conversation, text: str) -> None:
    command, _, rest = text.partition(" ")
    match command:
        case "/reset":
            conversation.turns.clear()
            click.echo("Forgotten.", err=True)
        case "/system":
            conversation.system = rest.strip() or None
            click.echo("The system prompt is set." if conversation.system else "There is no system prompt.", err=True)
        case _ if command.startswith("/") and "/" not in command[1:]:
            click.echo(HELP, err=True)
        case _:
            try:
                conversation.answer(text)
            except KeyboardInterrupt:
                click.echo("(cut off)", err=True)
            except LlmuxError as error:
                click.echo(f"llmux: {clean(error.message)}", err=True)


class _AnswerPrinter:
    """Prints reasoning and answer, each to its stream. Control characters of the model never reach a terminal."""

    def __init__(self, *, thinking: bool) -> None:
        self._shows_thought = thinking
        self._terminal = sys.stdout.isatty()
        self._is_in_thought = self._has_written = False

    def show(self, thought: str, text: str) -> None:
        if thought and self._shows_thought:
            self._is_in_thought = True
            self._write(thought, thought=True)
        if text:
            self._end_thought()
            self._write(text)
            self._has_written = True

    def end(self) -> None:
        self._end_thought()
        if self._has_written:
            self._write("\n")

    def _end_thought(self) -> None:
        if self._is_in_thought:
            self._is_in_thought = False
            (sys.stdout if self._terminal else sys.stderr).write("\n")

    def _write(self, text: str, *, thought: bool = False) -> None:
        stream = sys.stderr if thought and not self._terminal else sys.stdout
        if stream.isatty():
            text = clean(text)
            click.echo(click.style(text, dim=True) if thought else text, file=stream, nl=False)
        else:
            stream.write(text.encode("utf-8", "replace").decode())  # a lone surrogate can't be encoded
            stream.flush()


def _delta_texts(chunk: Json) -> tuple[str, str]:
    """The texts that a chunk adds to reasoning and answer. Raises LlmuxError for an error in the stream."""
    if "error" in chunk:
        raise client.error_of(client.part(chunk, "error"), 500, PATH)
    choices = client.rows(chunk, "choices")
    delta = client.part(choices[0], "delta") if choices else {}
    return str(delta.get("reasoning_content") or ""), str(delta.get("content") or "")


def chat_options(command: Command) -> Command:
    """The options of a chat, for `chat` and `run`."""
    thinking = click.option("--no-thinking", is_flag=True, help="Don't show the model's reasoning.")
    most = click.option("--max-tokens", type=click.IntRange(min=1), help="End each answer after so many tokens.")
    return click.option("--system", help="The system prompt.")(most(thinking(command)))


def question(prompt: tuple[str, ...], *, as_json: bool) -> str:
    """The prompt, else the text on stdin; empty: a person types it. Raises UsageError where no terminal is there for that."""
    text = " ".join(prompt).encode("utf-8", "replace").decode()  # arguments may be any bytes
    if not sys.stdin.isatty() and (not prompt or text == "-"):
        text = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
        if not text:
            raise click.UsageError("There is no prompt: stdin is empty.")
    if as_json and not text:
        raise click.UsageError("--json is for one answer: give a prompt.")
    return text


def converse(conversation: Conversation, text: str, *, as_json: bool) -> None:
    """Answer the question; without one, chat until the person ends the conversation."""
    if as_json:
        conversation.answer_json(text)
    elif text:
        conversation.answer(text)
    else:
        talk(conversation)


@click.command()
@model_argument(public=True)
@click.argument("prompt", nargs=-1)
@chat_options
@inference_options
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
    text = question(prompt, as_json=as_json)
    converse(Conversation(daemon, model, system, max_tokens, thinking=not no_thinking), text, as_json=as_json)
