"""Grammars in llguidance's dialect of Lark, which limit the text that a model may generate: reasoning if the model has it, then
an answer that follows a schema, or tool calls, in the format of the model's family.

The markers around reasoning and calls are single tokens in most vocabularies; otherwise they are spelt out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from runtimes.sdk.chat import schema as json_schema
from runtimes.sdk.chat.formats.harmony import ENDS
from runtimes.sdk.chat.formats.tagged import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN
from runtimes.sdk.chat.schema import Schema
from runtimes.sdk.chat.tokenizer import TokenizerLanguage
from runtimes.sdk.chat.tools import Tools


@dataclass(frozen=True, slots=True)
class _Form:
    """The format of a family. `start` refers to the rule `body`, `answer` to the rule `said`; `rules` are further ones.

    `call` builds the rule of a call, from its name and a function that builds the rule of its arguments. `between` separates
    two calls; None: there can be only one.
    """

    start: str
    answer: str
    call: Callable[[str, Callable[[], str]], str]
    between: str | None
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddedSchema:
    """A schema within a grammar, as JSON, with its request parameter and a description of its purpose."""

    schema: str
    param: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar: its text, and the schemas in the text."""

    text: str
    schemas: tuple[EmbeddedSchema, ...]


Mark = Callable[[str], int | None]
"""A function that returns the special token for a text; None: ordinary tokens write the text."""


def grammar(
    language: TokenizerLanguage, tokens: list[int], tools: Tools, schema: Schema | None, *, thinking: bool, mark: Mark
) -> Grammar | None:
    """The grammar of an answer that must call a tool or follow a schema; None for a free answer.

    `tokens` are the prompt's; `thinking`: it ends within reasoning. A required call wins over a schema. If calls are
    optional, the answer is a call or follows the schema. Raises WorkerError for unsupported schemas.
    """
    if not tools.must and schema is None:
        return None
    form = (
        _harmony_form(mark) if language.format == "harmony" else _tagged_form(mark, language, tokens, thinking=thinking)
    )
    schemas: list[EmbeddedSchema] = []
    bodies, rules = [], [*form.rules]
    if schema is not None and not tools.must:
        schemas.append(EmbeddedSchema(json_schema.to_guidance_json(schema), "response_format", "an answer"))
        bodies.append("answer")
        rules += [f"answer: {form.answer}", f"said: %json {schemas[0].schema}"]
    calls = [form.call(name, partial(_arguments_rule, tools, name, schemas)) for name in tools.must or tools.schemas]
    if calls:
        bodies.append("calls")
        further = f" ({form.between} call)*" if tools.parallel and form.between is not None else ""
        rules += [f"calls: call{further}", f"call: {' | '.join(calls)}"]
    return Grammar("\n".join([f"start: {form.start}", f"body: {' | '.join(bodies)}", *rules]), tuple(schemas))


def _arguments_rule(tools: Tools, name: str, schemas: list[EmbeddedSchema]) -> str:
    """The rule of a call's arguments. Adds their schema to `schemas`. A non-strict schema is enforced as far as possible."""
    schema, lenient = tools.schemas[name] or json_schema.OBJECT, name not in tools.strict
    if not lenient:
        json_schema.check(schema, "tools")
    schemas.append(
        EmbeddedSchema(json_schema.to_guidance_json(schema, lenient=lenient), "tools", f"the arguments of {name}")
    )
    return f"%json {schemas[-1].schema}"


def _harmony_form(mark: Mark) -> _Form:
    channel, message, constrained = (
        _marker_terminal(mark, f"<|{name}|>") for name in ("channel", "message", "constrain")
    )
    start = _marker_terminal(mark, "<|start|>")
    return _Form(
        start=f'({channel} "analysis" {message} thought {start} "assistant")? body',
        answer=f'{channel} "final" (" " {constrained} "json")? {message} said',
        call=lambda name, arguments: (
            f'{channel} "commentary to=functions.{name} " {constrained} "json" {message} {arguments()}'
        ),
        between=None,
        rules=(_text_until_rules(mark, "thought", *ENDS),),
    )


def _tagged_form(mark: Mark, language: TokenizerLanguage, tokens: list[int], *, thinking: bool) -> _Form:
    """The tagged format. Also for models without a format, which have neither reasoning nor calls."""
    call, called = _marker_terminal(mark, CALL_OPEN), _marker_terminal(mark, CALL_CLOSE)

    def as_json(name: str, arguments: Callable[[], str]) -> str:
        begin, end = json.dumps(f'\n{{"name": "{name}", "arguments":'), json.dumps("}\n")
        return f'{call} {begin} " "? {arguments()} {end} {called}'

    def as_tags(name: str, _rule: Callable[[], str]) -> str:
        begin = json.dumps(f"\n<function={name}>")
        return f"{call} {begin} tags"

    rules = (
        "GAP: /\\n{0,2}/",
        _text_until_rules(mark, "thought", THINK_CLOSE),
        _text_until_rules(mark, "tags", CALL_CLOSE),
    )
    form = partial(_Form, answer="said", call=as_tags if language.xml_calls else as_json, between=r'"\n"', rules=rules)
    if thinking:
        return form("thought GAP body")
    think_token = language.single_token(THINK_OPEN)
    has_tags = language.format == "tagged" and (
        THINK_OPEN in str(language.tokenizer.chat_template) or think_token in tokens
    )
    closed = language.decode(tokens[-8:]).rstrip().endswith(THINK_CLOSE)  # thinking is off
    return form(f"({_marker_terminal(mark, THINK_OPEN)} thought GAP)? body" if has_tags and not closed else "body")


def _marker_terminal(mark: Mark, text: str) -> str:
    token = mark(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _text_until_rules(mark: Mark, name: str, end: str, *others: str) -> str:
    """Rules for a text that contains none of these markers, spelt out or not, followed by the first marker."""
    spelt = [re.escape(text).replace("/", r"\/") for text in (end, *others)]
    if mark(end) is None:
        return f"{name}[lazy]: /(?s:.*){spelt[0]}/"
    terminal = name.upper()
    return f"{name}: {terminal} {_marker_terminal(mark, end)}\n{terminal}: /(?s:.*)/ & ~/(?s:.*)({'|'.join(spelt)})(?s:.*)/"
