"""Chat templates, rendered as transformers renders them, for workers whose library doesn't.

The dialect is Jinja in a sandbox with transformers' additions: `raise_exception`, `strftime_now`, `tojson` that leaves
characters as they are, loop controls, and the tag `generation`, which marks a text and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtimes.sdk.chat.formats.tagged import THINK_OPEN
from runtimes.sdk.chat.language import Language
from runtimes.sdk.chat.messages import Message
from runtimes.sdk.errors import WorkerError, unsupported

_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class _Generation(Extension):  # type: ignore[misc]  # Jinja has no types here
    """`{% generation %}…{% endgeneration %}`: its content."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class ChatTemplate:
    """One template. `special` are the tokens that templates know by name, such as `bos_token`."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _format_now}
        self._template = environment.from_string(source)
        self._source, self._special = source, special

    def render(
        self, turns: Sequence[Message], tools: Sequence[Mapping[str, object]], arguments: Mapping[str, object]
    ) -> str:
        """The prompt of the next turn. Raises WorkerError."""
        for name in arguments:
            if name in _RESERVED or name in self._special or name not in self._source:
                raise unsupported("chat_template_kwargs", f"this model's chat template has no argument {name!r}")
        known: dict[str, Any] = {**self._special, **arguments}
        try:
            text: str = self._template.render(
                messages=list(turns), tools=list(tools) or None, documents=None, add_generation_prompt=True, **known
            )
            text.encode()
        except UnicodeEncodeError as error:
            message = "messages: there is half a character in them, a lone surrogate."
            raise WorkerError(message, param="messages") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise WorkerError(message, param="messages") from error
        return text


def ends_thinking(language: Language, text: str) -> bool:
    """Does this prompt end within reasoning?"""
    return language.format == "tagged" and text.rstrip().endswith(THINK_OPEN)


def no_template() -> WorkerError:
    """The error for a chat with a model without a chat template."""
    return WorkerError("This model has no chat template; use /v1/completions.", code="unsupported_endpoint")


def _to_json(value: object, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # as the model's makers mean it: local time
