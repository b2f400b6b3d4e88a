"""Reasoning in `<think>` tags and calls in `<tool_call>` tags: Qwen3, Qwen3.5, Qwen3-Coder and similar models.

The prompt may end within reasoning. A `<tool_call>` contains JSON or tags, recognised by how it begins. Blanks around
reasoning and before calls belong to the format, not to the answer.
"""

from __future__ import annotations

from runtimes.sdk.chat.formats import xml_call
from runtimes.sdk.chat.formats.json_call import CallEndedError, JsonCall
from runtimes.sdk.chat.formats.pieces import Schemas, Text, Thought
from runtimes.sdk.chat.formats.reader import Reader, Reading, ignore

THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"


class TaggedParser(Reader):
    """`thinking`: the text begins within reasoning, because the prompt ends there. `calls`: parse calls, else they are text."""

    def __init__(self, *, thinking: bool, calls: bool, schemas: Schemas | None = None) -> None:
        super().__init__()
        self._schemas: Schemas = schemas or {}
        self._calls = (CALL,) if calls else ()
        self._fresh = True  # only blanks so far
        self._blanks = ""  # at the end of what was output
        self.thinking = thinking

    @property
    def answering(self) -> bool:
        """Is the text within the answer, after its first text?"""
        return not self.thinking and not self._fresh

    def read(self) -> Reading[None]:
        """Read reasoning, if there is any, then the answer and calls."""
        self.thinking = self.thinking or (yield from self._thinks())
        if self.thinking:
            if not (yield from self.until((THOUGHT,), self._say)):
                return
            self.thinking, self._fresh, self._blanks = False, True, ""
        count = 0
        while (yield from self.until(self._calls, self._say)):
            self._fresh, self._blanks = True, ""
            count += yield from self._call(count)
        self.out.append(Text(self._blanks))

    def _thinks(self) -> Reading[bool]:
        while not self.ended:
            text = self.buffer.lstrip()
            if text.startswith(THINK):
                self.buffer = text[len(THINK) :]
                return True
            if not THINK.startswith(text):  # else only blanks, or the beginning of the tag
                self._fresh = False
                return False
            yield
        return False

    def _say(self, text: str) -> None:
        """Output text, without blanks at the beginning and end of the answer."""
        if self._fresh:
            text = text.lstrip()
        if not text:
            return
        self._fresh = False
        text = self._blanks + text
        stripped = text.rstrip()
        self._blanks = text[len(stripped) :]
        if stripped:
            self.out.append(Thought(stripped) if self.thinking else Text(stripped))

    def _call(self, index: int) -> Reading[bool]:
        """Read a call and its closing tag. False if it was no call: then the text is output."""
        begin = self.buffer.lstrip()
        while not self.ended and xml_call.FUNCTION.startswith(begin) and begin != xml_call.FUNCTION:
            yield
            begin = self.buffer.lstrip()
        if begin.startswith(xml_call.FUNCTION):
            found = yield from xml_call.read_call(self, index, self._schemas)
            raw, self.buffer = ("", self.buffer) if found else (self.buffer, "")
        else:
            call = JsonCall(self, index, CALLED)
            try:
                yield from call.read()
                self._fresh = call.name is not None
            except CallEndedError:
                pass
            found, raw = call.name is not None, call.raw
        if found:
            yield from self.until((CALLED,), ignore)
        else:
            self.out.append(Text(CALL + raw))
        return found
