"""What a model may say, as a grammar in llguidance's dialect of Lark: a thought where it has any, then an answer in a
format, or calls of tools, in the form of its family.

The marks around thoughts and calls are tokens of their own in most vocabularies; where they aren't, they are spelt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from runtimes.transformers.worker.chat import schema as json_schema
from runtimes.transformers.worker.chat.formats.harmony import ENDS
from runtimes.transformers.worker.chat.formats.tagged import CALL, CALLED, THINK, THOUGHT
from runtimes.transformers.worker.chat.guide import EmbeddedSchema, Guide, Guides
from runtimes.transformers.worker.chat.model import Loaded
from runtimes.transformers.worker.chat.prompt import Prompt
from runtimes.transformers.worker.chat.schema import Schema
from runtimes.transformers.worker.chat.tools import Tools


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family writes. `start` has the rule `body` in it, `answer` the rule `said`; `rules` are its own.

    `call` is a call's rule, of its name and of what gives the rule of arguments that are JSON. `between` two calls; None:
    there is but one.
    """

    start: str
    answer: str
    call: Callable[[str, Callable[[], str]], str]
    between: str | None
    rules: tuple[str, ...] = ()


def guide(guides: Guides, loaded: Loaded, prompt: Prompt, tools: Tools, said: Schema | None) -> Guide | None:
    """For an answer that has to call a tool, or what it says has to follow a schema; None for one that is free.

    Where both are asked for the call wins; where it may call, or say something, it is schemas to one of them. Raises
    WorkerError for schemas that can't be kept.
    """
    if not tools.must and said is None:
        return None
    form = _harmony(guides) if loaded.format == "harmony" else _tagged(guides, loaded, prompt)
    schemas: list[EmbeddedSchema] = []
    bodies, rules = [], [*form.rules]
    if said is not None and not tools.must:
        schemas.append(EmbeddedSchema(json_schema.annotated(said), "response_format", "an answer"))
        bodies.append("answer")
        rules += [f"answer: {form.answer}", f"said: %json {schemas[0].schema}"]
    calls = [form.call(name, partial(_arguments, tools, name, schemas)) for name in tools.must or tools.schemas]
    if calls:
        bodies.append("calls")
        further = f" ({form.between} call)*" if tools.parallel and form.between is not None else ""
        rules += [f"calls: call{further}", f"call: {' | '.join(calls)}"]
    return guides.guide("\n".join([f"start: {form.start}", f"body: {' | '.join(bodies)}", *rules]), schemas)


def _arguments(tools: Tools, name: str, schemas: list[EmbeddedSchema]) -> str:
    """What isn't strict is schemas to as much of its schema as can be. Adds to `schemas`."""
    schema, lenient = tools.schemas[name] or json_schema.OBJECT, name not in tools.strict
    if not lenient:
        json_schema.check(schema, "tools")
    schemas.append(EmbeddedSchema(json_schema.annotated(schema, lenient=lenient), "tools", f"the arguments of {name}"))
    return f"%json {schemas[-1].schema}"


def _harmony(guides: Guides) -> _Form:
    channel, message, constrained = (_mark(guides, f"<|{name}|>") for name in ("channel", "message", "constrain"))
    start = _mark(guides, "<|start|>")
    return _Form(
        start=f'({channel} "analysis" {message} thought {start} "assistant")? body',
        answer=f'{channel} "final" (" " {constrained} "json")? {message} said',
        call=lambda name, arguments: (
            f'{channel} "commentary to=functions.{name} " {constrained} "json" {message} {arguments()}'
        ),
        between=None,
        rules=(_until(guides, "thought", *ENDS),),
    )


def _tagged(guides: Guides, loaded: Loaded, prompt: Prompt) -> _Form:
    """Also for models without any format of their own, which have no thoughts and no calls."""
    call, called = _mark(guides, CALL), _mark(guides, CALLED)

    def as_json(name: str, arguments: Callable[[], str]) -> str:
        begin, end = json.dumps(f'\n{{"name": "{name}", "arguments":'), json.dumps("}\n")
        return f'{call} {begin} " "? {arguments()} {end} {called}'

    def as_tags(name: str, _arguments: Callable[[], str]) -> str:
        begin = json.dumps(f"\n<function={name}>")
        return f"{call} {begin} tags"

    rules = ("GAP: /\\n{0,2}/", _until(guides, "thought", THOUGHT), _until(guides, "tags", CALLED))
    form = partial(_Form, answer="said", call=as_tags if loaded.xml_calls else as_json, between=r'"\n"', rules=rules)
    if prompt.thinking:
        return form("thought GAP body")
    begun = loaded.one(THINK)
    knows = loaded.format == "tagged" and (THINK in str(loaded.tokenizer.chat_template) or begun in prompt.tokens)
    closed = loaded.decode(prompt.tokens[-8:]).rstrip().endswith(THOUGHT)  # thinking is off
    return form(f"({_mark(guides, THINK)} thought GAP)? body" if knows and not closed else "body")


def _mark(guides: Guides, text: str) -> str:
    token = guides.mark(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _until(guides: Guides, name: str, mark: str, *others: str) -> str:
    """Rules for a text without any of these marks, which would be read as such where they are spelt, too, and the first."""
    spelt = [re.escape(text).replace("/", r"\/") for text in (mark, *others)]
    if guides.mark(mark) is None:
        return f"{name}[lazy]: /(?s:.*){spelt[0]}/"
    terminal = name.upper()
    return f"{name}: {terminal} {_mark(guides, mark)}\n{terminal}: /(?s:.*)/ & ~/(?s:.*)({'|'.join(spelt)})(?s:.*)/"
