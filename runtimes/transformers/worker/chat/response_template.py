"""Response templates: a checkpoint's own description of how its model writes thoughts and calls, read by transformers' parser.

They serve models whose chat template uses none of the formats in `runtimes.sdk.chat.formats`. Those formats do more: they
stream arguments, accept slightly wrong calls, and have grammars that force calls (docs/adr/0022-response-templates.md).

The parser reports regions: a region opens, has text, closes. A call that can't be parsed becomes text, and so does a call of
a tool that the request didn't offer. Therefore `TemplateParser` keeps all text since the last region or text. It passes one
character at a time to the parser, because a failing parser loses everything it found in the same piece.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from runtimes.sdk.chat.formats.pieces import CallArguments, CallStart, Piece, Text, Thought

CALLS: Final = "tool_calls"
_TEXT: Final = "content"
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")  # names that templates give them
_UNREADABLE: Final = (ValueError, KeyError, TypeError, RecursionError)


def response_template(tokenizer: Any, model: Any) -> ResponseTemplate | None:
    """The checkpoint's response template, else transformers' own for this type; None: there is none that can be parsed."""
    found = get_response_template(tokenizer, model)
    try:
        return None if found is None else load_response_template(found)
    except _UNREADABLE as error:
        sys.stderr.write(f"response_template: {error}. Thoughts and calls stay in the text.\n")
        return None


def used_tokens(template: ResponseTemplate, tokens: Sequence[str]) -> frozenset[str]:
    """The subset of these tokens that the template looks for."""
    fields = template.fields.values()
    patterns = [found.pattern for field in fields for found in (field.open_re, field.close_re) if found is not None]
    wanted = " ".join([*patterns, json.dumps([field.content_args for field in fields], ensure_ascii=False)])
    plain = re.sub(r"\\(.)", r"\1", wanted)
    return frozenset(token for token in tokens if token and token in plain)


class TemplateParser:
    """`prompt`: may end within reasoning. `tools`: the offered tools, for the types of arguments; empty: calls are text."""

    def __init__(self, template: ResponseTemplate, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._template, self._tools = template, [dict(tool) for tool in tools]
        self._count = 0
        self._raw = ""  # read since the last region or text
        self._only_blanks = False  # a thought or a call is over, and only blanks came since
        self._trailing_blanks = ""  # at the end of the output
        self.thinking = False
        self.answering = False
        begun = template.start_anchor_re.search(prompt) is not None  # without it the parser would read the conversation
        try:
            self._parser = ResponseParser(template, prefix=prompt if begun else "", tools=self._tools)
        except _UNREADABLE:
            self._parser = ResponseParser(template, prefix="", tools=self._tools)
        list(self._to_pieces(self._parser.initial_events))
        self._trailing_blanks, self.answering = "", False

    def feed(self, text: str) -> list[Piece]:
        """Add text. Returns the pieces that are certain now."""
        out: list[Piece] = []
        for char in text:
            self._raw += char
            try:
                events = self._parser.feed(char)
            except _UNREADABLE:
                out.append(self._raw_as_text())
            else:
                out += self._to_pieces(events)
        return out

    def end(self) -> list[Piece]:
        """The remaining pieces. Call it when the text has ended."""
        try:
            _, events = self._parser.finalize()
        except _UNREADABLE:
            return [self._raw_as_text()]
        return [*self._to_pieces(events), Text(self._trailing_blanks)]

    def _to_pieces(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_open":
                self._open_region(field)
            elif kind == "region_chunk" and not event["dirty"]:
                yield from self._output_text(field, event["text"])
            elif kind == "region_close" and field == CALLS:
                calls = self._to_call_pieces(event["value"])
                if not calls:
                    yield self._raw_as_text()
                    return  # that text contains the remaining events
                yield from calls
                self._end_format()
            elif kind == "region_close" and field in _THOUGHTS:
                self._end_format()

    def _open_region(self, field: str) -> None:
        self.answering = False
        opening = self._template.fields[field].open_re
        if field == CALLS or opening is None:
            return
        self._raw = self._raw[max((found.end() for found in opening.finditer(self._raw)), default=0) :]
        if field in _THOUGHTS:
            self._end_format()
            self.thinking = True

    def _end_format(self) -> None:
        """Drop blanks around reasoning and before calls: they belong to the format, not to the answer."""
        self.thinking, self.answering, self._only_blanks, self._trailing_blanks = False, False, True, ""

    def _output_text(self, field: str, text: str) -> Iterator[Piece]:
        self._raw = self._raw.partition(text)[2]  # the text that the parser still holds back
        if self._only_blanks:
            text = text.lstrip()
        if not text or field not in (_TEXT, *_THOUGHTS):
            return
        self._only_blanks = False
        self.answering = field == _TEXT
        text = self._trailing_blanks + text
        stripped = text.rstrip()
        self._trailing_blanks = text[len(stripped) :]
        if stripped:
            yield Text(stripped) if self.answering else Thought(stripped)

    def _to_call_pieces(self, value: object) -> list[Piece]:
        """The pieces of these calls; empty if a call can't be parsed or no tools were offered."""
        try:
            calls = [_parse_call(found) for found in (value if isinstance(value, list) else [value])]
        except _UNREADABLE:
            return []
        if not self._tools:
            return []
        self._raw = ""
        first, self._count = self._count, self._count + len(calls)
        numbered = enumerate(calls, first)
        return [piece for at, (name, given) in numbered for piece in (CallStart(at, name), CallArguments(at, given))]

    def _raw_as_text(self) -> Text:
        """All text since the last region or text. Restarts the parser."""
        text, self._raw, self._trailing_blanks = self._trailing_blanks + self._raw, "", ""
        self._parser = ResponseParser(self._template, prefix="", tools=self._tools)
        self.thinking, self._only_blanks, self.answering = False, False, True
        return Text(text)


def _parse_call(value: Any) -> tuple[str, str]:
    """A call's name, and its arguments as JSON. Raises one of `_UNREADABLE`."""
    function = value["function"]
    name, arguments = function["name"], function.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        raise TypeError(value)
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
