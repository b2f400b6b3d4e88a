"""Reasoning in `<think>` tags and calls in `<tool_call>` tags: Qwen3, Qwen3.5, Qwen3-Coder and similar models.

The prompt may end within reasoning. A `<tool_call>` contains JSON or tags, recognised by how it begins. Blanks around
reasoning and before calls belong to the format, not to the answer.
"""

from __future__ import annotations

from runtimes.sdk.chat.formats import xml_call
from runtimes.sdk.chat.formats.json_call import CallEndedError, JsonCall
from runtimes.sdk.chat.formats.pieces import Schemas, Text, Thought
from runtimes.sdk.chat.formats.reader import Reader, Reading, ignore

THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE = "<think>", "</think>", "<tool_call>", "</tool_call>"


class TaggedParser(Reader):
    """`thinking`: the text begins within reasoning, because the prompt ends there. `calls`: parse calls, else they are text."""

    def __init__(self, *, thinking: bool, calls: bool, schemas: Schemas | None = None) -> None:
        super().__init__()
        self._schemas: Schemas = schemas or {}
        self._calls = (CALL_OPEN,) if calls else ()
        self._only_blanks = True  # only blanks so far
        self._trailing_blanks = ""  # at the end of the output
        self.thinking = thinking

    @property
    def answering(self) -> bool:
        """Is the text within the answer, after its first text?"""
        return not self.thinking and not self._only_blanks

    def read(self) -> Reading[None]:
        """Read reasoning, if there is any, then the answer and calls."""
        self.thinking = self.thinking or (yield from self._read_think_tag())
        if self.thinking:
            if not (yield from self.read_until((THINK_CLOSE,), self._output_text)):
                return
            self.thinking, self._only_blanks, self._trailing_blanks = False, True, ""
        count = 0
        while (yield from self.read_until(self._calls, self._output_text)):
            self._only_blanks, self._trailing_blanks = True, ""
            count += yield from self._read_call(count)
        self.out.append(Text(self._trailing_blanks))

    def _read_think_tag(self) -> Reading[bool]:
        while not self.ended:
            text = self.buffer.lstrip()
            if text.startswith(THINK_OPEN):
                self.buffer = text[len(THINK_OPEN) :]
                return True
            if not THINK_OPEN.startswith(text):  # else only blanks, or the beginning of the tag
                self._only_blanks = False
                return False
            yield
        return False

    def _output_text(self, text: str) -> None:
        """Output text, without blanks at the beginning and end of the answer."""
        if self._only_blanks:
            text = text.lstrip()
        if not text:
            return
        self._only_blanks = False
        text = self._trailing_blanks + text
        stripped = text.rstrip()
        self._trailing_blanks = text[len(stripped) :]
        if stripped:
            self.out.append(Thought(stripped) if self.thinking else Text(stripped))

    def _read_call(self, index: int) -> Reading[bool]:
        """Read a call and its closing tag. False if it was no call: then the text is output."""
        begin = self.buffer.lstrip()
        while not self.ended and xml_call.FUNCTION.startswith(begin) and begin != xml_call.FUNCTION:
            yield
            begin = self.buffer.lstrip()
        if begin.startswith(xml_call.FUNCTION):
            found = yield from xml_call.read_call(self, index, self._schemas)
            raw, self.buffer = ("", self.buffer) if found else (self.buffer, "")
        else:
            call = JsonCall(self, index, CALL_CLOSE)
            try:
                yield from call.read()
                self._only_blanks = call.name is not None
            except CallEndedError:
                pass
            found, raw = call.name is not None, call.raw
        if found:
            yield from self.read_until((CALL_CLOSE,), ignore)
        else:
            self.out.append(Text(CALL_OPEN + raw))
        return found
